"""Warming at start: conversations that will likely go on are brought from disk into memory.

What is pinned first, agents and places that marks hold; then the other agents. Of both, what was
used last goes first. Their files are read in a thread of its own, so that they lie in the system's
memory; the engine's thread then copies them, one conversation at a time. While requests wait or run
nothing is warmed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nlargest
from typing import NamedTuple, Self

from keepwarm.cache.agents.agents import Agent
from keepwarm.cache.disk_store import DiskStore
from keepwarm.cache.restore.manager import Manager
from keepwarm.cache.restore.plan import Read
from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import make_options
from keepwarm.errors import BadInput, KeepwarmError, Stopping
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import TTL_PIN, StoredBlock

LOG = logging.getLogger(__name__)
MAX_HELD = 64  # places that marks hold; those used last
PATIENCE_S = 0.05  # between two looks at an engine that is busy


class Warmed(NamedTuple):
    """A conversation that now lies in memory, and how much of it does."""

    agent: str  # empty for a place that a mark holds
    n_tokens: int
    n_bytes: int


class Warmer:
    """Ends at its budget, when it is closed, or with the engine. Nothing live gives way to it."""

    def __init__(self, engine: Engine, budget_bytes: int | None = None) -> None:
        """Without a budget it fills half of what live caches may take."""
        self._engine = engine
        self._left_bytes = engine.live.max_bytes // 2 if budget_bytes is None else budget_bytes
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.warmed: list[Warmed] = []

    def run_in_background(self) -> Self:
        self._thread = threading.Thread(target=self._run_quietly, name="keepwarm-warm", daemon=True)
        self._thread.start()
        return self

    def run(self) -> list[Warmed]:
        """Warm what fits; what was warmed, in that order."""
        for manager, agent in self._likely():
            self._warm(manager, agent)
        return self.warmed

    def wait(self) -> None:
        """Return once it has run."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop after what is being read."""
        self._closed.set()
        self.wait()

    def _run_quietly(self) -> None:
        try:
            self.run()
        except Stopping:
            LOG.debug("stopped before all was warm")
        except KeepwarmError as error:
            LOG.warning("not all that is kept could be warmed: %s", error)

    def _likely(self) -> list[tuple[Manager, Agent]]:
        """What is kept of this model, that first which is likely to be asked again."""
        try:
            disk_store = self._engine.store.on_disk
        except BadInput:  # nothing is kept on disk
            return []
        agents = [*disk_store.agents.all(), *_held(disk_store)]
        if not agents:
            return []
        managers = {name: self._manager(salt) for name, salt in self._salts(agents).items()}
        mine = [agent for agent in agents if agent.namespace in managers]
        mine.sort(key=lambda agent: (not agent.pinned, -agent.used))
        return [(managers[agent.namespace], agent) for agent in mine]

    def _salts(self, agents: Sequence[Agent]) -> dict[Namespace, str]:
        """Of whose blocks of this model there are: what its manager is made with."""
        identity_of = self._engine.store.on_disk.identity_of
        ours, found = identity_of(self._manager("").namespace), {}
        for name in {agent.namespace for agent in agents}:
            with suppress(BadInput):  # nobody knows what it was made from
                theirs = identity_of(name)
                if replace(theirs, salt=ours.salt) == ours:
                    found[name] = theirs.salt
        return found

    def _manager(self, salt: str) -> Manager:
        """Of the engine's model with the options it has when nobody names others."""
        self._wait_until_idle()
        model, attach = self._engine.model, self._engine.store.attach
        options = make_options(self._engine.config.kv)
        made = self._engine.call(lambda: attach(model.module, model.path, salt=salt, **options))
        return made.result().manager

    def _warm(self, manager: Manager, agent: Agent) -> None:
        tokens = self._engine.store.on_disk.tokens_of(agent)
        prompt = [*tokens, 0]  # one more, for a restore always leaves one to be fed
        plan = manager.plan(prompt)
        n_bytes = plan.point.n_bytes
        if not plan.n_tokens or n_bytes > self._room():
            return
        self._read(plan.point.reads)
        self._wait_until_idle()
        n_tokens = self._engine.call(lambda: self._put(manager, agent.id, prompt)).result()
        if n_tokens:
            self._left_bytes -= n_bytes
            self.warmed.append(Warmed(agent.id, n_tokens, n_bytes))

    def _room(self) -> int:
        live = self._engine.live.stats
        return min(self._left_bytes, live.max_bytes - live.n_bytes)

    def _read(self, reads: Sequence[Read]) -> None:
        """Bring files into the system's memory; what is bad is set aside here already."""
        for read in reads:
            self._wait_until_idle()
            self._engine.store.on_disk.disk.read(read.key, read.part)

    def _put(self, manager: Manager, agent_id: str, prompt: Sequence[int]) -> int:
        """On the engine's thread; how many tokens are live now that were not."""
        live, namespace = self._engine.live, manager.namespace
        found = manager.restore(prompt, beyond=live.n_served(namespace, prompt))
        if found.caches is None:
            return 0
        kept = live.put(namespace, prompt[: found.n_tokens], found.caches, agent_id)
        return found.n_tokens if kept else 0

    def _wait_until_idle(self) -> None:
        while self._is_busy():
            self._closed.wait(PATIENCE_S)
        if self._closed.is_set() or not self._engine.alive:
            raise Stopping("Warming was stopped; what is not warm is read from disk when needed.")

    def _is_busy(self) -> bool:
        if self._closed.is_set() or not self._engine.alive:
            return False
        stats = self._engine.stats()
        return bool(stats.waiting or stats.prefilling or stats.decoding)


def _held(disk_store: DiskStore) -> Iterator[Agent]:
    """Places that requests asked to keep, as pinned agents without a name."""
    disk_store.ttl_pins.expire()
    disk = disk_store.disk
    pinned = [block for block in disk.walk() if block.pinned]
    held = [block for block in pinned if _is_marked(disk.index.lookups.owners(block.key))]
    for block in nlargest(MAX_HELD, held, key=lambda block: block.used):
        way = tuple(disk.index.lookups.parents(block.key))[::-1]
        n_tokens = block.number * BLOCK_TOKENS + _place_in(disk, block)
        yield Agent("", block.namespace, way, n_tokens, pinned=True, used=block.used)


def _is_marked(owners: Sequence[str]) -> bool:
    return any(owner.startswith(TTL_PIN) for owner in owners)


def _place_in(disk: DiskTier, block: StoredBlock) -> int:
    """Up to which of its tokens others are likely to agree: its first checkpoint, or its end."""
    record = disk.read(block.key, next(iter(block.n_bytes)), tensors=())
    children = disk.children(block.parent, record.header.tokens) if record is not None else []
    known = disk.have([child.key for child in children])
    ends = [n for key, n in children if key in known and known[key].n_tokens == n]
    return min(ends, default=block.n_tokens)
