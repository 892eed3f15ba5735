"""Blocks as files: `blocks/ab/<key>.<part>.safetensors`, with an index beside them.

Order of things: file first, name second, row last; deleting marks the row, removes the files and
then the row. So at every moment a crash leaves only what the next start can finish.
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
from dataclasses import dataclass, replace
from pathlib import Path

from keepwarm.errors import BadRecord
from keepwarm.prefix.blocks import BlockKey, block_key
from keepwarm.store.atomic import DIRECTORY_MODE, Files, Scratch, exclusive, is_alive
from keepwarm.store.index import Index
from keepwarm.store.record import Header, Part, Record, open_record, pieces, read_tensors
from keepwarm.store.tier import Child, Known, Put, State, Stored, TierStats

SUFFIX = ".safetensors"
LOG = logging.getLogger(__name__)


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
    ) -> None:
        self.root = root
        self.limits = limits or DiskLimits()
        self._files = files or Files()
        self._clock = clock
        self._stats = TierStats(max_bytes=self.limits.max_bytes)
        self._stats_lock = threading.Lock()
        self._make_directories()
        self._scratch = Scratch(root / "tmp")
        self._index = self._open_index()
        self._reconcile()
        self._other_bytes = self._measure_others()

    # The tier protocol

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, Known]:
        return self._index.have(keys)

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self._index.children(parent, tokens)

    def states(self, parents: Collection[BlockKey]) -> list[State]:
        return self._index.states(parents)

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        path = self.path_of(key, part)
        try:
            record = self._read_verified(path, key, part, tensors)
        except BadRecord as bad:
            self.quarantine(key, part, str(bad))
        except FileNotFoundError:
            self._index.drop_part(key, part)
            self._count(misses=1)
        except OSError as error:
            LOG.warning("%s could not be read: %s", path.name, error)
            self._count(errors=1, misses=1)
        else:
            self._count(hits=1)
            return record
        return None

    def put(self, record: Record) -> Put:
        durable: Future[None] = Future()
        try:
            stored = self._put(record)
        except OSError as error:
            LOG.warning("a block could not be written: %s", error)
            self._count(errors=1)
            durable.set_exception(error)
            return Put(False, durable)
        durable.set_result(None)
        return Put(stored, durable)

    def pin(self, key: BlockKey, owner: str) -> None:
        self._index.pin(key, owner)

    def unpin(self, key: BlockKey, owner: str) -> None:
        self._index.unpin(key, owner)

    def delete(self, key: BlockKey) -> None:
        self._delete([key])

    def walk(self) -> Iterator[Stored]:
        return self._index.walk()

    def touch(self, keys: Collection[BlockKey]) -> None:
        self._index.touch(keys, self._clock())

    def stats(self) -> TierStats:
        n_bytes = self._index.n_bytes() + self._other_bytes
        return replace(self._stats, blocks=self._index.n_blocks(), n_bytes=n_bytes)

    def close(self) -> None:
        self._index.close()
        self._scratch.close()

    # Reading

    def path_of(self, key: BlockKey, part: Part) -> Path:
        name = key.hex()
        return self.root / "blocks" / name[:2] / f"{name}.{part.value}{SUFFIX}"

    def _read_verified(
        self, path: Path, key: BlockKey, part: Part, tensors: Collection[str] | None
    ) -> Record:
        if path.is_dir():
            raise BadRecord("it is a directory")
        with self._files.open(path) as file:
            opened = open_record(file, path.stat().st_size)
            check_identity(opened.header, key, part)
            return Record(opened.header, read_tensors(file, opened, tensors))

    def quarantine(self, key: BlockKey, part: Part, why: str) -> None:
        """Put a bad record out of reach, with the reason beside it; from now on it is a miss."""
        path = self.path_of(key, part)
        aside = self.root / "quarantine" / f"{path.name}.{time.time_ns()}"
        try:
            self._files.replace(path, aside)
            aside.with_name(f"{aside.name}.why").write_text(f"{why}\n")
        except OSError as error:
            LOG.warning("%s could not be set aside: %s", path.name, error)
        self._index.drop_part(key, part)
        LOG.warning("%s is bad and was set aside: %s", path.name, why)
        self._count(quarantined=1, misses=1)

    # Writing

    def _put(self, record: Record) -> bool:
        header = record.header
        known = self._index.have([header.key]).get(header.key)
        if known and header.part in known.parts and not header.improves_on(known.w_rows):
            return False
        buffers = pieces(record)
        n_bytes = sum(len(memoryview(piece).cast("B")) for piece in buffers)
        if not self._make_room(header, n_bytes):
            return False
        try:
            return self._publish(header, buffers, n_bytes, replace_it=known is not None)
        except BaseException:
            self._index.cancel(header.key, header.part, self._scratch.name)
            raise

    def _publish(
        self, header: Header, buffers: list[bytes | memoryview], n_bytes: int, replace_it: bool
    ) -> bool:
        target = self.path_of(header.key, header.part)
        self._files.make_directory(target.parent)
        while True:
            temp = self._scratch.new()
            self._files.write(temp, buffers)
            if replace_it and target.exists():
                self._files.replace(temp, target)
                stored = True
            else:
                stored = self._files.publish(temp, target)
            if self._index.add(header, n_bytes, self._clock(), self._scratch.name):
                self._count(puts=int(stored))
                return stored
            with exclusive(self._delete_lock):  # somebody is deleting this very block
                self._finish_deleting([header.key])

    def _make_room(self, header: Header, n_bytes: int) -> bool:
        """Reserve the bytes, evicting as needed; False if that is not enough."""
        limit = None if self.limits.max_bytes is None else self.limits.max_bytes - self._other_bytes
        while True:
            short = n_bytes + self.limits.min_free_bytes - shutil.disk_usage(self.root).free
            if short <= 0 and self._index.reserve(
                header.key, header.part, n_bytes, self._scratch.name, limit
            ):
                return True
            over = self._index.n_bytes() + n_bytes - limit if limit is not None else 0
            victims = self._index.victims(max(short, over, 1), spare={header.key, header.parent})
            if not victims or (limit is not None and n_bytes > limit):
                return False
            self._delete([victim.key for victim in victims])
            self._count(evicted=len(victims))

    @property
    def _delete_lock(self) -> Path:
        return self.root / "tmp" / "delete"

    def _delete(self, keys: Collection[BlockKey]) -> None:
        with exclusive(self._delete_lock):
            self._index.doom(keys)
            self._finish_deleting(keys)

    def _finish_deleting(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            for part in Part:
                self._files.remove(self.path_of(key, part))
        self._index.drop(keys)

    # Start

    def _make_directories(self) -> None:
        self.root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        for name in ("blocks", "agents", "quarantine", "tmp"):
            (self.root / name).mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def _open_index(self) -> Index:
        """The index, or a new one where the file is lost or damaged; the files fill it again."""
        path = self.root / "index.sqlite"
        try:
            return Index(path)
        except sqlite3.DatabaseError as error:
            LOG.warning("the index is damaged (%s) and is built anew", error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return Index(path)

    def _reconcile(self) -> None:
        """Finish what a crash left: deletions, reservations, files without rows and the reverse."""
        for writer in self._index.writers():
            if not is_alive(self.root / "tmp", writer):
                self._index.forget_writer(writer)
        with exclusive(self._delete_lock):
            self._finish_deleting(self._index.doomed())
        on_disk = set(self._scan())
        known = self._index.parts()
        for key, part in on_disk - known:
            self._adopt(key, part)
        for key, part in known - on_disk:
            if not self.path_of(key, part).exists():
                self._index.drop_part(key, part)

    def _scan(self) -> Iterator[tuple[BlockKey, Part]]:
        """Every file whose name is that of a record."""
        for directory in os.scandir(self.root / "blocks"):
            if not directory.is_dir():
                continue
            for entry in os.scandir(directory.path):
                found = _parse_name(entry.name)
                if found is not None:
                    yield found

    def _adopt(self, key: BlockKey, part: Part) -> None:
        path = self.path_of(key, part)
        try:
            header = self._read_verified(path, key, part, tensors=()).header
            self._index.add(header, path.stat().st_size, path.stat().st_mtime)
        except BadRecord as bad:
            self.quarantine(key, part, str(bad))
        except OSError as error:
            LOG.warning("%s could not be adopted: %s", path.name, error)

    def _measure_others(self) -> int:
        """Bytes under the root that are not records: index, agents, whatever else lies there."""
        total = 0
        for directory, _, names in os.walk(self.root):
            in_blocks = Path(directory).parent.name == "blocks"
            for name in names:
                if in_blocks and _parse_name(name) is not None:
                    continue
                try:
                    total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118
                except OSError:
                    continue
        return total

    def _count(self, **more: int) -> None:
        with self._stats_lock:
            sums = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = replace(self._stats, **sums)


def check_identity(header: Header, key: BlockKey, part: Part) -> None:
    """A record must be the one it was asked for, and its key the hash of what it says."""
    if header.key != key or header.part is not part:
        raise BadRecord("it is another record under this name")
    if block_key(header.namespace, header.parent, header.tokens) != key:
        raise BadRecord("its key is not the hash of its tokens")


def _parse_name(name: str) -> tuple[BlockKey, Part] | None:
    stem, _, suffix = name.partition(".")
    part = suffix.removesuffix(SUFFIX)
    try:
        key = bytes.fromhex(stem)
        return (BlockKey(key), Part(part)) if len(key) == 20 else None
    except ValueError:
        return None
