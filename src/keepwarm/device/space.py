"""Is there room? Asked before disk or memory is used, so that nothing stops half-way."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from keepwarm.errors import InsufficientResources


def require(what: str, needed: int, free: int, kind: str) -> None:
    """Refuse, in words, what needs more bytes than are free."""
    if needed > free:
        raise InsufficientResources(
            f"{what} needs {in_words(needed)} of {kind} and only {in_words(free)} is free; "
            f"free some, or choose a smaller model."
        )


def require_disk(what: str, needed: int, directory: Path) -> None:
    """Against the disk that will hold `directory`, which need not exist yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    require(what, needed, shutil.disk_usage(existing).free, f"disk in {directory}")


def require_memory(what: str, needed: int) -> None:
    require(what, needed, psutil.virtual_memory().available, "memory")


def in_words(n_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"
