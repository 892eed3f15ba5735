"""Stored prompts that belong to no agent: each is named by the key of its last block, and may be
pinned for good or for a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from keepwarm.agents.agent import Agent, Branch
from keepwarm.agents.agents import Agents
from keepwarm.agents.block_refs import find_block_refs, read_header
from keepwarm.agents.reachability import used_by
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, chain, pack
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.maintenance import Progress, no_progress
from keepwarm.store.disk.tombstones import delete_everywhere
from keepwarm.store.tier import TTL_PIN, NamedBlock, as_store_errors

PREFIX_SIGN = "@"  # starts a prefix id; no agent id starts with it
ID_DIGITS = 12
OWNER = "prefix"  # of pins
DEFAULT_TTL_S = 300.0


class Prefix(NamedTuple):
    """A stored prompt that belongs to no agent."""

    id: str
    model: str  # empty if no agent names it
    n_tokens: int
    n_bytes: int  # including blocks shared with others
    pinned: bool
    used: float


class StoredPrefixes:
    """The prefixes of one store directory. Their ids may be shortened."""

    def __init__(self, disk: DiskTier, agents: Agents) -> None:
        self._disk = disk
        self._agents = agents

    def all(self) -> Iterator[Prefix]:
        """Most recently used first."""
        lookups, agents = self._disk.index.lookups, list(self._agents.all())
        models = {branch.namespace: branch.model for a in agents for branch in a.branches}
        named = {key for agent in agents for key in self._held_by(agent)}
        for end in lookups.leaves():
            if end.key not in named:
                known = self._disk.have(list(lookups.parents(end.key)))
                yield Prefix(
                    id=f"{PREFIX_SIGN}{end.key.hex()[:ID_DIGITS]}",
                    model=models.get(end.namespace, ""),
                    n_tokens=end.number * BLOCK_TOKENS + end.n_tokens,
                    n_bytes=sum(one.n_bytes for one in known.values()),
                    pinned=bool(lookups.owners(end.key)),
                    used=end.used,
                )

    def _held_by(self, agent: Agent) -> Iterator[BlockKey]:
        for branch in agent.branches:
            held = find_block_refs(self._disk, branch.sized_blocks, branch.n_tokens)
            yield from (holder.key for holder in held)

    def show(self, prefix_id: str) -> Agent:
        """A prefix as an agent without an id."""
        path = list(self._disk.index.lookups.parents(self._last_block(prefix_id)))[::-1]
        headers = [
            read_header(self._disk, key, known) for key, known in self._disk.have(path).items()
        ]
        found = {header.key: header for header in headers if header is not None}
        if len(found) < len(path) or found[path[0]].number:
            raise BadInput(
                f"{prefix_id} is incomplete, because earlier blocks were evicted; send its prompt "
                "again to compute them."
            )
        n_tokens = sum(len(header.tokens) // 4 for header in found.values())
        return Agent("", Branch(found[path[0]].namespace, tuple(path), n_tokens))

    def pin(self, prefix_id: str, pinned: bool = True) -> None:
        """Protect a prefix from eviction, or no more; its last block protects all before it."""
        key = self._last_block(prefix_id)
        (self._disk.pin if pinned else self._disk.unpin)(key, OWNER)

    def delete(self, prefix_id: str, progress: Progress = no_progress) -> int:
        """Delete a prefix, but for blocks that agents or other prefixes have too; how many."""
        keep, last = used_by(self._disk, self._agents.all()), self._last_block(prefix_id)
        ends = self._disk.index.lookups.leaves()
        namespaces = [end.namespace for end in ends if end.key == last]
        own = list(self._own_blocks(last, keep))
        self._disk.forget(OWNER, own)
        keys = [block.key for block in own]
        with as_store_errors(self._disk, f"delete {prefix_id}"):
            for key in keys:
                self._disk.unpin(key, OWNER)
            return delete_everywhere(self._disk, namespaces, keys, keep, progress=progress)

    def _own_blocks(self, last: BlockKey, keep: set[BlockKey]) -> Iterator[NamedBlock]:
        """From the last block up to where another conversation parts from it."""
        lookups = self._disk.index.lookups
        path = list(lookups.parents(last))
        known = self._disk.have(path)
        below: set[BlockKey] = set()
        for key, parent in zip(path, [*path[1:], None], strict=True):
            if key in keep or set(lookups.children_of(key)) - below:
                return
            header = read_header(self._disk, key, known[key]) if key in known else None
            if header is not None:
                yield NamedBlock(key, header.parent, known[key].n_tokens)
            below = {key, *lookups.shorter_siblings(key)} if parent is not None else set()

    def _last_block(self, prefix_id: str) -> BlockKey:
        text = prefix_id.removeprefix(PREFIX_SIGN)
        leaves = self._disk.index.lookups.leaves()
        keys = [end.key for end in leaves if end.key.hex().startswith(text)]
        if len(text) < 4 or len(keys) != 1:
            raise BadInput(
                f"{len(keys)} prefixes match {PREFIX_SIGN}{text}; `cache ls --prefixes` lists them."
            )
        return keys[0]


class _PinnedBlock(NamedTuple):
    until: float
    n_bytes: int


def _n_bytes(pinned: Mapping[BlockKey, _PinnedBlock]) -> int:
    return sum(block.n_bytes for block in pinned.values())


class TtlPins:
    """Pins with a TTL: a client asked to keep a prompt up to some token for some time.

    The expiry time is part of the pin's owner name, so that any process can end expired pins.
    """

    def __init__(self, disk: DiskTier, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._clock = clock
        self._pinned: dict[str, dict[BlockKey, _PinnedBlock]] = {}  # by this process, for a tenant
        self.max_bytes: int | None = None  # that those of one tenant may protect

    def pin(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        n_tokens: int,
        ttl_s: float | None,
        tenant: str = "",
    ) -> None:
        """Keep the blocks of the first `n_tokens`, unless the tenant's are too many already;
        pinning again extends the time.

        The block that holds the last of them is pinned, which protects all its ancestors. So is
        one that ends exactly there, if it is stored: on state models it has the checkpoint.
        """
        refs = list(chain(namespace, tokens))
        last = (n_tokens - 1) // BLOCK_TOKENS
        if not 0 <= last < len(refs):
            return
        start = last * BLOCK_TOKENS
        ending = block_key(namespace, refs[last].parent, pack(tokens[start:n_tokens]))
        until = self._clock() + (DEFAULT_TTL_S if ttl_s is None else ttl_s)
        kept = {*(ref.key for ref in refs[: last + 1]), *self._disk.have([ending])}
        if not self._fit(tenant, kept, until):
            return
        for key in kept & {refs[last].key, ending}:
            self._disk.pin(key, f"{TTL_PIN}{until:.0f}")

    def _fit(self, tenant: str, keys: set[BlockKey], until: float) -> bool:
        if self.max_bytes is None:
            return True
        now, before = self._clock(), self._pinned.get(tenant, {})
        pinned = {key: block for key, block in before.items() if block.until > now}
        for key, info in self._disk.have(keys).items():
            since = pinned[key].until if key in pinned else until
            pinned[key] = _PinnedBlock(max(until, since), info.n_bytes)
        if _n_bytes(pinned) > self.max_bytes:  # perhaps with blocks that were deleted
            known = self._disk.have(pinned)
            pinned = {key: block for key, block in pinned.items() if key in known}
        if _n_bytes(pinned) > self.max_bytes:
            return False
        self._pinned[tenant] = pinned
        return True

    def expire(self) -> int:
        """End expired pins; how many there were. Eviction also does this."""
        return self._disk.index.expire_ttl_pins(self._clock())
