"""A snapshot of an engine, read by metrics, dashboard, command line and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from keepwarm.cache.counts import PromptCounts
from keepwarm.cache.restore.writing import WriteStats
from keepwarm.cache.store import Store
from keepwarm.device.memory import MemoryConfig
from keepwarm.engine.admission import Admission
from keepwarm.engine.lane import Lanes
from keepwarm.engine.live import Live, LiveStats
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


def memory_uses(
    live: Live, store: Store, admission: Admission, memory: MemoryConfig
) -> list[MemoryUse]:
    tier = store.tier_stats()["memory"]
    return [
        MemoryUse("live", live.stats.n_bytes, live.max_bytes),
        MemoryUse("memory", tier.n_bytes, tier.max_bytes),
        MemoryUse("batch", admission.used_bytes, admission.limit_bytes),
        MemoryUse("buffers", mx.get_cache_memory(), memory.buffer_active_bytes),
    ]


def add_up(found: Sequence[Stats], closed: Mapping[str, Any]) -> Stats:
    """Of engines on one store, with the counters of those that were closed: sums, and the slowest
    model's speeds."""
    counters = closed
    for stats in found:
        counters = add_counters(counters, stats.counters)
    lives = zip(*(stats.live for stats in found), strict=True)
    return replace(
        found[0],
        waiting=sum(stats.waiting for stats in found),
        prefilling=sum(stats.prefilling for stats in found),
        decoding=sum(stats.decoding for stats in found),
        counters=counters,
        step_ms=max(stats.step_ms for stats in found),
        prefill_tokens_per_s=min(stats.prefill_tokens_per_s for stats in found),
        live=LiveStats(*map(sum, lives)),
    )


def add_counters(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Each name's sum; some have counts by tier."""
    return {name: _sum(one.get(name), two.get(name)) for name in [*two, *(one.keys() - two.keys())]}


def _sum(one: Any, two: Any) -> Any:
    if isinstance(one, Mapping) or isinstance(two, Mapping):
        return add_counters(one or {}, two or {})
    return (one or 0) + (two or 0)
