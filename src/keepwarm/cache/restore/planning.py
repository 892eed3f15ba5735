"""What of a prompt is loaded, and from which tiers: what is stored against what computing costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from keepwarm.cache.restore.plan import NOTHING, KnownBlocks, Needs, Point, longest, n_matched
from keepwarm.cache.restore.rates import Rates
from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    BlockKey,
    BlockRef,
    Namespace,
    block_key,
    chain,
    root,
)
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.remote.question import Question
from keepwarm.store.remote.tier import ASK_S, MIN_READ_S, RemoteTier
from keepwarm.store.tier import BlockInfo
from keepwarm.store.tiers import Tiers

SMALL_LOAD_S = 0.02
MAX_ASK_SHARE = 0.1  # of the time to compute, for a question to a distant place
MIN_LOAD_SHARE = 0.1  # that a load may always take: on a busy machine no plan is exact


@dataclass(frozen=True)
class Plan:
    """What can be restored for a prompt, and the cost compared with prefilling it."""

    point: Point
    load_s: float
    rates: Rates
    is_shared: bool = False  # a part comes from a tier that machines share
    n_here: int = 0  # tokens that this machine has
    declined: tuple[RemoteTier, ...] = ()  # have more, too slowly

    @property
    def n_tokens(self) -> int:
        return self.point.n_tokens

    def is_worth_loading(self, beyond: int = 0) -> bool:
        """Whether loading is no slower than computing the tokens after the first `beyond`."""
        # Below this the measurement is noise, and computing wears the machine more.
        load_s = 0.0 if self.load_s < SMALL_LOAD_S else self.load_s
        return self.n_tokens > beyond and load_s <= self.rates.prefill_s(beyond, self.n_tokens)

    def deadline(self, clock: Callable[[], float] = time.monotonic) -> CallDeadline | None:
        """For what machines share: twice the planned time, or a tenth of computing it, but no
        longer than computing it takes. None if nothing is.
        """
        if not self.is_shared:
            return None
        computing_s = self.rates.prefill_s(self.n_here, self.n_tokens)
        limit_s = max(2 * self.load_s, MIN_LOAD_SHARE * computing_s)
        return CallDeadline(max(MIN_READ_S, min(limit_s, computing_s)), clock)

    def seconds(self, n_tokens: int) -> float:
        """Until so many tokens are loaded and computed."""
        return self.load_s + self.rates.prefill_s(self.n_tokens, n_tokens)


@dataclass(frozen=True)
class Planner:
    """Looks up prompts of one namespace in some tiers."""

    namespace: Namespace
    needs: Needs
    tiers: Tiers
    rates: Rates
    max_restored: int  # tokens of a prompt that are restored at most

    def plan(self, tokens: Sequence[int], without: Collection[BlockKey] = ()) -> Plan:
        """The cheapest of: load what is here, or what is in the first of the shared tiers too, or
        in all of them.

        A part of what a shared tier has is never the cheapest: loading costs the same for each
        block, and computing costs the more, the later it comes.
        """
        limit, reaches = self._limit(tokens), self.tiers.reaches()
        plans = [self._plan_in(tiers, tokens, limit, without) for tiers in reaches]
        best = min(plans, key=lambda plan: plan.seconds(len(tokens)) if plans[1:] else 0.0)
        slower = zip(reaches[1:], plans[1:], strict=True)
        more = (tiers.shared[-1] for tiers, plan in slower if plan.n_tokens > best.n_tokens)
        return replace(best, n_here=plans[0].n_tokens, declined=tuple(more))

    def _plan_in(
        self, tiers: Tiers, tokens: Sequence[int], limit: int, without: Collection[BlockKey]
    ) -> Plan:
        within = replace(self, tiers=tiers)
        point = within.longest(tokens, limit, without) if limit > 0 else NOTHING
        n_here, shared_s = point.n_bytes, 0.0
        for tier, n_bytes in tiers.shared_bytes(point.keys_by_part).items():
            n_here -= n_bytes
            shared_s += tier.speed.load_s(n_bytes)
        load_s = shared_s + max(0, n_here) / self.rates.load_bytes_per_s
        return Plan(point, load_s, self.rates, shared_s > 0)

    def ask(self, tokens: Sequence[int]) -> None:
        """Learn what shared tiers have of a prompt, if it is not here; on the caller's thread."""
        limit, here = self._limit(tokens), replace(self, tiers=self.tiers.local)
        shared = [tier for tier in self.tiers.shared if not tier.breaker.is_open]
        if limit <= 0 or not shared:
            return
        blocks = here.blocks_of(tokens)
        n_here = longest(self.needs, blocks, limit).n_tokens
        computing_s = self.rates.prefill_s(n_here, len(tokens))
        if n_here >= limit or computing_s < SMALL_LOAD_S:
            return
        question = Question(
            self.namespace,
            list(chain(self.namespace, tokens)),
            n_whole=len(blocks.refs),
            n_here=blocks.n_matched if self.needs.delta else 0,
            has_rows=self.needs.delta,
            n_window=-(-self.needs.window // BLOCK_TOKENS) + 1 if self.needs.window else 0,
            has_states=self.needs.state,
        )
        for tier in shared:
            seconds = ask_s(tier, question, computing_s)
            if seconds is None:
                tier.declined()
                continue
            deadline = CallDeadline(seconds)
            tier.ask(question, deadline)
            if deadline.is_over:  # no request waits for two
                return

    def _limit(self, tokens: Sequence[int]) -> int:
        """One token is always left, because a model must be fed one."""
        return min(len(tokens) - 1, self.max_restored)

    def longest(
        self, tokens: Sequence[int], limit: int, without: Collection[BlockKey] = ()
    ) -> Point:
        return longest(self.needs, self.blocks_of(tokens, without), limit)

    def blocks_of(self, tokens: Sequence[int], without: Collection[BlockKey] = ()) -> KnownBlocks:
        blocks = list(chain(self.namespace, tokens))
        refs = [ref for ref in blocks if ref.n_tokens == BLOCK_TOKENS]
        needs = self.needs
        known = self._have([ref.key for ref in refs], without)
        matched = n_matched(needs, refs, known)
        packed = b"".join(ref.tokens for ref in blocks)
        parent = refs[matched - 1].key if matched else root(self.namespace)
        rest = packed[4 * BLOCK_TOKENS * matched : 4 * BLOCK_TOKENS * (matched + 1)]
        children = self.tiers.children(parent, rest)
        states = self._states(refs, packed) if needs.state else {}
        partial = [child.key for child in children] + list(states.values())
        known |= self._have(partial, without)
        return KnownBlocks(refs, known, matched, children, states)

    def _states(self, refs: Sequence[BlockRef], packed: bytes) -> dict[int, BlockKey]:
        """Checkpoints inside the blocks of this prompt, by position."""
        starts = {root(self.namespace): 0}
        starts |= {ref.key: (ref.number + 1) * BLOCK_TOKENS for ref in refs}
        found = {}
        for state in self.tiers.states(list(starts)):
            start = starts[state.parent]
            tokens = packed[4 * start : 4 * (start + state.n_tokens)]
            if block_key(self.namespace, state.parent, tokens) == state.key:
                found[start + state.n_tokens] = state.key
        return found

    def _have(
        self, keys: Sequence[BlockKey], without: Collection[BlockKey]
    ) -> dict[BlockKey, BlockInfo]:
        return self.tiers.have([key for key in keys if key not in without])


def ask_s(tier: RemoteTier, question: Question, computing_s: float) -> float | None:
    """Seconds that a question may take; None if it is not worth asking.

    A distant place has as long as its calls usually take, and no longer than a tenth of computing.
    """
    if not tier.backend.is_distant:
        return ASK_S
    planned_s, most_s = tier.ask_s(question), MAX_ASK_SHARE * computing_s
    return None if planned_s > most_s else max(planned_s, min(ASK_S, most_s))
