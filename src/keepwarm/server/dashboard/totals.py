"""Sums over all keys: tokens by source and by minute, time saved, faults."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

from keepwarm.engine.stats import Stats
from keepwarm.store.counts import ALL_TIERS, TIERS, PromptCounts
from keepwarm.telemetry.history import Amounts, Timeline, minute_name
from keepwarm.telemetry.ledger import percentile_ms

JsonObject: TypeAlias = dict[str, Any]
N_POINTS = 60
AMOUNTS = (*ALL_TIERS, "prefilled", "generated", "finished", "cancelled", "failed")
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


def points_out(timeline: Timeline, hours: int) -> list[JsonObject]:
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


def _point(timeline: Timeline, minute: int, width: int) -> JsonObject:
    n = _sum(timeline, range(minute, minute + width))
    return {
        "at": 60 * minute,
        **{name: n.get(name, 0) for name in AMOUNTS},
        "computed": _computed(n),
        "ttft_p50_ms": percentile_ms(n, 0.5),
        "ttft_p95_ms": percentile_ms(n, 0.95),
    }


def _computed(amounts: Amounts) -> int:
    """Prompt tokens that were reused from nowhere."""
    return max(0, amounts.get("prompt", 0) - sum(amounts.get(tier, 0) for tier in ALL_TIERS))


def totals_out(amounts: Amounts) -> JsonObject:
    return {
        "reused": {t: n for t in ALL_TIERS if (n := amounts.get(t, 0)) or t in TIERS},
        "computed": _computed(amounts),
        "saved_s": amounts.get("saved_ms", 0) / 1000,
    }


def store_totals_out(amounts: Amounts, counts: PromptCounts) -> JsonObject:
    """Tokens as the store has counted them; the rest as this server has."""
    tokens = {**counts.reused, "prompt": counts.prompt_tokens}
    return totals_out({**amounts, **dict.fromkeys(TIERS, 0), **tokens})


def health_out(stats: Stats) -> dict[str, int]:
    """Faults since the start; none of them has failed a request."""
    tiers, writes = stats.tiers.values(), stats.writes
    return {
        "quarantined": sum(tier.quarantined for tier in tiers),
        "read_errors": sum(tier.errors for tier in tiers),
        "dropped_saves": writes.dropped + writes.over_budget,
        "failed_saves": writes.failed + stats.counters["failed_saves"],
        "failed_restores": sum(stats.failed_restores.values()),
        "evicted": sum(tier.evicted for tier in tiers),
        "audits": stats.counters["audits"],
        "drifts": stats.counters["drifts"],
    }


def condition_out(stats: Stats) -> JsonObject:
    """Whether the server is well, and if not, why."""
    counts = health_out(stats)
    red, amber = (_reasons(counts, kinds) for kinds in (RED, AMBER))
    return {"level": "red" if red else "amber" if amber else "green", "reasons": [*red, *amber]}


def _reasons(counts: dict[str, int], kinds: dict[str, tuple[str, str, str]]) -> list[str]:
    return [
        f"{n:,} {one if n == 1 else many} {what}."
        for name, (one, many, what) in kinds.items()
        if (n := counts[name])
    ]
