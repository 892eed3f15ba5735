"""Which files are records, and where they lie: `blocks/ab/<key>.<part>.safetensors`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from keepwarm.prefix.blocks import KEY_BYTES, BlockKey
from keepwarm.store.record import Part

SUFFIX = ".safetensors"
INDEX = "index.sqlite"
TEMPORARY = ".tmp"


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


def entries(root: Path) -> Iterator[tuple[Name, os.DirEntry[str]]]:
    """Every entry that has the name of a record and lies where that record belongs."""
    for directory in os.scandir(root / "blocks"):
        if not directory.is_dir():
            continue
        for entry in os.scandir(directory.path):
            name = parse_name(entry.name)
            if name is not None and name.key.hex().startswith(directory.name):
                yield name, entry


def stray_bytes(root: Path) -> int:
    """Bytes of files among the blocks that are no records; looks at every one of them."""
    paths = _files(root / "blocks")
    return sum(size_of(path) for path in paths if not _is_record(root, path))


def other_bytes(root: Path) -> int:
    """Bytes of all files beside the blocks, the index among them; not of records on their way."""
    on_its_way = root / "tmp"
    return sum(
        size_of(path)
        for path in _files(root, leave_out="blocks")
        if not (path.suffix == TEMPORARY and path.parent.parent == on_its_way)
    )


def _files(directory: Path, leave_out: str | None = None) -> Iterator[Path]:
    for where, directories, names in os.walk(directory):
        if leave_out in directories and Path(where) == directory:
            directories.remove(leave_out)
        yield from (Path(where, name) for name in names)


def _is_record(root: Path, path: Path) -> bool:
    name = parse_name(path.name)
    return name is not None and path == path_of(root, *name)


def size_of(file: os.DirEntry[str] | Path) -> int:
    try:
        return file.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
