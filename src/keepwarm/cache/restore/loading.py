"""Loading a prompt's records into caches while the model runs.

Reader threads read and verify records and copy them into place, prefetch threads have the operating
system load the next files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import compress
from time import perf_counter
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from keepwarm.cache.restore.plan import Needs, Point, Read
from keepwarm.cache.restore.records import SlabTensors, block_of
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.concurrency import CallDeadline
from keepwarm.errors import CacheError, CorruptBlock
from keepwarm.kv.assembly import Assembly
from keepwarm.kv.kinds import Caches
from keepwarm.kv.layout import Layout
from keepwarm.kv.slabs import SlabPool
from keepwarm.kv.slices import Block
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, pack
from keepwarm.records.at_rest import CODEC, check_codec
from keepwarm.records.record import Part, ReadBuffer, RecordView
from keepwarm.store.atomic import CAN_PREFETCH
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers

# The best of 1 to 8 on 2 and on 16 cores: more of them contend for the interpreter lock.
READER_THREADS = 3
PREFETCH_THREADS = 2  # keep the disk busy
MAX_PREFETCHED = 16  # records

Use: TypeAlias = Callable[[Read, RecordView], None]

Fault: TypeAlias = Literal["missing", "damaged", "unreadable", "newer", "layout", "error"]
"""
missing      a record was gone when it was to be read
damaged      its digests did not match; it is quarantined
unreadable   the file system gave an error
newer        a newer Keepwarm has written it
layout       it is whole, but does not fit the model or the prompt; it is quarantined
error        anything else; the log has it
"""

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)


class RestoreFailures:
    """Requests whose restore failed in part or whole, by its first fault. None of them fails: the
    prompt is computed.

    The engine's thread counts, any may read.
    """

    def __init__(self) -> None:
        self.by_reason: dict[str, int] = dict.fromkeys(FAULTS, 0)

    def add(self, fault: Fault | None) -> None:
        if fault is not None:
            self.by_reason[fault] += 1


class ReadOutcome(NamedTuple):
    """The tier of each record, in order, and the blocks that could not be used."""

    tiers: list[str]
    missed: set[BlockKey]
    fault: Fault = "missing"  # of the first of them


class PendingReads:
    """Records that are being read."""

    def __init__(self, n_records: int, deadline: CallDeadline | None = None) -> None:
        self.deadline = deadline
        self.futures: list[Future[str]] = []
        self.use: Future[Use] = Future()  # the function that takes the records, once prepared
        self.missed: set[BlockKey] = set()
        self.fault: Fault = "missing"
        self.prefetch_slots = threading.Semaphore(MAX_PREFETCHED)
        self._n_records = n_records
        self._is_stopped = False

    @property
    def is_late(self) -> bool:
        """Whether tiers that machines share were given up."""
        return self.deadline is not None and self.deadline.is_over

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def add(self, future: Future[str]) -> None:
        self.futures.append(future)
        slots = self.prefetch_slots
        future.add_done_callback(lambda _: slots.release())

    def is_prefetch_useless(self, number: int) -> bool:
        """Whether that record has been read, or reading was stopped."""
        n_begun = len(self.futures)
        return self._is_stopped or (number < n_begun and self.futures[number].done())

    def stop(self) -> None:
        """Start no more reads."""
        self._is_stopped = True
        self.use.cancel()
        for future in self.futures:
            future.cancel()
        self.prefetch_slots.release(self._n_records)  # wake the prefetch threads

    def outcome(self, meanwhile: Callable[[], object] = lambda: None) -> ReadOutcome:
        """Wait for all reads; `meanwhile` is called after each."""
        tiers = []
        for future in self.futures:
            tiers.append(future.result())
            meanwhile()
        # It refers to what holds these reads: without that cycle, rows are freed with the caches.
        self.use = Future()
        return ReadOutcome(tiers, self.missed, self.fault)

    def miss(self, key: BlockKey, fault: Fault) -> None:
        if not self.missed:
            self.fault = fault
        self.missed.add(key)


class _PerThread(threading.local):
    """A buffer that each reader thread reuses for every tensor."""

    def __init__(self) -> None:
        self.buffer = ReadBuffer()


class Reader:
    """Reads the records of a plan in several threads."""

    def __init__(
        self,
        tiers: Tiers,
        slabs: SlabPool | None = None,
        memory: MemoryTier | None = None,
        n_threads: int = READER_THREADS,
    ) -> None:
        """On CUDA blocks are read into slabs; those in memory are in slabs already."""
        self._tiers = tiers
        self._own = _PerThread()
        self.slabs = slabs
        self._memory = memory
        self.n_threads = n_threads
        self._pool = ThreadPoolExecutor(self.n_threads, thread_name_prefix="keepwarm-reader")
        self._background = ThreadPoolExecutor(
            self.n_threads, thread_name_prefix="keepwarm-background"
        )
        self._prefetch_pool = ThreadPoolExecutor(
            PREFETCH_THREADS, thread_name_prefix="keepwarm-prefetch"
        )

    def start(
        self,
        reads: Sequence[Read],
        prepare: Callable[[], Use],
        in_background: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        deadline: CallDeadline | None = None,
    ) -> PendingReads:
        """Pass every record, in no order, to the function that `prepare` returns; stop at the
        first miss or refusal. Files are opened and prefetched while `prepare` runs.

        Each thread holds one tensor at a time, so memory stays small. Background reads have
        threads of their own, so that other requests do not queue behind them. What is in slabs
        is there already, so no thread is woken for it; `meanwhile` is called after each. After the
        deadline tiers that machines share are not read any more.
        """
        pool = self._background if in_background else self._pool
        started = PendingReads(len(reads), deadline)
        ready = [self._is_in_slab(read) for read in reads]
        try:
            if CAN_PREFETCH and not in_background and not all(ready):
                numbered = iter(enumerate(reads))  # shared
                for _ in range(PREFETCH_THREADS):
                    self._prefetch_pool.submit(self._prefetch, started, numbered)
            for read, is_ready in zip(reads, ready, strict=True):
                started.add(Future() if is_ready else pool.submit(self._one, started, read))
            started.use.set_result(prepare())
            for read, future in compress(zip(reads, started.futures, strict=True), ready):
                _resolve(future, partial(self._one, started, read))
                meanwhile()
        except BaseException:
            started.stop()
            raise
        return started

    def _is_in_slab(self, read: Read) -> bool:
        """Window rows may be read from another tier, which has more of them."""
        if self._memory is None or self.slabs is None or read.part is Part.WINDOW:
            return False
        record = self._memory.peek(read.key, read.part)
        return record is not None and isinstance(record.tensors, SlabTensors)

    def _one(self, started: PendingReads, read: Read) -> str:
        """Read a record; the tier it came from, or "" if it could not be used."""

        def use(record: RecordView) -> None:
            started.use.result()(read, record)

        if started.missed:
            return ""
        try:
            tier = self._tiers.visit(read.key, read.part, use, self._own.buffer, started.deadline)
        except FewerRows:
            started.miss(read.key, "missing")
            return ""
        except CacheError as error:
            self._tiers.discard(read.key, read.part, str(error))
            started.miss(read.key, "layout")
            return ""
        if tier is None:
            fault = self._tiers.take_fault(read.key, read.part)
            started.miss(read.key, fault or "missing")
        return tier or ""

    def _prefetch(self, started: PendingReads, numbered: Iterator[tuple[int, Read]]) -> None:
        """Have the operating system load records while reader threads process earlier ones.

        Not too far ahead: if memory is short, they would be dropped before they are read.
        """
        for number, read in numbered:
            started.prefetch_slots.acquire()
            if not started.is_prefetch_useless(number):
                self._tiers.prefetch(read.key, read.part)

    def discard(self, reads: Iterable[Read], why: str) -> None:
        """Set records aside that do not fit together, so that computing replaces them."""
        for read in reads:
            self._pool.submit(self._tiers.discard, read.key, read.part, why)

    def close(self) -> None:
        for pool in (self._pool, self._background, self._prefetch_pool):
            pool.shutdown(wait=True, cancel_futures=True)


def _resolve(future: Future[str], read: Callable[[], str]) -> None:
    try:
        future.set_result(read())
    except Exception as error:
        future.set_exception(error)


class RestoredPrefix(NamedTuple):
    """Caches that hold exactly the first `n_tokens` of the prompt, and their tiers."""

    caches: Caches | None
    n_tokens: int
    tokens_by_tier: dict[str, int]
    fault: Fault | None = None  # why a longer prefix could not be loaded
    n_lossy: int = 0  # tokens whose rows were rounded at rest


EMPTY = RestoredPrefix(None, 0, {})


class LoadResult(NamedTuple):
    """A restore, or the blocks that could not be read or differ from the index."""

    restored: RestoredPrefix | None
    missed: set[BlockKey]
    fault: Fault | None = None


class FewerRows(Exception):
    """A sound record has fewer rows of a window than the plan was made for: another one had more,
    and is gone, or the window is narrower than the widest.
    """


class Loading:
    """Create, finish or abandon it on the thread that owns MLX."""

    def __init__(
        self,
        tokens: Sequence[int],
        point: Point,
        layout: Layout,
        reader: Reader,
        saver: MemorySaver,
        *,
        in_background: bool = False,
        deadline: CallDeadline | None = None,
        at_rest: str | None = None,
    ) -> None:
        """A load in background has threads of its own, so that other loads need not wait. What
        machines share is not read after the deadline. `at_rest` is the codec that records may have.
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
        self._at_rest = at_rest
        self._needs = Needs.of(layout)
        most = self._needs.window
        self._narrow = [leaf for leaf in layout.leaves() if leaf.window and leaf.window < most]
        self._lossy: set[int] = set()  # numbers of blocks that were rounded

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
        n_lossy = sum(map(self.point.n_in_block, self._lossy))
        by_tier = self.point.tokens_by_tier(outcome.tiers)
        restored = RestoredPrefix(caches, self.point.n_tokens, by_tier, n_lossy=n_lossy)
        return LoadResult(restored, set())

    def abandon(self) -> None:
        """Cancel it; records being read are read to their end and discarded."""
        self._reads.stop()
        self._assembly.abandon()

    def _add(self, read: Read, record: RecordView) -> None:
        start = read.number * BLOCK_TOKENS
        end = min(start + BLOCK_TOKENS, self.point.n_tokens)
        header = record.header
        if not header.tokens.startswith(self._packed[4 * start : 4 * end]):
            raise CorruptBlock("?", read.number, "its tokens differ from the prompt")
        check_codec(header, self._at_rest)
        block = block_of(record)
        first = block.n_tokens - header.w_rows
        has_rows = self._needs.has_rows(first, read.number, self.point.n_tokens)
        if read.part is Part.WINDOW and not (has_rows and self._has_narrow_rows(block)):
            raise FewerRows
        began = perf_counter()
        with self._saver.restoring():
            self._assembly.add(block)
        with self._lock:
            self._first_read = min(self._first_read or began, began)
            self._last_read = perf_counter()
            if CODEC in record.header.extra:
                self._lossy.add(read.number)

    def _has_narrow_rows(self, block: Block) -> bool:
        """Whether it has what the narrower windows need; the plan knows of the widest alone."""
        n_tokens = self.point.n_tokens
        for leaf in self._narrow:
            needed = max(block.start, leaf.first_row_needed(n_tokens))
            held = block.start + block.first_rows.get(leaf.path, block.n_tokens)
            if held > needed < n_tokens and needed < block.end:
                return False
        return True
