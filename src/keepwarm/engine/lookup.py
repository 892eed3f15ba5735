"""How much of a prompt is warm, in which tier, and the expected time to its first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.cache.restore.restorer import Plan
from keepwarm.engine.lane import Lane
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.store.tiers import TierLookups


@dataclass(frozen=True)
class Lookup:
    prompt_tokens: int
    warm: Mapping[str, int]  # tokens by tier: live, memory, disk
    first_token_ms: float  # expected


def look_up(lane: Lane, tokens: list[int]) -> Lookup:
    """Loads nothing. Runs on the engine's thread."""
    n_live, plan = lane.n_live(tokens), lane.restorer.plan(tokens)
    warm = {"live": n_live} if n_live >= plan.n_tokens else _by_tier(plan, lane.restorer.lookups)
    rest_s = lane.restorer.rates.prefill_s(max(plan.n_tokens, n_live), len(tokens))
    load_s = plan.load_s if plan.n_tokens > n_live else 0.0
    first_ms = 1000 * (load_s + rest_s)
    return Lookup(len(tokens), {k: n for k, n in warm.items() if n}, round(first_ms, 1))


def _by_tier(plan: Plan, tiers: TierLookups) -> dict[str, int]:
    """Tokens by the tier they would come from; blocks that no layer reads count with the last."""
    tier_of: dict[BlockKey, str] = {}
    keys = [read.key for read in plan.point.reads]
    for name, tier in reversed(tiers.looked_up):
        tier_of |= dict.fromkeys(tier.have(keys), name)
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for read in plan.point.reads:
        if read.number not in seen and read.key in tier_of:
            seen.add(read.number)
            counts[tier_of[read.key]] += min(
                BLOCK_TOKENS, plan.n_tokens - read.number * BLOCK_TOKENS
            )
    if keys and keys[-1] in tier_of:
        counts[tier_of[keys[-1]]] += plan.n_tokens - counts.total()
    return dict(counts)
