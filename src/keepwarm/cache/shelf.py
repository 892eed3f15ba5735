"""The part of a store that lies on disk: blocks, agents, the models they belong to, wear.

Needs no MLX, so that looking at a store is quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from keepwarm.cache.agents import Agent, Agents
from keepwarm.cache.bundle import export_bundle, import_bundle
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import Namespace, unpack
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.store.disk import DiskLimits, DiskTier
from keepwarm.store.upkeep import write_file
from keepwarm.store.wear import Wear


class Shelf:
    def __init__(
        self, root: Path, limits: DiskLimits | None = None, writes_per_day: int | None = None
    ) -> None:
        self.disk = DiskTier(root, limits)
        self.agents = Agents(self.disk)
        self.wear = Wear(root, writes_per_day)

    def register(self, identity: Identity) -> Namespace:
        """Remember which model a namespace stands for; bundles name it."""
        name = namespace(identity)
        path = self._identity_path(name)
        if not path.exists():
            write_file(self.disk, path, json.dumps(asdict(identity)).encode())
        return name

    def identity_of(self, name: Namespace) -> Identity:
        try:
            return Identity(**json.loads(self._identity_path(name).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(
                "The model of these blocks is not known here; run it once, then try again."
            ) from error

    def tokens_of(self, agent: Agent) -> list[int]:
        """The agent's conversation, read back from its blocks as far as they are there."""
        tokens: list[int] = []
        known = self.disk.have(agent.blocks)
        for key in agent.blocks:
            if key not in known:
                break
            record = self.disk.read(key, next(iter(known[key].parts)), tensors=())
            if record is None:
                break
            tokens += unpack(record.header.tokens)
        return tokens[: agent.n_tokens]

    def export_agent(self, agent_id: str, path: Path) -> int:
        """Write an agent into one file; answers with the number of records in it."""
        agent = self.agents.show(agent_id)
        identity, tokens = self.identity_of(agent.namespace), self.tokens_of(agent)
        turns = [n for n in agent.turns if n <= len(tokens)]
        return export_bundle(self.disk, path, identity, tokens, turns=turns, agent=agent_id)

    def import_agent(self, path: Path, expected: Identity, agent_id: str | None = None) -> Agent:
        """Read an agent from a file, verified; refused if it belongs to another model."""
        manifest = import_bundle(self.disk, path, expected)
        name = self.register(manifest.identity)
        tokens = unpack(manifest.tokens)
        return self.agents.create(
            agent_id or manifest.agent or path.stem,
            name,
            blocks=tuple(manifest.blocks),
            n_tokens=len(tokens),
            turns=manifest.turns,
        )

    def close(self) -> None:
        self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _identity_path(self, name: Namespace) -> Path:
        return self.disk.root / "models" / f"{name.hex()}.json"
