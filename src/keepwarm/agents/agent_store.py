"""The part of a store that is on disk: blocks, agents, the models they belong to, wear.

Imports no MLX, so that the command line starts quickly.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

from keepwarm.agents.agent import Agent, Branch
from keepwarm.agents.agents import TENANT, Agents
from keepwarm.agents.block_refs import Holder, find_block_refs
from keepwarm.agents.bundle import (
    NOT_WHOLE,
    BundleExport,
    BundleSource,
    CheckRecord,
    Manifest,
    accept_any,
    export_bundle,
    import_bundle,
)
from keepwarm.agents.reachability import named_blocks, namespaces_of, used_by
from keepwarm.agents.shares import AgentLimits, TtlPins
from keepwarm.agents.signing import NO_KEYS, BundleKeys, SigningKey
from keepwarm.agents.texts import AgentTurn
from keepwarm.config import Settings
from keepwarm.errors import BadCacheFile, BadInput, BadRecord, Busy
from keepwarm.files import replacing
from keepwarm.prefix.blocks import BlockKey, Namespace, unpack
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.prefix.turn import KeptTurn
from keepwarm.records.cipher import stored_namespace
from keepwarm.store.counts import CountsFile
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.disk.maintenance import (
    Progress,
    file_path,
    no_progress,
    read_file,
    write_file,
)
from keepwarm.store.disk.tombstones import Tombstones, delete_everywhere
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.marker import unlock
from keepwarm.store.names import bytes_under
from keepwarm.store.tier import as_store_errors

EXPIRY_INTERVAL_S = 300.0  # between two looks at which agents have expired
GRACE_S = 600.0  # an agent's running request counts as a use only when it has ended
CONFIRM_S = 600.0  # an agent is deleted if it is still expired then: the clock may have jumped
LOSSY_S = 60.0  # that a sum over all blocks is used again
MAX_IDENTITIES = 256  # that are remembered
PINS_MADE = "pins made"  # noted in the index once agents' pins are in it


class Cleared(NamedTuple):
    """How much was deleted."""

    n_agents: int
    n_blocks: int


class AgentStore:
    """A store directory. Close it, or use `with`."""

    def __init__(
        self,
        root: Path,
        limits: DiskLimits | None = None,
        writes_per_day: int | None = None,
        secret: str | None = None,
        retention_s: float | None = None,
        *,
        handshake: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """`retention_s` is that of new agents. `handshake` returns the marker that other machines
        have put where blocks are shared, given that of a new encrypted store.
        """
        try:
            self.disk = DiskTier(root, limits, cipher=unlock(root, secret, handshake=handshake))
        except TimeoutError as error:
            raise Busy(
                f"Another process, perhaps suspended, holds a lock of the store {root}; "
                "resume or end it, then try again."
            ) from error
        except OSError as error:
            raise BadInput(
                f"The store {root} cannot be used ({error.strerror}); "
                "name another directory as KEEPWARM_STORE."
            ) from error
        self._lossy_bytes, self._lossy_until = 0, -math.inf
        self._registered = lru_cache(MAX_IDENTITIES)(self._read_registered)
        self.agents = Agents(self.disk, retention_s=retention_s)
        self.tombstones = Tombstones(self.disk)
        self.ttl_pins = TtlPins(self.disk)
        self.wear = WriteBudget(self.disk.root, writes_per_day)
        self.counts = CountsFile(self.disk.root)
        self._next_expiry = 0.0  # by the monotonic clock
        self._expired_since: dict[str, float] = {}  # by the same clock
        try:
            self._make_pins()
        except BaseException:
            self.disk.close()
            raise

    def limit(self, limits: AgentLimits) -> None:
        """From now on, for each key: agents, pins and quotas, and as much again for TTL pins."""
        if limits == AgentLimits():  # counting them takes time
            return
        self.agents.limit(limits)
        self.ttl_pins.max_bytes = limits.n_bytes

    def expire(self) -> list[str]:
        """Delete the agents that were not used for their retention time; looks every few minutes,
        because it reads the files of all.
        """
        if time.monotonic() < self._next_expiry:
            return []
        self._next_expiry = time.monotonic() + EXPIRY_INTERVAL_S
        return self.agents.expire(self._long_expired())

    def _long_expired(self) -> list[str]:
        now, expired = time.monotonic(), self.agents.expired(GRACE_S)
        self._expired_since = {each: self._expired_since.get(each, now) for each in expired}
        return [each for each, since in self._expired_since.items() if now - since >= CONFIRM_S]

    def _make_pins(self) -> None:
        with as_store_errors(self.disk, "pin the blocks of agents"):
            database = self.disk.index.database
            if not database.has_flag(PINS_MADE) and self.agents.pin_all():
                database.set_flag(PINS_MADE)

    def is_unverified(self, name: Namespace) -> bool:
        """Whether blocks may be of a shared tier that anybody could have written to."""
        with as_store_errors(self.disk, "tell where its blocks come from"):
            return self._unverified_path(name).exists()

    def note_unverified(self, name: Namespace) -> None:
        with as_store_errors(self.disk, "note where its blocks come from"):
            write_file(self.disk, self._unverified_path(name), b"")

    def register(self, identity: Identity, revision: str = "") -> Namespace:
        """Record which model a namespace stands for, and its revision on the hub, if it has one;
        bundles name both.
        """
        name = stored_namespace(self.disk.cipher, namespace(identity))
        path = self._identity_path(name)
        if not path.exists():
            fields = identity.to_json() | ({"revision": revision} if revision else {})
            write_file(self.disk, path, json.dumps(fields).encode())
        return name

    def lossy_bytes(self) -> int:
        """Of all blocks, those that are kept where keys and values are rounded; as of a minute ago
        at most, because every block is looked at.
        """
        if time.monotonic() >= self._lossy_until:
            sums = self.disk.bytes_by_namespace()
            self._lossy_bytes = sum(n for name, n in sums.items() if self._is_lossy(name))
            self._lossy_until = time.monotonic() + LOSSY_S
        return self._lossy_bytes

    def _is_lossy(self, name: Namespace) -> bool:
        try:
            return "at_rest" in self.identity_of(name).kv_options
        except BadInput:  # nobody knows the model
            return False

    def identity_of(self, name: Namespace) -> Identity:
        return self._registered(name)[0]

    def _read_registered(self, name: Namespace) -> tuple[Identity, str]:
        """A model and its revision; these never change."""
        try:
            fields = json.loads(read_file(self.disk, self._identity_path(name)))
            revision = fields.pop("revision", "")
            return Identity(**fields), revision
        except (OSError, ValueError, TypeError, BadRecord) as error:
            raise BadInput(
                "The model of these blocks is not known here; run it once, then try again."
            ) from error

    def origin_of(self, agent: Agent) -> str:
        """The import that an agent's blocks came with; "" if they were computed here."""
        try:
            return self.identity_of(agent.namespace).origin
        except BadInput:  # no look-up without its origin reaches a block of an import
            return ""

    def holders(self, agent: Agent) -> Iterator[Holder]:
        """The blocks that hold an agent's conversation, up to the first missing one."""
        return find_block_refs(self.disk, agent.head.sized_blocks, agent.n_tokens)

    def tokens_of(self, agent: Agent) -> list[int]:
        """The agent's conversation, read from its blocks up to the first missing one."""
        return [token for holder in self.holders(agent) for token in unpack(holder.tokens)]

    def latest_turn(self, agent_id: str) -> AgentTurn:
        """An agent's conversation, with its messages if they were kept."""
        agent = self.agents.show(agent_id)
        tokens = self.tokens_of(agent)
        if not agent.n_tokens:
            return AgentTurn(agent.namespace, (), KeptTurn(()))
        if len(tokens) < agent.n_tokens:  # blocks of it were evicted
            (found,) = self.agents.turns.find_by_ends(agent_id, agent.blocks[-1:])
            return AgentTurn(agent.namespace, (), found)
        return AgentTurn(agent.namespace, tokens, self.agents.turns.find(agent_id, tokens))

    def first(self, agent: Agent, n_tokens: int) -> Agent:
        """The agent as it was when it had this many tokens."""
        tokens = self.tokens_of(agent)
        if not 0 < n_tokens <= len(tokens):
            raise BadInput(
                f"{n_tokens} tokens were asked for, but {len(tokens)} are stored; "
                "ask for 1 to that many."
            )
        head = Branch.of(agent.namespace, tokens[:n_tokens], agent.turns, model=agent.head.model)
        return replace(agent, head=head)

    def find(
        self,
        name: str,
        n_tokens: int | None = None,
        turn: int | None = None,
        branch: int | None = None,
    ) -> Agent:
        """An agent as it stands in its head or in another branch, cut to its first tokens or turns
        if asked.
        """
        agent = self.agents.show(name).on(branch)
        if turn is not None:
            if not 0 < turn <= len(agent.turns):
                raise BadInput(f"{name!r} has {len(agent.turns)} turns; there is no turn {turn}.")
            n_tokens = agent.turns[turn - 1]
        return agent if n_tokens is None else self.first(agent, n_tokens)

    def export_agent(
        self,
        agent: Agent | str,
        path: Path,
        progress: Progress = no_progress,
        key: SigningKey | None = None,
    ) -> int:
        """Write an agent, or part of one, to a file, signed if asked; the number of records."""
        export = self.export(self.find(agent) if isinstance(agent, str) else agent, progress, key)
        with replacing(path) as temp, temp.open("wb") as file:
            file.writelines(export.pieces)
        return export.n_records

    def export(
        self, agent: Agent, progress: Progress = no_progress, key: SigningKey | None = None
    ) -> BundleExport:
        """A bundle of an agent, made while it is read."""
        holders = list(self.holders(agent))
        tokens = b"".join(holder.tokens for holder in holders)
        if len(tokens) < 4 * agent.n_tokens:
            raise BadCacheFile(NOT_WHOLE)
        identity, revision = self._registered(agent.namespace)
        manifest = Manifest(
            identity=identity,
            tokens=tokens,
            blocks=tuple(holder.key.hex() for holder in holders),
            turns=agent.turns,
            agent=agent.id,
            metadata=agent.metadata,
            model=agent.head.model,
            revision=revision,
            turn=self.agents.turns.find(agent.id, unpack(tokens)) if agent.id else None,
            imported=self.is_unverified(agent.namespace),
        )
        return export_bundle(self.disk, manifest, progress, key)

    def import_agent(
        self,
        source: Path | BundleSource,
        expected: Identity,
        agent_id: str | None = None,
        progress: Progress = no_progress,
        model: str = "",
        *,
        keys: BundleKeys = NO_KEYS,
        check_record: CheckRecord = accept_any,
    ) -> Agent:
        """Read and verify an agent; raises if it belongs to another model.

        Unless one of `keys` signed it, only this agent and its forks are served from its blocks.
        `check_record` raises for a record that does not fit the model; a restore checks it anyway.
        `model` is the name of the model here, which its author may call otherwise.
        """
        with _opened(source) as bundle:
            manifest, identity = import_bundle(
                *(self.disk, self.wear, bundle, expected),
                check_manifest=lambda it: self.agents.check_new(
                    agent_id or name_of(it, bundle.name)
                ),
                keys=keys,
                check_record=check_record,
                progress=progress,
            )
        name, tokens = self.register(identity, manifest.revision), unpack(manifest.tokens)
        opening = manifest.turns[0] if manifest.turns else len(tokens)
        head = Branch.of(name, tokens, manifest.turns, n_opening=opening, main=True, model=model)
        called = agent_id or name_of(manifest, bundle.name)
        agent = self.agents.create(called, head, metadata=manifest.metadata)
        if manifest.turn is not None and agent.blocks:
            self.agents.turns.keep(agent.id, tokens, agent.blocks[-1], manifest.turn)
        return agent

    def text_bytes(self) -> dict[str, int]:
        """Bytes of agents' messages and of stored responses; `disk.stats` counts them too."""
        root = self.disk.root
        return {f"{name}_bytes": bytes_under(root / name) for name in ("messages", "responses")}

    def clear(self, progress: Progress = no_progress) -> Cleared:
        """Delete every agent and every block, also from the memory of all processes."""
        self.disk.forget_all()
        with as_store_errors(self.disk, "look for the blocks of agents"):
            agents = list(self.agents.all()) if self.tombstones.read_places() else []
        n_agents = self.agents.delete_all()
        stored = list(self.disk.walk())
        names, keys = {one.namespace for one in stored}, [one.key for one in stored]
        names.update(*map(namespaces_of, agents))
        gone = (block for agent in agents for block in named_blocks(agent))
        return Cleared(
            n_agents, delete_everywhere(self.disk, names, keys, gone=gone, progress=progress)
        )

    def blocks_of_agents(self) -> set[BlockKey]:
        """The blocks of all agents: shared tiers keep them when others are deleted."""
        with as_store_errors(self.disk, "look for the blocks of agents"):
            return used_by(self.disk, self.agents.in_use())

    def close(self) -> None:
        self.counts.save()
        self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _identity_path(self, name: Namespace) -> Path:
        return file_path(self.disk, "models", name.hex())

    def _unverified_path(self, name: Namespace) -> Path:
        """Not in the index, which may be lost while the blocks stay."""
        return file_path(self.disk, "models", f"{name.hex()}-unverified")


def name_of(manifest: Manifest, file: Path | str) -> str:
    """Of an agent that is imported without an id; no author names an agent of an API key."""
    return re.sub(f"^({TENANT})+", "", manifest.agent or Path(file).stem)


@contextmanager
def _opened(source: Path | BundleSource) -> Iterator[BundleSource]:
    if isinstance(source, BundleSource):
        yield source
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise BadCacheFile(f"{source} could not be read ({error}); check it.") from error
    with file:
        yield BundleSource(str(source), file, os.fstat(file.fileno()).st_size)


def handshake_with(settings: Settings) -> Callable[[bytes], bytes]:
    """For a new encrypted store: the marker, or that of the first remote store which answers."""
    if not settings.remotes:
        return bytes
    from keepwarm.remote.handshake import handshake  # only fleets need it

    return handshake(settings.remotes, settings.read_secret("remote_password"))
