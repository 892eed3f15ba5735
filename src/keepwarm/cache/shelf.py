"""The part of a store that lies on disk: blocks, agents, the models they belong to, wear.

Needs no MLX, so that looking at a store is quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, Self

from keepwarm.cache.agents.agents import Agent, Agents
from keepwarm.cache.agents.bundle import Manifest, export_bundle, import_bundle
from keepwarm.cache.agents.holders import Holder, header_of, holders
from keepwarm.cache.agents.pins import Marks
from keepwarm.errors import BadInput, BadRecord
from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    Namespace,
    chain,
    unpack,
)
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.disk.upkeep import Progress, file_path, no_progress, read_file, write_file
from keepwarm.store.disk.wear import Wear
from keepwarm.store.seal import stored_namespace
from keepwarm.store.tier import as_store_errors
from keepwarm.store.unlock import unlock

MARK = "@"  # no agent's id begins so
ID_DIGITS = 12
PINS_MADE = "pins made"  # a note in the index: it was new once, and knew no pins


class Prefix(NamedTuple):
    """A prompt that is kept and has no name."""

    id: str
    n_tokens: int
    n_bytes: int  # shared blocks included
    used: float


class Shelf:
    def __init__(
        self,
        root: Path,
        limits: DiskLimits | None = None,
        writes_per_day: int | None = None,
        secret: str | None = None,
    ) -> None:
        try:
            self.disk = DiskTier(root, limits, seal=unlock(root, secret))
        except OSError as error:
            raise BadInput(
                f"The store {root} cannot be used ({error.strerror}); "
                "name another directory as KEEPWARM_STORE."
            ) from error
        self.agents = Agents(self.disk)
        self.marks = Marks(self.disk)
        self.wear = Wear(root, writes_per_day)
        with as_store_errors(self.disk, "pin what agents were promised"):
            if not self.disk.index.database.has_flag(PINS_MADE):
                self.agents.hold_all()
                self.disk.index.database.set_flag(PINS_MADE)

    def register(self, identity: Identity) -> Namespace:
        """Remember which model a namespace stands for; bundles name it."""
        name = stored_namespace(self.disk.seal, namespace(identity))
        path = self._identity_path(name)
        if not path.exists():
            write_file(self.disk, path, json.dumps(asdict(identity)).encode())
        return name

    def identity_of(self, name: Namespace) -> Identity:
        try:
            return Identity(**json.loads(read_file(self.disk, self._identity_path(name))))
        except (OSError, ValueError, TypeError, BadRecord) as error:
            raise BadInput(
                "The model of these blocks is not known here; run it once, then try again."
            ) from error

    def holders(self, agent: Agent) -> Iterator[Holder]:
        """The blocks that hold an agent's conversation, as far as they are there."""
        return holders(self.disk, agent.heads, agent.n_tokens)

    def tokens_of(self, agent: Agent) -> list[int]:
        """The agent's conversation, read back from its blocks as far as they are there."""
        return [token for holder in self.holders(agent) for token in unpack(holder.tokens)]

    def prefixes(self) -> Iterator[Prefix]:
        """The ends of what is kept and is no agent's, used last first."""
        named = {holder.key for agent in self.agents.all() for holder in self.holders(agent)}
        for end in self.disk.index.lookups.leaves():
            if end.key not in named:
                known = self.disk.have(list(self.disk.index.lookups.parents(end.key)))
                n_bytes = sum(one.n_bytes for one in known.values())
                n_tokens = end.number * BLOCK_TOKENS + end.n_tokens
                yield Prefix(f"{MARK}{end.key.hex()[:ID_DIGITS]}", n_tokens, n_bytes, end.used)

    def _prefix(self, text: str) -> Agent:
        """The prefix that ends with the block whose key begins so, as an agent without a name."""
        keys = [
            k for end in self.disk.index.lookups.leaves() if (k := end.key).hex().startswith(text)
        ]
        if len(text) < 4 or len(keys) != 1:
            raise BadInput(
                f"{len(keys)} prefixes are called {MARK}{text}; `cache ls --prefixes` names them."
            )
        way = list(self.disk.index.lookups.parents(keys[0]))[::-1]
        headers = [header_of(self.disk, key, known) for key, known in self.disk.have(way).items()]
        found = {header.key: header for header in headers if header is not None}
        if len(found) < len(way) or found[way[0]].number:
            raise BadInput(f"{MARK}{text} is not whole: what comes before it is gone.")
        n_tokens = sum(len(header.tokens) // 4 for header in found.values())
        return Agent("", found[way[0]].namespace, tuple(way), n_tokens)

    def first(self, agent: Agent, n_tokens: int) -> Agent:
        """The agent as it was when it had so many tokens."""
        tokens = self.tokens_of(agent)
        if not 0 < n_tokens <= len(tokens):
            raise BadInput(f"{len(tokens)} tokens are kept; there are no first {n_tokens}.")
        return replace(
            agent,
            blocks=tuple(ref.key for ref in chain(agent.namespace, tokens[:n_tokens])),
            n_tokens=n_tokens,
            turns=tuple(n for n in agent.turns if n <= n_tokens),
        )

    def find(self, name: str, n_tokens: int | None = None, turn: int | None = None) -> Agent:
        """An agent, or a prefix (`@` and its id), or the first tokens or turns of it."""
        is_prefix = name.startswith(MARK)
        agent = self._prefix(name.removeprefix(MARK)) if is_prefix else self.agents.show(name)
        if turn is not None:
            if not 0 < turn <= len(agent.turns):
                raise BadInput(f"{name!r} has {len(agent.turns)} turns; there is no turn {turn}.")
            n_tokens = agent.turns[turn - 1]
        return agent if n_tokens is None else self.first(agent, n_tokens)

    def export_agent(self, agent: Agent | str, path: Path, progress: Progress = no_progress) -> int:
        """Write an agent, or part of one, into a file; answers with the number of records in it."""
        if isinstance(agent, str):
            agent = self.find(agent)
        holders = list(self.holders(agent))
        tokens = b"".join(holder.tokens for holder in holders)
        manifest = Manifest(
            identity=self.identity_of(agent.namespace),
            tokens=tokens,
            blocks=tuple(holder.key.hex() for holder in holders),
            turns=tuple(n for n in agent.turns if 4 * n <= len(tokens)),
            agent=agent.id,
        )
        return export_bundle(self.disk, path, manifest, progress)

    def import_agent(
        self,
        path: Path,
        expected: Identity,
        agent_id: str | None = None,
        progress: Progress = no_progress,
    ) -> Agent:
        """Read an agent from a file, verified; refused if it belongs to another model.

        Its blocks become those of `expected`, under whosever key they were made.
        """
        manifest = import_bundle(self.disk, self.wear, path, expected, progress)
        name = self.register(expected)
        tokens = unpack(manifest.tokens)
        return self.agents.create(
            agent_id or manifest.agent or path.stem,
            name,
            blocks=tuple(ref.key for ref in chain(name, tokens)),
            n_tokens=len(tokens),
            turns=manifest.turns,
        )

    def close(self) -> None:
        self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _identity_path(self, name: Namespace) -> Path:
        return file_path(self.disk, "models", name.hex())
