"""Has this process forget what any process on the store deletes on purpose.

Live caches, and blocks in memory or in the writer's queue, would otherwise serve prompts again and
be written again after they were deleted from disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, TypeAlias
from weakref import WeakMethod

from keepwarm.agents.block_refs import find_extensions
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, Namespace, chain_packed, pack
from keepwarm.records.record import Record
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.maintenance import subtrees
from keepwarm.store.index.forgotten import Forgotten
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import NamedBlock, agent_owner, default_on_io_error

MAX_UNRECORDED = 4096  # agents, and blocks of each, that only memory has
MAX_LOGGED = 4096  # deletions that a running request is compared with
MAX_LOGGED_BLOCKS = 1 << 18  # of these


class KeptTokens(NamedTuple):
    """Tokens that this process keeps something of, and for which agent, if any."""

    agent: str
    namespace: Namespace
    packed: bytes


class Deletions:
    """What is to be forgotten; where `found` is None, everything."""

    def __init__(self, found: Sequence[Forgotten] | None, owner_of: Callable[[str], str]) -> None:
        self.found = found
        self._owner_of = owner_of

    @classmethod
    def all_of(cls, many: Sequence[Deletions]) -> Deletions:
        """One of several, so that tokens are hashed once to compare with them."""
        found = [each.found for each in many]
        owner_of = many[0]._owner_of if many else str
        every = None if None in found else [one for part in found for one in part or ()]
        return cls(every, owner_of)

    def hold(self, kept: KeptTokens) -> bool:
        """Whether tokens are of an agent that was deleted, or have blocks that were."""
        return self.first_in(kept) is not None

    def include(self, agent: str) -> bool:
        """Whether an agent was deleted."""
        if self.found is None:
            return True
        owner = self._owner_of(agent_owner(agent))
        return any(each.owner == owner for each in self.found)

    def first_in(self, kept: KeptTokens) -> int | None:
        """The number of the first block of these tokens that is to be forgotten."""
        if self.found is None or self.include(kept.agent):
            return 0
        refs = list(chain_packed(kept.namespace, kept.packed))
        firsts = (each.first_in(kept.namespace, refs) for each in self.found)
        return min((first for first in firsts if first is not None), default=None)

    def delete_from(self, tier: MemoryTier) -> None:
        """Delete the blocks, all that continues them, and their shorter copies."""
        if self.found is None:
            tier.delete_all([block.key for block in tier.walk()])
            return
        blocks = [block for each in self.found for block in each.blocks]
        found = list(find_extensions(tier, blocks))
        keys = [*(block.key for block in blocks), *(one.header.key for one in found)]
        held = tier.have(keys).keys() | {one.block.key for one in found}
        keys += _perhaps_shorter(tier, [block for block in blocks if block.key not in held])
        tier.delete_all(list(subtrees(tier, keys)))


def _perhaps_shorter(tier: MemoryTier, blocks: Iterable[NamedBlock]) -> Iterator[BlockKey]:
    """What may be shorter copies of blocks that the tier does not have to compare."""
    for block in blocks:
        siblings = tier.have(tier.children_of(block.parent))
        yield from (key for key, known in siblings.items() if known.n_tokens < block.n_tokens)


Forget: TypeAlias = Callable[[Deletions], None]


class Forgetting:
    """Compares the store's generation with this process's. For all threads."""

    def __init__(self, disk: DiskTier) -> None:
        self.lock = threading.RLock()  # held while something is kept, and while it is forgotten
        self._disk = disk
        self._tiers: list[MemoryTier] = []
        self._forgets: list[WeakMethod[Forget]] = []
        self._unrecorded: OrderedDict[str, dict[BlockKey, None]] = OrderedDict()  # by agent
        self._log: deque[tuple[int, Deletions]] = deque()  # by the generation they led to
        self.generation = self._oldest = disk.index.forgotten.generation()
        disk.generation = self.generation

    def add_tier(self, tier: MemoryTier) -> None:
        """Have blocks deleted from a tier of this process."""
        with self.lock:
            self._tiers.append(tier)

    def add(self, forget: Forget) -> None:
        """Have a method called with all later deletions, on any thread, while its object lives."""
        with self.lock:
            self._forgets.append(WeakMethod(forget))

    def catch_up(self) -> int:
        """Forget what was deleted since the last call; one small query if that is nothing.

        Returns the generation that this leads to; an older one if the index cannot be read.
        """
        self._catch_up()
        return self.generation

    @default_on_io_error(lambda: None)
    def _catch_up(self) -> None:
        log = self._disk.index.forgotten
        if log.generation() == self.generation:
            return
        with self.lock:
            now, found = log.since(self.generation)
            if now == self.generation:  # another thread was faster
                return
            deletions = Deletions(found, log.owner)
            for tier in self._tiers:
                deletions.delete_from(tier)
            self._delete_unrecorded(deletions)
            for method in self._forgets:
                if (forget := method()) is not None:
                    forget(deletions)
            if found is None:
                self._log.clear()
                self._oldest = now
            else:
                self._log.append((now, deletions))
            while len(self._log) > MAX_LOGGED or self._n_logged() > MAX_LOGGED_BLOCKS:
                self._oldest, _ = self._log.popleft()
            self.generation = self._disk.generation = now

    def unless_forgotten(self, keep: Callable[[Record], object]) -> Callable[[Record], object]:
        """What keeps a record, but only if nothing is forgotten before it is called."""
        began = self.generation

        def keep_if_same(record: Record) -> None:
            with self.lock:
                if self.generation == began:
                    keep(record)

        return keep_if_same

    def _n_logged(self) -> int:
        """Blocks that the log names."""
        return sum(len(one.blocks) for _, each in self._log for one in each.found or ())

    def later(self, since: int) -> list[Deletions]:
        """What was forgotten after a generation; if that was too long ago, everything."""
        found: list[Deletions] = []
        with self.lock:
            for number, deletions in reversed(self._log):
                if number == since:
                    return found
                found.append(deletions)
            is_known = since == self._oldest
        return found if is_known else [Deletions(None, self._disk.index.forgotten.owner)]

    def note_unrecorded(self, agent: str, key: BlockKey) -> None:
        """Remember a block in memory that no file of its agent will name."""
        with self.lock:
            keys = self._unrecorded.setdefault(agent, {})
            keys[key] = None
            self._unrecorded.move_to_end(agent)
            if len(keys) > MAX_UNRECORDED:
                del keys[next(iter(keys))]
            if len(self._unrecorded) > MAX_UNRECORDED:
                self._unrecorded.popitem(last=False)

    def _delete_unrecorded(self, deletions: Deletions) -> None:
        for agent in [agent for agent in self._unrecorded if deletions.include(agent)]:
            keys = self._unrecorded.pop(agent)
            for tier in self._tiers:
                tier.delete_all(list(subtrees(tier, keys)))

    def has_deleted(self, agent: str, since: int) -> bool:
        """Whether an agent was deleted after a generation."""
        return any(deletions.include(agent) for deletions in self.later(since))

    def note_error(self, error: Exception) -> None:
        self._disk.note_error(error)


class RequestClaim:
    """What a request keeps, for an agent if it is one's: any part of its tokens, which may grow."""

    def __init__(
        self,
        forgetting: Forgetting | None,
        agent: str,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        since: int,
        to_disk: bool = True,
    ) -> None:
        """`since` is the generation at which the request began; without `to_disk` its blocks stay
        in memory.
        """
        self.tokens = tokens
        self._to_disk = to_disk
        self._forgetting = forgetting  # without a disk nobody else deletes
        self._agent = agent
        self._namespace = namespace
        self._is_forgotten = False
        self._began = self._checked = since

    def share(self, ref: BlockRef) -> Share:
        """The part of a block's records in this claim."""
        if self._forgetting is not None and self._agent and not self._to_disk:
            self._forgetting.note_unrecorded(self._agent, ref.key)
        return Share(self, ref.number * BLOCK_TOKENS + ref.n_tokens)

    @property
    def kept(self) -> KeptTokens:
        return KeptTokens(self._agent, self._namespace, pack(self.tokens))

    @property
    def is_forgotten(self) -> bool:
        """Whether its tokens were deleted on purpose since it began, or a part of them."""
        forgetting = self._forgetting
        if forgetting is None or self._is_forgotten or forgetting.generation == self._checked:
            return self._is_forgotten
        with forgetting.lock:
            self._is_forgotten = Deletions.all_of(forgetting.later(self._checked)).hold(self.kept)
            self._checked = forgetting.generation
        return self._is_forgotten

    def is_wanted(self) -> bool:
        """Whether none of its tokens was deleted since it began, by any process until now."""
        if self._forgetting is not None:
            self._forgetting.catch_up()
        return not self.is_forgotten

    @property
    def is_of_deleted_agent(self) -> bool:
        """Whether its agent was deleted since it began."""
        forgetting = self._forgetting
        return forgetting is not None and forgetting.has_deleted(self._agent, self._began)

    @contextmanager
    def unless_forgotten(self) -> Iterator[bool]:
        """Whether something may be kept; while inside, nothing is forgotten."""
        with nullcontext() if self._forgetting is None else self._forgetting.lock:
            yield not self.is_forgotten


class Share(NamedTuple):
    """A record's part in a claim: it holds some of the first `n_tokens`."""

    claim: RequestClaim
    n_tokens: int


class Unclaimed:
    """Which records no request has a claim to, after deletions."""

    def __init__(self, deletions: Deletions) -> None:
        self._deletions = deletions
        self._firsts: dict[RequestClaim, int | None] = {}  # found once for a claim's records

    def holds(self, shares: Iterable[Share]) -> bool:
        return all(self._is_forgotten(*share) for share in shares)

    def _is_forgotten(self, claim: RequestClaim, n_tokens: int) -> bool:
        if claim not in self._firsts:
            self._firsts[claim] = self._deletions.first_in(claim.kept)
        first = self._firsts[claim]
        return first is not None and first * BLOCK_TOKENS < n_tokens
