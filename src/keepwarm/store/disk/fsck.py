"""Verifies every record of a store; changes nothing unless asked to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from keepwarm.errors import NewerFormat
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.record import Part
from keepwarm.store.tier import as_store_errors


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
        disk.records.mend()
        return record._replace(
            wrong=wrong, quarantined=not disk.records.path_of(key, part).exists()
        )
    return record._replace(wrong=wrong)
