"""Publishing files: a reader sees a whole file or none, and a published file survives a crash.

All file operations of the store go through `Files`, so that a test can record or break them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import BinaryIO

from keepwarm.files import (
    FILE_MODE,
    SharedLock,
    flush_drive,
    open_lock,
    sync_file,
    write_all,
)

DIRECTORY_MODE = 0o700
SCRATCH = re.compile("[0-9a-f]{32}")
UNFINISHED = re.compile(r"[0-9]+\.tmp")
CAN_PREFETCH = sys.platform == "linux"  # elsewhere sendfile needs a socket
RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux only


class Files:
    """The file system operations of a store."""

    def make_directory(self, path: Path) -> None:
        """Create a directory if missing. Synced even if it exists: its creator may have crashed."""
        _refuse_link(path.parent)
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        with suppress(PermissionError):  # we did not make a parent that we may not read
            self.sync_directory(path.parent)

    def write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        """Create a new file from buffers and sync it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, FILE_MODE)
        try:
            write_all(fd, pieces)
            self.sync(fd)
        finally:
            os.close(fd)

    def publish(self, temp: Path, target: Path) -> None:
        """Rename a written file to its final name, replacing an older file. Synced."""
        _refuse_link(target.parent)
        temp.replace(target)
        self.sync_directory(target.parent)

    def remove(self, path: Path) -> bool:
        """Delete a file; returns whether it existed. Synced."""
        try:
            _refuse_link(path.parent)
            path.unlink()
        except FileNotFoundError:
            return False
        self.sync_directory(path.parent)
        return True

    def discard(self, temp: Path) -> None:
        """Delete an unpublished file. Not synced: the next start deletes such files anyway."""
        temp.unlink(missing_ok=True)

    def open(self, path: Path) -> BinaryIO:
        _refuse_link(path.parent)
        return open_unlinked(path)

    def read_into_page_cache(self, file: BinaryIO) -> None:
        """Read a whole file without copying it. Needs CAN_PREFETCH."""
        at, n_bytes = 0, os.fstat(file.fileno()).st_size
        with Path(os.devnull).open("wb", buffering=0) as null:
            while at < n_bytes:
                n_read = os.sendfile(null.fileno(), file.fileno(), at, n_bytes - at)
                if not n_read:  # it was truncated meanwhile
                    return
                at += n_read

    def is_cached(self, file: BinaryIO) -> bool:
        """Whether the end of a file is in the page cache; True where the system cannot tell."""
        if not RWF_NOWAIT:
            return True
        last = max(0, os.fstat(file.fileno()).st_size - 1)
        try:
            os.preadv(file.fileno(), [bytearray(1)], last, RWF_NOWAIT)
        except BlockingIOError:  # not in the page cache
            return False
        except OSError:  # the file system does not support the flag
            pass
        return True

    def drop_cached_pages(self, file: BinaryIO) -> None:
        """Drop a file from the page cache. Best effort; failure is ignored."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def sync(self, fd: int) -> None:
        """On macOS only a barrier: a full flush of each record would cost more than the record."""
        sync_file(fd, full=False)

    def flush_drive(self, path: Path) -> None:
        """Have all that was synced until now survive a power cut."""
        flush_drive(path)


def open_unlinked(path: Path) -> BinaryIO:
    """Open a file for reading; raises OSError if it is a symbolic link. A pipe is empty: waiting
    for its writer could take for ever.
    """
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | more))


def _refuse_link(directory: Path) -> None:
    """A directory of the store, or the one that it is in, may have been exchanged for a link."""
    if directory.is_symlink() or directory.parent.is_symlink():
        raise OSError(errno.ELOOP, "its directory is a symbolic link", str(directory))


class Scratch:
    """A directory of this process for unfinished files; deletes those of dead processes.

    Each process holds a lock in its directory as long as it lives. What has another name, or no
    lock, is not ours and stays.
    """

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        self.name = uuid.uuid4().hex
        self.path = directory / self.name
        # No other process may check this directory before its lock is held.
        with SharedLock(directory / "lock").hold():
            for name in _names(directory):
                if not is_alive(directory, name):
                    _clear(directory / name)
            self.path.mkdir(mode=DIRECTORY_MODE)
            self._lock: int | None = open_lock(self.path / "lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        # After a power cut no file may be left here without the lock, by which it is ours.
        (files or Files()).sync_directory(self.path)
        self._numbers = count()

    def new(self) -> Path:
        """A new path."""
        return self.path / f"{next(self._numbers)}.tmp"

    def close(self) -> None:
        _clear(self.path)
        lock, self._lock = self._lock, None
        if lock is not None:  # closing twice could close another file
            os.close(lock)


def is_alive(directory: Path, name: str) -> bool:
    """Whether the process that made this scratch directory still runs."""
    try:
        if not _has_lock(directory / name):
            return False
        fd = os.open(directory / name / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two checks do not collide
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _names(directory: Path) -> list[str]:
    """Scratch directories, by their names."""
    found = (e for e in os.scandir(directory) if e.is_dir(follow_symlinks=False))
    return [entry.name for entry in found if SCRATCH.fullmatch(entry.name)]


def _has_lock(scratch: Path) -> bool:
    """Whether the lock is an empty file, as we make it."""
    if scratch.is_symlink():
        return False
    lock = (scratch / "lock").lstat()
    return stat.S_ISREG(lock.st_mode) and lock.st_size == 0


def _clear(scratch: Path) -> None:
    """Delete a scratch directory and the files that we make in it; with others in it, it stays.

    The lock goes last: without it the directory is taken for someone else's.
    """
    with suppress(OSError):
        fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _has_lock(scratch):
                _delete_unfinished(fd)
        finally:
            os.close(fd)
            scratch.rmdir()  # also one without a lock, if it is empty: its process was killed


def _delete_unfinished(fd: int) -> None:
    found = [entry.name for entry in os.scandir(fd) if entry.is_file(follow_symlinks=False)]
    for name in filter(UNFINISHED.fullmatch, found):
        os.unlink(name, dir_fd=fd)
    sync_file(fd, full=False)
    os.unlink("lock", dir_fd=fd)
