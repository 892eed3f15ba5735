"""Blocks in memory, by the same index and the same rules of eviction as on disk."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.index.index import Index
from keepwarm.store.record import Buffer, Part, Record, Visit
from keepwarm.store.thinning import surplus
from keepwarm.store.tier import (
    Child,
    CutOff,
    Known,
    Put,
    State,
    Stored,
    TierStats,
    outage_is,
    telling,
)


class MemoryTier:
    """Records as they came, shared and not copied, up to a number of bytes."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._index = Index(":memory:")
        self._records: dict[tuple[BlockKey, Part], Record] = {}
        self._known: dict[BlockKey, Known] = {}  # what the index says: quicker to ask, and often
        self._cut_off = CutOff()
        self._loose: dict[BlockKey, None] = {}  # their window rows go first; the oldest first
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._durable: Future[None] = Future()  # as durable as it gets, for every record
        self._durable.set_result(None)

    @outage_is(dict)
    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, Known]:
        with self._lock:
            return {key: self._known[key] for key in keys if key in self._known}

    @outage_is(list)
    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self._index.children(parent, tokens)

    @outage_is(list)
    def states(self, parents: Collection[BlockKey]) -> list[State]:
        return self._index.states(parents)

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        with self._lock:
            record = self._records.get((key, part))
            self._count(hits=1 if record else 0, misses=0 if record else 1)
        if record is None or tensors is None:
            return record
        return replace(record, tensors=tuple(t for t in record.tensors if t.name in tensors))

    def visit(
        self,
        key: BlockKey,
        part: Part,
        use: Callable[[Visit], None],
        buffer: Buffer,  # noqa: ARG002
    ) -> bool:
        record = self.read(key, part)
        if record is not None:
            use(Visit(record.header, record.tensors))
        return record is not None

    def fetch(self, key: BlockKey, part: Part) -> bool:
        """It is as near as it gets."""
        with self._lock:
            return (key, part) in self._records

    def put(self, record: Record) -> Put:
        with self._lock:
            return Put(self._put(record), self._durable)

    def loosen(self, key: BlockKey) -> None:
        """Let the window rows of a block go before anything else does: nobody will likely ask."""
        with self._lock:
            if (key, Part.WINDOW) in self._records:
                self._loose[key] = None

    def tighten(self, key: BlockKey) -> None:
        """Somebody may ask for them after all."""
        with self._lock:
            self._loose.pop(key, None)

    @outage_is(bool)
    def _put(self, record: Record) -> bool:
        header, n_bytes = record.header, max(1, record.n_bytes)  # 0 bytes would mean: not there
        before, now = self._records.get((header.key, header.part)), self._clock()
        if before and not header.improves_on(before.header.w_rows):
            return False
        if not self._make_room(record, n_bytes - (before.n_bytes if before else 0), now):
            self._cut_off.refused(header.key)
            self._count(refused=1)
            return False
        self._records[header.key, header.part] = record
        self._index.add(header, n_bytes, now)
        self._known |= self._index.have([header.key])
        self._count(puts=1)
        return True

    def _make_room(self, record: Record, n_bytes: int, now: float) -> bool:
        """Evict what is worth less than a block used once, now."""
        over = self._index.n_bytes() + n_bytes - self._max_bytes
        if over <= 0:
            return True
        if n_bytes > self._max_bytes:
            return False
        if self._cut_off.follows(record.header.parent, self._index.have):
            return False
        over -= self._let_loose_go(over)
        if over <= 0:
            return True
        spare = {record.header.key, record.header.parent}
        priority = self._index.priority_of(record.header, n_bytes, now)
        victims = self._index.evict(over, spare, priority)
        self._forget([victim.key for victim in victims])
        self._count(evicted=len(victims))
        return bool(victims)

    def _forget(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self._known.pop(key, None)
            for part in Part:
                self._records.pop((key, part), None)

    def loose(self, keys: Collection[BlockKey]) -> set[BlockKey]:
        """Which of these have window rows that go first."""
        with self._lock:
            return {key for key in keys if key in self._loose}

    def _let_loose_go(self, n_bytes: int) -> int:
        """As many window rows that nobody misses as it takes; their bytes."""
        freed = 0
        while self._loose and freed < n_bytes:
            key = next(iter(self._loose))
            del self._loose[key]
            record = self._records.get((key, Part.WINDOW))
            if record is not None:
                freed += max(1, record.n_bytes)
                self.delete_part(key, Part.WINDOW)
        return freed

    def resize(self, max_bytes: int) -> None:
        """Hold no more than so many bytes from now on."""
        with self._lock:
            self._max_bytes = max_bytes
            if (over := self._index.n_bytes() - max_bytes) > 0:
                self.shed(over)

    def shed(self, n_bytes: int) -> int:
        """Evict the least valuable until so many bytes are free; how many it was."""
        with self._lock:
            before = self._index.n_bytes()
            n_bytes -= self._let_loose_go(n_bytes)
            victims = self._index.evict(max(0, n_bytes), set(), math.inf, partly=True)
            self._forget([victim.key for victim in victims])
            self._count(evicted=len(victims))
            return before - self._index.n_bytes()

    def pin(self, key: BlockKey, owner: str) -> None:
        with telling(self, "pin a block"):
            self.tighten(key)
            self._index.pin(key, owner)

    def unpin(self, key: BlockKey, owner: str) -> None:
        with telling(self, "let go of a block"):
            self._index.unpin(key, owner)

    @outage_is(lambda: None)
    def touch(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self.tighten(key)
        self._index.touch(keys, self._clock())

    @outage_is(lambda: None)
    def drop_outgrown(self, key: BlockKey) -> None:
        for state in surplus(*self._index.checkpoints(key)):
            self.delete_part(state.key, Part.STATE)
            self._delete(self._index.outgrown(state.beside))
        self._delete(self._index.outgrown(key))

    def delete(self, key: BlockKey) -> None:
        with telling(self, "delete a block"):
            self._delete([key])

    def _delete(self, keys: Collection[BlockKey]) -> None:
        with self._lock:
            self._forget(keys)
            if keys:
                self._index.doom(keys)
                self._index.drop(keys)

    def delete_part(self, key: BlockKey, part: Part) -> None:
        """Remove one part; the block goes with its last one."""
        with self._lock:
            self._records.pop((key, part), None)
            self._known.pop(key, None)
            self._index.drop_part(key, part)
            self._known |= self._index.have([key])

    def walk(self) -> Iterator[Stored]:
        with telling(self, "list its blocks"):
            yield from self._index.walk()

    @outage_is(lambda: (0, 0))
    def _totals(self) -> tuple[int, int]:
        return self._index.n_blocks(), self._index.n_bytes()

    def stats(self) -> TierStats:
        n_blocks, n_bytes = self._totals()
        return TierStats(n_blocks, n_bytes, self._max_bytes, **self._counts)

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._known.clear()
            self._index.close()

    def _failed(self, error: Exception) -> None:  # noqa: ARG002
        self._count(errors=1)

    def _count(self, **more: int) -> None:
        self._counts.update(more)
