"""Writing whole files: a reader sees the old content or the new, never a part of it."""

from __future__ import annotations

import glob
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    temp = Path(name)
    try:
        yield temp
        if sync:
            os.fsync(handle)
        temp.replace(path)
    finally:
        os.close(handle)
        temp.unlink(missing_ok=True)
    if sync:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make names that were created, replaced or deleted in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(directory: Path, prefix: str, suffix: str) -> None:
    """Delete what killed processes left unfinished: files under names that `mkstemp` makes."""
    ours = re.compile(f"{re.escape(prefix)}{RANDOM}{re.escape(suffix)}")
    for path in directory.glob(f"{glob.escape(prefix)}*"):
        try:
            about = path.lstat()
            is_old = time.time() - about.st_mtime > STALE_AFTER_S
            if is_old and stat.S_ISREG(about.st_mode) and ours.fullmatch(path.name):
                path.unlink()
        except OSError:
            continue  # another process was faster, or it is not ours to delete
