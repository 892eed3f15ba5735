"""What a request may do with the cache."""

from __future__ import annotations

from enum import StrEnum


class Policy(StrEnum):
    READ_WRITE = "read-write"
    READ_ONLY = "read-only"
    EPHEMERAL = "ephemeral"  # shared while in memory, never on disk
    NO_STORE = "no-store"
    DURABLE = "durable"  # answered once everything is on disk

    @property
    def reads(self) -> bool:
        return self is not Policy.NO_STORE

    @property
    def writes(self) -> bool:
        return self not in (Policy.NO_STORE, Policy.READ_ONLY)

    @property
    def to_disk(self) -> bool:
        return self in (Policy.READ_WRITE, Policy.DURABLE)

    @property
    def leads(self) -> bool:
        """Whether other requests may wait for what this one computes."""
        return self.writes
