"""Which files are records, and where they lie: `blocks/ab/<key>.<part>.safetensors`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from keepwarm.prefix.blocks import KEY_BYTES, BlockKey
from keepwarm.store.record import Part

SUFFIX = ".safetensors"
INDEX = "index.sqlite"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm")
TEMPORARY = ".tmp"
MEASURE_EVERY_S = 1.0


class Name(NamedTuple):
    key: BlockKey
    part: Part


def path_of(root: Path, key: BlockKey, part: Part) -> Path:
    name = key.hex()
    return root / "blocks" / name[:2] / f"{name}.{part.value}{SUFFIX}"


def parse_name(name: str) -> Name | None:
    """The record that a file name stands for, if it is exactly as `path_of` writes it."""
    stem, _, suffix = name.partition(".")
    try:
        key = BlockKey(bytes.fromhex(stem))
        part = Part(suffix.removesuffix(SUFFIX))
    except ValueError:
        return None
    exact = name == f"{key.hex()}.{part.value}{SUFFIX}"
    return Name(key, part) if exact and len(key) == KEY_BYTES else None


def entries(root: Path) -> Iterator[tuple[Name | None, os.DirEntry[str]]]:
    """Everything among the blocks, by name where a record belongs; None is anything else."""
    for directory in os.scandir(root / "blocks"):
        if not directory.is_dir(follow_symlinks=False):
            yield None, directory
            continue
        for entry in os.scandir(directory.path):
            name = parse_name(entry.name)
            in_place = name is not None and name.key.hex()[:2] == directory.name
            yield (name if in_place else None), entry


class Others:
    """Bytes under a root that are no records.

    The index is measured whenever asked; the rest, thousands of agents maybe, once a second.
    """

    def __init__(self, root: Path) -> None:
        self.stray_bytes = 0  # of what lies among the blocks
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
        """Measure again when asked next."""
        self._next = 0.0

    def _measure(self) -> int:
        own = ("blocks", *INDEX_FILES)
        found = [entry for entry in os.scandir(self._root) if entry.name not in own]
        return sum(bytes_of(entry, in_scratch=entry.name == "tmp") for entry in found)


def bytes_of(entry: os.DirEntry[str], in_scratch: bool = False) -> int:
    """Of a file or a whole directory; what is on its way in scratch is counted as reserved."""
    if not entry.is_dir(follow_symlinks=False):
        return 0 if in_scratch and entry.name.endswith(TEMPORARY) else size_of(entry)
    try:
        return sum(bytes_of(inner, in_scratch) for inner in os.scandir(entry.path))
    except FileNotFoundError:  # a writer that has just closed
        return 0


def size_of(file: os.DirEntry[str] | Path) -> int:
    try:
        return file.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
