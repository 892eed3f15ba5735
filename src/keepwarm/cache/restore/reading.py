"""Getting records from where they lie, beside the running model: a few threads read them, others
have the disk bring the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

from keepwarm.cache.restore.plan import Read
from keepwarm.errors import CacheError
from keepwarm.kv.staging import Staging
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.atomic import CAN_PREFETCH
from keepwarm.store.record import ReadBuffer, RecordView
from keepwarm.store.tiers import Tiers

LOG = logging.getLogger(__name__)
# The best of 1 to 8 on two cores and on sixteen: more of them wait for each other's Python.
READER_THREADS = 3
AHEAD_THREADS = 2  # so that the disk need not wait for one to get its turn
MAX_AHEAD = 16  # records

Use: TypeAlias = Callable[[Read, RecordView], None]


class ReadOutcome(NamedTuple):
    """The tier of each record, in order, and the blocks that were of no use."""

    tiers: list[str]
    missed: set[BlockKey]


class Reads:
    """Records that are being read."""

    def __init__(self, n_records: int) -> None:
        self.futures: list[Future[str]] = []
        self.use: Future[Use] = Future()  # who takes the records, once that is prepared
        self.missed: set[BlockKey] = set()  # so far
        self.ahead = threading.Semaphore(MAX_AHEAD)  # how many more may be fetched
        self._n_records = n_records
        self._is_stopped = False

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def add(self, future: Future[str]) -> None:
        self.futures.append(future)
        future.add_done_callback(lambda _: self.ahead.release())

    def has(self, number: int) -> bool:
        """Whether nobody needs that record brought nearer."""
        n_begun = len(self.futures)
        return self._is_stopped or (number < n_begun and self.futures[number].done())

    def stop(self) -> None:
        """Begin no more of them."""
        self._is_stopped = True
        self.use.cancel()
        for future in self.futures:
            future.cancel()
        self.ahead.release(self._n_records)  # nobody need wait who would have fetched them

    def outcome(self) -> ReadOutcome:
        """Wait for all of them."""
        return ReadOutcome([future.result() for future in self.futures], self.missed)


class _PerThread(threading.local):
    """Memory that each reader uses for one tensor after the other."""

    def __init__(self) -> None:
        self.buffer = ReadBuffer()


class Reader:
    """Reads the records of a plan in several threads, each putting its own where it belongs."""

    def __init__(self, tiers: Tiers, n_threads: int = READER_THREADS) -> None:
        self._tiers = tiers
        self._own = _PerThread()
        self.staging = Staging.if_cuda()
        self.n_threads = n_threads
        self._pool = ThreadPoolExecutor(self.n_threads, thread_name_prefix="keepwarm-reader")
        self._background = ThreadPoolExecutor(
            self.n_threads, thread_name_prefix="keepwarm-background"
        )
        self._ahead = ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="keepwarm-ahead")

    def start(
        self, reads: Sequence[Read], prepare: Callable[[], Use], in_background: bool = False
    ) -> Reads:
        """Hand every record, at least one, to what `prepare` returns, in no order; the first miss
        or refusal ends it. While that is prepared files are opened and fetched already.

        Each thread has one tensor in hand at a time: memory stays small, and in reach. What is
        read aside has threads of its own, so that nobody who waits stands behind it.
        """
        pool, started = self._background if in_background else self._pool, Reads(len(reads))
        try:
            if CAN_PREFETCH and not in_background:
                for number, read in enumerate(reads):
                    self._ahead.submit(self._fetch, started, number, read)
            for read in reads:
                started.add(pool.submit(self._one, started, read))
            started.use.set_result(prepare())
        except BaseException:
            started.stop()
            raise
        return started

    def _one(self, started: Reads, read: Read) -> str:
        """Read a record, and say from which tier."""

        def use(record: RecordView) -> None:
            started.use.result()(read, record)

        if started.missed:
            return ""
        try:
            tier = self._tiers.visit(read.key, read.part, use, self._own.buffer)
        except CacheError as error:
            LOG.warning("a block is of no use: %s", error)
            tier = None
        if tier is None:
            started.missed.add(read.key)
        return tier or ""

    def _fetch(self, started: Reads, number: int, read: Read) -> None:
        """Have a record brought nearer, so that the disk works on while threads are at theirs.

        Not too far ahead: where memory is short, the first would be gone before they are read.
        """
        started.ahead.acquire()
        if not started.has(number):
            self._tiers.prefetch(read.key, read.part)

    def close(self) -> None:
        for pool in (self._pool, self._background, self._ahead):
            pool.shutdown(wait=True, cancel_futures=True)
