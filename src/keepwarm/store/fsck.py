"""Is everything in a store what it claims to be? Reads all of it; changes nothing unless asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from keepwarm.errors import NewerFormat
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.disk import DiskTier
from keepwarm.store.record import Part


class Checked(NamedTuple):
    """One record and what is wrong with it; None where nothing is, or where nobody here can say."""

    key: BlockKey
    part: Part
    n_bytes: int
    wrong: str | None = None
    newer: bool = False


def verify(disk: DiskTier, fix: bool = False) -> Iterator[Checked]:
    """Check every record in turn; with `fix`, bad ones are set aside with their reason."""
    for stored in disk.walk():
        for part, n_bytes in stored.n_bytes.items():
            checked = Checked(stored.key, part, n_bytes)
            try:
                wrong = disk.fault_of(stored.key, part)
            except NewerFormat:
                yield checked._replace(newer=True)
                continue
            if wrong is not None and fix:
                disk.read(stored.key, part)  # reading a bad record sets it aside
            yield checked._replace(wrong=wrong)
