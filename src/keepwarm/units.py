"""Numbers as people read them."""

from __future__ import annotations

import re

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b|bytes)?", re.IGNORECASE | re.ASCII)


def format_bytes(n_bytes: float) -> str:
    """As `98 MB` or `5.1 GB`, in decimal units."""
    for unit in ("bytes", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"


def parse_bytes(text: str) -> int:
    """`20G` and `20GiB` are binary, `20GB` is decimal; ValueError for anything else."""
    found = SIZE.fullmatch(text.strip().replace("_", ""))
    if found is None:
        raise ValueError(text)
    number, prefix, unit = found.groups()
    if prefix is None:
        return int(number)
    base = 1000 if (unit or "").lower() == "b" else 1024
    return int(float(number) * base ** (1 + "kmgt".index(prefix.lower())))
