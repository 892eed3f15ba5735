"""Writing whole files: a reader sees the old content or the new, never a part of it. Locks that
processes share.

Everything that must survive a power cut is synced here, but for SQLite's own files.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS only
F_BARRIERFSYNC = 85  # of macOS too
RANDOM = "[a-z0-9_]{8}"  # in names that `tempfile` makes
FILE_MODE = 0o600
LOCK_WAIT_S = 5.0  # for another process, which may be stopped
MAX_POLL_S = 0.02
MAX_PIECES = 512  # of one system call
STALE_AFTER_S = 3600.0  # an unfinished file that was not written to for so long is a leftover


def write_atomically(path: Path, data: str | bytes, *, sync: bool = False) -> None:
    """Replace the content of a file. Only its owner may read it."""
    with replacing(path, sync=sync) as temp:
        temp.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a new empty file in the same directory; on success it takes the place of `path`.

    On an exception it is deleted and `path` stays as it was. With `sync` the content and the name
    are on disk afterwards.
    """
    prefix = f".{path.name}.part-"
    _remove_leftovers(path.parent, prefix, path.suffix)
    handle, name = tempfile.mkstemp(path.suffix, prefix, path.parent)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH)  # as long as it is written, whatever the clock says
    temp = Path(name)
    try:
        yield temp
        if sync:
            sync_file(handle)
        temp.replace(path)
    finally:
        os.close(handle)
        temp.unlink(missing_ok=True)
    if sync:
        sync_directory(path.parent)


def write_all(handle: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write buffers one after another; the system may take fewer bytes than it is given."""
    rest: list[bytes | memoryview] = [memoryview(piece).cast("B") for piece in pieces]
    while rest:
        drop_written(rest, os.writev(handle, rest[:MAX_PIECES]))


def drop_written(pieces: list[bytes | memoryview], n_bytes: int) -> None:
    """Take away the first bytes of pieces, which the system has taken."""
    while pieces and n_bytes >= len(pieces[0]):
        n_bytes -= len(pieces.pop(0))
    if n_bytes:
        pieces[0] = memoryview(pieces[0])[n_bytes:]


def sync_file(handle: int, *, full: bool = True) -> None:
    """Have what was written to a file survive a power cut, or the names in a directory.

    On macOS that takes a full flush, because `fsync` leaves it in the drive's cache. Without `full`
    there is a barrier instead: nothing that is written later survives without it.
    """
    if F_FULLFSYNC is not None:
        with suppress(OSError):  # the file system supports neither
            fcntl.fcntl(handle, F_FULLFSYNC if full else F_BARRIERFSYNC)
            return
    os.fsync(handle)


def sync_directory(path: Path, *, full: bool = True) -> None:
    """The same for names that were created, replaced or deleted in a directory."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(handle, full=full)
    finally:
        os.close(handle)


def flush_drive(path: Path) -> None:
    """Have all that was synced survive a power cut, on the drive with this directory.

    Elsewhere than on macOS it does already.
    """
    if F_FULLFSYNC is not None:
        sync_directory(path)


def _remove_leftovers(directory: Path, prefix: str, suffix: str) -> None:
    """Delete what killed processes left unfinished: files under names that `mkstemp` makes."""
    ours = re.compile(f"{re.escape(prefix)}{RANDOM}{re.escape(suffix)}")
    for path in directory.glob(f"{glob.escape(prefix)}*"):
        try:
            about = path.lstat()
            is_old = abs(time.time() - about.st_mtime) > STALE_AFTER_S
            is_ours = stat.S_ISREG(about.st_mode) and ours.fullmatch(path.name)
            if is_old and is_ours and not _is_locked(path):
                path.unlink()
        except OSError:
            continue  # another process was faster, or it is not ours to delete


def _is_locked(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class SharedLock:
    """A lock that all processes share by its path.

    Once a wait was in vain, none waits any more until the lock could be taken again: a process that
    was stopped while it held the lock costs the others one wait, not one for each operation.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.Lock()  # polled by one thread of this process at a time
        self._is_stuck = False

    @contextmanager
    def hold(self, wait_s: float | None = None) -> Iterator[None]:
        """Raises TimeoutError if others hold it for longer than LOCK_WAIT_S, or than `wait_s`."""
        wait_s = 0.0 if self._is_stuck else LOCK_WAIT_S if wait_s is None else wait_s
        if not self._threads.acquire(timeout=wait_s):
            raise _timeout(self._path)
        try:
            fd = self._take(wait_s)
            try:
                yield
            finally:
                os.close(fd)
        finally:
            self._threads.release()

    def _take(self, wait_s: float) -> int:
        try:
            fd = _take_lock(self._path, wait_s)
        except TimeoutError:
            self._is_stuck = self._is_stuck or wait_s > 0
            raise
        self._is_stuck = False
        return fd


def _take_lock(path: Path, wait_s: float) -> int:
    fd = open_lock(path)
    deadline, pause_s = time.monotonic() + wait_s, 0.001
    while not _try_lock(fd):
        if time.monotonic() >= deadline:
            os.close(fd)
            raise _timeout(path)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_POLL_S)
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _timeout(path: Path) -> TimeoutError:
    return TimeoutError(
        errno.ETIMEDOUT, "another process holds a lock and may be stopped", str(path)
    )


def open_lock(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
