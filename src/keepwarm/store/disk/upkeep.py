"""What is done to a store besides keeping blocks: small files, whole branches, leftovers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.names import size_of
from keepwarm.store.tier import as_store_errors

AT_ONCE = 64  # blocks deleted in one step

Progress: TypeAlias = Callable[[int, int], None]  # how much of how much is done


def no_progress(done: int, total: int) -> None:
    """Progress that nobody watches."""


def file_path(disk: DiskTier, directory: str, name: str) -> Path:
    """Where a small file lies; in a sealed store its name tells nothing."""
    seal = disk.seal
    stem = name if seal is None else seal.hidden(directory, name.encode()).hex()
    return disk.root / directory / f"{stem}.json"


def write_file(disk: DiskTier, path: Path, data: bytes) -> None:
    """Publish a small file of its own under the root, in place of an older one."""
    with as_store_errors(disk, f"write {path.name}"):
        disk.ensure_directory(path.parent)
        temp = disk.scratch.new()
        disk.files.write(temp, [data if disk.seal is None else disk.seal.seal(_label(path), data)])
        disk.files.publish(temp, path)


def read_file(disk: DiskTier, path: Path) -> bytes:
    """What was written; raises BadRecord where that is sealed and does not prove itself."""
    data = path.read_bytes()
    return data if disk.seal is None else disk.seal.open(_label(path), data)


def _label(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()


def delete_branches(
    disk: DiskTier,
    blocks: Sequence[BlockKey],
    keep: Collection[BlockKey],
    progress: Progress = no_progress,
) -> int:
    """Delete these blocks of one conversation, whatever descends from them, and shorter copies.

    What is in `keep` stays, and so do its ancestors. Afterwards none of the deleted tokens is left
    in the index, in its log or among the records set aside, which are all cleared. Answers with the
    number of blocks.
    """
    doomed = list(dict.fromkeys(_branches(disk, blocks, set(keep))))
    for start in range(0, len(doomed), AT_ONCE):
        disk.delete_all(doomed[start : start + AT_ONCE])
        progress(min(start + AT_ONCE, len(doomed)), len(doomed))
    with as_store_errors(disk, "clear what was set aside"):
        clear_quarantine(disk)  # a bad record may be anybody's, whatever its name
        disk.index.database.scrub()
    return len(doomed)


def _branches(
    disk: DiskTier, blocks: Sequence[BlockKey], keep: set[BlockKey]
) -> Iterator[BlockKey]:
    lookups = disk.index.lookups
    for key in blocks:
        if key not in keep:  # a conversation with a whole block also has its shorter copies
            yield from (part for part in lookups.shorter_siblings(key) if part not in keep)
            yield key
            yield from (child for child in lookups.descendants(key) if child not in keep)


def clear_quarantine(disk: DiskTier, progress: Progress = no_progress) -> int:
    """Delete the bad records that were set aside; answers with their bytes."""
    freed = 0
    with as_store_errors(disk, "clear what was set aside"):
        paths = list((disk.root / "quarantine").iterdir())
        for number, path in enumerate(paths):
            freed += size_of(path)
            _remove(disk, path)
            progress(number + 1, len(paths))
    return freed


def _remove(disk: DiskTier, path: Path) -> None:
    """A directory may have lain in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        disk.files.remove(path)
