"""Has this process forget what any process on the store deletes on purpose.

Live caches, and blocks in memory or in the writer's queue, would otherwise serve prompts again and
be written again after they were deleted from disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias
from weakref import WeakMethod

from keepwarm.cache.agents.holders import find_extensions
from keepwarm.prefix.blocks import Namespace, chain_packed
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.upkeep import subtrees
from keepwarm.store.index.forgotten import Forgotten
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import agent_owner, default_on_io_error

MAX_LOGGED = 64  # deletions that a running request is compared with


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

    def hold(self, kept: KeptTokens) -> bool:
        """Whether tokens are of an agent that was deleted, or have blocks that were."""
        if self.found is None:
            return True
        owner = self._owner_of(agent_owner(kept.agent))
        refs = list(chain_packed(kept.namespace, kept.packed))
        return any(each.owner == owner or each.is_in(kept.namespace, refs) for each in self.found)

    def delete_from(self, tier: MemoryTier) -> None:
        """Delete the blocks, all that continues them, and their shorter copies."""
        if self.found is None:
            tier.delete_all([block.key for block in tier.walk()])
            return
        blocks = [block for each in self.found for block in each.blocks]
        longer = [one.header.key for one in find_extensions(tier, blocks)]
        keys = [*(block.key for block in blocks), *longer]
        tier.delete_all(list(dict.fromkeys(subtrees(tier.index.lookups, keys))))


Forget: TypeAlias = Callable[[Deletions], None]


class Forgetting:
    """Compares the store's generation with this process's. For all threads."""

    def __init__(self, disk: DiskTier) -> None:
        self.lock = threading.RLock()  # held while something is kept, and while it is forgotten
        self._disk = disk
        self._tiers: list[MemoryTier] = []
        self._forgets: list[WeakMethod[Forget]] = []
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

    @default_on_io_error(lambda: None)
    def catch_up(self) -> None:
        """Forget what was deleted since the last call; one small query if that is nothing."""
        log = self._disk.index.forgotten
        if log.generation() == self.generation:
            return
        with self.lock:
            now, found = log.since(self.generation)
            deletions = Deletions(found, log.owner)
            for tier in self._tiers:
                deletions.delete_from(tier)
            for method in self._forgets:
                if (forget := method()) is not None:
                    forget(deletions)
            self._log.append((now, deletions))
            while len(self._log) > MAX_LOGGED:
                self._oldest, _ = self._log.popleft()
            self.generation = self._disk.generation = now

    def has_forgotten(self, since: int, kept: KeptTokens) -> bool:
        """Whether tokens were among what was forgotten after a generation."""
        with self.lock:
            numbers = [self._oldest, *(number for number, _ in self._log)]
            if since not in numbers:
                return True  # too long ago
            later = list(self._log)[numbers.index(since) :]
            return any(deletions.hold(kept) for _, deletions in later)

    def note_error(self, error: Exception) -> None:
        self._disk.note_error(error)
