"""Records read from files: each proves itself, or is set aside with the reason."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.atomic import Files, exclusive
from keepwarm.store.disk.pages import Pages
from keepwarm.store.index.database import is_damage
from keepwarm.store.index.index import Index
from keepwarm.store.index.opening import note_damage
from keepwarm.store.names import OtherFiles, path_of
from keepwarm.store.record import (
    Part,
    ReadBuffer,
    Record,
    RecordView,
    VerifiedHeader,
    check_identity,
    open_record,
    read_record,
    read_tensors,
    view_record,
)
from keepwarm.store.seal import Seal
from keepwarm.store.tier import TierStats, default_on_io_error

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Records:
    """The files of one directory and what the index says of them."""

    index: Index

    def __init__(self, root: Path, files: Files, seal: Seal | None, stats: TierStats) -> None:
        self.root = root
        self.files = files
        self.seal = seal
        self._others = OtherFiles(root)
        self.pages = Pages(files)
        self._stats = stats
        self._stats_lock = threading.Lock()

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        def whole(file: BinaryIO, opened: VerifiedHeader) -> Record:
            if tensors is None:
                self.pages.opened(file)  # for whoever restores it: that will be the first time
            return read_record(file, opened, tensors)

        return self._read(key, part, whole)

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[RecordView], None], buffer: ReadBuffer
    ) -> bool:
        def visited(file: BinaryIO, opened: VerifiedHeader) -> bool:
            self.pages.opened(file)
            _ask_ahead(file)
            use(view_record(file, opened, buffer))
            if file.tell() == os.fstat(file.fileno()).st_size:  # some only want the header
                self.pages.done(file)
            return True

        return bool(self._read(key, part, visited))

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Have the system read the file while others are worked on: it keeps the pages."""
        path = self.path_of(key, part)
        with suppress(OSError):
            if path.is_file():
                with self.files.open(path) as file:
                    self.pages.opened(file)
                    _ask_ahead(file)
                    self.files.read_into_page_cache(file)
                return True
        return False

    def _read(
        self, key: BlockKey, part: Part, use: Callable[[BinaryIO, VerifiedHeader], T]
    ) -> T | None:
        """What `use` makes of a verified header and the file behind it; None is a miss."""
        try:
            made = self.use_record(key, part, use)
        except BadRecord as bad:
            self.quarantine(key, part, str(bad))
        except NewerFormat as newer:
            self.skip_newer(key, part, str(newer))
        except FileNotFoundError:
            self.delete_missing(key, part)
        except OSError as error:
            LOG.warning("%s could not be read: %s", self.path_of(key, part).name, error)
            self._count(errors=1)
        else:
            self._count(hits=1)
            return made
        self._count(misses=1)
        return None

    def path_of(self, key: BlockKey, part: Part) -> Path:
        return path_of(self.root, key, part)

    def use_record(
        self, key: BlockKey, part: Part, use: Callable[[BinaryIO, VerifiedHeader], T]
    ) -> T:
        """What `use` makes of a record; raises what is wrong with it."""
        path = self.path_of(key, part)
        if path.is_dir():
            raise BadRecord("it is a directory")
        with self.files.open(path) as file:
            opened = open_record(file, os.fstat(file.fileno()).st_size, self.seal)
            check_identity(opened.header, key, part)
            return use(file, opened)

    @default_on_io_error(lambda: None)
    def quarantine(self, key: BlockKey, part: Part, why: str) -> None:
        """Put a bad record out of reach, with the reason beside it; from now on it is a miss."""
        path = self.path_of(key, part)
        with self.names_lock():
            if not self._is_bad(key, part):  # whoever was asked last may have put it anew
                return
            self.move_to_quarantine(path, why)
            self.index.delete_part(key, part)
        LOG.warning("%s is bad and was set aside: %s", path.name, why)
        self._others.changed()
        self._count(quarantined=1)

    def skip_newer(self, key: BlockKey, part: Part, why: str) -> None:
        """A record that only a newer Keepwarm reads: a miss, and not ours to move or delete."""
        LOG.warning("%s is left to a newer Keepwarm: %s", self.path_of(key, part).name, why)
        self._count(newer=1)

    def find_fault(self, key: BlockKey, part: Part) -> str | None:
        """What is wrong with a record, all of it read; None where nothing is. Changes nothing.

        Raises NewerFormat for one that nobody here can judge, and OSError for one that cannot be
        read: neither is bad.
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
        """Move a file out of reach, with the reason beside it; False where that failed."""
        aside = self.root / "quarantine" / f"{path.name}.{time.time_ns()}"
        try:
            self.files.write(aside.with_name(f"{aside.name}.why"), [f"{why}\n".encode()])
            self.files.publish(path, aside)
        except OSError as error:
            LOG.warning("%s could not be set aside: %s", path.name, error)
            return False
        return True

    @default_on_io_error(lambda: None)
    def delete_missing(self, key: BlockKey, part: Part) -> None:
        """A row without a file is dropped, but not one that was put a moment ago."""
        if not self._knows(key, part):
            return
        with self.names_lock():
            if not self.path_of(key, part).exists():
                self.index.delete_part(key, part)

    def _knows(self, key: BlockKey, part: Part) -> bool:
        known = self.index.have([key]).get(key)
        return known is not None and part in known.parts

    def names_lock(self) -> AbstractContextManager[None]:
        """The lock under which files get and lose their names."""
        return exclusive(self.root / "tmp" / "names")

    def note_error(self, error: Exception) -> None:
        self._count(errors=1)
        if is_damage(error):
            note_damage(self.root)

    def _count(self, **more: int) -> None:
        with self._stats_lock:
            sums = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = replace(self._stats, **sums)


def _ask_ahead(file: BinaryIO) -> None:
    """All of the file will be read in order: let the disk run ahead of the tensor in hand.

    Not by asking for the whole file at once (WILLNEED): measured, that takes Linux more time of a
    core than it saves in waiting.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
