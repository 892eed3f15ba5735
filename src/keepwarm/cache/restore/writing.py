"""Writing records to disk while the model runs.

A record can be found as soon as it is put: until it is on disk it is in a memory tier of its own.
That tier is the bounded queue: when full it evicts the least valuable records, deepest first, as
every tier does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

from keepwarm.cache.restore.forgetting import Deletions, Share, Unclaimed
from keepwarm.prefix.blocks import BlockKey
from keepwarm.prefix.policy import Policy
from keepwarm.records.at_rest import CODEC, at_rest
from keepwarm.records.record import Header, Part, Record
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import BlockInfo, LookupTier, Outdated, PutResult, Tier, is_busy
from keepwarm.store.tiers import TierLookups

LOG = logging.getLogger(__name__)
MAX_DEFERRAL_S = 2.0  # how long a save waits for restores
MAX_TRIES = 8  # to write a record while other processes delete
UNEVEN = "uneven"  # of a record: it has fewer rows of some windows than of others
CATCH_UP_S = 0.5  # how often an idle writer looks for deletions of other processes
WRITE_BACKOFF_S = 60.0  # seconds without re-saves after a refusal
MAX_WRITTEN = 1 << 14  # blocks, the latest, that requests which wait already are told of


@dataclass(frozen=True)
class WriteStats:
    written_records: int = 0
    written_bytes: int = 0
    dropped: int = 0  # saves for which the queue had no room
    failed: int = 0  # saves that the disk failed at
    over_budget: int = 0  # saves beyond today's write budget
    disk_full: int = 0  # saves for which the disk budget had no room
    orphans: int = 0  # saves of blocks whose parent was not saved
    queued_blocks: int = 0  # not on disk yet
    queued_bytes: int = 0

    @property
    def lost(self) -> dict[str, int]:
        """Saves that were wanted and not done, by reason. What was forgotten was not wanted."""
        return {
            "queue_full": self.dropped,
            "disk_full": self.disk_full,
            "disk_error": self.failed,
            "daily_budget": self.over_budget,
            "orphan": self.orphans,
        }


class MemorySaver:
    """Where captured records go; here there is no disk."""

    def __init__(self, memory: Tier | None) -> None:
        self._memory = memory
        self.written: dict[BlockKey, BlockInfo] = {}  # the latest, by this process, to disk

    def put(
        self,
        record: Record,
        policy: Policy,  # noqa: ARG002
        memory_only: bool = False,
        share: Share | None = None,  # noqa: ARG002
    ) -> None:
        """Make a record findable now and, if the policy says so, durable later.

        What is `memory_only` is never written to disk, and window rows of it are evicted first. A
        record is not written once no request with a share in it has a claim any more.
        """
        if self._memory is not None:
            _put_in_memory(self._memory, record, memory_only)

    def kept(
        self,
        keys: Collection[BlockKey],
        disk: LookupTier | None = None,  # noqa: ARG002
    ) -> dict[BlockKey, BlockInfo]:
        """Which of these blocks are saved, or queued to be; `disk` answers in place of the disk."""
        memory = self._memory
        demoted = memory.demoted_windows(keys) if isinstance(memory, MemoryTier) else set()
        return memory.have([key for key in keys if key not in demoted]) if memory else {}

    def accepts_resaves(self, policy: Policy) -> bool:  # noqa: ARG002
        """Whether blocks that are in memory only should be put again."""
        return False

    @property
    def n_put(self) -> int:
        """Records that were put so far, for `flush`."""
        return 0

    def flush(self, n_put: int | None = None) -> None:
        """Return once everything put so far, or by then, is on disk or has been dropped."""

    def restoring(self) -> AbstractContextManager[None]:
        """While inside, saves wait."""
        return nullcontext()

    def stats(self) -> WriteStats:
        return WriteStats()

    def close(self) -> None:
        """Write the queue, then stop."""


class Writer(MemorySaver):
    """Writes records to disk, in order, on its own thread; restores have priority."""

    def __init__(
        self,
        memory: Tier | None,
        disk: Tier,
        max_queued_bytes: int,
        wear: WriteBudget | None = None,
        catch_up: Callable[[], object] | None = None,
    ) -> None:
        """`catch_up` forgets what other processes have deleted; it is called before anything is
        written after a deletion, and at intervals.
        """
        super().__init__(memory)
        self._wear = wear
        self._catch_up = catch_up or _nothing
        self._max_queued_bytes = max_queued_bytes
        self.queued = MemoryTier(max_queued_bytes)
        self._disk = disk
        self._order: dict[tuple[BlockKey, Part], bool] = {}  # False: it is forgotten
        self._writing: dict[tuple[BlockKey, Part], bool] = {}  # the one that is written, likewise
        self._shares: dict[tuple[BlockKey, Part], list[Share]] = {}  # of what is queued
        self._changed = threading.Condition()
        self._restores = 0
        self._closing = False
        self._n_put = self._n_done = 0  # records
        self._n_flushing = 0  # threads waiting in `flush`
        self._backoff_until = 0.0  # by the monotonic clock
        self._stats = WriteStats()
        self._thread = threading.Thread(target=self._run, name="keepwarm-writer", daemon=True)
        self._thread.start()

    def put(
        self,
        record: Record,
        policy: Policy,
        memory_only: bool = False,
        share: Share | None = None,
    ) -> None:
        super().put(record, policy, memory_only)
        if memory_only or not policy.to_disk:
            return
        item = record.header.key, record.header.part
        with self._changed:
            if self.queued.put(record).stored:
                self._n_put += item not in self._order
                self._order[item] = True
                self._changed.notify_all()
            elif not self.holds(record.header):
                self._count(dropped=1)
                return
            if share is not None:  # perhaps one of several
                self._shares.setdefault(item, []).append(share)

    def holds(self, header: Header) -> bool:
        """Whether a record is in the queue."""
        return header.part in _parts(self.queued, header.key)

    def forget(self, deletions: Deletions) -> None:
        """Drop what is queued and was deleted on purpose."""
        unclaimed = Unclaimed(deletions)
        self.written.clear()
        with self._changed:
            for item, shares in self._shares.items():
                if unclaimed.holds(shares):
                    self.queued.delete_part(*item)
                    for items in (self._order, self._writing):
                        if item in items:
                            items[item] = False

    def _drop(self, key: BlockKey, part: Part) -> None:
        """Unless it was put once more meanwhile, to be rounded."""
        with self._changed:
            if (key, part) not in self._order:
                self._shares.pop((key, part), None)
                self.queued.delete_part(key, part)

    def _is_orphan(self, record: Record) -> bool:
        """Whether its parent, which was queued before it, was not saved: rows are useless without
        those before them.
        """
        header = record.header
        is_first = header.part is not Part.DELTA or header.number == 0
        return not (is_first or self._disk.have([header.parent]))

    def kept(
        self, keys: Collection[BlockKey], disk: LookupTier | None = None
    ) -> dict[BlockKey, BlockInfo]:
        return TierLookups([("queue", self.queued), ("disk", disk or self._disk)]).have(keys)

    def accepts_resaves(self, policy: Policy) -> bool:
        """Slicing blocks takes the engine's time, so after a refusal only for durable requests."""
        is_over = time.monotonic() >= self._backoff_until
        return policy is Policy.DURABLE or (policy.to_disk and is_over)

    @property
    def n_put(self) -> int:
        return self._n_put

    def flush(self, n_put: int | None = None) -> None:
        with self._changed:
            n_put = self._n_put if n_put is None else n_put
            self._n_flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._n_done >= n_put)
            self._n_flushing -= 1

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
        queued = self.queued.stats()
        return replace(self._stats, queued_blocks=queued.blocks, queued_bytes=queued.n_bytes)

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
            except OSError as error:
                level = logging.DEBUG if is_busy(error) else logging.WARNING
                LOG.log(level, "a block could not be saved: %s", error)
                self._refused(failed=1)
            except Exception:  # one bad record must not stop the writer thread
                LOG.exception("a block could not be saved")
                self._count(failed=1)
            with self._changed:
                self._n_done += 1
                self._changed.notify_all()

    def _next(self) -> tuple[BlockKey, Part] | None:
        while not self._wait_for_work():
            try:
                self._catch_up()
            except Exception:  # of what is told of deletions: it must not stop the writer thread
                LOG.exception("what was deleted could not be forgotten")
        with self._changed:
            if not self._order:
                return None
            self._changed.wait_for(lambda: not self._must_wait(), MAX_DEFERRAL_S)
            item = next(iter(self._order))
            self._writing = {item: self._order.pop(item)}
            return item

    def _wait_for_work(self) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._order or self._closing, CATCH_UP_S))

    def _must_wait(self) -> bool:
        """For restores, unless a flush waits or the queue is half full and may drop records."""
        if not self._restores or self._closing or self._n_flushing:
            return False
        return 2 * self.queued.stats().n_bytes < self._max_queued_bytes

    def _write(self, key: BlockKey, part: Part) -> None:
        lost = {"failed": 1}  # others delete all the time
        for _ in range(MAX_TRIES):
            record = self.queued.read(key, part)
            if record is None:  # evicted or forgotten
                lost = {"dropped": int(self._writing[key, part])}
                break
            if self._is_orphan(record):
                lost = {"orphans": 1}
                break
            if self._is_saved(record):
                return
        self._drop(key, part)
        self._count(**lost)

    def _is_saved(self, record: Record) -> bool:
        """False if it must be tried again: it may be among what other processes have deleted."""
        try:
            record = at_rest(record)  # so that the budget counts what is written
            if CODEC in record.header.extra and isinstance(self._memory, MemoryTier):
                self._memory.replace(record)
            self._save(record)
        except Outdated:
            self._give_back(record)
            self._catch_up()
            return False
        except BaseException:
            self._drop(record.header.key, record.header.part)
            raise
        self._drop(record.header.key, record.header.part)
        return True

    def _give_back(self, record: Record) -> None:
        """Return a record's bytes to today's budget."""
        if self._wear is not None:
            with suppress(OSError):  # then the budget is a little smaller
                self._wear.give_back(record.n_bytes)

    def _save(self, record: Record) -> None:
        if self._wear is not None and not self._wear.take(record.n_bytes):
            self._refused(over_budget=1)
            return
        put = _put(self._disk, record)
        self._note_written(record.header.key)
        if put.stored:
            self._count(written_records=1, written_bytes=record.n_bytes)
            return
        self._give_back(record)
        if put.durable.exception() is not None:
            self._refused(failed=1)
        elif record.header.part not in _parts(self._disk, record.header.key):
            self._refused(disk_full=1)

    def _note_written(self, key: BlockKey) -> None:
        """Before the record leaves the queue, so that it is always found."""
        self.written |= self._disk.have([key])
        if len(self.written) > MAX_WRITTEN:
            del self.written[next(iter(self.written))]

    def _refused(self, **why: int) -> None:
        self._backoff_until = time.monotonic() + WRITE_BACKOFF_S
        self._count(**why)

    def _count(self, **more: int) -> None:
        with self._changed:
            sums = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = replace(self._stats, **sums)


def _parts(tier: Tier, key: BlockKey) -> Collection[Part]:
    known = tier.have([key]).get(key)
    return known.parts if known else ()


def _nothing() -> None:
    return


def _put(tier: Tier, record: Record) -> PutResult:
    put = tier.put(record)
    if put.stored and not record.header.extra.get(UNEVEN):  # a shorter block may have more rows
        tier.delete_superseded(record.header.key)
    return put


def _put_in_memory(memory: Tier, record: Record, memory_only: bool) -> None:
    put = _put(memory, record)
    if record.header.part is not Part.WINDOW or not isinstance(memory, MemoryTier):
        return
    if not memory_only:
        memory.promote_window(record.header.key)
    elif put.stored:
        memory.demote_window(record.header.key)
