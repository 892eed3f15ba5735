"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(n_bytes: float) -> str:
    """As `98 MB` or `5.1 GB`, in decimal units."""
    for unit in ("bytes", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"
