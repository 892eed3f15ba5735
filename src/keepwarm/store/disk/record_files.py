"""Record files read and verified; a bad one is quarantined with the reason."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, TypeVar

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.files import SharedLock
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
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
from keepwarm.store.atomic import Files
from keepwarm.store.index.database import is_damage
from keepwarm.store.index.index import Index, note_damage
from keepwarm.store.names import OtherFiles, path_of
from keepwarm.store.tier import ReadFault, TierCounts, default_on_io_error, is_busy

MAX_KNOWN = 1 << 16  # files


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

    def forget(self) -> None:
        """As after a start."""
        self._brought.clear()
        self._known.clear()


def _add(name: str, names: set[str]) -> None:
    """Remember a file. Forgets all at the limit: that only costs some time."""
    if len(names) >= MAX_KNOWN:
        names.clear()
    names.add(name)


LOG = logging.getLogger(__name__)
T = TypeVar("T")
Use: TypeAlias = Callable[[BinaryIO, VerifiedHeader], T]


MAX_FAULTS = 64


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
            self._note_repair(Repair(key, part, str(bad)))
        except NewerFormat as newer:
            self._note_fault(key, part, "newer")
            self.skip_newer(key, part, str(newer))
        except FileNotFoundError:
            self._note_repair(Repair(key, part, None))
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

    def _note_repair(self, repair: Repair) -> None:
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

    @default_on_io_error(lambda: None)
    def quarantine(self, key: BlockKey, part: Part, why: str) -> None:
        """Move a bad record to quarantine, with the reason beside it; from now on it is a miss."""
        self._quarantine(Repair(key, part, why))

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        """The same for a record with right digests that does not fit the model."""
        self._note_repair(Repair(key, part, why, is_misfit=True))

    def _quarantine(self, repair: Repair, wait_s: float | None = None) -> None:
        key, part, why, is_misfit = repair
        path = self.path_of(key, part)
        with self.names_lock.hold(wait_s):
            if not os.path.lexists(path):  # it was moved before, and the index was locked
                self.index.delete_part(key, part, wait_s)
                return
            # Another process may have replaced it meanwhile.
            if not (is_misfit or self._is_bad(key, part)):
                return
            self.move_to_quarantine(path, str(why))
            self.index.delete_part(key, part, wait_s)
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

    @default_on_io_error(lambda: None)
    def delete_missing(self, key: BlockKey, part: Part) -> None:
        """Delete the row of a record without a file, unless the file has just been put."""
        self._delete_missing(key, part)

    def _delete_missing(self, key: BlockKey, part: Part, wait_s: float | None = None) -> None:
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
