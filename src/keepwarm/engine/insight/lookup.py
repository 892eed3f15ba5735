"""How much of a prompt is warm, where, and what its first token would take. Loads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from keepwarm.cache.restore.manager import Plan
from keepwarm.engine.lane import Lane
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.store.tiers import Tiers


@dataclass(frozen=True)
class Lookup:
    prompt_tokens: int
    warm: Mapping[str, int]  # tokens by place: live, memory, disk
    first_token_ms: float  # expected

    @property
    def warm_tokens(self) -> int:
        return sum(self.warm.values())


def look_up(lane: Lane, tokens: list[int]) -> Lookup:
    """On the engine's thread."""
    n_live, plan = lane.n_live(tokens), lane.manager.plan(tokens)
    warm = {"live": n_live} if n_live >= plan.n_tokens else by_tier(plan, lane.manager.tiers)
    rest = len(tokens) - max(plan.n_tokens, n_live)
    load_s = plan.load_s if plan.n_tokens > n_live else 0.0
    first_ms = 1000 * (load_s + rest / lane.manager.rates.prefill_tokens_per_s)
    return Lookup(len(tokens), {k: n for k, n in warm.items() if n}, round(first_ms, 1))


def by_tier(plan: Plan, tiers: Tiers) -> dict[str, int]:
    """Which tier each block would come from; those that no layer reads go with the last."""
    homes: dict[BlockKey, str] = {}
    keys = [read.key for read in plan.point.reads]
    for name, tier in reversed(tiers.named):
        homes |= dict.fromkeys(tier.have(keys), name)
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for read in plan.point.reads:
        if read.number not in seen and read.key in homes:
            seen.add(read.number)
            counts[homes[read.key]] += min(BLOCK_TOKENS, plan.n_tokens - read.number * BLOCK_TOKENS)
    if keys and keys[-1] in homes:
        counts[homes[keys[-1]]] += plan.n_tokens - counts.total()
    return dict(counts)
