"""Blocks as files: `blocks/ab/<key>.<part>.safetensors`, with an index beside them.

Order of things: file first, name second, row last; deleting marks the row, removes the files and
then the row. So at every moment a crash leaves only what the next start can finish. Names come and
go under one lock among all processes, so that row and file cannot disagree while all live.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from keepwarm.errors import BadRecord
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.atomic import Files, Scratch, exclusive, is_alive
from keepwarm.store.index import Index, is_damage
from keepwarm.store.names import Others, bytes_of, directories, path_of, strays
from keepwarm.store.opening import note_damage, open_index
from keepwarm.store.record import (
    Buffer,
    Header,
    Opened,
    Part,
    Record,
    Visit,
    check_identity,
    open_record,
    pieces,
    read_tensors,
    record_of,
    unread,
)
from keepwarm.store.seal import Seal
from keepwarm.store.tier import Child, Known, Put, State, Stored, TierStats, outage_is

INDEX_ROOM = 1 << 19  # what index and log may grow by while a record comes or goes
LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class DiskLimits:
    max_bytes: int | None = None  # of every file under the root, whoever made it
    min_free_bytes: int = 1 << 30  # of the file system


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
        self.root = root
        self.seal = seal
        self.limits = limits or DiskLimits()
        self.files = files or Files()
        self._clock = clock
        self._stats = TierStats(max_bytes=self.limits.max_bytes)
        self._stats_lock = threading.Lock()
        self._others = Others(root)
        self._directories = self._make_directories()
        self.index = self._open_index()
        self.scratch = Scratch(root / "tmp")
        try:
            self._reconcile()
        except sqlite3.DatabaseError as error:
            self._failed(error)
            self.index.close()
            self.index = self._open_index()
            self._reconcile()

    # The tier protocol

    @outage_is(dict)
    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, Known]:
        return self.index.have(keys)

    @outage_is(list)
    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self.index.children(parent, tokens)

    @outage_is(list)
    def states(self, parents: Collection[BlockKey]) -> list[State]:
        return self.index.states(parents)

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        return self._read(key, part, lambda file, opened: record_of(file, opened, tensors))

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[Visit], None], buffer: Buffer
    ) -> bool:
        def visited(file: BinaryIO, opened: Opened) -> bool:
            use(unread(file, opened, buffer))
            return True

        return bool(self._read(key, part, visited))

    def _read(self, key: BlockKey, part: Part, use: Callable[[BinaryIO, Opened], T]) -> T | None:
        """What `use` makes of a verified header and the file behind it; None is a miss."""
        try:
            made = self._opened(key, part, use)
        except BadRecord as bad:
            self.quarantine(key, part, str(bad))
        except FileNotFoundError:
            self._forget_missing(key, part)
        except OSError as error:
            LOG.warning("%s could not be read: %s", self.path_of(key, part).name, error)
            self._count(errors=1)
        else:
            self._count(hits=1)
            return made
        self._count(misses=1)
        return None

    def put(self, record: Record) -> Put:
        durable: Future[None] = Future()
        try:
            stored = self._put(record)
        except (OSError, sqlite3.Error) as error:
            LOG.warning("a block could not be written: %s", error)
            self._failed(error)
            durable.set_exception(error)
            return Put(False, durable)
        durable.set_result(None)
        return Put(stored, durable)

    def pin(self, key: BlockKey, owner: str) -> None:
        self.index.pin(key, owner)

    def unpin(self, key: BlockKey, owner: str) -> None:
        self.index.unpin(key, owner)

    def unpin_owner(self, owner: str) -> None:
        """Let go of everything one owner holds."""
        self.index.unpin_owner(owner)

    @outage_is(lambda: None)
    def drop_outgrown(self, key: BlockKey) -> None:
        self.delete_all(self.index.outgrown(key))

    def delete(self, key: BlockKey) -> None:
        self.delete_all([key])

    def walk(self) -> Iterator[Stored]:
        return self.index.walk()

    @outage_is(lambda: None)
    def touch(self, keys: Collection[BlockKey]) -> None:
        self.index.touch(keys, self._clock())

    def stats(self) -> TierStats:
        n_bytes = self.index.n_bytes() + self._others.n_bytes()
        return replace(self._stats, blocks=self.index.n_blocks(), n_bytes=n_bytes)

    def close(self) -> None:
        self.index.close()
        self.scratch.close()

    # Reading

    def path_of(self, key: BlockKey, part: Part) -> Path:
        return path_of(self.root, key, part)

    def _opened(self, key: BlockKey, part: Part, use: Callable[[BinaryIO, Opened], T]) -> T:
        path = self.path_of(key, part)
        if path.is_dir():
            raise BadRecord("it is a directory")
        with self.files.open(path) as file:
            opened = open_record(file, os.fstat(file.fileno()).st_size, self.seal)
            check_identity(opened.header, key, part)
            return use(file, opened)

    @outage_is(lambda: None)
    def quarantine(self, key: BlockKey, part: Part, why: str) -> None:
        """Put a bad record out of reach, with the reason beside it; from now on it is a miss."""
        path = self.path_of(key, part)
        with self.naming():
            if self.fault_of(key, part) is None:  # whoever was asked last may have put it anew
                return
            self._set_aside(path, why)
            self.index.drop_part(key, part)
        LOG.warning("%s is bad and was set aside: %s", path.name, why)
        self._others.changed()
        self._count(quarantined=1)

    def fault_of(self, key: BlockKey, part: Part) -> str | None:
        """What is wrong with a record, all of it read; None where nothing is. Changes nothing."""
        try:
            self._opened(key, part, read_tensors)
        except BadRecord as bad:
            return str(bad)
        except OSError:
            return None
        return None

    def _set_aside(self, path: Path, why: str) -> None:
        aside = self.root / "quarantine" / f"{path.name}.{time.time_ns()}"
        try:
            self.files.write(aside.with_name(f"{aside.name}.why"), [f"{why}\n".encode()])
            self.files.publish(path, aside)
        except OSError as error:
            LOG.warning("%s could not be set aside: %s", path.name, error)

    @outage_is(lambda: None)
    def _forget_missing(self, key: BlockKey, part: Part) -> None:
        """A row without a file is dropped, but not one that was put a moment ago."""
        if not self._knows(key, part):
            return
        with self.naming():
            if not self.path_of(key, part).exists():
                self.index.drop_part(key, part)

    def _knows(self, key: BlockKey, part: Part) -> bool:
        known = self.index.have([key]).get(key)
        return known is not None and part in known.parts

    # Writing

    def _put(self, record: Record) -> bool:
        header = record.header
        if self._has(header):
            return False
        buffers = pieces(record, self.seal)
        n_bytes = sum(memoryview(piece).nbytes for piece in buffers)
        reservation = self._make_room(header, n_bytes)
        if reservation is None:
            return False
        temp = self.scratch.new()
        try:
            self.files.write(temp, buffers)
            stored = self._publish(temp, header, n_bytes, reservation)
        except BaseException:
            self.files.discard(temp)
            self.index.cancel(reservation)
            raise
        self._count(puts=int(stored))
        return stored

    def _has(self, header: Header) -> bool:
        known = self.index.have([header.key]).get(header.key)
        if known is None or header.part not in known.parts:
            return False
        return not header.improves_on(known.w_rows)

    def _publish(self, temp: Path, header: Header, n_bytes: int, reservation: int) -> bool:
        target = self.path_of(header.key, header.part)
        self.need_directory(target.parent)
        with self.naming():
            if self.index.is_doomed(header.key):  # by a process that died over it
                self._finish_deleting([header.key])
            if self._has(header):  # somebody else was faster
                self.files.discard(temp)
                self.index.cancel(reservation)
                return False
            self.files.publish(temp, target)
            self.index.add(header, n_bytes, self._clock(), reservation)
            return True

    def need_directory(self, path: Path) -> None:
        """Once a process, because one that another has just made may not be synced yet."""
        if path not in self._directories or not path.is_dir():
            self.files.make_directory(path)
            self._directories.add(path)

    def _make_room(self, header: Header, n_bytes: int) -> int | None:
        """Reserve the bytes, evicting as needed; None if that is not enough."""
        while True:
            limit = self._record_limit()
            if self._missing_bytes(n_bytes) <= 0:
                reservation = self.index.reserve(
                    header.key, header.parent, n_bytes, self.scratch.name, limit
                )
                if reservation is not None:
                    return reservation
            if limit is not None and n_bytes > limit:
                return None
            if not self._evict(n_bytes, spare={header.key, header.parent}):
                return None

    def _evict(self, n_bytes: int, spare: Collection[BlockKey]) -> bool:
        """Make room for so many bytes; False if nothing could be done."""
        with self.naming():
            missing = self._missing_bytes(n_bytes)
            if missing <= 0:  # another process has just done it
                return True
            victims = self.index.condemn(missing, spare)
            self._finish_deleting(victims)
        self._count(evicted=len(victims))
        return bool(victims)

    def _missing_bytes(self, n_bytes: int) -> int:
        """How many bytes must go before so many can come."""
        short = n_bytes + self.limits.min_free_bytes - shutil.disk_usage(self.root).free
        limit = self._record_limit()
        return short if limit is None else max(short, self.index.n_bytes() + n_bytes - limit)

    def _record_limit(self) -> int | None:
        if self.limits.max_bytes is None:
            return None
        return self.limits.max_bytes - self._others.n_bytes() - INDEX_ROOM

    def naming(self) -> AbstractContextManager[None]:
        """The lock under which files get and lose their names."""
        return exclusive(self.root / "tmp" / "names")

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        """Remove all parts of these blocks."""
        if not keys:
            return
        with self.naming():
            self.index.doom(keys)
            self._finish_deleting(keys)

    def _finish_deleting(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            for part in Part:
                self.files.remove(self.path_of(key, part))
        if keys:
            self.index.drop(keys)

    @outage_is(lambda: None)
    def _retry_deleting(self, key: BlockKey) -> None:
        self._finish_deleting([key])

    # Start

    def _make_directories(self) -> set[Path]:
        """Make what is missing; says which directories of blocks are there to stay."""
        missing = [path for path in self.root.parents if not path.exists()]
        for path in (*reversed(missing), self.root):
            self.files.make_directory(path)
        for name in ("blocks", "agents", "quarantine", "tmp"):
            self.files.make_directory(self.root / name)
        blocks = self.root / "blocks"
        found = {path for path in blocks.iterdir() if path.is_dir()}
        self.files.sync_directory(blocks)
        return found

    def _open_index(self) -> Index:
        return open_index(self.root, self.seal)

    def _reconcile(self) -> None:
        """Finish what a crash left: deletions, reservations, files without rows and the reverse."""
        for writer in self.index.writers():
            if not is_alive(self.root / "tmp", writer):
                self.index.forget_writer(writer)
        with self.naming():
            for key in self.index.doomed():
                self._retry_deleting(key)
        stray = strays(self.root)
        for directory in directories(self.root):
            changes = directory.changes(self.index.names(directory.first))
            for key, part in changes.come:
                self._adopt(key, part)
            for key, part in changes.gone:
                self._forget_missing(key, part)
            stray += changes.strays
        self._others.stray_bytes = sum(map(bytes_of, stray))

    def _adopt(self, key: BlockKey, part: Part) -> None:
        path = self.path_of(key, part)
        try:
            with self.naming():
                header = self._opened(key, part, lambda _, opened: opened.header)
                self.index.add(header, path.stat().st_size, path.stat().st_mtime)
        except BadRecord as bad:
            self.quarantine(key, part, str(bad))
        except FileNotFoundError:
            return  # somebody deleted it meanwhile
        except OSError as error:
            LOG.warning("%s could not be adopted: %s", path.name, error)

    def _failed(self, error: Exception) -> None:
        self._count(errors=1)
        if is_damage(error):
            note_damage(self.root)

    def _count(self, **more: int) -> None:
        with self._stats_lock:
            sums = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = replace(self._stats, **sums)
