"""Publishing files so that a reader sees a whole one or none, and a crash loses nothing promised.

All file operations of the store go through `Files`, so that a test can record or break them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
MAX_PIECES = 512  # of one writev call
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


class Files:
    """The operations a store needs of a file system, each as safe as its docstring says."""

    def make_directory(self, path: Path) -> None:
        """Create a directory, and sync its parent if it is new."""
        try:
            path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            return
        self.sync_directory(path.parent)

    def write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        """Create a new file from buffers and sync it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, FILE_MODE)
        try:
            _write_all(fd, pieces)
            os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self, temp: Path, target: Path) -> bool:
        """Give a written file its name unless that is taken; says whether it was free. Synced."""
        try:
            os.link(temp, target)
        except FileExistsError:
            temp.unlink()
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if target.exists():
                temp.unlink()
                return False
            temp.rename(target)
        else:
            temp.unlink()
        self.sync_directory(target.parent)
        return True

    def replace(self, temp: Path, target: Path) -> None:
        """Give a written file its name, in place of what is there. Synced."""
        temp.replace(target)
        self.sync_directory(target.parent)

    def remove(self, path: Path) -> bool:
        """Delete a file for good; says whether it was there. Synced."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        self.sync_directory(path.parent)
        return True

    def open(self, path: Path) -> BinaryIO:
        return path.open("rb", buffering=0)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    rest = [memoryview(piece).cast("B") for piece in pieces if len(memoryview(piece).cast("B"))]
    while rest:
        written = os.writev(fd, rest[:MAX_PIECES])
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


class Scratch:
    """A directory of this process for files on their way; those of dead processes are cleared.

    A lock held for the life of the process tells the living from the dead.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        self.name = uuid.uuid4().hex
        self.path = directory / self.name
        # Nobody may judge this directory before its lock is held.
        with exclusive(directory / "lock"):
            for name in _names(directory):
                if not is_alive(directory, name):
                    shutil.rmtree(directory / name, ignore_errors=True)
            self.path.mkdir(mode=DIRECTORY_MODE)
            self._lock = _open_lock(self.path / "lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._numbers = count()

    def new(self) -> Path:
        """A path that nobody else uses."""
        return self.path / f"{next(self._numbers)}.tmp"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def is_alive(directory: Path, name: str) -> bool:
    """Whether the process that made this scratch directory still runs."""
    path = directory / name / "lock"
    if not path.exists():
        return False
    fd = _open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock among all processes that use the same path."""
    fd = _open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in os.scandir(directory) if entry.is_dir()]
