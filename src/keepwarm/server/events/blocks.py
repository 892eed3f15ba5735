"""Which whole blocks this server has, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.store import Store
from keepwarm.engine.live import Live
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, chain_packed
from keepwarm.records.record import Part
from keepwarm.store.tier import TierStats

Medium: TypeAlias = Literal["GPU", "CPU", "DISK", "EXTERNAL"]
Change: TypeAlias = tuple[int, ...]
TIERS: dict[str, Medium] = {"memory": "CPU", "disk": "DISK"}
LOOKS = 20  # after which a tier is walked though nothing seems to have changed: others delete, too
MAX_SHARED = 1 << 17  # blocks that are remembered as shared


class HeldBlock(NamedTuple):
    key: BlockKey
    parent: BlockKey
    number: int  # in its prompt


Blocks: TypeAlias = dict[BlockKey, HeldBlock]
Holdings: TypeAlias = dict[Medium, Blocks]


class BlockView:
    """The blocks of one model that requests without a tenant and KV options find.

    It only looks: nothing that runs a request tells it anything, or waits for it.
    """

    def __init__(self, restorer: Restorer, live: Live, store: Store) -> None:
        self.restorer, self._live, self._store = restorer, live, store
        self._walked: dict[str, Blocks] = {}
        self._changes: dict[str, Change] = {}
        self._shared: Blocks = {}
        self._n_looks = 0

    def look(self) -> Holdings:
        self._n_looks += 1
        stats = self._store.tier_stats()
        found: Holdings = {"GPU": dict(self._in_live())}
        for tier, medium in TIERS.items():
            if tier in stats:
                found[medium] = self._in_tier(tier, stats[tier])
        found["EXTERNAL"] = self._in_shared(found)
        return found

    def tokens_of(self, key: BlockKey) -> bytes:
        """The packed token ids of a block, or nothing if it is gone."""
        for _, tier in self.restorer.tiers.local.named:
            if (record := tier.read(key, self._part, ())) is not None:
                return record.header.tokens
        return b""

    @property
    def _part(self) -> Part:
        return Part.DELTA if self.restorer.needs.delta else Part.WINDOW

    def _in_live(self) -> Iterator[tuple[BlockKey, HeldBlock]]:
        for namespace, packed in self._live.held():
            if namespace == self.restorer.namespace:
                for ref in chain_packed(namespace, packed):
                    if ref.n_tokens == BLOCK_TOKENS:
                        yield ref.key, HeldBlock(ref.key, ref.parent, ref.number)

    def _in_tier(self, tier: str, stats: TierStats) -> Blocks:
        change = stats.blocks, stats.n_bytes, stats.puts, stats.evicted
        if self._changes.get(tier) != change or self._n_looks % LOOKS == 0:
            self._changes[tier] = change
            self._walked[tier] = {
                block.key: HeldBlock(block.key, block.parent, block.number)
                for block in self._store.blocks()[tier]
                if block.namespace == self.restorer.namespace
                and block.n_tokens == BLOCK_TOKENS
                and self._part in block.n_bytes
            }
        return self._walked[tier]

    def _in_shared(self, here: Holdings) -> Blocks:
        """Blocks of this machine that were put into a shared tier or found there. That another
        machine, or the place itself, has deleted one since is not known.
        """
        known = {key: block for blocks in here.values() for key, block in blocks.items()}
        for tier in self.restorer.tiers.shared:
            self._shared |= {key: known[key] for key in tier.have(known.keys() - self._shared)}
        while len(self._shared) > MAX_SHARED:
            del self._shared[next(iter(self._shared))]
        return dict(self._shared)
