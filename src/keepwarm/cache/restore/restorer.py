"""Plan, load, capture: restoring prompts from stored blocks, and saving them.

A restorer serves one namespace: one model with one set of KV options. It has no request state; that
is in the `Capture` that `open` returns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keepwarm.cache.restore.forgetting import Forgetting, RequestClaim
from keepwarm.cache.restore.loading import (
    EMPTY,
    Fault,
    Loading,
    Reader,
    RestoredPrefix,
    RestoreFailures,
)
from keepwarm.cache.restore.plan import NOTHING, KnownBlocks, Needs, Point, longest, n_matched
from keepwarm.cache.restore.rates import PrefillTimes, Rates
from keepwarm.cache.restore.records import records_of
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.concurrency import CallDeadline
from keepwarm.errors import StoreFailed
from keepwarm.kv.kinds import Caches, Kind
from keepwarm.kv.layout import LayerSpec, Layout
from keepwarm.kv.slices import Block, cut_blocks, offload_blocks
from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    BlockKey,
    BlockRef,
    Namespace,
    block_key,
    chain,
    pack,
    root,
)
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.recent import SIMILAR_TOKENS, StoredPrefix
from keepwarm.records.at_rest import Q4
from keepwarm.records.record import Part, PrefillTime
from keepwarm.store.eviction import LAST_KEPT, NEAR, Checkpoint, find_surplus
from keepwarm.store.tier import BlockInfo, Child, RemoteLookup, SharedTier
from keepwarm.store.tiers import DISK, SHARED, DiskAnswers, TierLookups, Tiers

if TYPE_CHECKING:
    from keepwarm.agents.agent_store import AgentStore
    from keepwarm.remote.uploader import Uploader  # only where a remote is set

# Where a prompt is to be restorable: there its slices end, and states and window rows are kept.
#
#     cuts      ends of messages, where another prompt may part from this one
#     sparse    at growing distances: a raw prompt has no messages, and a message may be long
#     learned   where this prompt parts from a stored one that could not be restored there
#     last      before the last token, for the same prompt again
#
# Plain attention is restorable at every token and has no points.

SPARSE_SHARE = 0.25  # of the bytes that a prompt takes anyway, for its sparse points
NO_KEY = BlockKey(b"")


@dataclass(frozen=True)
class PointSizes:
    """What restore points take, beside the rows that are kept of every token."""

    layout: Layout

    def rows(self, n_tokens: int) -> int:
        """Bytes of the rows of a prompt, of which every token adds some."""
        return sum(_bytes(leaf, n_tokens) for leaf in self.layout.leaves() if _grows(leaf))

    def point(self, n_tokens: int) -> int:
        """Bytes of the states and window rows at one point."""
        kept = (leaf for leaf in self.layout.leaves() if leaf.kind is not Kind.DELTA)
        return sum(_bytes(leaf, n_tokens) for leaf in kept)


def _grows(leaf: LayerSpec) -> bool:
    return leaf.kind is Kind.DELTA or leaf.has_variable_tensors


def _bytes(leaf: LayerSpec, n_tokens: int) -> int:
    limit = leaf.window or leaf.scalars.get("max_size")
    n_rows = min(n_tokens, limit + BLOCK_TOKENS) if limit else n_tokens
    return sum(spec.n_bytes(n_rows) for spec in leaf.tensors.values())


class Divergence(NamedTuple):
    """Where a prompt diverges from stored ones."""

    n_shared: int  # tokens that one of them has too
    n_known: int  # of them can be restored
    n_states: int = 0  # kept so far before this place


def divergence_point(layout: Layout, divergence: Divergence, cuts: Iterable[int] = ()) -> int:
    """The place to keep for the next prompt that parts there; 0 where that is not worth it.

    That is the end of a message, if one is near: what follows parts anywhere in its first words.
    """
    nearest = divergence.n_known + NEAR
    if divergence.n_shared < nearest or not _fits(PointSizes(layout), divergence):
        return 0
    block = divergence.n_shared // BLOCK_TOKENS * BLOCK_TOKENS  # a fork is seen within its block
    near = range(max(nearest, block, divergence.n_shared - NEAR + 1), divergence.n_shared)
    return max((cut for cut in cuts if cut in near), default=divergence.n_shared)


def _fits(sizes: PointSizes, divergence: Divergence) -> bool:
    """Whether one state more takes no more bytes, with those before it, than the rows up to there,
    or than the rows that it spares. Three always fit, as in `find_surplus`; windows do too.
    """
    rows = sizes.rows(divergence.n_shared)
    if Kind.STATE not in sizes.layout.kinds or not rows or divergence.n_states < LAST_KEPT:
        return True
    state, spared = sizes.point(divergence.n_shared), rows - sizes.rows(divergence.n_known)
    return state <= spared or (divergence.n_states + 1) * state <= rows


def restore_points(
    layout: Layout, n_tokens: int, cuts: Iterable[int] = (), learned: int = 0
) -> frozenset[int]:
    """The points of a prompt. No state is taken that the store would delete at once."""
    sizes, last = PointSizes(layout), n_tokens - 1
    if not sizes.point(n_tokens):
        return frozenset()
    cuts = [cut for cut in {*cuts, learned} if 0 < cut < last]
    wanted = {*cuts, *sparse_points(sizes, n_tokens, cuts), last}
    if Kind.STATE not in layout.kinds:
        return frozenset(wanted)
    # The end of the answer will be one more.
    states = [_state(sizes, n, is_fork=n == learned) for n in sorted({*wanted, n_tokens})]
    surplus = {state.at for state in find_surplus(states, sizes.rows(n_tokens))}
    return frozenset(wanted - surplus)


def _state(sizes: PointSizes, n_tokens: int, *, is_fork: bool) -> Checkpoint:
    return Checkpoint(n_tokens, NO_KEY, NO_KEY, sizes.point(n_tokens), False, is_fork)


def sparse_points(sizes: PointSizes, n_tokens: int, others: Sequence[int] = ()) -> list[int]:
    """Points in the first three quarters of a prompt, each half as far again as the one before.

    The same in every prompt, so that prompts share them, and on the grid of long slices. Within a
    budget of bytes, smallest gaps first; none where another point is near.
    """
    near = takewhile(lambda n: 4 * n <= 3 * n_tokens, _growing())
    points = [n for n in near if not any(3 * n < 4 * other <= 4 * n for other in others)]
    budget = SPARSE_SHARE * sizes.rows(n_tokens)
    while budget and sum(map(sizes.point, points)) > budget:
        gaps = [after - before for before, after in pairwise([0, *points])]
        del points[gaps.index(min(gaps))]
    return points


def _growing() -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 … blocks."""
    yield BLOCK_TOKENS
    for power in count(1):
        yield BLOCK_TOKENS << power
        yield 3 * BLOCK_TOKENS << (power - 1)


SMALL_LOAD_S = 0.02
MIN_READ_S = 0.05  # that a load from other machines may always take
MIN_LOAD_SHARE = 0.1  # that a load may always take: on a busy machine no plan is exact
WORTH_SAVING = 32  # tokens that a place spares after a restart: less is not worth its records


@dataclass(frozen=True)
class Plan:
    """What can be restored for a prompt, and the cost compared with prefilling it."""

    point: Point
    load_s: float
    rates: Rates
    is_shared: bool = False  # a part comes from a tier that machines share
    n_here: int = 0  # tokens that this machine has
    declined: tuple[SharedTier, ...] = ()  # have more, too slowly

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


class UnverifiedBlocks:
    """In which namespaces blocks may be a stranger's: since one of them came from a shared tier
    that anybody can write to, for good.
    """

    def __init__(self, on_disk: AgentStore | None) -> None:
        self._on_disk = on_disk
        self._names: set[Namespace] = set()

    def __contains__(self, name: Namespace) -> bool:
        return name in self._names

    def note(self, name: Namespace) -> None:
        """Before the block is used."""
        if name not in self._names and self._on_disk is not None:
            self._on_disk.note_unverified(name)
        self._names.add(name)

    def learn(self, name: Namespace) -> None:
        """What any process has noted; asks the disk."""
        if name in self._names or self._on_disk is None:
            return
        with suppress(StoreFailed):  # then nothing on disk is found either
            if self._on_disk.is_unverified(name):
                self._names.add(name)


class MixedBlocks:
    """Whether blocks may be of machines that compute other numbers: since the setting of any
    process allowed them, for good.
    """

    def __init__(self, marker: Path | None = None, *, are_here: bool = False) -> None:
        self._marker = marker
        self.are_here = are_here

    def learn(self) -> bool:
        """What any process has noted; asks the disk."""
        if not self.are_here and self._marker is not None:
            with suppress(OSError):  # then nothing on disk is found either
                self.are_here = self._marker.exists()
        return self.are_here


@dataclass
class Restorer:
    namespace: Namespace
    layout: Layout
    tiers: Tiers
    reader: Reader
    writer: MemorySaver
    rates: Rates = field(default_factory=Rates)
    failures: RestoreFailures = field(default_factory=RestoreFailures)
    forgetting: Forgetting | None = None  # without a disk nobody else deletes
    uploader: Uploader | None = None  # without shared tiers nobody shares
    mixed: MixedBlocks = field(default_factory=MixedBlocks)
    unverified: UnverifiedBlocks | None = None  # without shared tiers all are known
    at_rest: str | None = None  # the codec of rows on disk and in shared tiers; None: exact
    machine: str = ""  # the kind of this one: what was computed by another took another time
    answers: DiskAnswers | None = None  # about one prompt, for the engine's thread

    def __post_init__(self) -> None:
        self.needs = Needs.of(self.layout)

    @property
    def is_unverified(self) -> bool:
        """Whether blocks may be a stranger's."""
        return self.unverified is not None and self.namespace in self.unverified

    def in_namespace(self, name: Namespace) -> Restorer:
        """The same model for blocks of another tenant, or of one import."""
        return replace(self, namespace=name)

    def catch_up(self) -> int:
        """Forget what other processes have deleted; the generation that this leads to."""
        return 0 if self.forgetting is None else self.forgetting.catch_up()

    def look_up(self, tokens: Sequence[int], policy: Policy) -> Restorer:
        """The same for one prompt: the disk is asked now, on the caller's thread, and not again.

        NOTE: everything that the engine's thread asks about a prompt is asked here once, so that
        the answers to it are known.
        """
        disk = next((tier for name, tier in self.tiers.named if name == DISK), None)
        if disk is None or not (policy.reads or policy.writes):
            return self
        self.catch_up()
        answers = DiskAnswers(disk, self.writer.written)
        made = replace(self, answers=answers)
        made.needs = self.needs
        n_tokens = made.plan(tokens).n_tokens
        made.n_saved(tokens, policy)
        if self.needs.points:
            made.survives(tokens[:n_tokens])
        answers.close()
        self.mixed.learn()  # behind the look-up: it is noted before they are there
        if self.unverified is not None:
            self.unverified.learn(self.namespace)
        return made

    @property
    def lookups(self) -> TierLookups:
        """What plans are made from."""
        return self.tiers if self.answers is None else self.tiers.with_answers(self.answers)

    def plan(
        self, tokens: Sequence[int], without: Collection[BlockKey] = (), only_here: bool = False
    ) -> Plan:
        """The cheapest of: load what is here, or what is in the first of the shared tiers too, or
        in all of them.

        A part of what a shared tier has is never the cheapest: loading costs the same for each
        block, and computing costs the more, the later it comes.
        """
        if self.answers is None:
            self.catch_up()
        lookups = self.lookups
        reaches = [TierLookups(lookups.here)] if only_here else lookups.reaches()
        plans = [self._plan_in(tiers, tokens, without) for tiers in reaches]
        best = min(plans, key=lambda plan: plan.seconds(len(tokens)) if plans[1:] else 0.0)
        slower = zip(reaches[1:], plans[1:], strict=True)
        more = (tiers.shared[-1] for tiers, plan in slower if plan.n_tokens > best.n_tokens)
        return replace(best, n_here=plans[0].n_tokens, declined=tuple(more))

    def _plan_in(
        self, tiers: TierLookups, tokens: Sequence[int], without: Collection[BlockKey]
    ) -> Plan:
        limit = len(tokens) - 1  # a model must be fed one token
        point = self._longest(tiers, tokens, limit, without) if limit > 0 else NOTHING
        if point.n_tokens < SIMILAR_TOKENS:  # a read for what every prompt begins with
            point = NOTHING
        n_here, shared_s = point.n_bytes, 0.0
        for tier, n_bytes in tiers.shared_bytes(point.keys_by_part).items():
            n_here -= n_bytes
            shared_s += tier.load_s(n_bytes)
        load_s = shared_s + max(0, n_here) / self.rates.load_bytes_per_s
        return Plan(point, load_s, self.rates, shared_s > 0)

    def _longest(
        self,
        tiers: TierLookups,
        tokens: Sequence[int],
        limit: int,
        without: Collection[BlockKey] = (),
    ) -> Point:
        blocks = self.blocks_of(tokens, tiers, without)
        point = longest(self.needs, blocks, limit)
        if not self.needs.whole_blocks or not point.n_tokens < limit < blocks.n_stored:
            return point
        # The whole block lost the first rows of a window that ends inside it; one beside it may end
        # there, as after a prompt of whole blocks without its last token.
        beside = longest(self.needs, self.blocks_of(tokens[:limit], tiers, without), limit)
        return max(point, beside, key=lambda found: found.n_tokens)

    def blocks_of(
        self, tokens: Sequence[int], tiers: TierLookups, without: Collection[BlockKey] = ()
    ) -> KnownBlocks:
        """What these tiers have of a prompt."""
        blocks = list(chain(self.namespace, tokens))
        refs = [ref for ref in blocks if ref.n_tokens == BLOCK_TOKENS]
        known = tiers.have([ref.key for ref in refs if ref.key not in without])
        matched = n_matched(self.needs, refs, known)
        packed = b"".join(ref.tokens for ref in blocks)
        parent = refs[matched - 1].key if matched else root(self.namespace)
        rest = packed[4 * BLOCK_TOKENS * matched : 4 * BLOCK_TOKENS * (matched + 1)]
        children = tiers.children(parent, rest)
        states = self._states(tiers, refs, packed) if self.needs.state else {}
        inside = [*(child.key for child in children), *states.values()]
        known |= tiers.have([key for key in inside if key not in without])
        return KnownBlocks(refs, known, matched, children, states)

    def _states(
        self, tiers: TierLookups, refs: Sequence[BlockRef], packed: bytes
    ) -> dict[int, BlockKey]:
        """Checkpoints inside the blocks of this prompt, by position."""
        starts = {root(self.namespace): 0}
        starts |= {ref.key: (ref.number + 1) * BLOCK_TOKENS for ref in refs}
        found = {}
        for state in tiers.states(list(starts)):
            start = starts[state.parent]
            tokens = packed[4 * start : 4 * (start + state.n_tokens)]
            if block_key(self.namespace, state.parent, tokens) == state.key:
                found[start + state.n_tokens] = state.key
        return found

    def ask(self, tokens: Sequence[int], policy: Policy) -> None:
        """Learn what shared tiers have of a prompt, if it is not here; on the caller's thread,
        before it is planned on the engine's.
        """
        limit = len(tokens) - 1  # a model must be fed one token
        shared = [tier for tier in self.tiers.shared if not tier.is_open]
        if limit <= 0 or not shared or not policy.reads:
            return
        if self.needs.whole_blocks:  # then a block must end at the limit
            tokens = tokens[:limit]
        blocks = self.blocks_of(tokens, TierLookups(self.lookups.here))
        n_here = longest(self.needs, blocks, limit).n_tokens
        computing_s = self.rates.prefill_s(n_here, len(tokens))
        if n_here >= limit or computing_s < SMALL_LOAD_S:
            return
        lookup = RemoteLookup(
            self.namespace,
            list(chain(self.namespace, tokens)),
            n_whole=len(blocks.refs),
            n_here=blocks.n_matched if self.needs.delta else 0,
            has_rows=self.needs.delta,
            n_window=-(-self.needs.window // BLOCK_TOKENS) + 1 if self.needs.window else 0,
            has_states=self.needs.state,
        )
        for tier in shared:
            if not tier.ask(lookup, computing_s):
                return

    def stored_prefix(self, tokens: Sequence[int]) -> StoredPrefix:
        """What is stored of a prompt, whether or not it can be restored there."""
        blocks = self.blocks_of(tokens, self.lookups)
        n_tokens = max([blocks.n_shared, *blocks.states])
        goes_on = blocks.goes_on and n_tokens == blocks.n_shared < len(tokens)
        return StoredPrefix(n_tokens, goes_on, self.needs.points, self.needs.delta)

    def prefill_times(self, tokens: Sequence[int], n_known: int) -> PrefillTimes:
        """What prefilling the first tokens of a prompt took, by what is stored of them."""
        times = PrefillTimes()
        if not n_known:
            return times
        blocks = self.blocks_of(tokens, self.lookups)
        whole = [Child(ref.key, BLOCK_TOKENS) for ref in blocks.refs[: blocks.n_matched]]
        for number, (key, n_common) in enumerate([*whole, *blocks.children[:1]]):
            start = number * BLOCK_TOKENS
            if start < n_known:
                n_tokens = min(n_common, n_known - start)
                times.add(start + n_tokens, self._prefill_s(blocks.known.get(key), n_tokens))
        times.add_unknown(n_known)
        return times

    def _prefill_s(self, block: BlockInfo | None, n_tokens: int) -> float | None:
        """What the first tokens of a block took, if a machine like this one has computed it."""
        prefill = None if block is None else block.prefill
        if block is None or prefill is None or prefill.machine != self.machine:
            return None
        return prefill.seconds * n_tokens / block.n_tokens

    def restore(
        self, tokens: Sequence[int], policy: Policy = Policy.READ_WRITE, beyond: int = 0
    ) -> RestoredPrefix:
        """Plan, load and wait, on the thread that owns MLX.

        Loads only if that restores more than `beyond` tokens, which the caller has already.
        """
        loading = self.begin(tokens, policy, beyond)
        restored = EMPTY if loading is None else self.finish(loading, beyond)
        self.failures.add(restored.fault)
        return restored

    def begin(
        self,
        tokens: Sequence[int],
        policy: Policy,
        beyond: int = 0,
        without: Collection[BlockKey] = (),
        *,
        others_wait: bool = False,
        only_here: bool = False,
    ) -> Loading | None:
        """Start loading the stored blocks of a prompt; None if that is not worth it.

        Where `others_wait`, a long load runs in background; `only_here`: from this machine alone.
        """
        if not policy.reads:
            return None
        plan = self.plan(tokens, without, only_here)
        for tier in plan.declined:
            tier.declined()
        if not plan.is_worth_loading(beyond):
            if plan.n_tokens > beyond:
                self.rates.declined_load()
            return None
        is_long = others_wait and (plan.is_shared or plan.load_s >= SMALL_LOAD_S)
        return Loading(
            tokens,
            plan.point,
            self.layout,
            self.reader,
            self.writer,
            in_background=is_long,
            deadline=plan.deadline(),
            at_rest=self.at_rest,
        )

    def finish(self, loading: Loading, beyond: int = 0) -> RestoredPrefix:
        """Wait for a load. A bad record is a miss: a new plan is made without it. A load that falls
        behind its plan is left: what has arrived is here by then. The caller counts the fault, once
        for a request.
        """
        missed: set[BlockKey] = set()
        fault: Fault | None = None
        current: Loading | None = loading
        while current is not None:
            loaded = current.finish()
            if loaded.restored is not None:
                is_local = SHARED not in loaded.restored.tokens_by_tier
                if is_local and not current.in_background:  # else other work slowed it down
                    self.rates.saw_load(current.point.n_bytes, current.seconds)
                self.touch(loading.tokens[: current.point.n_tokens], current.keys)
                return loaded.restored._replace(fault=fault)
            fault = fault or loaded.fault or "error"
            missed |= loaded.missed
            current = self.begin(
                loading.tokens, Policy.READ_ONLY, beyond, missed, only_here=current.is_late
            )
        return EMPTY._replace(fault=fault)

    def touch(self, tokens: Sequence[int], keys: Collection[BlockKey] = ()) -> None:
        """Note a use of these tokens: of their last block, and of all that it follows.

        `keys` are other blocks that were read for them.
        """
        refs = list(chain(self.namespace, tokens))
        self.tiers.touch(list(dict.fromkeys([*(ref.key for ref in refs), *keys])))
        if self.uploader is not None and refs:
            self.uploader.offer(self.namespace, refs, keys)

    @property
    def shares(self) -> bool:
        """Whether anything is written to tiers that machines share."""
        return self.uploader is not None

    def share(self, tokens: Sequence[int]) -> Future[None] | None:
        """Share a prompt with other machines at its first use; done when it was tried."""
        refs = list(chain(self.namespace, tokens)) if self.uploader is not None else []
        return self.uploader.offer(self.namespace, refs) if self.uploader and refs else None

    def n_saved(self, tokens: Sequence[int], policy: Policy) -> int:
        """How many restored tokens a request need not save again.

        Blocks that are only in memory are saved again if the policy wants them on disk: blocks
        after them would be useless there.
        """
        if not self.writer.accepts_resaves(policy):
            return len(tokens)
        n_kept = self.n_kept(tokens)
        return len(tokens) if n_kept > len(tokens) - BLOCK_TOKENS else n_kept

    def n_kept(self, tokens: Sequence[int]) -> int:
        """Leading tokens whose blocks are saved, or queued to be."""
        refs = [ref for ref in chain(self.namespace, tokens) if ref.n_tokens == BLOCK_TOKENS]
        return n_matched(self.needs, refs, self.kept([ref.key for ref in refs])) * BLOCK_TOKENS

    def kept(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        """Which of these blocks are saved, or queued to be."""
        return self.writer.kept(keys, self.answers)

    def is_on_disk(self, tokens: Sequence[int]) -> bool:
        """Whether a process that starts now would find all of these tokens on disk."""
        return self._n_in(self._on_disk, tokens, len(tokens)) == len(tokens)

    def n_on_disk(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt a process that starts now would restore from disk."""
        return self._n_in(self._on_disk, tokens, len(tokens) - 1)

    def n_shared(self, tokens: Sequence[int]) -> int | None:
        """How many tokens of a prompt another machine would restore, as far as is known here."""
        shared = Tiers([], self.tiers.shared)
        return self._n_in(shared, tokens, len(tokens) - 1) if shared.named else None

    @property
    def _on_disk(self) -> Tiers:
        return Tiers([(name, tier) for name, tier in self.tiers.named if name == DISK])

    def _n_in(self, tiers: TierLookups, tokens: Sequence[int], limit: int) -> int:
        return self._longest(tiers, tokens, limit).n_tokens if limit > 0 else 0

    def survives(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, which can be restored now, could be after a restart too, or nearly
        all of them. True where there is no disk.

        A window narrower than a block must be in a block that ends there: that of a longer one is
        found only until enough others part from it.
        """
        saved = self.lookups.here[1:]  # without memory
        if not saved or len(tokens) < WORTH_SAVING:
            return True
        point = self._longest(TierLookups(saved), tokens, len(tokens))
        if point.n_tokens <= len(tokens) - WORTH_SAVING:
            return False
        last = list(chain(self.namespace, tokens[: point.n_tokens]))[-1]
        return not self.needs.whole_blocks or last.key in {read.key for read in point.reads}

    def open(
        self,
        tokens: Sequence[int],
        policy: Policy = Policy.READ_WRITE,
        agent: str = "",
        since: int | None = None,
        times: PrefillTimes | None = None,
    ) -> Capture:
        """Start saving what a request computes, for an agent if it is one's.

        The list of tokens is not copied, so the caller may append to it. `since` is what `catch_up`
        returned before the request knew of anything stored: what is deleted later is not saved.
        `times` are kept with the blocks; None: nobody knows them.
        """
        if policy.writes and self.reader.slabs is not None:
            self.reader.slabs.will_take()
        since = self.catch_up() if since is None else since
        return Capture(self, tokens, policy, agent, since, times=times)

    def points(self, tokens: Sequence[int], cuts: Iterable[int], n_known: int) -> frozenset[int]:
        """Where a prompt, of which so many tokens are restored, is to be restorable later."""
        if not self.needs.points:
            return frozenset()
        blocks, cuts = self.blocks_of(tokens, self.lookups), list(cuts)
        n_states = sum(n <= blocks.n_shared for n in blocks.states)
        diverges = Divergence(blocks.n_shared, n_known, n_states)
        learned = divergence_point(self.layout, diverges, cuts)
        return restore_points(self.layout, len(tokens), cuts, learned)


class Capture:
    """Saves the blocks of one request as they are computed.

    `capture` may be called after any slice and saves the blocks that are whole by then. Window rows
    are written to disk only within a window before a position that may be restored; those of other
    blocks stay in memory.
    """

    def __init__(
        self,
        restorer: Restorer,
        tokens: Sequence[int],
        policy: Policy,
        agent: str,
        since: int,
        *,
        times: PrefillTimes | None,
    ) -> None:
        self._restorer, self._tokens, self._policy = restorer, tokens, policy
        self._times = times
        to_disk, known = policy.to_disk, (restorer.forgetting, agent, restorer.namespace)
        self.claim = RequestClaim(*known, tokens, since=since, to_disk=to_disk)
        self._n_start = 0
        self._n_blocks = 0  # whole blocks saved so far
        self._parent = root(restorer.namespace)
        self._windowed: set[int] = set()  # blocks whose window rows go to disk
        self._behind: dict[int, int] = {}  # those saved without them, and the position to restore
        self._state_at = -NEAR  # the latest state that goes to disk
        self._is_end_exact = True  # whether the last whole block was saved as it is
        self._latest: deque[BlockRef] = deque(maxlen=restorer.needs.window // BLOCK_TOKENS + 2)

    def start_at(self, n_tokens: int) -> None:
        """Skip the first tokens, which were restored and need not be saved again."""
        for ref in self._refs(n_tokens // BLOCK_TOKENS * BLOCK_TOKENS):
            self._passed(ref)
        self._n_start = n_tokens
        if n_tokens % BLOCK_TOKENS:  # a prefix that was restored once is likely to be again
            self._windowed.add(self._n_blocks)

    def expect(self, positions: Iterable[int]) -> None:
        """Prepare for restores at these positions, such as the ends of messages."""
        for position in sorted(n for n in positions if n >= self._n_start):
            for number in self._restorer.needs.window_blocks(position):
                if number < self._n_blocks and number not in self._windowed:
                    self._behind[number] = position
                self._windowed.add(number)

    def capture(
        self, caches: Caches, upto: int, checkpoint: bool = False, temporary: bool = False
    ) -> None:
        """Save what the caches, which represent `upto` tokens, hold beyond what is saved already.

        A checkpoint saves the open block too, so that exactly `upto` can be restored; a temporary
        one, soon replaced by a longer block, is not written to disk.
        """
        if not self._policy.writes:
            return
        is_near = checkpoint and self._is_near(upto)
        if checkpoint and not temporary and not is_near:
            self.expect([upto])
            self._state_at = upto
        behind, n_whole = self._missing_windows(), upto // BLOCK_TOKENS
        cooled = self._cooled() if n_whole > self._n_blocks else []
        first = min([self._n_blocks, *(ref.number for ref in [*behind, *cooled])])
        if checkpoint and self._is_stateless_end(upto):
            first = min(first, self._n_blocks - 1)
        if not checkpoint and first == n_whole:
            return
        n_blocks = -(-upto // BLOCK_TOKENS) if checkpoint else n_whole
        blocks = self._cut(caches, upto, range(first, n_blocks), checkpoint)
        passed = list(islice(blocks, self._n_blocks - first))
        self._keep_cooled(cooled, passed)
        self._keep_behind(behind, passed, checkpoint, is_near)
        for ref in self._refs(upto if checkpoint else n_whole * BLOCK_TOKENS):
            block = next(blocks)
            is_whole = ref.n_tokens == BLOCK_TOKENS
            is_kept = is_whole or not (temporary or is_near)
            policy = self._policy if is_kept else Policy.EPHEMERAL
            self._keep(ref, block if checkpoint else replace(block, state={}), policy, is_near)
            if is_whole:
                self._passed(ref)
                self._is_end_exact = self._codec(ref) is None

    def keep_restored(self, caches: Caches, n_tokens: int) -> None:
        """Have the window before a place that was restored from memory on disk too: the next prompt
        that parts there may come after a restart. The first slice drops rows that this needs.
        """
        needs = self._restorer.needs
        if (
            needs.window
            and not needs.state
            and not self._restorer.survives(self._tokens[:n_tokens])
        ):
            self.capture(caches, n_tokens, checkpoint=True)

    def finish(self, all_tokens: Sequence[int], caches: Caches) -> None:
        """Save everything, including generated tokens and the open block."""
        self._tokens = self.claim.tokens = all_tokens
        self.expect([len(all_tokens) - 1])  # the same prompt again restores all but its last token
        self.capture(caches, len(self._tokens), checkpoint=True)

    def _cut(self, caches: Caches, upto: int, numbers: range, with_state: bool) -> Iterator[Block]:
        if (slabs := self._restorer.reader.slabs) is None:
            return cut_blocks(caches, upto, first_block=numbers.start)
        return offload_blocks(slabs, caches, upto, numbers, with_state)

    def _refs(self, upto: int) -> Iterator[BlockRef]:
        """The blocks from the first unsaved one up to a position."""
        parent = self._parent
        for number in range(self._n_blocks, -(-upto // BLOCK_TOKENS)):
            start = number * BLOCK_TOKENS
            tokens = pack(self._tokens[start : min(start + BLOCK_TOKENS, upto)])
            ref = BlockRef(
                block_key(self._restorer.namespace, parent, tokens), parent, number, tokens
            )
            yield ref
            parent = ref.key

    def _passed(self, ref: BlockRef) -> None:
        self._n_blocks, self._parent = ref.number + 1, ref.key
        self._latest.append(ref)

    def _missing_windows(self) -> list[BlockRef]:
        """Saved blocks whose window rows should be on disk now and are not. Each is listed once."""
        behind, self._behind = self._behind, {}
        if not behind:
            return []
        refs = [ref for ref in self._latest if ref.number in behind]
        kept = self._restorer.kept([ref.key for ref in refs])

        def has_window(ref: BlockRef) -> bool:
            position = behind[ref.number]
            return self._restorer.needs.has_window(kept.get(ref.key), ref.number, position)

        return [ref for ref in refs if not has_window(ref)]

    def _is_near(self, upto: int) -> bool:
        """Whether this is so near behind a state on disk that another one, as large as thousands of
        tokens, is not worth writing: few are computed again, and only after a restart.
        """
        is_last = upto == len(self._tokens)
        if is_last or not self._restorer.needs.state or self._policy is Policy.DURABLE:
            return False
        if upto - self._state_at < NEAR:
            return True
        start = self._n_start
        return upto - start < NEAR and self._restorer.survives(self._tokens[:start])

    def _is_stateless_end(self, upto: int) -> bool:
        """Whether this is the end of a block that was saved without the state there."""
        at_end = bool(self._latest) and upto == self._n_blocks * BLOCK_TOKENS
        return at_end and self._restorer.needs.state and upto > self._n_start

    def _keep_behind(
        self, refs: Sequence[BlockRef], blocks: Iterable[Block], checkpoint: bool, is_near: bool
    ) -> None:
        """Save the rows of the last window, which the caches still have, and the state if any."""
        wanted = {ref.number for ref in refs}
        passed = {ref.number: ref for ref in self._latest}
        for block in blocks:
            if block.index in wanted and block.window:
                window = replace(block, delta={}, state={})
                self._keep(passed[block.index], window, self._policy)
            if block.state and checkpoint:
                state = replace(block, delta={}, window={}, first_rows={})
                self._keep(passed[block.index], state, self._policy, is_near)

    def _codec(self, ref: BlockRef) -> str | None:
        """How the rows of a block are kept. In 4 bits only between the first and the last whole
        block: what is attended to most stays exact.
        """
        codec, n_whole = self._restorer.at_rest, len(self._tokens) // BLOCK_TOKENS
        return None if codec == Q4 and not 0 < ref.number < n_whole - 1 else codec

    def _cooled(self) -> list[BlockRef]:
        """The last whole block, if it was saved exactly, and another one follows it now."""
        is_exact = self._is_end_exact and self._restorer.at_rest == Q4
        last = list(self._latest)[-1:] if is_exact and self._restorer.needs.delta else []
        return [ref for ref in last if self._codec(ref) is not None]

    def _keep_cooled(self, refs: Sequence[BlockRef], blocks: Sequence[Block]) -> None:
        """Save rows once more, to be rounded; where they are already, nothing changes."""
        for ref in refs:
            rows = next(block for block in blocks if block.index == ref.number)
            rows = replace(rows, window={}, first_rows={}, state={})
            self._keep(ref, rows, self._policy)

    def _keep(self, ref: BlockRef, block: Block, policy: Policy, is_near: bool = False) -> None:
        # Without delta layers, window rows are all that a block has.
        all_parts = ref.number in self._windowed or not self._restorer.needs.delta
        share = self.claim.share(ref)
        name = self._restorer.namespace
        for record in records_of(name, ref, block, self._prefill(ref), self._codec(ref)):
            skipped = {Part.WINDOW: not all_parts, Part.STATE: is_near}
            memory_only = skipped.get(record.header.part, False)
            with self.claim.unless_forgotten() as is_wanted:
                if is_wanted:
                    self._restorer.writer.put(record, policy, memory_only, share)

    def _prefill(self, ref: BlockRef) -> PrefillTime | None:
        """What prefilling a block took."""
        start = ref.number * BLOCK_TOKENS
        seconds = self._times.seconds(start, start + ref.n_tokens) if self._times else None
        return None if seconds is None else PrefillTime(seconds, self._restorer.machine)
