"""Blocks as files: `blocks/ab/<key>.<part>.safetensors`, with an index beside them.

A put writes the file, renames it, then adds the row; a deletion marks the row, deletes the files,
then the row. So a crash at any moment leaves only what the next start can finish. All processes
rename and delete files under one lock, so that rows and files agree as long as none crashes.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.atomic import Files, Scratch
from keepwarm.store.disk.reconcile import make_directories, reconcile
from keepwarm.store.disk.records import RecordFiles
from keepwarm.store.index.index import Index
from keepwarm.store.index.opening import open_index
from keepwarm.store.marker import claim
from keepwarm.store.record import (
    Header,
    Part,
    ReadBuffer,
    Record,
    RecordView,
    encode_record,
)
from keepwarm.store.seal import Seal
from keepwarm.store.thinning import find_surplus
from keepwarm.store.tier import (
    BlockInfo,
    CheckpointRef,
    Child,
    NamedBlock,
    Outdated,
    PutResult,
    ReadFault,
    RefusedBlocks,
    StoredBlock,
    TierStats,
    as_store_errors,
    default_on_io_error,
    is_busy,
)

INDEX_ROOM = 1 << 19  # what index and log may grow by in one put or deletion
LOG = logging.getLogger(__name__)


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


class DiskTier:
    """A directory that several processes may use at once."""

    def __init__(
        self,
        root: Path,
        limits: DiskLimits | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        seal: Seal | None = None,
    ) -> None:
        self.limits = limits or DiskLimits()
        self._clock = clock
        self._refused = RefusedBlocks()
        self._is_stuck = False  # another process may be stopped
        self.generation: int | None = None  # that the caller knows of; others' puts do not ask
        # Whether a record was not forgotten between its caller's look at it and its put.
        self.is_wanted: Callable[[Header], bool] = lambda _: True
        files = files or Files()
        self.root = root = claim(root, files)
        self.seal = seal
        self._directories = make_directories(root, files)
        self.records = RecordFiles(root, files, self._open_index(), seal)
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

    def unpin(self, key: BlockKey, owner: str) -> None:
        with as_store_errors(self, "unpin a block"):
            self.index.unpin(key, owner)

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
            self._delete_part(state.key, Part.STATE)
            self._delete(lookups.superseded(state.beside))
        self._delete(lookups.superseded(key))

    def delete(self, key: BlockKey) -> None:
        self.delete_all([key])

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        """Delete all parts of these blocks."""
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

    def close(self) -> None:
        self.index.close()
        self.scratch.close()

    # Writing

    def _put(self, record: Record) -> bool:
        self.records.mend()
        if self._has(record.header):
            return False
        written = self.write(record)
        return written is not None and self.publish(written, self.generation)

    def write(self, record: Record) -> UnpublishedRecord | None:
        """Write a record that cannot be found yet; None if there is no room for it."""
        header, buffers = record.header, encode_record(record, self.seal)
        n_bytes = sum(memoryview(piece).nbytes for piece in buffers)
        reservation = self._make_room(header, n_bytes)
        if reservation is None:
            self._refused.add(header.key)
            self.records.counts.add(refused=1)
            return None
        written = UnpublishedRecord(header, self.scratch.new(), n_bytes, reservation)
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
            stored = self._publish(*written, generation)
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
        return not header.improves_on(known.w_rows)

    def _publish(
        self, header: Header, temp: Path, n_bytes: int, reservation: int, generation: int | None
    ) -> bool:
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
            self.files.publish(temp, target)
            self.index.add(header, n_bytes, self._clock(), reservation)
            return True

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
        """Evict for a record of so many bytes; False if nothing could be evicted."""
        priority = self.index.priority_of(header, n_bytes, self._clock())
        with self.records.names_lock.hold():
            missing = self._missing_bytes(n_bytes)
            if missing <= 0:  # another process has just evicted
                return True
            self.index.follow_clock(self._clock())
            self.index.expire_ttl_pins(self._clock())
            victims = self.index.select_victims(missing, {header.key, header.parent}, priority)
            self._finish_deleting(victims)
        self.records.counts.add(evicted=len(victims))
        return bool(victims)

    def _missing_bytes(self, n_bytes: int) -> int:
        """How many bytes must be freed before so many can be written."""
        short = n_bytes + self.limits.min_free_bytes - shutil.disk_usage(self.root).free
        limit = self._record_limit()
        if limit is None:
            return short
        return max(short, self.index.lookups.n_bytes() + n_bytes - limit)

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
        for key in keys:
            for part in Part:
                self.files.remove(self.records.path_of(key, part))
        if keys:
            self.index.delete_marked(keys)

    def _delete_part(self, key: BlockKey, part: Part) -> None:
        """The file first: a start deletes a row without a file."""
        with self.records.names_lock.hold():
            self.files.remove(self.records.path_of(key, part))
            self.index.delete_part(key, part)

    @default_on_io_error(lambda: None)
    def _retry_deleting(self, key: BlockKey) -> None:
        self._finish_deleting([key])

    # Start

    def _open_index(self) -> Index:
        return open_index(self.root, self.seal)

    def _reconcile(self) -> None:
        self.index.follow_clock(self._clock())
        self.records.others.stray_bytes = reconcile(
            self.records, self._retry_deleting, self._clock()
        )
