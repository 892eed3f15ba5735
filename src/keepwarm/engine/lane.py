"""A lane: one model with one choice of KV options, for one tenant.

Requests of one lane share blocks; those that differ in nothing but the tenant still share a batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from keepwarm import kv
from keepwarm.cache.live import Live
from keepwarm.cache.manager import Manager
from keepwarm.cache.policy import Policy
from keepwarm.engine.model import Model
from keepwarm.engine.request import KVOptions
from keepwarm.engine.store import Store


class Warm(NamedTuple):
    """Caches that hold the first `n_tokens` of a prompt, and where these came from."""

    caches: kv.Caches
    n_tokens: int
    reused: dict[str, int]


@dataclass
class Lane:
    model: Model
    options: KVOptions
    manager: Manager
    live: Live
    can_batch: bool
    exact: bool  # keys and values are as the model computed them

    @property
    def exact_places(self) -> bool:
        """Whether a prompt can be restored only where a slice of it ended."""
        return self.manager.needs.checkpoints

    def warm(self, tokens: list[int], policy: Policy) -> Warm:
        """The longest known prefix of a prompt as caches; fresh ones where nothing is known."""
        if policy.reads:
            stored = self.manager.restore(tokens, policy, beyond=self._n_live(tokens))
            if stored.caches is not None:
                return Warm(stored.caches, stored.n_tokens, stored.tokens_by_tier)
            mine = self.live.take(self.manager.namespace, tokens, keep=not policy.writes)
            if mine is not None:
                return Warm(mine.caches, mine.n_tokens, {"live": mine.n_tokens})
        return Warm(self.fresh(), 0, {})

    def _n_live(self, tokens: list[int]) -> int:
        found = self.live.look(self.manager.namespace, tokens)
        return found.serves(len(tokens)) if found else 0

    def saw_prefill(self, n_tokens: int, seconds: float) -> None:
        if n_tokens >= 8:  # fewer tell of the weights, not of the tokens
            self.manager.rates.saw_prefill(n_tokens, seconds)

    def fresh(self) -> kv.Caches:
        return kv.make_caches(self.model.module, **make_options(self.options))


@dataclass
class Lanes:
    """All lanes of an engine, each made when it is first asked for, on the engine's thread."""

    model: Model
    store: Store
    live: Live
    _made: dict[tuple[KVOptions, str], Lane] = field(default_factory=dict)

    def of(self, options: KVOptions, tenant: str) -> Lane:
        key = (options, tenant)
        if key not in self._made:
            self._made[key] = self._make(options, tenant)
        return self._made[key]

    def _make(self, options: KVOptions, tenant: str) -> Lane:
        attached = self.store.attach(
            self.model.module, self.model.path, salt=tenant, **make_options(options)
        )
        fresh = kv.make_caches(self.model.module, **make_options(options))
        return Lane(
            self.model,
            options,
            attached.manager,
            self.live,
            can_batch=kv.can_batch(fresh),
            exact=not kv.is_quantized(fresh),
        )


def make_options(options: KVOptions) -> dict[str, Any]:
    """Those that differ from the default, so that naming a default changes no identity."""
    default = asdict(KVOptions())
    return {name: value for name, value in asdict(options).items() if value != default[name]}
