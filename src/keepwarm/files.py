"""Writing whole files: a reader sees the old content or the new, never a part of it.

Everything that must survive a power cut is synced here, but for SQLite's own files.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS only
F_BARRIERFSYNC = 85  # of macOS too
RANDOM = "[a-z0-9_]{8}"  # in names that `tempfile` makes
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
