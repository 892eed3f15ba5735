"""Sums over all keys: tokens by source and by minute, time saved, faults."""

from __future__ import annotations

import time

from keepwarm.engine.stats import Stats
from keepwarm.server.dashboard.shapes import (
    BudgetOut,
    ConditionOut,
    HealthCountsOut,
    HistoryPointOut,
    TotalsOut,
)
from keepwarm.store.counts import ALL_TIERS, TIERS, PromptCounts
from keepwarm.telemetry.history import Amounts, Timeline, minute_name, percentile_ms

N_POINTS = 60
# What turns the status red, and what amber; a count of each, in words for one and for several.
RED = {
    "quarantined": ("damaged record was", "damaged records were", "quarantined; check the disk"),
    "failed_saves": ("save", "saves", "failed; check the disk and its free space"),
    "drifts": ("audit", "audits", "differed from a cold run; see the log"),
}
AMBER = {
    "read_errors": ("record", "records", "could not be read"),
    "dropped_saves": ("save was", "saves were", "dropped: the queue or the daily budget was full"),
    "failed_restores": ("restore", "restores", "failed; the tokens were computed"),
}


def budget_out(name: str, n_bytes: int, max_bytes: int | None) -> BudgetOut:
    return {"budget": name, "place": name, "n_bytes": n_bytes, "max_bytes": max_bytes}


def points_out(timeline: Timeline, hours: int) -> list[HistoryPointOut]:
    """Always 60 points; each covers as many minutes as there are hours."""
    last = int(time.time() // 60)
    first = last - N_POINTS * hours + 1
    return [_point(timeline, minute, hours) for minute in range(first, last + 1, hours)]


def latencies_ms(timeline: Timeline, hours: int) -> tuple[float | None, float | None]:
    """Median and 95th percentile of the time to the first token in the last hours."""
    last = int(time.time() // 60)
    n = _sum(timeline, range(last - N_POINTS * hours + 1, last + 1))
    return percentile_ms(n, 0.5), percentile_ms(n, 0.95)


def _sum(timeline: Timeline, minutes: range) -> Amounts:
    n: dict[str, int] = {}
    for minute in minutes:
        for name, amount in timeline.minutes.get(minute_name(60 * minute), {}).items():
            n[name] = n.get(name, 0) + amount
    return n


def _point(timeline: Timeline, minute: int, width: int) -> HistoryPointOut:
    n = _sum(timeline, range(minute, minute + width))
    return {
        "at": 60 * minute,
        "live": n.get("live", 0),
        "memory": n.get("memory", 0),
        "disk": n.get("disk", 0),
        "shared": n.get("shared", 0),
        "computed": _computed(n),
        "prefilled": n.get("prefilled", 0),
        "generated": n.get("generated", 0),
        "finished": n.get("finished", 0),
        "cancelled": n.get("cancelled", 0),
        "failed": n.get("failed", 0),
        "ttft_p50_ms": percentile_ms(n, 0.5),
        "ttft_p95_ms": percentile_ms(n, 0.95),
    }


def _computed(amounts: Amounts) -> int:
    """Prompt tokens that were reused from nowhere."""
    return max(0, amounts.get("prompt", 0) - sum(amounts.get(tier, 0) for tier in ALL_TIERS))


def totals_out(amounts: Amounts) -> TotalsOut:
    return {
        "reused": {t: n for t in ALL_TIERS if (n := amounts.get(t, 0)) or t in TIERS},
        "computed": _computed(amounts),
        "saved_s": amounts.get("saved_ms", 0) / 1000,
    }


def store_totals_out(amounts: Amounts, counts: PromptCounts) -> TotalsOut:
    """Tokens as the store has counted them; the rest as this server has."""
    tokens = {**counts.reused, "prompt": counts.prompt_tokens}
    return totals_out({**amounts, **dict.fromkeys(TIERS, 0), **tokens})


def health_out(stats: Stats) -> HealthCountsOut:
    """Faults since the start; none of them has failed a request."""
    tiers, writes = stats.tiers.values(), stats.writes
    quarantined = sum(tier.quarantined for tier in tiers)
    read_errors = sum(tier.errors for tier in tiers)
    dropped_saves = writes.dropped + writes.over_budget
    failed_saves = writes.failed + stats.counters["failed_saves"]
    evicted = sum(tier.evicted for tier in tiers)
    return {
        "quarantined": quarantined,
        "read_errors": read_errors,
        "dropped_saves": dropped_saves,
        "failed_saves": failed_saves,
        "failed_restores": sum(stats.failed_restores.values()),
        "evicted": evicted,
        "audits": stats.counters["audits"],
        "drifts": stats.counters["drifts"],
        "set aside as damaged": quarantined,
        "could not be read": read_errors,
        "saves given up": dropped_saves,
        "saves that failed": failed_saves,
        "let go for lack of room": evicted,
        "audits that differed": stats.counters["drifts"],
    }


def condition_out(stats: Stats) -> ConditionOut:
    """Whether the server is well, and if not, why."""
    counts: dict[str, int] = {**health_out(stats)}  # type: ignore[dict-item]
    red, amber = (_reasons(counts, kinds) for kinds in (RED, AMBER))
    return {"level": "red" if red else "amber" if amber else "green", "reasons": [*red, *amber]}


def _reasons(counts: dict[str, int], kinds: dict[str, tuple[str, str, str]]) -> list[str]:
    return [
        f"{n:,} {one if n == 1 else many} {what}."
        for name, (one, many, what) in kinds.items()
        if (n := counts[name])
    ]
