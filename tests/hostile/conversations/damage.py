"""What happens to the files of a store: noise in records, lost files, an index that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from tests.kit.mutants.changes import spoil


def damage_records(chance: Random, home: Path) -> str:
    """Spoil, swap or remove record files, also under a store that is open; what was done."""
    files = sorted((home / "store" / "blocks").glob("*/*.safetensors"))
    if len(files) < 2:
        return "nothing to damage"
    how = chance.choice(("flipped", "flipped", "spoiled", "swapped", "lost"))
    chosen = chance.sample(files, len(files) // 2)
    for path, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
        try:
            _damage(chance, path, other, how)
        except FileNotFoundError:
            continue  # it has been evicted meanwhile
    return f"records {how}"


def damage_file(chance: Random, path: Path) -> str:
    """One file gets other bits, or goes; what was done."""
    how = chance.choice(("flipped", "lost"))
    _damage(chance, path, path, how)
    return f"files {how}"


def _damage(chance: Random, path: Path, other: Path, how: str) -> None:
    if how == "lost":
        path.unlink()
    elif how == "swapped":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    elif how == "flipped":
        path.write_bytes(_flipped(chance, path.read_bytes()))
    else:
        path.write_bytes(spoil(chance, path.read_bytes()))


def _flipped(chance: Random, data: bytes) -> bytes:
    """A high bit of many numbers is another; only digests can tell."""
    changed = bytearray(data)
    for at in range(len(data) // 2 + chance.randrange(4), len(data), 512):
        changed[at] ^= 0x40
    return bytes(changed)


def damage_closed(chance: Random, home: Path) -> str:
    """What may be found wrong at a start."""
    how = chance.choice(("records", "records", "index lost", "index spoiled", "agents", "notes"))
    if how == "records":
        return damage_records(chance, home)
    found = {
        "index lost": "store/index*",
        "index spoiled": "store/index*",
        "agents": "store/agents/*.json",
        "notes": "*.json",
    }[how]
    for path in filter(Path.is_file, sorted(home.glob(found))):
        if how == "index lost":
            path.unlink()
        else:
            path.write_bytes(spoil(chance, path.read_bytes()))
    return how


def copy_running(home: Path, to: Path) -> None:
    """The files as they are now, as a crash would leave them."""
    shutil.copytree(home, to, copy_function=_copy_if_there, dirs_exist_ok=True)


def _copy_if_there(source: str, target: str) -> str:
    try:
        return shutil.copy2(source, target)
    except FileNotFoundError:
        return target
