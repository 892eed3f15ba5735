"""A lane: one model with one choice of KV options, for one tenant, or for one import of a tenant.

Requests of one lane share blocks; lanes that differ only in tenant or import share a batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from keepwarm import kv
from keepwarm.cache.identity import identity_of, with_options
from keepwarm.cache.restore.loading import EMPTY, Fault, Loading
from keepwarm.cache.restore.rates import PrefillTimes
from keepwarm.cache.restore.restorer import SMALL_LOAD_S, Plan, Restorer
from keepwarm.cache.store import Store
from keepwarm.engine.admission import kv_bytes
from keepwarm.engine.drafts import DraftGate
from keepwarm.engine.live import Live, copy_without
from keepwarm.engine.padding import RowSharing, VerdictsFile
from keepwarm.errors import BadInput, BadModelFile
from keepwarm.models.catalog import file_stamps
from keepwarm.models.hub import revision_of
from keepwarm.models.load import Model, may_drift
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.prefix.fingerprint import Identity, salt_of
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.store.tiers import TierLookups
from keepwarm.text.request import Inexact, KVOptions

LOG = logging.getLogger(__name__)
Call: TypeAlias = Callable[[Callable[[], Any]], Future[Any]]

MAX_CHOICES = 64  # of KV options, by one tenant
MIN_SHARED_TOKENS = 16  # a shorter shared prefix is not worth waiting for


class WarmPrefix(NamedTuple):
    """Caches that hold the first `n_tokens` of a prompt, and where they came from."""

    caches: kv.Caches
    n_tokens: int
    reused: dict[str, int]  # tokens by tier
    n_kept: int  # tokens that this lane already stores, and that need not be put again
    fault: Fault | None = None  # why more, which was planned, could not be restored
    n_lossy: int = 0  # tokens that were rounded at rest


@dataclass
class Lane:
    model: Model
    options: KVOptions
    identity: Identity
    restorer: Restorer
    live: Live
    sharing: RowSharing
    exact_lane: Lane | None = None  # for what comes before `quantized_kv_start`
    gate: DraftGate | None = None  # None if its sequences get no drafts
    may_drift: bool = False  # restored prompts of this type, in this dtype

    def inexact(self, n_reused: int, n_tokens: int) -> tuple[Inexact, ...]:
        """Why an answer is not exact: the only definition, as docs/serving.md has it.

        `n_tokens` are those of prompt and answer so far. A bounded cache differs once it has
        dropped a row. Blocks of an import are whatever the bundle's author wrote, and so is what
        follows them. Where machines share blocks although they compute other numbers, any block may
        be another's. Once a block has come from a shared tier that anybody could have written to,
        any block of its model and tenant may be a stranger's too. What is reused of a type that was
        not shown to be exact may drift. Where blocks are rounded at rest, any that is reused may
        have been, or follow one that was.
        """
        limit = self.options.max_kv_size
        windows = {leaf.window for leaf in self.restorer.layout.leaves()}
        reasons: dict[Inexact, bool] = {
            "quantised": self.options.kv_bits is not None,
            "bounded": limit is not None and limit in windows and n_tokens > limit,
            "imported": bool(self.identity.origin and n_reused),
            "numerics": bool(self.restorer.mixed.are_here and n_reused),
            "unverified": bool(n_reused and self.restorer.is_unverified),
            "drifts": bool(self.may_drift and n_reused),
            "q8": bool(self.options.at_rest == "q8" and n_reused),
            "q4": bool(self.options.at_rest == "q4" and n_reused),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    @property
    def can_batch(self) -> bool:
        """Whether its sequences share a batch, as far as is known."""
        return self.sharing.can_batch and self.sharing.allowed is not False

    @property
    def can_trim(self) -> bool:
        """Whether the last tokens of a cache can be removed."""
        return not self.restorer.needs.points

    @property
    def needs_cuts(self) -> bool:
        """Whether what is stored depends on where the messages of a prompt end."""
        return self.restorer.needs.points

    def of_import(self, origin: str, store: Store) -> Lane:
        """The same for an imported agent and its forks: a lane that shares blocks with no other."""
        identity = replace(self.identity, origin=origin)
        exact_lane = self.exact_lane
        return replace(
            self,
            identity=identity,
            restorer=self.restorer.in_namespace(store.on_disk.register(identity)),
            exact_lane=None if exact_lane is None else exact_lane.of_import(origin, store),
        )

    @property
    def namespaces(self) -> set[Namespace]:
        """Those of its blocks."""
        exact = self.exact_lane
        return {self.restorer.namespace, *((exact.restorer.namespace,) if exact else ())}

    def shares_blocks_with(self, other: Lane) -> bool:
        return self.restorer.namespace == other.restorer.namespace

    def for_prompt(self, n_tokens: int) -> Lane:
        """The lane that a prompt of this length runs in."""
        if self.exact_lane is not None and n_tokens < self.options.quantized_kv_start:
            return self.exact_lane
        return self

    def look_up(self, tokens: list[int], policy: Policy) -> Lane:
        """The same for one prompt, whose blocks on disk are looked up now, on the caller's thread:
        the engine's must not wait for an index.
        """
        exact_lane, first = self.exact_lane, tokens[: self.n_exact + 1]
        return replace(
            self,
            restorer=self.restorer.look_up(tokens, policy),
            exact_lane=None if exact_lane is None else exact_lane.look_up(first, policy),
        )

    @property
    def n_exact(self) -> int:
        """Leading tokens of a prompt that are computed in the exact lane, and then quantised.

        Rows from before that place are not restored here: a cold run would have computed the next
        ones from exact rows.
        """
        return 0 if self.exact_lane is None else self.options.quantized_kv_start

    def begin_loading(self, tokens: list[int], policy: Policy) -> Loading | None:
        """Begin to load a prompt's stored blocks, if they reach further than a live cache."""
        try:
            return self.restorer.begin(tokens, policy, self._n_least(tokens), others_wait=True)
        except Exception:
            _log_failure()
            return None

    def restore(
        self, tokens: list[int], policy: Policy, loading: Loading | None = None
    ) -> WarmPrefix:
        """The longest known prefix of a prompt; empty caches if none is known.

        `loading` is what `begin_loading` returned for this prompt.
        """
        found = self._restore_or_fail(tokens, policy, loading) if policy.reads else self._cold()
        if self.exact_lane is None or found.n_tokens:
            return found
        policy = Policy.READ_ONLY if policy.reads else policy  # its live caches stay
        exact = self.exact_lane.restore(tokens[: self.n_exact + 1], policy)
        if exact.n_tokens == self.n_exact:
            exact = exact._replace(caches=self.quantized(exact.caches), n_kept=0)
        return exact._replace(fault=found.fault or exact.fault)

    def quantized(self, caches: kv.Caches) -> kv.Caches:
        """Caches of the exact lane as this lane has them."""
        assert self.options.kv_bits is not None
        options = self.options.kv_bits, self.options.kv_group_size
        return kv.evaluate(kv.quantize_caches(caches, *options))

    def copy_of(
        self, caches: kv.Caches, n_excess: int, tokens: list[int], policy: Policy, n_lossy: int
    ) -> WarmPrefix | None:
        """A copy of another request's caches without their last tokens: those of `tokens`."""
        try:
            copied = copy_without(caches, n_excess)
        except Exception:
            _log_failure()
            return None
        n_kept = self.restorer.n_saved(tokens, policy)
        n_lossy = min(n_lossy, len(tokens))
        return WarmPrefix(copied, len(tokens), {"live": len(tokens)}, n_kept, n_lossy=n_lossy)

    def n_warm(self, tokens: list[int]) -> int:
        n_known = max(self.n_live(tokens), self.n_stored(tokens))
        if self.exact_lane is None or n_known >= self.n_exact:
            return n_known
        return self.exact_lane.n_warm(tokens[: self.n_exact + 1])

    def n_stored(self, tokens: list[int]) -> int:
        """Tokens of a prompt that blocks could restore, worth it or not."""
        return self.restorer.plan(tokens).n_tokens

    def n_live(self, tokens: list[int]) -> int:
        if self.restorer.answers is None:
            self.restorer.catch_up()
        n_served = self.live.n_served(self.restorer.namespace, tokens)
        return n_served if n_served >= self.n_exact else 0

    def _n_least(self, tokens: list[int]) -> int:
        """A load is of use if it restores more than this."""
        return max(self.n_live(tokens), self.n_exact - 1)

    def is_worth_waiting(self, n_tokens: int, n_known: int, n_shared: int) -> bool:
        """Whether restoring `n_shared` of a prompt's tokens, which another request is computing,
        is quicker than computing what follows the first `n_known`."""
        if n_shared < n_known + MIN_SHARED_TOKENS:
            return False
        rates = self.restorer.rates
        load_s = kv_bytes(self.restorer.layout, n_shared) / rates.load_bytes_per_s
        spared_s = rates.prefill_s(n_known, n_tokens) - rates.prefill_s(n_shared, n_tokens)
        return load_s < SMALL_LOAD_S or load_s <= spared_s

    def prefill_times(self, tokens: list[int], n_known: int) -> PrefillTimes:
        """What prefilling the first tokens of a prompt took when they were computed."""
        lane = self.exact_lane if n_known <= self.n_exact else None
        return (lane or self).restorer.prefill_times(tokens, n_known)

    def make_caches(self) -> kv.Caches:
        return kv.make_caches(self.model.module, **make_options(self.options))

    def _cold(self, fault: Fault | None = None) -> WarmPrefix:
        return WarmPrefix(self.make_caches(), 0, {}, 0, fault)

    def _restore_or_fail(
        self, tokens: list[int], policy: Policy, loading: Loading | None = None
    ) -> WarmPrefix:
        """A restore that fails counts as a miss."""
        try:
            return self._restore(tokens, policy, loading)
        except Exception:
            _log_failure()
            return self._cold("error")

    def _restore(self, tokens: list[int], policy: Policy, loading: Loading | None) -> WarmPrefix:
        n_live = self._n_least(tokens)
        if loading is not None and loading.in_background and self._is_stale(loading):
            loading.abandon()
            loading = None
        loading = loading or self.restorer.begin(tokens, policy, beyond=n_live)
        stored = EMPTY
        if loading is not None and loading.point.n_tokens > n_live:
            stored = self.restorer.finish(loading, beyond=n_live)
            if stored.caches is not None:
                n_kept = self.restorer.n_saved(tokens[: stored.n_tokens], policy)
                _, n_tokens, by_tier, fault, n_lossy = stored
                return WarmPrefix(stored.caches, n_tokens, by_tier, n_kept, fault, n_lossy)
        elif loading is not None:
            loading.abandon()  # meanwhile another request left a longer live cache
        beyond = max(0, self.n_exact - 1)
        taken = self.live.take(self.restorer.namespace, tokens, beyond, keep=not policy.writes)
        if taken is None:
            return self._cold(stored.fault)
        known, by_tier = tokens[: taken.n_tokens], {"live": taken.n_tokens}
        n_kept = self.restorer.n_saved(known, policy)
        fault, n_lossy = stored.fault, taken.n_lossy
        return WarmPrefix(taken.caches, taken.n_tokens, by_tier, n_kept, fault, n_lossy)

    def _is_stale(self, loading: Loading) -> bool:
        """Whether other requests have stored more of the same prompt meanwhile."""
        n_known = self.restorer.plan(loading.tokens).n_tokens
        return n_known >= loading.point.n_tokens + MIN_SHARED_TOKENS


def _log_failure() -> None:
    LOG.exception("a restore failed; the prompt is prefilled")


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
    return Lookup(len(tokens), {k: n for k, n in warm.items() if k and n}, round(first_ms, 1))


def _by_tier(plan: Plan, tiers: TierLookups) -> dict[str, int]:
    """Tokens by the tier they would come from; "" is none."""
    tier_of: dict[BlockKey, str] = {}
    keys = [read.key for read in plan.point.reads]
    for name, tier in reversed(tiers.named):
        tier_of |= dict.fromkeys(tier.have(keys), name)
    return plan.point.tokens_by_tier([tier_of.get(key, "") for key in keys])


@dataclass
class Lanes:
    """All lanes of an engine, each made at its first use. Never on the engine's thread: files are
    read for it."""

    model: Model
    store: Store
    live: Live
    layout: kv.Layout  # with the default KV options
    padding: VerdictsFile
    call: Call  # runs work on the engine's thread
    recent: RecentPrompts | None  # whose texts are drafts, too; None: sequences get no drafts
    _loaded: Identity | None = None
    _made: dict[tuple[KVOptions, str], Lane] = field(default_factory=dict)
    _gates: dict[KVOptions, DraftGate] = field(default_factory=dict)
    _making: threading.RLock = field(default_factory=threading.RLock)

    def get(self, options: KVOptions, tenant: str) -> Lane:
        key = (options, tenant)
        if (lane := self._made.get(key)) is not None:
            return lane
        with self._making:
            if key not in self._made:
                self._check_choices(tenant)
                self._made[key] = self._make(options, tenant)
            return self._made[key]

    def _check_choices(self, tenant: str) -> None:
        """Lanes are never freed, and anyone can name any size."""
        if sum(owner == tenant for _, owner in self._made) >= MAX_CHOICES:
            raise BadInput(
                f"There were {MAX_CHOICES} different kv options since the start; use one of those."
            )

    def of_agent(self, lane: Lane, agent: str | None) -> Lane:
        """The lane that a tenant's agent runs in; from any thread. Reads the agent's file."""
        origin = self.store.origin_of(agent) if agent else ""
        return lane.of_import(origin, self.store) if origin else lane

    @property
    def share_batches(self) -> bool | None:
        """Whether sequences of all lanes may share batches; None if it is not known yet."""
        known = {lane.sharing.allowed for lane in list(self._made.values())}
        return next((answer for answer in (False, True) if answer in known), None)

    def _make(self, options: KVOptions, tenant: str) -> Lane:
        start, is_exact = options.quantized_kv_start, options.kv_bits is None
        given = make_options(options)
        module, layout = self.model.module, self.layout
        if given:
            layout = self.call(lambda: kv.probe(module, kv.make_caches(module, **given))).result()
        identity = with_options(self._identity(), layout, given, salt_of(tenant, start))
        gate = self._gate(options, layout)
        return Lane(
            self.model,
            options,
            identity,
            self.store.make_restorer(identity, layout, revision_of(self.model.path)),
            self.live,
            RowSharing(
                *(self.model.module, given, identity, self.model.path, self.padding),
                own_ends=gate is not None and _takes_back(layout),
            ),
            gate=gate,
            exact_lane=None if is_exact or not start else self.get(exact_options(options), tenant),
            may_drift=may_drift(module, layout.dtypes),
        )

    def _identity(self) -> Identity:
        """Of the files that were loaded, with the default options; those that replace them later
        are another model's."""
        if self._loaded is None:
            model = self.model
            found = identity_of(model.module, model.path, self.store.settings, layout=self.layout)
            if model.stamps and file_stamps(model.path) != model.stamps:
                raise BadModelFile(
                    f"The files of {model.path} were replaced since it was loaded; load it again."
                )
            self._loaded = found
        return self._loaded

    def _gate(self, options: KVOptions, layout: kv.Layout) -> DraftGate | None:
        """One for all tenants: costs and hit rates are the model's."""
        can_replay = layout.kinds <= {kv.Kind.DELTA, kv.Kind.STATE}
        caches = kv.make_caches(self.model.module, **make_options(options))
        can_draft = (_takes_back(layout) or can_replay) and kv.can_batch(caches)
        if self.recent is None or not can_draft:
            return None
        return self._gates.setdefault(options, DraftGate(self.recent))


def _takes_back(layout: kv.Layout) -> bool:
    return layout.kinds <= {kv.Kind.DELTA, kv.Kind.WINDOW}


def exact_options(options: KVOptions) -> KVOptions:
    """The same without quantization."""
    return replace(options, kv_bits=None, quantized_kv_start=0)


def make_options(options: KVOptions) -> dict[str, Any]:
    """Only those that differ from the default, so that naming a default changes no identity."""
    default = asdict(KVOptions())
    given = {name: value for name, value in asdict(options).items() if value != default[name]}
    given.pop("quantized_kv_start", None)
    if options.kv_bits is None:
        given.pop("kv_group_size", None)
    return given
