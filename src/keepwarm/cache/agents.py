"""Named conversations: which blocks an agent has, where its turns end, what is promised to it.

An agent is a record of its own, `agents/<id>.json`, published like a block (sealed, and under a
hidden name, in a sealed store). It names blocks and copies none, so a fork or a rewind costs a
small file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from keepwarm.errors import BadInput, BadRecord, NewerFormat, UnknownAgent
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain
from keepwarm.store.disk import DiskTier
from keepwarm.store.tier import telling
from keepwarm.store.upkeep import (
    Progress,
    delete_branches,
    file_path,
    quietly,
    read_file,
    write_file,
)

VERSION = 1
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, BadRecord, NewerFormat)


@dataclass(frozen=True)
class Agent:
    id: str
    namespace: Namespace
    blocks: tuple[BlockKey, ...] = ()  # from the first token on; the last may be open
    n_tokens: int = 0
    turns: tuple[int, ...] = ()  # where each turn ended, in tokens
    pinned: bool = False
    quota_bytes: int | None = None  # this much of it nobody else may evict
    retention_s: float | None = None  # forgotten when unused for longer
    created: float = 0.0
    used: float = 0.0
    forked_from: str = ""

    def to_json(self) -> str:
        fields = (
            {"version": VERSION}
            | asdict(self)
            | {
                "namespace": self.namespace.hex(),
                "blocks": [key.hex() for key in self.blocks],
            }
        )
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Agent:
        fields: dict[str, Any] = json.loads(text)
        version = fields.pop("version", 1)  # it was not said at first
        if version > VERSION:
            raise NewerFormat(f"agent version {version} is newer than {VERSION}")
        return cls(
            **fields
            | {
                "namespace": Namespace(bytes.fromhex(fields["namespace"])),
                "blocks": tuple(BlockKey(bytes.fromhex(key)) for key in fields["blocks"]),
                "turns": tuple(fields["turns"]),
            }
        )


class Agents:
    """All agents of one store directory."""

    def __init__(self, disk: DiskTier, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._clock = clock

    def all(self) -> Iterator[Agent]:
        """Those that can be read; `unreadable` names the others."""
        found = [agent for _, agent in self._each() if isinstance(agent, Agent)]
        return iter(sorted(found, key=lambda agent: agent.id))

    def unreadable(self) -> Iterator[tuple[str, Exception]]:
        """Files torn by hand or written by a newer Keepwarm, and what was said of each."""
        for path, why in self._each():
            if isinstance(why, Exception):
                yield path.name, why

    def _each(self) -> Iterator[tuple[Path, Agent | Exception]]:
        for path in self._directory.glob("*.json"):
            try:
                yield path, self._read(path)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except UNREADABLE as error:
                yield path, error

    def show(self, agent_id: str) -> Agent:
        path = self._path(agent_id)
        try:
            return self._read(path)
        except FileNotFoundError as error:
            raise UnknownAgent(f"There is no agent {agent_id!r}; `cache ls` names them.") from error
        except NewerFormat as error:
            raise BadInput(
                f"Agent {agent_id!r} was written by a newer Keepwarm; update this one."
            ) from error
        except UNREADABLE as error:
            raise BadInput(
                f"Agent {agent_id!r} is not as it was written ({error}); remove {path}."
            ) from error

    def _read(self, path: Path) -> Agent:
        return Agent.from_json(read_file(self._disk, path).decode())

    def create(self, agent_id: str, namespace: Namespace, **promises: Any) -> Agent:
        if self._path(agent_id).exists():
            raise BadInput(f"There is an agent {agent_id!r} already; choose another id.")
        now = self._clock()
        return self._save(Agent(agent_id, namespace, created=now, used=now, **promises))

    def advance(self, agent_id: str, namespace: Namespace, tokens: Sequence[int]) -> Agent:
        """Say what an agent's conversation is now, at the end of a turn; made if it is new."""
        try:
            agent = self.show(agent_id)
        except UnknownAgent:
            agent = self.create(agent_id, namespace)
        blocks = tuple(ref.key for ref in chain(namespace, tokens))
        kept = [n for n in agent.turns if _same_until(agent, blocks, n)]
        turns = (*(n for n in kept if n < len(tokens)), len(tokens))
        return self._save(
            replace(
                agent,
                namespace=namespace,
                blocks=blocks,
                n_tokens=len(tokens),
                turns=turns,
                used=self._clock(),
            )
        )

    def fork(self, agent_id: str, new_id: str) -> Agent:
        """Another agent with the same past. No block is copied."""
        old = self.show(agent_id)
        return self.create(
            new_id,
            old.namespace,
            blocks=old.blocks,
            n_tokens=old.n_tokens,
            turns=old.turns,
            forked_from=agent_id,
        )

    def rewind(self, agent_id: str, turn: int) -> Agent:
        """Forget the turns after this one (0: all of them). Their blocks stay until evicted."""
        agent = self.show(agent_id)
        if not 0 <= turn <= len(agent.turns):
            raise BadInput(f"{agent_id!r} has {len(agent.turns)} turns; there is no turn {turn}.")
        n_tokens = agent.turns[turn - 1] if turn else 0
        n_blocks = -(-n_tokens // BLOCK_TOKENS)
        return self._save(
            replace(
                agent,
                blocks=agent.blocks[:n_blocks],
                n_tokens=n_tokens,
                turns=agent.turns[:turn],
            )
        )

    def promise(self, agent_id: str, **changes: Any) -> Agent:
        """Change what an agent was promised: `pinned`, `quota_bytes`, `retention_s`."""
        return self._save(replace(self.show(agent_id), **changes))

    def delete(self, agent_id: str, progress: Progress = quietly) -> int:
        """Remove an agent and every block no other agent reaches; answers with their number.

        What only anonymous requests used goes too, where it descends from the agent's own blocks.
        Nothing of its tokens is left in any file.
        """
        agent = self.show(agent_id)
        self._refuse_newer()
        others = {key for other in self.all() if other.id != agent_id for key in other.blocks}
        self._disk.unpin_owner(_owner(agent_id))
        removed = delete_branches(self._disk, agent.blocks, others, progress)
        with telling(self._disk, f"remove agent {agent_id!r}"):
            self._disk.files.remove(self._path(agent_id))
        return removed

    def _refuse_newer(self) -> None:
        """Raise where some agent cannot be asked what it shares with others."""
        for name, why in self.unreadable():
            if isinstance(why, NewerFormat):
                raise BadInput(
                    f"{name} was written by a newer Keepwarm, and what it shares with others is "
                    "not known here; update this one before deleting agents."
                )

    def expire(self, progress: Progress = quietly) -> list[str]:
        """Delete the agents that were unused for longer than their retention."""
        now = self._clock()
        gone = [
            agent.id
            for agent in self.all()
            if agent.retention_s is not None and not agent.pinned
            if now - agent.used > agent.retention_s
        ]
        for number, agent_id in enumerate(gone):
            self.delete(agent_id)
            progress(number + 1, len(gone))
        return gone

    @property
    def _directory(self) -> Path:
        return self._disk.root / "agents"

    def check_id(self, agent_id: str) -> None:
        """Refuse what cannot be an agent's id; ids become file names."""
        if not ID.fullmatch(agent_id):
            raise BadInput(
                f"{agent_id!r} is no agent id; use up to 128 letters, digits and . _ @ -, "
                "beginning with a letter or digit."
            )

    def _path(self, agent_id: str) -> Path:
        self.check_id(agent_id)
        return file_path(self._disk, "agents", agent_id)

    def _save(self, agent: Agent) -> Agent:
        write_file(self._disk, self._path(agent.id), agent.to_json().encode())
        self._hold(agent)
        return agent

    def hold_all(self) -> None:
        """Pin again what was promised to anybody: an index that is built anew knows no pins."""
        for agent in self.all():
            self._hold(agent)

    def _hold(self, agent: Agent) -> None:
        """Pin what was promised. Eviction takes leaves only, so a pin holds all its ancestors."""
        self._disk.unpin_owner(_owner(agent.id))
        if agent.pinned:
            last = len(agent.blocks)
        elif agent.quota_bytes:
            last = self._n_within(agent.blocks, agent.quota_bytes)
        else:
            return
        if last:
            self._disk.pin(agent.blocks[last - 1], _owner(agent.id))

    def _n_within(self, blocks: Sequence[BlockKey], n_bytes: int) -> int:
        """How many leading blocks fit into a quota."""
        known = self._disk.have(blocks)
        total = 0
        for n, key in enumerate(blocks):
            total += known[key].n_bytes if key in known else 0
            if total > n_bytes:
                return n
        return len(blocks)


def _owner(agent_id: str) -> str:
    return f"agent:{agent_id}"


def _same_until(agent: Agent, blocks: Sequence[BlockKey], n_tokens: int) -> bool:
    """Whether a new conversation still has this much of the old one, by whole blocks."""
    n_blocks = n_tokens // BLOCK_TOKENS
    return agent.blocks[:n_blocks] == tuple(blocks[:n_blocks])
