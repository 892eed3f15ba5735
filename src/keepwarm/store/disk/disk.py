"""Blocks as files: `blocks/ab/<key>.<part>.safetensors`, with an index beside them.

A put writes the file, renames it, then adds the row; a deletion marks the row, deletes the files,
then the row. So a crash at any moment leaves only what the next start can finish. All processes
rename and delete files under one lock, so that rows and files agree as long as none crashes.

Files are read and verified; a bad one is quarantined with the reason.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, TypeAlias, TypeVar

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.files import SharedLock
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.records.at_rest import at_rest, is_rounded
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
    Header,
    Part,
    PrefillTime,
    ReadBuffer,
    Record,
    RecordView,
    VerifiedHeader,
    check_identity,
    encode_record,
    open_record,
    read_record,
    read_tensors,
    view_record,
)
from keepwarm.store.atomic import Files, Scratch, is_alive
from keepwarm.store.eviction import find_surplus
from keepwarm.store.index.database import is_damage
from keepwarm.store.index.index import Index, note_damage, open_index
from keepwarm.store.marker import claim
from keepwarm.store.names import OtherFiles, bytes_of, directories, path_of, size_of, strays
from keepwarm.store.tier import (
    BlockChanges,
    BlockInfo,
    CheckpointRef,
    Child,
    NamedBlock,
    Outdated,
    PutResult,
    ReadFault,
    RefusedBlocks,
    StoredBlock,
    TierCounts,
    TierStats,
    as_store_errors,
    default_on_io_error,
    is_busy,
)

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Use: TypeAlias = Callable[[BinaryIO, VerifiedHeader], T]
MAX_KNOWN = 1 << 16  # files
MAX_FAULTS = 64
INDEX_ROOM = 1 << 19  # what index and log may grow by in one put or deletion
VAIN_S = 60.0  # that nothing is evicted for, after deletions that left no more space


class Pages:
    """Which files are dropped from the page cache, in one process.

    Restored rows live on as arrays, so the cached pages of their file would hold them twice. A file
    that was not cached and is restored for the first time is dropped again, which frees its pages
    for the next one. A file that is restored again, by another agent with the same prefix or
    because the arrays were released, stays cached.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._brought: set[str] = set()  # cached by us, for the first time
        self._known: set[str] = set()  # restored before

    def opened(self, file: BinaryIO) -> None:
        """The file is about to be read."""
        name = os.fspath(file.name)
        if name not in self._known and not self._files.is_cached(file):
            _add(name, self._brought)

    def done(self, file: BinaryIO) -> None:
        """The whole file was restored."""
        name = os.fspath(file.name)
        if name in self._brought:
            self._brought.discard(name)
            self._files.drop_cached_pages(file)
        _add(name, self._known)


def _add(name: str, names: set[str]) -> None:
    """Remember a file. Forgets all at the limit: that only costs some time."""
    if len(names) >= MAX_KNOWN:
        names.clear()
    names.add(name)


class Repair(NamedTuple):
    """A record that a reader found to be bad, and why, or whose file it did not find."""

    key: BlockKey
    part: Part
    why: str | None
    is_misfit: bool = False  # its digests are right


class RecordFiles:
    """The record files of one directory, and the index of them."""

    def __init__(self, root: Path, files: Files, index: Index, cipher: Cipher | None) -> None:
        self.root = root
        self.files = files
        self.index = index
        self.cipher = cipher
        self.counts = TierCounts()
        self.others = OtherFiles(root)
        self.pages = Pages(files)
        # Among processes: files are named, renamed and deleted under it.
        self.names_lock = SharedLock(root / "tmp" / "names")
        self.faults: dict[tuple[BlockKey, Part], ReadFault] = {}  # the latest, until taken
        self._repairs: dict[Repair, None] = {}

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        def read_from(file: BinaryIO, opened: VerifiedHeader) -> Record:
            if tensors is None:
                self.pages.opened(file)  # a restore that follows counts as the first read
            return read_record(file, opened, tensors)

        return self._read(key, part, read_from)

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[RecordView], None], buffer: ReadBuffer
    ) -> bool:
        def visit_file(file: BinaryIO, opened: VerifiedHeader) -> bool:
            self.pages.opened(file)
            _advise_sequential(file)
            use(view_record(file, opened, buffer))
            if file.tell() == os.fstat(file.fileno()).st_size:  # not if only the header was read
                self.pages.done(file)
            return True

        return bool(self._read(key, part, visit_file))

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Read the file into the page cache while other records are worked on."""
        path = self.path_of(key, part)
        with suppress(OSError):
            if path.is_file():
                with self.files.open(path) as file:
                    self.pages.opened(file)
                    _advise_sequential(file)
                    self.files.read_into_page_cache(file)
                return True
        return False

    def _read(self, key: BlockKey, part: Part, use: Use[T]) -> T | None:
        """What `use` returns for a verified header and its open file; None is a miss."""
        try:
            made = self.use_record(key, part, use)
        except BadRecord as bad:
            self._note_fault(key, part, "damaged")
            self.note_repair(Repair(key, part, str(bad)))
        except NewerFormat as newer:
            self._note_fault(key, part, "newer")
            self.skip_newer(key, part, str(newer))
        except FileNotFoundError:
            self.note_repair(Repair(key, part, None))
        except OSError as error:
            LOG.warning("%s could not be read: %s", self.path_of(key, part).name, error)
            self._note_fault(key, part, "unreadable")
            self.counts.add(errors=1)
        else:
            self.counts.add(hits=1)
            return made
        self.counts.add(misses=1)
        return None

    def _note_fault(self, key: BlockKey, part: Part, fault: ReadFault) -> None:
        if len(self.faults) >= MAX_FAULTS:  # nobody has asked
            self.faults.clear()
        self.faults[key, part] = fault

    def path_of(self, key: BlockKey, part: Part) -> Path:
        return path_of(self.root, key, part)

    def use_record(self, key: BlockKey, part: Part, use: Use[T]) -> T:
        """What `use` returns for a record; raises what is wrong with it."""
        path = self.path_of(key, part)
        if path.is_dir() and not path.is_symlink():
            raise BadRecord("it is a directory")
        with self.files.open(path) as file:
            opened = open_record(file, os.fstat(file.fileno()).st_size, self.cipher)
            check_identity(opened.header, key, part)
            return use(file, opened)

    def note_repair(self, repair: Repair) -> None:
        """Repair now if no lock is held by others, for which a reader does not wait."""
        self._repairs[repair] = None
        self.repair(wait_s=0.0)

    @default_on_io_error(lambda: None)
    def repair(self, wait_s: float | None = None) -> None:
        """Do the repairs that readers have noted."""
        for repair in list(self._repairs):
            try:
                self._repair(repair, wait_s)
            except (OSError, sqlite3.Error) as error:
                if not is_busy(error):
                    self._repairs.pop(repair, None)
                    raise
                return
            self._repairs.pop(repair, None)

    def _repair(self, repair: Repair, wait_s: float | None) -> None:
        if repair.why is None:
            self._delete_missing(repair.key, repair.part, wait_s)
        else:
            self._quarantine(repair, wait_s)

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        """Quarantine a record with right digests that does not fit the model."""
        self.note_repair(Repair(key, part, why, is_misfit=True))

    def _quarantine(self, repair: Repair, wait_s: float | None) -> None:
        """Move a bad record to quarantine, with the reason beside it; from now on it is a miss."""
        key, part, why, is_misfit = repair
        path = self.path_of(key, part)
        with self.names_lock.hold(wait_s):
            if not os.path.lexists(path):  # it was moved before, and the index was locked
                self.index.delete_part(key, part, wait_s)
                return
            # Another process may have replaced it meanwhile.
            if not (is_misfit or self._is_bad(key, part)):
                return
            is_moved = self.move_to_quarantine(path, str(why))
            self.index.delete_part(key, part, wait_s)
        if not is_moved:  # it is a miss, and the next put replaces it
            return
        LOG.warning("%s is bad and was quarantined: %s", path.name, why)
        self.others.changed()
        self.counts.add(quarantined=1)

    def skip_newer(self, key: BlockKey, part: Part, why: str) -> None:
        """A record that only a newer Keepwarm reads is a miss, but is not moved or deleted."""
        LOG.warning("%s is left to a newer Keepwarm: %s", self.path_of(key, part).name, why)
        self.counts.add(newer=1)

    def find_fault(self, key: BlockKey, part: Part) -> str | None:
        """Read a whole record and return what is wrong with it, or None. Changes nothing.

        Raises NewerFormat or OSError for a record that cannot be judged: neither means bad.
        """
        try:
            self.use_record(key, part, read_tensors)
        except BadRecord as bad:
            return str(bad)
        return None

    def _is_bad(self, key: BlockKey, part: Part) -> bool:
        try:
            return self.find_fault(key, part) is not None
        except (NewerFormat, OSError):
            return False

    def move_to_quarantine(self, path: Path, why: str) -> bool:
        """Move any file of the store there, with the reason beside it; False if that failed."""
        target = self.root / "quarantine" / f"{path.name}.{time.time_ns():019d}"
        try:
            self.files.write(target.with_name(f"{target.name}.why"), [f"{why}\n".encode()])
            self.files.publish(path, target)
        except OSError as error:
            LOG.warning("%s could not be quarantined: %s", path.name, error)
            return False
        return True

    def _delete_missing(self, key: BlockKey, part: Part, wait_s: float | None) -> None:
        """Delete the row of a record without a file, unless the file has just been put."""
        known = self.index.lookups.have([key]).get(key)
        if known is None or part not in known.parts:
            return
        with self.names_lock.hold(wait_s):
            if not self.path_of(key, part).exists():
                self.index.delete_part(key, part, wait_s)

    def note_error(self, error: Exception) -> None:
        self.counts.add(errors=1)
        if is_damage(error):
            note_damage(self.root)


def _advise_sequential(file: BinaryIO) -> None:
    """Let the system read ahead: the whole file is read in order.

    Asking for all of it at once (WILLNEED) costs Linux more CPU time than it saves waiting.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


@dataclass(frozen=True)
class DiskLimits:
    max_bytes: int | None = None  # of all files under the root
    min_free_bytes: int = 1 << 30  # on the file system


class UnpublishedRecord(NamedTuple):
    """A record in a temporary file, which the next start deletes, with its bytes reserved."""

    header: Header
    temp: Path
    n_bytes: int
    reservation: int
    prefill: PrefillTime | None


class DiskTier:
    """A directory that several processes may use at once."""

    def __init__(
        self,
        root: Path,
        limits: DiskLimits | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        cipher: Cipher | None = None,
    ) -> None:
        self.limits = limits or DiskLimits()
        self._clock = clock
        self._refused = RefusedBlocks()
        self._is_stuck = False  # another process may be stopped
        self._in_vain_at = -math.inf  # the latest eviction that left no more space
        self.generation: int | None = None  # that the caller knows of; others' puts do not ask
        # Whether a record was not forgotten between its caller's look at it and its put.
        self.is_wanted: Callable[[Header], bool] = lambda _: True
        files = files or Files()
        self.root = root = claim(root, files)
        self.cipher = cipher
        self._directories = make_directories(root, files)
        self.records = RecordFiles(root, files, self._open_index(), cipher)
        self.scratch = Scratch(root / "tmp", files)
        try:
            self._reconcile()
        except sqlite3.DatabaseError as error:
            self.note_error(error)
            self.index.close()
            self.records.index = self._open_index()
            with as_store_errors(self, "repair its index"):
                self._reconcile()

    @property
    def files(self) -> Files:
        return self.records.files

    @property
    def index(self) -> Index:
        return self.records.index

    def note_error(self, error: Exception) -> None:
        self.records.note_error(error)

    # The tier protocol

    @default_on_io_error(dict)
    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        return self.index.lookups.have(keys)

    @default_on_io_error(list)
    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self.index.lookups.children(parent, tokens)

    @default_on_io_error(list)
    def children_of(self, parent: BlockKey) -> list[BlockKey]:
        return self.index.lookups.children_of(parent)

    @default_on_io_error(list)
    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return self.index.lookups.states(parents)

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        return self.records.read(key, part, tensors)

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[RecordView], None], buffer: ReadBuffer
    ) -> bool:
        return self.records.visit(key, part, use, buffer)

    def take_fault(self, key: BlockKey, part: Part) -> ReadFault | None:
        return self.records.faults.pop((key, part), None)

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        return self.records.prefetch(key, part)

    def put(self, record: Record) -> PutResult:
        durable: Future[None] = Future()
        try:
            stored = self._put(record)
        except (OSError, sqlite3.Error) as error:
            if not (self._is_stuck and is_busy(error)):  # one warning for all blocks meanwhile
                LOG.warning("a block could not be written: %s", error)
            self._is_stuck = is_busy(error)
            self.note_error(error)
            durable.set_exception(error)
            return PutResult(False, durable)
        self._is_stuck = False
        durable.set_result(None)
        return PutResult(stored, durable)

    def pin(self, key: BlockKey, owner: str) -> None:
        with as_store_errors(self, "pin a block"):
            self.index.pin(key, owner)

    def pin_only(self, owner: str, keys: Collection[BlockKey]) -> None:
        """Replace all pins of an owner."""
        with as_store_errors(self, "pin blocks"):
            self.index.pin_only(owner, keys)

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        self.records.discard(key, part, why)

    @default_on_io_error(lambda: None)
    def delete_superseded(self, key: BlockKey) -> None:
        lookups = self.index.lookups
        for state in find_surplus(*lookups.checkpoints(key)):
            self.delete_part(state.key, Part.STATE)
            self._delete(lookups.superseded(state.beside))
        self._delete(lookups.superseded(key))

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        with as_store_errors(self, "delete blocks"):
            self._delete(keys)

    def forget(self, owner: str, blocks: Iterable[NamedBlock]) -> None:
        """Have every process forget these blocks, and all that is the owner's, before they are
        deleted. What was put before can be found now; what is put later is put by one that knows.
        """
        with as_store_errors(self, "note what is deleted"), self.records.names_lock.hold():
            self.index.forgotten.add(owner, blocks)

    def forget_all(self) -> None:
        """The same with everything."""
        with as_store_errors(self, "note what is deleted"), self.records.names_lock.hold():
            self.index.forgotten.add_all()

    def flush(self) -> None:
        """Return once all that was put or deleted survives a power cut."""
        with as_store_errors(self, "flush its drive"):
            self.files.flush_drive(self.root)

    def walk(self) -> Iterator[StoredBlock]:
        with as_store_errors(self, "list its blocks"):
            yield from self.index.walk()

    def changes(self, since: int) -> BlockChanges:
        with as_store_errors(self, "list its changes"):
            return self.index.lookups.changes(since)

    @default_on_io_error(lambda: None)
    def touch(self, keys: Collection[BlockKey]) -> None:
        self.index.touch(keys, self._clock())

    def stats(self) -> TierStats:
        n_blocks, n_bytes = self._totals()
        return self.records.counts.stats(n_blocks, n_bytes, self.limits.max_bytes)

    @default_on_io_error(lambda: (0, 0))
    def _totals(self) -> tuple[int, int]:
        lookups = self.index.lookups
        return lookups.n_blocks(), lookups.n_bytes() + self.records.others.n_bytes()

    @default_on_io_error(Counter)
    def bytes_by_namespace(self) -> Counter[Namespace]:
        return self.index.lookups.bytes_by_namespace()

    def close(self) -> None:
        self.index.close()
        self.scratch.close()

    # Writing

    def _put(self, record: Record) -> bool:
        self.records.repair()
        if self._has(record.header):
            return False
        written = self.write(record)
        return written is not None and self.publish(written, self.generation)

    def write(self, record: Record) -> UnpublishedRecord | None:
        """Write a record that cannot be found yet; None if there is no room for it."""
        record = at_rest(record)
        header, buffers = record.header, encode_record(record, self.cipher)
        n_bytes = sum(memoryview(piece).nbytes for piece in buffers)
        reservation = self._make_room(header, n_bytes)
        if reservation is None:
            self._refused.add(header.key)
            self.records.counts.add(refused=1)
            return None
        temp = self.scratch.new()
        written = UnpublishedRecord(header, temp, n_bytes, reservation, record.prefill)
        try:
            self.files.write(written.temp, buffers)
        except BaseException:
            self.withdraw(written)
            raise
        return written

    def publish(self, written: UnpublishedRecord, generation: int | None = None) -> bool:
        """Let a record be found; False if it is there already. Raises Outdated if something was
        deleted on purpose after this generation.
        """
        try:
            stored = self._publish(written, generation)
        except BaseException:
            self.withdraw(written)
            raise
        self.records.counts.add(puts=int(stored))
        return stored

    def withdraw(self, written: UnpublishedRecord) -> None:
        self.files.discard(written.temp)
        self.index.cancel(written.reservation)

    def _has(self, header: Header) -> bool:
        known = self.index.lookups.have([header.key]).get(header.key)
        if known is None or header.part not in known.parts:
            return False
        return not (header.improves_on(known.w_rows) or self._is_smaller(header))

    def _is_smaller(self, header: Header) -> bool:
        """Whether a record is rounded, and the one that is there is not."""
        if not is_rounded(header):
            return False
        try:
            there = self.records.use_record(header.key, header.part, lambda _, opened: opened)
        except (BadRecord, NewerFormat, OSError):  # whoever reads it will see to that
            return False
        return not is_rounded(there.header)

    def _publish(self, written: UnpublishedRecord, generation: int | None) -> bool:
        header, temp, n_bytes, reservation, prefill = written
        target = self.records.path_of(header.key, header.part)
        self.ensure_directory(target.parent)
        with self.records.names_lock.hold():
            if generation is not None and (
                generation != self.index.forgotten.generation() or not self.is_wanted(header)
            ):
                raise Outdated
            if self.index.lookups.is_deleting(header.key):  # by a process that crashed
                self._finish_deleting([header.key])
            if self._has(header):  # another thread or process was faster
                self.files.discard(temp)
                self.index.cancel(reservation)
                return False
            try:
                self.files.publish(temp, target)
                self.index.add(header, n_bytes, self._clock(), reservation, prefill)
            except BaseException:
                if not temp.exists():  # it has its final name
                    self._remove_without_row(header)
                raise
            return True

    def _remove_without_row(self, header: Header) -> None:
        """Nobody could delete it, and the next start would let it be found. A row is that of a
        record which it has replaced, and serves as well.
        """
        known = None
        with suppress(OSError, sqlite3.Error):
            known = self.index.lookups.have([header.key]).get(header.key)
        if known is None or header.part not in known.parts:
            with suppress(OSError):
                self.files.remove(self.records.path_of(header.key, header.part))

    def ensure_directory(self, path: Path) -> None:
        """Once per process: a directory that another has just made may not be synced yet."""
        if path not in self._directories or not path.is_dir() or path.is_symlink():
            self.files.make_directory(path)
            self._directories.add(path)

    def _make_room(self, header: Header, n_bytes: int) -> int | None:
        """Reserve the bytes, evicting blocks of lower priority; None if that is not enough."""
        if self._refused.follows(header.parent, self.index.lookups.have):
            return None
        while True:
            limit = self._record_limit()
            if limit is not None and n_bytes > limit:
                return None
            if self._missing_bytes(n_bytes) <= 0:
                reservation = self.index.reserve(
                    header.key, header.parent, n_bytes, self.scratch.name, limit
                )
                if reservation is not None:
                    return reservation
            if not self._evict(header, n_bytes):
                return None

    def _evict(self, header: Header, n_bytes: int) -> bool:
        """Evict for a record of so many bytes; False if nothing could be evicted.

        If all blocks are worth more than the record, only what other files have grown by goes.
        Snapshots keep the space of deleted files: a whole cache could go for one record.
        """
        now = self._clock()
        priority = self.index.priority_of(header, n_bytes, now)
        with self.records.names_lock.hold():
            short, missing = self._short_bytes(n_bytes), self._missing_bytes(n_bytes)
            if missing <= 0:  # another process has just evicted
                return True
            if short > 0 and 0 <= now - self._in_vain_at < VAIN_S:
                return False
            self.index.follow_clock(self._clock())
            self.index.expire_ttl_pins(self._clock())
            needed = {header.key, header.parent}
            victims = self.index.select_victims(missing, needed, priority)
            over = self._over_limit(-INDEX_ROOM)  # that room is for the index to grow
            if not victims and over > 0:
                victims = self.index.select_victims(over, needed)
            self._finish_deleting(victims)
            if victims and 0 < short <= self._short_bytes(n_bytes):
                self._in_vain_at = now
        self.records.counts.add(evicted=len(victims))
        return bool(victims)

    def _missing_bytes(self, n_bytes: int) -> int:
        """How many bytes must be freed before so many can be written."""
        return max(self._short_bytes(n_bytes), self._over_limit(n_bytes))

    def _over_limit(self, n_bytes: int) -> int:
        """By how much so many bytes more would exceed the limit."""
        limit = self._record_limit()
        return 0 if limit is None else self.index.lookups.n_bytes() + n_bytes - limit

    def _short_bytes(self, n_bytes: int) -> int:
        """How many of them the file system lacks."""
        return n_bytes + self.limits.min_free_bytes - shutil.disk_usage(self.root).free

    def _record_limit(self) -> int | None:
        if self.limits.max_bytes is None:
            return None
        return self.limits.max_bytes - self.records.others.n_bytes() - INDEX_ROOM

    def _delete(self, keys: Collection[BlockKey]) -> None:
        if not keys:
            return
        with self.records.names_lock.hold():
            self.index.mark_deleting(keys)
            self._finish_deleting(keys)

    def _finish_deleting(self, keys: Collection[BlockKey]) -> None:
        """Rows whose files cannot be deleted stay marked, and count, until the next start."""
        failed: dict[BlockKey, OSError] = {}
        for key in keys:
            try:
                for part in Part:
                    self.files.remove(self.records.path_of(key, part))
            except OSError as error:
                failed[key] = error
        if keys:
            self.index.delete_marked(key for key in keys if key not in failed)
        for failure in failed.values():
            raise failure

    @default_on_io_error(lambda: None)
    def delete_part(self, key: BlockKey, part: Part) -> None:
        """The block goes with its last part. The file first: a start deletes a row without one."""
        with self.records.names_lock.hold():
            self.files.remove(self.records.path_of(key, part))
            self.index.delete_part(key, part)

    @default_on_io_error(lambda: None)
    def _retry_deleting(self, key: BlockKey) -> None:
        self._finish_deleting([key])

    # Start

    def _open_index(self) -> Index:
        return open_index(self.root, self.cipher)

    def _reconcile(self) -> None:
        self.index.follow_clock(self._clock())
        self.records.others.stray_bytes = reconcile(
            self.records, self._retry_deleting, self._clock()
        )


def make_directories(root: Path, files: Files) -> set[Path]:
    """Make missing directories; returns those of blocks, which are synced."""
    for name in ("blocks", "agents", "quarantine", "tmp"):
        files.make_directory(root / name)
    blocks = root / "blocks"
    found = {path for path in blocks.iterdir() if path.is_dir() and not path.is_symlink()}
    files.sync_directory(blocks)
    return found


def reconcile(records: RecordFiles, finish_deleting: Callable[[BlockKey], None], now: float) -> int:
    """Finish deletions, cancel reservations of dead processes, add rows for files without one, and
    delete rows without a file. Returns the bytes of files in `blocks/` that are not records.
    """
    for writer in records.index.lookups.writers():
        if not is_alive(records.root / "tmp", writer):
            records.index.cancel_writes(writer)
    with records.names_lock.hold():
        for key in records.index.lookups.deleting():
            finish_deleting(key)
    n_bytes = sum(map(bytes_of, strays(records.root)))
    for directory in directories(records.root):
        changes = directory.changes(records.index.lookups.names(directory.first))
        n_bytes += sum(map(bytes_of, changes.strays))
        n_bytes += sum(_adopt(records, key, part, now) for key, part in changes.added)
        for key, part in changes.missing:
            records.note_repair(Repair(key, part, None))
    records.repair()
    return n_bytes


def _adopt(records: RecordFiles, key: BlockKey, part: Part, now: float) -> int:
    """Add the row of a file; returns the file's bytes if it must stay without one."""
    path = records.path_of(key, part)
    try:
        with records.names_lock.hold():
            header = records.use_record(key, part, lambda _, opened: opened.header)
            about = path.stat()
            records.index.add(header, about.st_size, min(about.st_mtime, now))
    except BadRecord as bad:
        records.note_repair(Repair(key, part, str(bad)))
    except NewerFormat as newer:
        records.skip_newer(key, part, str(newer))
        return size_of(path)
    except FileNotFoundError:
        return 0  # another process has deleted it
    except OSError as error:
        LOG.warning("%s could not be indexed: %s", path.name, error)
    return 0


class StagedRecords:
    """Records that wait for others; use `with`, which withdraws those that were not published.

    They are encrypted, counted and limited like all records of the store, and a start deletes what
    a killed process left of them.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._written: deque[UnpublishedRecord] = deque()

    def add(self, record: Record) -> bool:
        """Write a record; False if there is no room for it."""
        written = self._disk.write(record)
        if written is not None:
            self._written.append(written)
        return written is not None

    def publish(self) -> None:
        """Let all be found; if one fails, those before it are deleted again, unless they have
        replaced others, which would be missed."""
        published = []
        try:
            while self._written:
                written = self._written.popleft()
                header = written.header
                known = self._disk.have([header.key]).get(header.key)
                is_new = known is None or header.part not in known.parts
                if self._disk.publish(written) and is_new:
                    published.append(header)
        except BaseException:
            for header in published:
                self._disk.delete_part(header.key, header.part)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._written:
            self._disk.withdraw(self._written.popleft())
