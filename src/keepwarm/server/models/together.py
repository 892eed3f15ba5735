"""What operators see of several engines, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.engine.engine import Engine
from keepwarm.engine.stats import MemoryUse

ONE_FOR_ALL = frozenset({"memory", "buffers"})  # the store's tier, and MLX's buffers


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
