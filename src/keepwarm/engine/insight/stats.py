"""A snapshot of an engine, read by metrics, dashboard, command line and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from keepwarm.cache.counts import PromptCounts
from keepwarm.cache.restore.live import Live, LiveStats
from keepwarm.cache.restore.writing import WriteStats
from keepwarm.cache.store import Store
from keepwarm.engine.lane import Lanes
from keepwarm.engine.scheduler import Scheduler
from keepwarm.store.tier import TierStats


class MemoryUse(NamedTuple):
    """Memory of one kind: live, memory (the tier), batch or buffers (MLX's own)."""

    name: str
    n_bytes: int
    max_bytes: int | None


@dataclass(frozen=True)
class Stats:
    waiting: int
    prefilling: int
    decoding: int  # sequences in the batch
    counters: Mapping[str, Any]
    step_ms: float  # one decode step
    prefill_tokens_per_s: float
    live: LiveStats
    tiers: Mapping[str, TierStats]
    writes: WriteStats
    shares_batches: bool | None  # False: sequences decode one by one; None: not tried yet
    counts: PromptCounts  # of the store: all processes, all time
    failed_restores: Mapping[str, int]  # by reason


def snapshot(scheduler: Scheduler, live: Live, store: Store, lanes: Lanes) -> Stats:
    """From any thread; the numbers may be of different steps."""
    return Stats(
        waiting=len(scheduler.waiting),
        prefilling=len(scheduler.prefilling),
        decoding=len(scheduler.rows),
        counters=asdict(scheduler.counters),
        step_ms=round(1000 * scheduler.slice_sizer.step_s, 2),
        prefill_tokens_per_s=round(1 / scheduler.slice_sizer.token_s, 1),
        live=live.stats,
        tiers=store.tier_stats(),
        writes=store.write_stats(),
        shares_batches=lanes.share_batches,
        counts=store.counts.total(),
        failed_restores=dict(store.restore_failures.by_reason),
    )
