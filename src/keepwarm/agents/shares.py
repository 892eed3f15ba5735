"""What the agents of one API key may amount to: how many, and how much their pins protect."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self

from keepwarm.agents.reachability import UNPROTECTED, Protection, Room
from keepwarm.config import Settings
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, chain, pack
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import TTL_PIN
from keepwarm.units import format_bytes

PROTECTED = 2  # pins and quotas of all keys together take one part in so many of the store
DEFAULT_TTL_S = 300.0
RECOUNT_S = 600.0  # other processes may have deleted agents since they were counted


class AgentLimits(NamedTuple):
    """What one key may have; without keys there is nobody to pay for another."""

    n_agents: int = sys.maxsize
    n_bytes: int = sys.maxsize  # that pins and quotas protect from eviction
    has_tenants: bool = False  # ids begin with the tenant

    @classmethod
    def of(cls, settings: Settings) -> Self:
        named = settings.read_named_keys()
        keys = {each.name or each.key for each in named}
        if not keys:
            return cls()
        admin = settings.read_secret("admin_key")
        if admin and admin not in [each.key for each in named]:
            keys.add(admin)  # it may have agents too
        n_tenants = 1 if settings.share_cache else len(keys)
        n_bytes = settings.disk_bytes // PROTECTED // n_tenants
        return cls(settings.max_agents, n_bytes, has_tenants=not settings.share_cache)

    def tenant_of(self, agent_id: str) -> str:
        return agent_id.partition(".")[0] if self.has_tenants else ""


class _KeyShare:
    """The agents of one key; a block that several of them protect counts once."""

    def __init__(self) -> None:
        self.agents: dict[str, Protection] = {}
        self.n_bytes = 0
        self._sizes: dict[BlockKey, int] = {}
        self._n_agents: Counter[BlockKey] = Counter()  # that protect a block

    def put(self, agent_id: str, found: Protection) -> None:
        self.drop(agent_id)
        self.agents[agent_id] = found
        self.n_bytes += found.n_reserved
        for key, n_bytes in found.blocks.items():
            self.n_bytes += n_bytes - self._sizes.get(key, 0)  # it may have grown
            self._sizes[key] = n_bytes
            self._n_agents[key] += 1

    def drop(self, agent_id: str) -> None:
        dropped = self.agents.pop(agent_id, UNPROTECTED)
        self.n_bytes -= dropped.n_reserved
        for key in dropped.blocks:
            self._n_agents[key] -= 1
            if not self._n_agents[key]:
                del self._n_agents[key]
                self.n_bytes -= self._sizes.pop(key)

    def n_own(self, agent_id: str) -> int:
        """Bytes that no other agent protects."""
        own = self.agents.get(agent_id, UNPROTECTED)
        alone = [key for key in own.blocks if self._n_agents[key] == 1]
        return own.n_reserved + sum(self._sizes[key] for key in alone)

    def is_shared(self, agent_id: str, key: BlockKey) -> bool:
        """Whether others than this agent protect a block."""
        own = self.agents.get(agent_id, UNPROTECTED)
        return self._n_agents[key] > (key in own.blocks)


class AgentShares:
    """The agents of every key against its limits, as this process knows them.

    Counted from the files, and now and then again: other processes change agents too.
    """

    def __init__(
        self,
        limits: AgentLimits,
        count: Callable[[], Mapping[str, Protection]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count` tells what each agent's pins and quota protect."""
        self._limits = limits
        self._count = count
        self._clock = clock
        self._keys: dict[str, _KeyShare] = {}  # by tenant
        self._counted_at = -RECOUNT_S

    def note(self, agent_id: str, found: Protection) -> None:
        self._key_of(agent_id).put(agent_id, found)

    def drop(self, agent_id: str) -> None:
        self._key_of(agent_id).drop(agent_id)

    def room(self, agent_id: str) -> Room:
        """What the pins of this agent may protect; what they do stays so."""
        key = self._counted_key_of(agent_id)
        n_left = max(0, self._limits.n_bytes - key.n_bytes)
        return Room(key.n_own(agent_id) + n_left, partial(key.is_shared, agent_id))

    def has_room(self, agent_id: str, n_new: int = 1) -> bool:
        """Whether its key may have so many more agents."""
        return len(self._counted_key_of(agent_id).agents) + n_new <= self._limits.n_agents

    def check_number(self, agent_id: str, n_new: int = 1) -> None:
        if not self.has_room(agent_id, n_new):
            n_agents = len(self._counted_key_of(agent_id).agents)
            raise BadInput(
                f"This key has {n_agents:,} agents and may have {self._limits.n_agents:,}; delete "
                "some, or give them a retention_s."
            )

    def check_bytes(self, agent_id: str, found: Protection) -> None:
        """Refuse a pin or a quota that protects more than there is room for."""
        room = self.room(agent_id)
        n_bytes = found.n_bytes - sum(n for key, n in found.blocks.items() if room.is_free(key))
        left, wanted = format_bytes(room.n_bytes), format_bytes(n_bytes)
        if n_bytes > room.n_bytes:
            raise BadInput(
                f"Pins and quotas of one key protect at most {format_bytes(self._limits.n_bytes)}, "
                f"of which {left} are left, and this takes {wanted}; remove another pin or quota."
            )

    def _counted_key_of(self, agent_id: str) -> _KeyShare:
        if self._clock() - self._counted_at >= RECOUNT_S:
            self._keys = {}
            for each, found in self._count().items():
                self.note(each, found)
            self._counted_at = self._clock()
        return self._key_of(agent_id)

    def _key_of(self, agent_id: str) -> _KeyShare:
        return self._keys.setdefault(self._limits.tenant_of(agent_id), _KeyShare())


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
