"""File names in a store: `blocks/ab/<key>.<part>.safetensors`, and what other files take."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from keepwarm.prefix.blocks import KEY_BYTES, BlockKey
from keepwarm.records.record import Part

SUFFIX = ".safetensors"
SUFFIXES = [f".{part.value}{SUFFIX}" for part in Part]
MAY_GROW = f".{Part.WINDOW.value}{SUFFIX}"  # window rows; other records never change size
INDEX = "index.sqlite"
SEALED = "sealed.json"  # marks an encrypted store
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm")
DIRECTORY = re.compile("[0-9a-f]{2}")
TEMPORARY = ".tmp"
WHY = ".why"
QUARANTINED = re.compile(r"(?P<name>.+)\.[0-9]{19}(\.why)?")  # nanoseconds since 1970
MEASURE_EVERY_S = 1.0


class RecordName(NamedTuple):
    key: BlockKey
    part: Part


def path_of(root: Path, key: BlockKey, part: Part) -> Path:
    return root / "blocks" / key.hex()[:2] / record_name(key, part)


def record_name(key: BlockKey, part: Part) -> str:
    return f"{key.hex()}.{part.value}{SUFFIX}"


def parse_name(name: str) -> RecordName | None:
    """The record that a file name stands for; None if `record_name` would not make it."""
    stem, _, suffix = name.partition(".")
    try:
        key = BlockKey(bytes.fromhex(stem))
        part = Part(suffix.removesuffix(SUFFIX))
    except ValueError:
        return None
    exact = name == record_name(key, part)
    return RecordName(key, part) if exact and len(key) == KEY_BYTES else None


def is_quarantined(name: str) -> bool:
    """Whether we have put a file of this name into quarantine: a record or an agent, or why."""
    found = QUARANTINED.fullmatch(name)
    return found is not None and (
        parse_name(found["name"]) is not None or found["name"].endswith(".json")
    )


class Changes(NamedTuple):
    """How a directory differs from the index."""

    added: list[RecordName]  # new, or of another size
    missing: list[RecordName]
    strays: list[os.DirEntry[str]]  # not records


class Directory(NamedTuple):
    """The files of all keys that begin with one byte."""

    first: bytes
    entries: dict[str, os.DirEntry[str]]

    def changes(self, known: Mapping[str, int]) -> Changes:
        """Compares names, and sizes only of files that may grow: there are many files."""
        sized = {e for e in known if e.endswith(MAY_GROW) and e in self.entries}
        grown = {e for e in sized if size_of(self.entries[e]) != known[e]}
        added = {e: self._name_of(e) for e in (self.entries.keys() - known.keys()) | grown}
        missing = map(self._name_of, known.keys() - self.entries.keys())
        strays = [self.entries[entry] for entry, name in added.items() if name is None]
        return Changes(list(filter(None, added.values())), list(filter(None, missing)), strays)

    def _name_of(self, entry: str) -> RecordName | None:
        """The record of this name, if it belongs in this directory."""
        name = parse_name(entry)
        return name if name is not None and name.key.startswith(self.first) else None


def directories(root: Path) -> Iterator[Directory]:
    """The directories of blocks, existing or not: one for every first byte of a key."""
    for number in range(256):
        path = root / "blocks" / f"{number:02x}"
        found = os.scandir(path) if path.is_dir() and not path.is_symlink() else ()
        yield Directory(bytes([number]), {entry.name: entry for entry in found})


def strays(root: Path) -> list[os.DirEntry[str]]:
    """Everything else in `blocks/`."""
    return [entry for entry in os.scandir(root / "blocks") if not _is_ours(entry)]


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return bool(DIRECTORY.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


class OtherFiles:
    """Bytes of all files under a root that are not records.

    The index is measured every time; the rest, maybe thousands of agents, once a second.
    """

    def __init__(self, root: Path) -> None:
        self.stray_bytes = 0  # of files in `blocks/` that are not records
        self._root = root
        self._rest = 0
        self._next = 0.0

    def n_bytes(self) -> int:
        if time.monotonic() >= self._next:
            self._rest = self._measure()
            self._next = time.monotonic() + MEASURE_EVERY_S
        index = sum(size_of(self._root / name) for name in INDEX_FILES)
        return self.stray_bytes + index + self._rest

    def changed(self) -> None:
        """Measure again at the next call."""
        self._next = 0.0

    def _measure(self) -> int:
        own = ("blocks", *INDEX_FILES)
        found = [entry for entry in os.scandir(self._root) if entry.name not in own]
        return sum(bytes_of(entry, in_scratch=entry.name == "tmp") for entry in found)


def bytes_of(entry: os.DirEntry[str], in_scratch: bool = False) -> int:
    """Of a file or a whole directory; unfinished files in scratch count as reserved already."""
    if entry.is_dir(follow_symlinks=False):
        return bytes_under(Path(entry.path), in_scratch)
    return 0 if in_scratch and entry.name.endswith(TEMPORARY) else size_of(entry)


def bytes_under(directory: Path, in_scratch: bool = False) -> int:
    """Of all files in a directory; 0 if there is none, or none that we may read: not ours."""
    try:
        return sum(bytes_of(entry, in_scratch) for entry in os.scandir(directory))
    except (FileNotFoundError, PermissionError):
        return 0


def size_of(file: os.DirEntry[str] | Path) -> int:
    try:
        return file.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
