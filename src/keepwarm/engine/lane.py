"""A lane: one model with one choice of KV options, for one tenant.

Requests of one lane share blocks; those that differ in nothing but the tenant still share a batch.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from keepwarm import kv
from keepwarm.cache.policy import Policy
from keepwarm.cache.restore.continuations import continuations
from keepwarm.cache.restore.live import Live
from keepwarm.cache.restore.loading import Loading
from keepwarm.cache.restore.manager import Manager
from keepwarm.cache.store import Store
from keepwarm.models.load import Model
from keepwarm.prefix.fingerprint import salt_of
from keepwarm.text.past_answers import Continuations
from keepwarm.text.request import KVOptions

LOG = logging.getLogger(__name__)

MIN_SHARED = 16  # tokens that are worth waiting for


class Warm(NamedTuple):
    """Caches that hold the first `n_tokens` of a prompt, and where these came from."""

    caches: kv.Caches
    n_tokens: int
    reused: dict[str, int]
    n_kept: int  # of them, in blocks of this lane that need not be put again


@dataclass
class Lane:
    model: Model
    options: KVOptions
    manager: Manager
    live: Live
    can_batch: bool
    before: Lane | None = None  # where a prompt was before it grew long enough to be quantised

    @property
    def exact(self) -> bool:
        """Whether keys and values are as the model computed them."""
        return self.options.kv_bits is None

    @property
    def exact_places(self) -> bool:
        """Whether a prompt can be restored only where a slice of it ended."""
        return self.manager.needs.checkpoints

    @property
    def has_places(self) -> bool:
        """Whether what is kept for longer depends on where the messages of a prompt end."""
        return self.manager.needs.state or self.manager.needs.window > 0

    @property
    def stored(self) -> Continuations:
        """What the store holds after a prompt."""
        return partial(continuations, self.manager.namespace, self.manager.tiers)

    def begin(self, tokens: list[int], policy: Policy) -> Loading | None:
        """Have what the store knows of a prompt loaded, where nothing live reaches as far."""
        try:
            return self.manager.begin(tokens, policy, self.n_live(tokens), others_wait=True)
        except Exception:
            self._failed()
            return None

    @property
    def loads_beside(self) -> bool:
        """Whether blocks can be loaded while the model runs: not where a device copies them."""
        return self.manager.reader.staging is None

    def warm(self, tokens: list[int], policy: Policy, loading: Loading | None = None) -> Warm:
        """The longest known prefix of a prompt as caches; fresh ones where nothing is known.

        `loading` is what `begin` has begun for it.
        """
        found = self._known(tokens, policy, loading) if policy.reads else None
        if self.before is not None and policy.reads:
            n_known = found.n_tokens if found else 0
            found = self.before.quantised(tokens, self.options, n_known) or found
        return found or Warm(self.fresh(), 0, {}, 0)

    def quantised(self, tokens: list[int], options: KVOptions, beyond: int) -> Warm | None:
        """What this lane knows of a prompt, quantised; nothing if that is no more than `beyond`."""
        if self.n_warm(tokens) <= beyond:
            return None
        found = self._known(tokens, Policy.READ_ONLY)
        if found is None or options.kv_bits is None:
            return None
        caches = kv.quantize_caches(found.caches, options.kv_bits, options.kv_group_size)
        return found._replace(caches=kv.evaluate(caches), n_kept=0)

    def n_warm(self, tokens: list[int]) -> int:
        return max(self.n_live(tokens), self.manager.plan(tokens).n_tokens)

    def n_live(self, tokens: list[int]) -> int:
        return self.live.n_served(self.manager.namespace, tokens)

    def saw_prefill(self, n_tokens: int, seconds: float) -> None:
        if n_tokens >= 8:  # fewer tell of the weights, not of the tokens
            self.manager.rates.saw_prefill(n_tokens, seconds)

    def fresh(self) -> kv.Caches:
        return kv.make_caches(self.model.module, **make_options(self.options))

    def _known(
        self, tokens: list[int], policy: Policy, loading: Loading | None = None
    ) -> Warm | None:
        """What fails to come back is a miss, whatever the reason."""
        try:
            return self._found(tokens, policy, loading)
        except Exception:
            self._failed()
            return None

    def _is_stale(self, loading: Loading) -> bool:
        """Whether somebody has kept more of the same prompt meanwhile."""
        n_known = self.manager.plan(loading.tokens).n_tokens
        return n_known >= loading.point.n_tokens + MIN_SHARED

    def _failed(self) -> None:
        LOG.exception("a restore failed; the prompt is read anew")
        self.manager.restore_failures += 1

    def _found(self, tokens: list[int], policy: Policy, loading: Loading | None) -> Warm | None:
        n_live = self.n_live(tokens)
        if loading is not None and loading.in_background and self._is_stale(loading):
            loading.abandon()
            loading = None
        loading = loading or self.manager.begin(tokens, policy, beyond=n_live)
        if loading is not None and loading.point.n_tokens > n_live:
            stored = self.manager.finish(loading, beyond=n_live)
            if stored.caches is not None:
                n_kept = self.manager.n_saved(tokens[: stored.n_tokens], policy)
                return Warm(stored.caches, stored.n_tokens, stored.tokens_by_tier, n_kept)
        elif loading is not None:
            loading.abandon()  # somebody has left a longer one alive meanwhile
        mine = self.live.take(self.manager.namespace, tokens, keep=not policy.writes)
        if mine is None:
            return None
        n_kept = self.manager.n_saved(tokens[: mine.n_tokens], policy)
        return Warm(mine.caches, mine.n_tokens, {"live": mine.n_tokens}, n_kept)


@dataclass
class Lanes:
    """All lanes of an engine, each made when it is first asked for, on the engine's thread."""

    model: Model
    store: Store
    live: Live
    _made: dict[tuple[KVOptions, str], Lane] = field(default_factory=dict)

    def known(self, options: KVOptions, tenant: str) -> Lane | None:
        """A lane that is there already; any thread may ask."""
        return self._made.get((options, tenant))

    def of(self, options: KVOptions, tenant: str) -> Lane:
        key = (options, tenant)
        if key not in self._made:
            self._made[key] = self._make(options, tenant)
        return self._made[key]

    def _make(self, options: KVOptions, tenant: str) -> Lane:
        start = options.quantized_kv_start
        exactly = replace(options, kv_bits=None, quantized_kv_start=0)
        attached = self.store.attach(
            self.model.module,
            self.model.path,
            salt=salt_of(tenant, start),
            **make_options(options),
        )
        fresh = kv.make_caches(self.model.module, **make_options(options))
        return Lane(
            self.model,
            options,
            attached.manager,
            self.live,
            can_batch=kv.can_batch(fresh),
            before=self.of(exactly, tenant) if start and options.kv_bits else None,
        )


def options_for(options: KVOptions, n_prompt: int) -> KVOptions:
    """A prompt shorter than `quantized_kv_start` is held exactly."""
    if options.kv_bits is None or n_prompt < options.quantized_kv_start:
        return replace(options, kv_bits=None, quantized_kv_start=0)
    return options


def make_options(options: KVOptions) -> dict[str, Any]:
    """Those that differ from the default, so that naming a default changes no identity."""
    default = asdict(KVOptions())
    given = {name: value for name, value in asdict(options).items() if value != default[name]}
    given.pop("quantized_kv_start", None)
    if options.kv_bits is None:
        given.pop("kv_group_size", None)
    return given
