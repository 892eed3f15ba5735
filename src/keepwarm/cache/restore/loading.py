"""A restore in progress: reader threads copy records into caches while the model runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from keepwarm.cache.restore.failures import Fault
from keepwarm.cache.restore.plan import Point, Read
from keepwarm.cache.restore.reading import Reader, Use
from keepwarm.cache.restore.records import block_of
from keepwarm.cache.restore.writing import Saver
from keepwarm.errors import CorruptBlock
from keepwarm.kv.assembly import Assembly
from keepwarm.kv.kinds import Caches
from keepwarm.kv.layout import Layout
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, pack
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.record import RecordView


class RestoredPrefix(NamedTuple):
    """Caches that hold exactly the first `n_tokens` of the prompt, and their tiers."""

    caches: Caches | None
    n_tokens: int
    tokens_by_tier: dict[str, int]
    fault: Fault | None = None  # why a longer prefix could not be loaded


EMPTY = RestoredPrefix(None, 0, {})


class LoadResult(NamedTuple):
    """A restore, or the blocks that could not be read or differ from the index."""

    restored: RestoredPrefix | None
    missed: set[BlockKey]
    fault: Fault | None = None


class Loading:
    """Create, finish or abandon it on the thread that owns MLX."""

    def __init__(
        self,
        tokens: Sequence[int],
        point: Point,
        layout: Layout,
        reader: Reader,
        saver: Saver,
        *,
        in_background: bool = False,
        deadline: CallDeadline | None = None,
    ) -> None:
        """A load in background has threads of its own, so that other loads need not wait. What
        machines share is not read after the deadline.
        """
        self.tokens = tokens
        self.point = point
        self.in_background = in_background
        self._packed = pack(tokens[: point.n_tokens])
        self.seconds = 0.0  # from first to last read, and for assembling; not waiting for `finish`
        self._reader = reader
        self._saver = saver
        self._lock = threading.Lock()
        self._first_read = self._last_read = 0.0

        def prepared() -> Use:
            self._assembly = Assembly(layout, point.n_tokens, reader.slabs)
            return self._add

        self._reads = reader.start(
            point.reads, prepared, in_background, self._copy_if_alone, deadline
        )

    @property
    def is_late(self) -> bool:
        """Whether it fell behind its plan."""
        return self._reads.is_late

    def advance(self) -> bool:
        """Copy a piece of what has been read, where a device must; whether all is in place."""
        is_read = self._reads.is_done  # asked first: afterwards no more are added
        return self._assembly.advance(is_read) and is_read

    def _copy_if_alone(self) -> None:
        """A load in background copies between decode steps."""
        if not self.in_background:
            self._assembly.advance(False)

    @property
    def keys(self) -> list[BlockKey]:
        return [read.key for read in self.point.reads]

    def finish(self) -> LoadResult:
        try:
            outcome = self._reads.outcome(lambda: self._assembly.advance(False))
        except Exception:
            self.abandon()
            raise
        if outcome.missed:
            return LoadResult(None, outcome.missed, outcome.fault)
        began = perf_counter()
        try:
            caches = self._assembly.finish()
        except CorruptBlock as error:
            faulty = [read for read in self.point.reads if read.number == error.block]
            self._reader.discard(faulty, str(error))
            return LoadResult(None, {read.key for read in faulty} or set(self.keys), "layout")
        self.seconds = self._last_read - self._first_read + perf_counter() - began
        return LoadResult(
            RestoredPrefix(caches, self.point.n_tokens, self._by_tier(outcome.tiers)), set()
        )

    def abandon(self) -> None:
        """Cancel it; records being read are read to their end and discarded."""
        self._reads.stop()
        self._assembly.abandon()

    def _add(self, read: Read, record: RecordView) -> None:
        start = read.number * BLOCK_TOKENS
        end = min(start + BLOCK_TOKENS, self.point.n_tokens)
        if not record.header.tokens.startswith(self._packed[4 * start : 4 * end]):
            raise CorruptBlock("?", read.number, "its tokens differ from the prompt")
        began = perf_counter()
        with self._saver.restoring():
            self._assembly.add(block_of(record))
        with self._lock:
            self._first_read = min(self._first_read or began, began)
            self._last_read = perf_counter()

    def _by_tier(self, tiers: Sequence[str]) -> dict[str, int]:
        """Each block counts for the tier of its last record, which has its rows, if any has."""
        numbers = [read.number for read in self.point.reads]
        by_number = dict(zip(numbers, tiers, strict=True))
        counts: Counter[str] = Counter()
        for number, tier in by_number.items():
            counts[tier] += min(BLOCK_TOKENS, self.point.n_tokens - number * BLOCK_TOKENS)
        # Blocks before a window or a state that no layer had to read count for the last tier.
        counts[tiers[-1]] += self.point.n_tokens - counts.total()
        return dict(counts)
