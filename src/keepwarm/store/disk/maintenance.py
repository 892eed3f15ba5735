"""Maintenance of a store: small files, deletion of whole branches, the quarantine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from keepwarm.errors import NewerFormat
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.names import WHY, is_quarantined, size_of
from keepwarm.store.tier import BlockTree, as_store_errors

AT_ONCE = 64  # blocks deleted in one step

Progress: TypeAlias = Callable[[int, int], None]  # done, total


def no_progress(done: int, total: int) -> None:
    """Reports nothing."""


def file_path(disk: DiskTier, directory: str, name: str) -> Path:
    """The path of a small file; in a sealed store its name reveals nothing."""
    cipher = disk.cipher
    stem = name if cipher is None else cipher.hidden(directory, name.encode()).hex()
    return disk.root / directory / f"{stem}.json"


def write_file(disk: DiskTier, path: Path, data: bytes) -> None:
    """Publish a small file under the root, replacing an older one."""
    with as_store_errors(disk, f"write {path.name}"):
        disk.ensure_directory(path.parent)
        temp = disk.scratch.new()
        disk.files.write(
            temp, [data if disk.cipher is None else disk.cipher.seal(_label(path), data)]
        )
        disk.files.publish(temp, path)


def read_file(disk: DiskTier, path: Path) -> bytes:
    """The content of a small file; raises BadRecord if it is sealed and does not open."""
    with disk.files.open(path) as file:
        data = file.read()
    return data if disk.cipher is None else disk.cipher.open(_label(path), data)


def _label(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()


def secure_delete(
    disk: DiskTier, keys: Sequence[BlockKey], progress: Progress = no_progress
) -> int:
    """Delete blocks; how many there were. Afterwards their tokens are in neither the index, its log
    nor the quarantine, which is emptied.
    """
    n_stored = len(disk.have(keys))
    for start in range(0, len(keys), AT_ONCE):
        disk.delete_all(keys[start : start + AT_ONCE])
        progress(min(start + AT_ONCE, len(keys)), len(keys))
    with as_store_errors(disk, "empty its quarantine"):
        clear_quarantine(disk)  # a bad record may belong to any agent, whatever its name
        disk.index.database.scrub()
    return n_stored


def subtrees(
    stored: BlockTree, blocks: Iterable[BlockKey], keep: Collection[BlockKey] = ()
) -> Iterator[BlockKey]:
    """Blocks with their descendants and shorter copies, each once."""
    passed = set(keep)
    for key in blocks:
        if key in passed:  # so is what is below it
            continue
        # A conversation with a whole block also has its shorter copies.
        tree = [*stored.shorter_siblings(key), key, *stored.descendants(key)]
        found = [one for one in dict.fromkeys(tree) if one not in passed]
        passed.update(found)
        yield from found


def clear_quarantine(disk: DiskTier, progress: Progress = no_progress) -> int:
    """Delete all that we have put into quarantine; returns its bytes."""
    freed = 0
    with as_store_errors(disk, "empty its quarantine"):
        paths = sorted(_quarantined(disk.root / "quarantine"))  # a record before its reason
        for number, path in enumerate(paths):
            n_bytes = size_of(path)
            freed += n_bytes if _remove(disk, path) else 0
            progress(number + 1, len(paths))
    return freed


def _quarantined(directory: Path) -> Iterator[Path]:
    """Files that we have moved there with their reasons; everything else is someone else's."""
    if directory.is_symlink():
        return
    names = {entry.name: entry for entry in os.scandir(directory) if is_quarantined(entry.name)}
    for name, entry in names.items():
        if not entry.is_symlink() and (name.endswith(WHY) or f"{name}{WHY}" in names):
            yield Path(entry.path)


def _remove(disk: DiskTier, path: Path) -> bool:
    """A directory may have been in the place of a file; what is in it is not ours."""
    if not path.is_dir():
        return disk.files.remove(path)
    try:
        path.rmdir()
    except OSError:
        return False
    return True


class RecordCheck(NamedTuple):
    """One record and what is wrong with it; None if nothing is, or if it cannot be judged."""

    key: BlockKey
    part: Part
    n_bytes: int
    wrong: str | None = None
    newer: bool = False
    quarantined: bool = False


def total_bytes(disk: DiskTier) -> int:
    """Bytes of all records."""
    with as_store_errors(disk, "list its blocks"):
        return disk.index.lookups.n_bytes()


def verify(disk: DiskTier, fix: bool = False) -> Iterator[RecordCheck]:
    """Check every record; with `fix`, bad ones are quarantined with the reason.

    A record that cannot be read may be good: it is reported and stays.
    """
    for stored in disk.walk():
        for part, n_bytes in stored.n_bytes.items():
            checked = _check(disk, RecordCheck(stored.key, part, n_bytes), fix)
            if checked is not None:
                yield checked


def _check(disk: DiskTier, record: RecordCheck, fix: bool) -> RecordCheck | None:
    """None if it was deleted meanwhile."""
    key, part = record.key, record.part
    try:
        wrong = disk.records.find_fault(key, part)
    except NewerFormat:
        return record._replace(newer=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        return record._replace(wrong=f"could not be read: {error.strerror or error}")
    if wrong is not None and fix:
        disk.read(key, part)  # reading a bad record quarantines it
        disk.records.repair()
        return record._replace(
            wrong=wrong, quarantined=not disk.records.path_of(key, part).exists()
        )
    return record._replace(wrong=wrong)
