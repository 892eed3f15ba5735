"""Which files are dropped from the page cache.

Restored rows live on as arrays, so the cached pages of their file would hold them twice. A file
that was not cached and is restored for the first time is dropped again, which frees its pages for
the next one. A file that is restored again, by another agent with the same prefix or because the
arrays were released, stays cached.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from keepwarm.store.atomic import Files

MAX_KNOWN = 1 << 16  # files


class Pages:
    """For the files of one store, in one process."""

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
