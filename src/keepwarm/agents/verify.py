"""Checking a whole store, agents included: the same by command line and by HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from keepwarm.agents.agent_store import AgentStore
from keepwarm.errors import NewerFormat
from keepwarm.store.disk import maintenance
from keepwarm.store.disk.maintenance import Progress, no_progress


class BadFile(NamedTuple):
    """A record or an agent's file that is damaged or cannot be read."""

    record: str
    reason: str
    quarantined: bool


class StoreReport(NamedTuple):
    records: int
    n_bytes: int
    newer: int  # records and agents that only a newer Keepwarm reads
    bad: list[BadFile]

    def fields(self) -> dict[str, Any]:
        return self._asdict() | {"bad": [file._asdict() for file in self.bad]}


def verify_store(
    store: AgentStore, fix: bool = False, progress: Progress = no_progress
) -> StoreReport:
    """Check every record and every agent; with `fix`, what is damaged is quarantined.

    Progress is in bytes: a block has up to three records, and their sizes differ widely.
    """
    unreadable = list(store.agents.unreadable())
    n_newer = sum(isinstance(why, NewerFormat) for _, why in unreadable)
    bad = list(_bad_agents(store, unreadable, fix))
    n_records = n_bytes = 0
    all_bytes = maintenance.total_bytes(store.disk)
    progress(0, all_bytes)
    for checked in maintenance.verify(store.disk, fix):
        n_records, n_bytes = n_records + 1, n_bytes + checked.n_bytes
        n_newer += checked.newer
        progress(n_bytes, max(n_bytes, all_bytes))
        if checked.wrong is not None:
            name = f"{checked.key.hex()}.{checked.part.value}"
            bad.append(BadFile(name, checked.wrong, checked.quarantined))
    return StoreReport(n_records, n_bytes, n_newer, bad)


def _bad_agents(
    store: AgentStore, unreadable: list[tuple[str, Exception]], fix: bool
) -> Iterator[BadFile]:
    """A damaged file is quarantined if asked to; never one that could not be read."""
    for name, why in unreadable:
        record = f"agents/{name}"
        if isinstance(why, OSError):
            yield BadFile(record, f"could not be read: {why.strerror or why}", False)
        elif not isinstance(why, NewerFormat):
            path, files = store.disk.root / record, store.disk.records
            yield BadFile(record, str(why), fix and files.move_to_quarantine(path, str(why)))
