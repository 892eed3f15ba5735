"""The part of a store that lies on disk: blocks, agents, the models they belong to, wear.

Needs no MLX, so that looking at a store is quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Self

from keepwarm.cache.agents import Agent, Agents
from keepwarm.cache.bundle import Manifest, export_bundle, import_bundle
from keepwarm.errors import BadInput, BadRecord
from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    BlockKey,
    Namespace,
    block_key,
    chain,
    root,
    unpack,
)
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.store.disk import DiskLimits, DiskTier
from keepwarm.store.seal import stored_namespace
from keepwarm.store.tier import Known
from keepwarm.store.unlock import unlock
from keepwarm.store.upkeep import file_path, read_file, write_file
from keepwarm.store.wear import Wear


class Holder(NamedTuple):
    """A block on disk and those of its tokens that are an agent's."""

    key: BlockKey
    tokens: bytes


class Shelf:
    def __init__(
        self,
        root: Path,
        limits: DiskLimits | None = None,
        writes_per_day: int | None = None,
        secret: str | None = None,
    ) -> None:
        self.disk = DiskTier(root, limits, seal=unlock(root, secret))
        self.agents = Agents(self.disk)
        self.wear = Wear(root, writes_per_day)

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
        """The blocks that hold an agent's conversation, as far as they are there.

        Its open block may have been outgrown by a longer one, which then stands in for it.
        """
        known = self.disk.have(agent.blocks)
        parent = root(agent.namespace)
        for number, key in enumerate(agent.blocks):
            n_tokens = min(BLOCK_TOKENS, agent.n_tokens - number * BLOCK_TOKENS)
            if key in known:
                tokens = self._tokens(key, known[key])
                found = Holder(key, tokens[: 4 * n_tokens]) if tokens is not None else None
            else:
                found = self._outgrower(agent.namespace, parent, key, n_tokens)
            if found is None:
                return
            yield found
            parent = key

    def tokens_of(self, agent: Agent) -> list[int]:
        """The agent's conversation, read back from its blocks as far as they are there."""
        return [token for holder in self.holders(agent) for token in unpack(holder.tokens)]

    def _tokens(self, key: BlockKey, known: Known) -> bytes | None:
        record = self.disk.read(key, next(iter(known.parts)), tensors=())
        return record.header.tokens if record is not None else None

    def _outgrower(
        self, name: Namespace, parent: BlockKey, key: BlockKey, n_tokens: int
    ) -> Holder | None:
        """A longer sibling that begins with the tokens this key is the hash of."""
        children = self.disk.index.children_of(parent)
        for child, known in self.disk.have(children).items():
            tokens = (self._tokens(child, known) or b"")[: 4 * n_tokens]
            if block_key(name, parent, tokens) == key:
                return Holder(child, tokens)
        return None

    def export_agent(self, agent_id: str, path: Path) -> int:
        """Write an agent into one file; answers with the number of records in it."""
        agent = self.agents.show(agent_id)
        holders = list(self.holders(agent))
        tokens = b"".join(holder.tokens for holder in holders)
        manifest = Manifest(
            identity=self.identity_of(agent.namespace),
            tokens=tokens,
            blocks=tuple(holder.key.hex() for holder in holders),
            turns=tuple(n for n in agent.turns if 4 * n <= len(tokens)),
            agent=agent_id,
        )
        return export_bundle(self.disk, path, manifest)

    def import_agent(self, path: Path, expected: Identity, agent_id: str | None = None) -> Agent:
        """Read an agent from a file, verified; refused if it belongs to another model."""
        manifest = import_bundle(self.disk, path, expected)
        name = self.register(manifest.identity)
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
