"""Is everything in a store what it claims to be? Reads all of it; changes nothing unless asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.disk import DiskTier
from keepwarm.store.record import Part


class Checked(NamedTuple):
    """One record and what is wrong with it; None where nothing is."""

    key: BlockKey
    part: Part
    n_bytes: int
    wrong: str | None


def verify(disk: DiskTier, fix: bool = False) -> Iterator[Checked]:
    """Check every record in turn; with `fix`, bad ones are set aside with their reason."""
    for stored in disk.walk():
        for part, n_bytes in stored.n_bytes.items():
            wrong = disk.fault_of(stored.key, part)
            if wrong is not None and fix:
                disk.read(stored.key, part)  # reading a bad record sets it aside
            yield Checked(stored.key, part, n_bytes, wrong)
