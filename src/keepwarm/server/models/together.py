"""What operators see of several engines, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.engine.engine import Engine
from keepwarm.engine.insight.journal import JournalEntry
from keepwarm.engine.insight.misses import PrefixMiss
from keepwarm.engine.insight.stats import MemoryUse
from keepwarm.engine.insight.whatif import LoggedLookup

ONE_FOR_ALL = frozenset({"memory", "buffers"})  # the store's tier, and MLX's buffers


def requests_of(engines: Sequence[Engine]) -> list[JournalEntry]:
    """Recent requests that ended, then those that wait or run."""
    found = [entry for engine in engines for entry in engine.requests()]
    return sorted(found, key=lambda entry: (entry.ended is None, entry.ended or entry.number))


def misses_of(engines: Sequence[Engine]) -> list[tuple[Engine, PrefixMiss]]:
    """Newest first, each with the engine that knows its tokens."""
    found = [(engine, miss) for engine in engines for miss in engine.misses.latest()]
    return sorted(found, key=lambda each: -each[1].when)


def memory_of(engines: Sequence[Engine]) -> list[MemoryUse]:
    """Memory in use, and its limits, by kind."""
    uses: dict[str, MemoryUse] = {}
    for use in (use for engine in engines for use in engine.memory()):
        before = uses.get(use.name)
        if before is None:
            uses[use.name] = use
        elif use.name not in ONE_FOR_ALL:
            most = (before.max_bytes or 0) + (use.max_bytes or 0)
            uses[use.name] = MemoryUse(use.name, before.n_bytes + use.n_bytes, most)
    return list(uses.values())


def lookups_of(engines: Sequence[Engine]) -> list[LoggedLookup]:
    """In the order in which they were made."""
    found = [lookup for engine in engines for lookup in engine.lookup_log.all()]
    return sorted(found, key=lambda lookup: lookup.when)
