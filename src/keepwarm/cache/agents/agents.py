"""Named conversations: which blocks an agent has, where its turns end, what is promised to it.

An agent is a record of its own, `agents/<id>.json`, published like a block (sealed, and under a
hidden name, in a sealed store). It names blocks and copies none, so a fork or a rewind costs a
small file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from keepwarm.cache.agents.holders import Head, begun_with, holders
from keepwarm.errors import BadInput, BadRecord, NewerFormat, UnknownAgent
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, chain, pack, root
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.upkeep import (
    Progress,
    delete_branches,
    file_path,
    no_progress,
    read_file,
    write_file,
)
from keepwarm.store.tier import as_store_errors

VERSION = 2  # 1 did not say what an agent has left
MANY_LEFT = 64  # so many are kept without asking whether they are still there
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
    left: tuple[Head, ...] = ()  # blocks of a past that it has taken back, as long as they last

    @property
    def heads(self) -> list[Head]:
        """Its blocks. One that it was rewound into is longer than what the agent has of it."""
        longer = {head.key: head for head in self.left}
        parents = (root(self.namespace), *self.blocks)
        sizes = (self.n_tokens - n * BLOCK_TOKENS for n in range(len(self.blocks)))
        return [
            longer.get(key) or Head(key, parent, min(n_tokens, BLOCK_TOKENS))
            for key, parent, n_tokens in zip(self.blocks, parents, sizes, strict=False)
        ]

    def to_json(self) -> str:
        fields = (
            {"version": VERSION}
            | asdict(self)
            | {
                "namespace": self.namespace.hex(),
                "blocks": [key.hex() for key in self.blocks],
                "left": [[key.hex(), parent.hex(), n] for key, parent, n in self.left],
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
                "left": tuple(_head(*head) for head in fields.get("left", ())),
            }
        )


def _head(key: str, parent: str, n_tokens: int) -> Head:
    return Head(BlockKey(bytes.fromhex(key)), BlockKey(bytes.fromhex(parent)), n_tokens)


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
                left=self._lasting(_left(agent, _n_kept(agent, namespace, blocks, tokens))),
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
            left=tuple(head for head in old.left if head.key in old.blocks),
        )

    def rewind(self, agent_id: str, turn: int) -> Agent:
        """Forget the turns after this one (0: all of them).

        Their blocks stay until they are evicted, or the agent is deleted.
        """
        agent = self.show(agent_id)
        if not 0 <= turn <= len(agent.turns):
            raise BadInput(f"{agent_id!r} has {len(agent.turns)} turns; there is no turn {turn}.")
        n_tokens = agent.turns[turn - 1] if turn else 0
        n_blocks = -(-n_tokens // BLOCK_TOKENS)
        is_all = n_tokens == agent.n_tokens
        return self._save(
            replace(
                agent,
                blocks=agent.blocks[:n_blocks],
                n_tokens=n_tokens,
                turns=agent.turns[:turn],
                left=agent.left if is_all else _left(agent, n_tokens // BLOCK_TOKENS),
            )
        )

    def _lasting(self, left: tuple[Head, ...]) -> tuple[Head, ...]:
        """Those of which something is there; asked only where they are many.

        An outgrown one gives way to what has outgrown it, which need not be looked for again.
        """
        if len(left) <= MANY_LEFT:
            return left
        known = self._disk.have([head.key for head in left])
        gone = [head for head in left if head.key not in known]
        kept = [head for head in left if head.key in known]
        longer = (found.header for found in begun_with(self._disk, gone))
        kept += [Head(it.key, it.parent, len(it.tokens) // 4) for it in longer]
        return tuple(dict.fromkeys(kept))

    def promise(self, agent_id: str, **changes: Any) -> Agent:
        """Change what an agent was promised: `pinned`, `quota_bytes`, `retention_s`."""
        return self._save(replace(self.show(agent_id), **changes))

    def delete(self, agent_id: str, progress: Progress = no_progress) -> int:
        """Remove an agent and every block no other agent reaches; answers with their number.

        What only anonymous requests used goes too, where it descends from the agent's own blocks.
        So does what the agent has taken back. Nothing of its tokens is left in any file, but for
        blocks that others reach: one of which another agent has the beginning stays whole.
        """
        agent = self.show(agent_id)
        self._refuse_newer()
        with as_store_errors(self._disk, f"remove agent {agent_id!r}"):
            keep = self._reached([other for other in self.all() if other.id != agent_id])
            self._disk.pin_only(_owner(agent_id), ())
            removed = delete_branches(self._disk, self._own(agent, keep), keep, progress)
            self._disk.files.remove(self._path(agent_id))
        return removed

    def _reached(self, agents: Sequence[Agent]) -> set[BlockKey]:
        """What these hold; where a tail is not there, what stands in for it."""
        tails = [agent.heads[-1] for agent in agents if agent.blocks]
        known = self._disk.have([tail.key for tail in tails])
        missing = (tail for tail in tails if tail.key not in known)
        keys = {key for agent in agents for key in agent.blocks}
        return keys | {found.header.key for found in begun_with(self._disk, missing)}

    def _own(self, agent: Agent, reached: Collection[BlockKey]) -> list[BlockKey]:
        """What an agent has or had, and every block that goes on from the end of a turn, unless
        that is an end that others have reached too.
        """
        heads = [*agent.heads, *agent.left]
        begun = list(begun_with(self._disk, [*heads, *self._ends(agent)]))
        shared = {found.head for found in begun if found.header.key in reached}
        longer = [found.header.key for found in begun if found.head not in shared]
        return [*(head.key for head in heads), *longer]

    def _ends(self, agent: Agent) -> Iterator[Head]:
        """The blocks that ended with a turn; they are not there any more where it went on."""
        parents = (root(agent.namespace), *agent.blocks)
        held = list(holders(self._disk, agent.heads, agent.n_tokens))
        for number, n_tokens in (divmod(turn, BLOCK_TOKENS) for turn in agent.turns):
            if n_tokens and number < len(held):
                tokens = held[number].tokens[: 4 * n_tokens]
                key = block_key(agent.namespace, parents[number], tokens)
                yield Head(key, parents[number], n_tokens)

    def _refuse_newer(self) -> None:
        """Raise where some agent cannot be asked what it shares with others."""
        for name, why in self.unreadable():
            if isinstance(why, NewerFormat):
                raise BadInput(
                    f"{name} was written by a newer Keepwarm, and what it shares with others is "
                    "not known here; update this one before deleting agents."
                )

    def expire(self, progress: Progress = no_progress) -> list[str]:
        """Delete the agents that were unused for longer than their retention."""
        gone = self.expired()
        for number, agent_id in enumerate(gone):
            self.delete(agent_id)
            progress(number + 1, len(gone))
        return gone

    def expired(self, grace_s: float = 0.0) -> list[str]:
        """Those that were unused for longer than their retention, and for so much more."""
        now = self._clock() - grace_s
        return [
            agent.id
            for agent in self.all()
            if agent.retention_s is not None and not agent.pinned
            if now - agent.used > agent.retention_s
        ]

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
        last = 0
        if agent.pinned:
            last = len(agent.blocks)
        elif agent.quota_bytes:
            last = self._n_within(agent.blocks, agent.quota_bytes)
        keys = list(self._ends_of_runs(agent.heads[:last]))
        self._disk.pin_only(_owner(agent.id), keys)

    def _ends_of_runs(self, heads: Sequence[Head]) -> Iterator[BlockKey]:
        """The last block, there or not; what stands in for it; and the last before each gap."""
        known = self._disk.have([head.key for head in heads])
        for number, head in enumerate(heads, start=1):
            is_there, follows = head.key in known, heads[number : number + 1]
            if not follows or (is_there and follows[0].key not in known):
                yield head.key
        if heads and heads[-1].key not in known:
            longer = begun_with(self._disk, heads[-1:])
            yield from (found.header.key for found in islice(longer, 1))

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


def _n_kept(
    agent: Agent, namespace: Namespace, blocks: Sequence[BlockKey], tokens: Sequence[int]
) -> int:
    """How many of its blocks an agent keeps when it says this: all of them where it goes on."""
    pairs = zip(agent.blocks, blocks, strict=False)
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if n_same != len(agent.blocks) - 1:
        return n_same
    parent = blocks[n_same - 1] if n_same else root(namespace)
    begun = pack(tokens[n_same * BLOCK_TOKENS : agent.n_tokens])  # of its open block
    return n_same + (block_key(namespace, parent, begun) == agent.blocks[-1])


def _left(agent: Agent, n_kept: int) -> tuple[Head, ...]:
    """What it has left when it keeps so many of its blocks."""
    return tuple(dict.fromkeys((*agent.left, *agent.heads[n_kept:])))


def _same_until(agent: Agent, blocks: Sequence[BlockKey], n_tokens: int) -> bool:
    """Whether a new conversation still has this much of the old one, by whole blocks."""
    n_blocks = n_tokens // BLOCK_TOKENS
    return agent.blocks[:n_blocks] == tuple(blocks[:n_blocks])
