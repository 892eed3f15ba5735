"""What a request may do with the cache."""

from __future__ import annotations

from enum import StrEnum


class Policy(StrEnum):
    """What a request may reuse, and where its KV state is kept."""

    READ_WRITE = "read-write"  # reuse, keep in memory and on disk
    READ_ONLY = "read-only"  # reuse, keep nothing
    EPHEMERAL = "ephemeral"  # reuse, keep in memory only
    NO_STORE = "no-store"  # compute everything, keep nothing
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
    def can_prefill_for_others(self) -> bool:
        """Whether other requests may wait for what this one computes."""
        return self.writes
