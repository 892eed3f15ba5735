"""Warming at start: conversations that will likely continue are loaded from disk into memory; later
the vocabulary is read for grammars.

Pinned agents and TTL pins first, then the other agents; within both the most recently used first.
The warmer's thread reads the files, so that they are in the page cache; the engine's thread then
restores them, one conversation at a time. Warming pauses while requests wait or run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nlargest
from typing import NamedTuple, Self

from keepwarm.agents.agent import Agent, Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.cache.identity import make_options_in
from keepwarm.cache.restore.plan import Read
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import Lane
from keepwarm.errors import BadInput, CacheError, KeepwarmError, Stopping
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace
from keepwarm.prefix.policy import Policy
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import TTL_PIN, StoredBlock
from keepwarm.text.request import KVOptions

LOG = logging.getLogger(__name__)
MAX_TTL_PINS = 64  # the most recently used
POLL_S = 0.05  # while the engine is busy
VOCABULARY_AFTER_S = 10.0  # reading it keeps all threads waiting, also those of the first requests


class WarmedConversation(NamedTuple):
    """A conversation that was restored into memory."""

    agent: str  # empty for a TTL pin
    n_tokens: int
    n_bytes: int


class Warmer:
    """Loads conversations from disk into memory after a start, while no request runs.

    Ends at its budget, when closed, or with the engine. It evicts no live cache.
    """

    def __init__(self, engine: Engine, budget_bytes: int | None = None) -> None:
        """Without a budget it uses half of the memory for live caches."""
        self._engine = engine
        self._left_bytes = engine.live.max_bytes // 2 if budget_bytes is None else budget_bytes
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_run = threading.Event()
        self.warmed: list[WarmedConversation] = []

    def run_in_background(self) -> Self:
        self._thread = threading.Thread(target=self._run_quietly, name="keepwarm-warm", daemon=True)
        self._thread.start()
        return self

    def run(self) -> list[WarmedConversation]:
        """Warm as many conversations as fit; these, in order."""
        self._wait_until_idle()
        for restorer, agent in self._candidates():
            self._warm(restorer, agent)
        return self.warmed

    def wait(self) -> None:
        """Return once it has run in the background; at once if it was not started there."""
        if self._thread is not None:
            self._has_run.wait()

    def close(self) -> None:
        """Stop after the current conversation."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run_quietly(self) -> None:
        try:
            if warmed := self.run():
                n_tokens = sum(each.n_tokens for each in warmed)
                LOG.info("warmed %d conversations, %d tokens", len(warmed), n_tokens)
        except Stopping:
            LOG.debug("warming stopped before its end")
        except KeepwarmError as error:
            LOG.warning("warming ended early: %s", error)
        finally:
            self._has_run.set()
        self._read_vocabulary()

    def _read_vocabulary(self) -> None:
        self._closed.wait(VOCABULARY_AFTER_S)
        with suppress(Stopping):
            self._wait_until_idle()
            try:
                self._engine.preparer.load()
            except Exception:  # the first request that needs it says what is wrong
                LOG.exception("the vocabulary could not be read")

    def _candidates(self) -> list[tuple[Restorer, Agent]]:
        """Stored conversations of this model, the likeliest to continue first."""
        try:
            disk_store = self._engine.store.on_disk
        except BadInput:  # there is no disk tier
            return []
        agents = [*disk_store.agents.all(), *_ttl_pins(disk_store)]
        if not agents:
            return []
        names = {agent.namespace for agent in agents}
        restorers = {name: self._restorer(name) for name in names}
        found = [(restorer, agent) for agent in agents if (restorer := restorers[agent.namespace])]
        found.sort(key=lambda item: (not item[1].pinned, -item[1].used))
        return found

    def _restorer(self, name: Namespace) -> Restorer | None:
        """The restorer of a namespace, whichever its KV options, tenant or import; None if it is
        not of this model."""
        try:
            theirs = self._engine.store.on_disk.identity_of(name)
            usual = self._lane(KVOptions()).identity
            if (theirs.weights, theirs.config) != (usual.weights, usual.config):
                return None
            lane = self._lane(KVOptions(**make_options_in(theirs)))
        except (BadInput, CacheError):  # it is not recorded, or its options are not for this model
            return None
        ours = lane.identity
        is_ours = replace(theirs, salt=ours.salt, origin=ours.origin) == ours
        return lane.restorer.in_namespace(name) if is_ours else None

    def _lane(self, options: KVOptions) -> Lane:
        self._wait_until_idle()  # a new one runs the model
        return self._engine.lane_of(kv=options)

    def _warm(self, restorer: Restorer, agent: Agent) -> None:
        tokens = self._engine.store.on_disk.tokens_of(agent)
        prompt = [*tokens, 0]  # one more: a restore always leaves a token to feed
        restorer = restorer.look_up(prompt, Policy.READ_WRITE)
        plan = restorer.plan(prompt)
        n_bytes = plan.point.n_bytes
        if not plan.n_tokens or n_bytes > self._free_bytes():
            return
        self._read_ahead(plan.point.reads)
        self._wait_until_idle()
        n_tokens = self._engine.call(lambda: self._restore(restorer, agent.id, prompt)).result()
        if n_tokens:
            self._left_bytes -= n_bytes
            self.warmed.append(WarmedConversation(agent.id, n_tokens, n_bytes))

    def _free_bytes(self) -> int:
        live = self._engine.live.stats
        return min(self._left_bytes, live.max_bytes - live.n_bytes)

    def _read_ahead(self, reads: Sequence[Read]) -> None:
        """Read files into the page cache; damaged ones are quarantined."""
        for read in reads:
            self._wait_until_idle()
            self._engine.store.on_disk.disk.read(read.key, read.part)

    def _restore(self, restorer: Restorer, agent_id: str, prompt: Sequence[int]) -> int:
        """On the engine's thread; the tokens that are live now, 0 if nothing was gained."""
        live, namespace = self._engine.live, restorer.namespace
        found = restorer.restore(prompt, beyond=live.n_served(namespace, prompt))
        if found.caches is None:
            return 0
        tokens = prompt[: found.n_tokens]
        kept = live.put(namespace, tokens, found.caches, agent_id, found.n_lossy)
        return found.n_tokens if kept else 0

    def _wait_until_idle(self) -> None:
        while self._is_busy():
            self._closed.wait(POLL_S)
        if self._closed.is_set() or not self._engine.alive:
            raise Stopping(
                "Warming was stopped; other conversations are loaded from disk when needed."
            )

    def _is_busy(self) -> bool:
        if self._closed.is_set() or not self._engine.alive:
            return False
        stats = self._engine.stats()
        return bool(stats.waiting or stats.prefilling or stats.decoding)


def _ttl_pins(disk_store: AgentStore) -> Iterator[Agent]:
    """Prefixes with a TTL pin, as pinned agents without a name."""
    disk_store.ttl_pins.expire()
    disk = disk_store.disk
    pinned = [block for block in disk.walk() if block.pinned]
    ttl_pinned = [block for block in pinned if _has_ttl_pin(disk.index.lookups.owners(block.key))]
    for block in nlargest(MAX_TTL_PINS, ttl_pinned, key=lambda block: block.used):
        path = tuple(disk.index.lookups.parents(block.key))[::-1]
        n_tokens = block.number * BLOCK_TOKENS + _position_in(disk, block)
        head = Branch(block.namespace, path, n_tokens)
        yield Agent("", head, pinned=True, used=block.used)


def _has_ttl_pin(owners: Sequence[str]) -> bool:
    return any(owner.startswith(TTL_PIN) for owner in owners)


def _position_in(disk: DiskTier, block: StoredBlock) -> int:
    """The likely end of the pinned prefix in this block: its first checkpoint, or its end."""
    record = disk.read(block.key, next(iter(block.n_bytes)), tensors=())
    children = disk.children(block.parent, record.header.tokens) if record is not None else []
    known = disk.have([child.key for child in children])
    ends = [n for key, n in children if key in known and known[key].n_tokens == n]
    return min(ends, default=block.n_tokens)
