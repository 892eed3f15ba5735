"""Numbers and texts as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b|bytes)?", re.IGNORECASE | re.ASCII)
MOST = 1 << 60  # bytes


def format_bytes(n_bytes: float) -> str:
    """As `93.8 MiB` or `20.0 GiB`: the binary units of the settings and of the dashboard."""
    return _with_unit(n_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_rate(bytes_per_s: float) -> str:
    """As `54.0 MB/s`: decimal, as rates of drives and networks are given."""
    return _with_unit(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s"))


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    step = 0
    while number >= base and step < len(units) - 1:
        number, step = number / base, step + 1
    return f"{number:.{1 if step and number < 100 else 0}f} {units[step]}"


def printable(text: str) -> str:
    """With spaces for tabs, line breaks and what else would move a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def parse_bytes(text: str) -> int:
    """`20G` and `20GiB` are binary, `20GB` is decimal; ValueError for anything else."""
    found = SIZE.fullmatch(text.strip().replace("_", ""))
    if found is None:
        raise ValueError(text)
    number, prefix, unit = found.groups()
    n_bytes: float
    if prefix is None:
        n_bytes = int(number)
    else:
        base = 1000 if (unit or "").lower() == "b" else 1024
        n_bytes = float(number) * base ** (1 + "kmgt".index(prefix.lower()))
    if n_bytes > MOST:
        raise ValueError(text)
    return int(n_bytes)
