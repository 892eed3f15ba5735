"""Getting records to and from disk beside the running model: one writer, a few readers.

A record is findable from the moment it is put: it waits in a memory tier of its own until it is on
disk. That tier is the bounded queue: when it is full it lets go of its least valuable records,
deepest first, exactly as every tier does.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from keepwarm.cache.plan import Read
from keepwarm.cache.policy import Policy
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.memory import MemoryTier
from keepwarm.store.record import Part, Record
from keepwarm.store.tier import Tier
from keepwarm.store.tiers import Found, Tiers

LOG = logging.getLogger(__name__)
LOOK_AHEAD = 8  # records read before they are asked for
MAX_DEFERRAL_S = 2.0  # a save waits for restores, but not for ever


@dataclass(frozen=True)
class WriteStats:
    written_records: int = 0
    written_bytes: int = 0
    dropped: int = 0  # saves given up for lack of room in the queue
    failed: int = 0  # saves that the disk refused


class Saver(Protocol):
    """Where captured records go."""

    def put(self, record: Record, policy: Policy) -> None:
        """Make a record findable at once and, where the policy says so, durable in its own time."""

    def flush(self) -> None:
        """Return once everything put so far is on disk or was given up."""

    def restoring(self) -> AbstractContextManager[None]:
        """While inside, saves wait."""

    def stats(self) -> WriteStats: ...

    def close(self) -> None:
        """Write what is queued, then stop."""


class MemoryOnly:
    """A saver without a disk."""

    def __init__(self, memory: Tier) -> None:
        self._memory = memory

    def put(self, record: Record, policy: Policy) -> None:  # noqa: ARG002
        self._memory.put(record)

    def flush(self) -> None:
        return

    def restoring(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stats(self) -> WriteStats:
        return WriteStats()

    def close(self) -> None:
        return


class Writer:
    """Puts records on disk, in order, off the request path; restores go first."""

    def __init__(self, memory: Tier | None, disk: Tier, max_queued_bytes: int) -> None:
        self.queued = MemoryTier(max_queued_bytes)
        self._memory = memory
        self._disk = disk
        self._order: deque[tuple[BlockKey, Part]] = deque()
        self._changed = threading.Condition()
        self._restores = 0
        self._closing = False
        self._busy = False
        self._stats = WriteStats()
        self._thread = threading.Thread(target=self._run, name="keepwarm-writer", daemon=True)
        self._thread.start()

    def put(self, record: Record, policy: Policy) -> None:
        if self._memory is not None:
            self._memory.put(record)
        if not policy.to_disk:
            return
        with self._changed:
            if self.queued.put(record).stored:
                self._order.append((record.header.key, record.header.part))
                self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._order and not self._busy)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        with self._changed:
            self._restores += 1
        try:
            yield
        finally:
            with self._changed:
                self._restores -= 1
                self._changed.notify_all()

    def stats(self) -> WriteStats:
        return self._stats

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.queued.close()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._write(*item)
            except Exception:  # the writer must outlive any one record
                LOG.exception("a block could not be saved")
                self._count(failed=1)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[BlockKey, Part] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._order or self._closing)
            if not self._order:
                return None
            self._changed.wait_for(lambda: not self._restores or self._closing, MAX_DEFERRAL_S)
            self._busy = True
            return self._order.popleft()

    def _write(self, key: BlockKey, part: Part) -> None:
        record = self.queued.read(key, part)
        if record is None:
            self._count(dropped=1)
            return
        put = self._disk.put(record)
        if put.durable.exception() is not None:
            self._count(failed=1)
        elif put.stored:
            self._count(written_records=1, written_bytes=record.n_bytes)
        self.queued.delete_part(key, part)

    def _count(self, **more: int) -> None:
        sums = {name: getattr(self._stats, name) + n for name, n in more.items()}
        self._stats = WriteStats(**{**vars(self._stats), **sums})


class Reader:
    """Reads the records of a plan ahead of their use, in order."""

    def __init__(self, tiers: Tiers, n_threads: int = 4) -> None:
        self._tiers = tiers
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="keepwarm-reader")

    def read(self, reads: Sequence[Read]) -> Iterator[Found | None]:
        """Every record in order; None where one is a miss."""
        waiting: deque[Future[Found | None]] = deque()
        for read in reads:
            waiting.append(self._pool.submit(self._tiers.read, read.key, read.part))
            if len(waiting) > LOOK_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
