"""Which files the system need not keep in memory.

Rows that were restored live on as arrays, and the pages of their file would hold them twice. So a
file that was not in memory, and is read for the first time, leaves it again: its pages are at once
good for the next one. Whoever comes back for it, because another agent begins alike or those arrays
had to go, shows that it is worth its pages: it keeps them then.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from keepwarm.store.atomic import Files

MAX_KNOWN = 1 << 16  # files


class Pages:
    """Decides it for the files of one store, in one process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._brought: set[str] = set()  # in memory because of us, and for the first time
        self._known: set[str] = set()  # were restored

    def opened(self, file: BinaryIO) -> None:
        """It is about to be read."""
        name = os.fspath(file.name)
        if name not in self._known and not self._files.is_cached(file):
            _add(name, self._brought)

    def done(self, file: BinaryIO) -> None:
        """It was read, all of it, to where it is wanted."""
        name = os.fspath(file.name)
        if name in self._brought:
            self._brought.discard(name)
            self._files.drop_cached_pages(file)
        _add(name, self._known)

    def forget(self) -> None:
        """As after a start: nobody has read anything."""
        self._brought.clear()
        self._known.clear()


def _add(name: str, names: set[str]) -> None:
    """Remember it; not all of them for ever, as being wrong costs but some time."""
    if len(names) >= MAX_KNOWN:
        names.clear()
    names.add(name)
