"""Checks for free disk and memory, made before work that would otherwise stop half-way."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from keepwarm.errors import InsufficientResources
from keepwarm.units import format_bytes


def require(what: str, needed: int, free: int, kind: str) -> None:
    """Raise if more bytes are needed than are free."""
    if needed > free:
        raise InsufficientResources(
            f"{what} needs {format_bytes(needed)} of {kind} and only {format_bytes(free)} is free; "
            f"free some, or choose a smaller model."
        )


def require_disk(what: str, needed: int, directory: Path) -> None:
    """Checks the disk that will hold `directory`, which need not exist yet."""
    require(what, needed, free_disk_bytes(directory), f"disk in {directory}")


def free_disk_bytes(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def require_memory(what: str, needed: int) -> None:
    require(what, needed, psutil.virtual_memory().available, "memory")
