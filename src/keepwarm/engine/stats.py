"""An engine seen from outside: its load and memory now, its counters, its requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from keepwarm.cache.restore.writing import WriteStats
from keepwarm.cache.store import Store
from keepwarm.device.memory import MemoryConfig
from keepwarm.engine.admission import Admission
from keepwarm.engine.jobs import Job
from keepwarm.engine.lane import Lanes
from keepwarm.engine.live import Live, LiveStats
from keepwarm.engine.scheduler import Scheduler
from keepwarm.errors import Cancelled, KeepwarmError
from keepwarm.store.counts import PromptCounts
from keepwarm.store.tier import TierStats
from keepwarm.telemetry.ledger import RequestRecord, RequestState
from keepwarm.text.request import Receipt


class MemoryUse(NamedTuple):
    """Memory of one kind: live, memory (the tier), batch or buffers (MLX's own)."""

    name: str
    n_bytes: int
    max_bytes: int | None


@dataclass(frozen=True)
class Stats:
    waiting: int
    prefilling: int
    decoding: int  # those with sequences in the batch
    counters: Mapping[str, Any]  # of the ledger, which engines of one process may share
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
        decoding=len({row.job for row in scheduler.rows}),
        counters=scheduler.ledger.counters(),
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


def add_up(found: Sequence[Stats]) -> Stats:
    """Of engines on one store and one ledger: sums, and the slowest model's speeds."""
    lives = zip(*(stats.live for stats in found), strict=True)
    return replace(
        found[0],
        waiting=sum(stats.waiting for stats in found),
        prefilling=sum(stats.prefilling for stats in found),
        decoding=sum(stats.decoding for stats in found),
        step_ms=max(stats.step_ms for stats in found),
        prefill_tokens_per_s=min(stats.prefill_tokens_per_s for stats in found),
        live=LiveStats(*map(sum, lives)),
    )


def record_of(job: Job, error: KeepwarmError | None = None) -> RequestRecord:
    """What was done for a job until now, or until it ended."""
    is_done = job.ended and error is None
    return RequestRecord(
        number=job.number,
        seconds=round(job.seconds, 3),
        tenant=job.request.tenant,
        agent=job.request.agent,
        model=job.lane.model.name,
        state=_state(job, error),
        prompt_tokens=len(job.tokens),
        answer_tokens=sum(sequence.n_tokens for sequence in job.sequences),
        n_sequences=len(job.sequences),
        receipt=_receipt_so_far(job) if error else job.receipt,
        computed_tokens=job.n_prefilled,
        phases_ms=job.phases_ms,
        ttft_ms=job.ttft_ms,
        usage=job.done().usage if is_done and job.receipt else None,
        is_later_turn=job.is_later_turn,
        asks_for_reuse=job.n_answers > 0 and job.request.policy.reads,
        is_stored=job.request.policy.writes,
        error="" if error is None else str(error),
        status=None if error is None else error.status,
        ended=time.time() if job.ended else None,
        request_id=job.request.request_id,
    )


def _receipt_so_far(job: Job) -> Receipt | None:
    """Of a job that was cut short: it promised to compute the rest of the prompt."""
    if job.receipt is None or job.receipt.recomputed == job.n_prefilled:
        return job.receipt
    return replace(job.receipt, recomputed=job.n_prefilled, saved_ms=0.0)


def _state(job: Job, error: KeepwarmError | None) -> RequestState:
    if isinstance(error, Cancelled):
        return "cancelled"
    if job.ended:
        return "done" if error is None else "failed"
    if job.receipt is None:
        return "waiting"
    return "prefilling" if job.first_token is None else "decoding"
