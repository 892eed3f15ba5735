"""Named conversations: which blocks an agent has, where its turns end, its pin and its limits.

An agent is a file, `agents/<id>.json`, published like a block (sealed, and under a hidden name, in
a sealed store). It names blocks and copies none, so a fork or a rewind costs a small file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from keepwarm.cache.agents.agent import Agent
from keepwarm.cache.agents.holders import AgentBlock, find_extensions, find_holders
from keepwarm.errors import BadInput, BadRecord, NewerFormat, UnknownAgent
from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    BlockKey,
    Namespace,
    block_key,
    chain,
    common_prefix,
    pack,
    root,
)
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.upkeep import (
    Progress,
    delete_branches,
    file_path,
    no_progress,
    read_file,
    write_file,
)
from keepwarm.store.eviction import CLOCK_TOLERANCE_S
from keepwarm.store.tier import as_store_errors

MAX_UNCHECKED_LEFT = 64  # abandoned blocks listed without checking that they still exist
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, BadRecord, NewerFormat)


class Agents:
    """All agents of one store directory."""

    def __init__(self, disk: DiskTier, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._clock = clock

    def all(self) -> Iterator[Agent]:
        """All readable agents; `unreadable` lists the others."""
        found = [agent for _, agent in self._each() if isinstance(agent, Agent)]
        return iter(sorted(found, key=lambda agent: agent.id))

    def unreadable(self) -> Iterator[tuple[str, Exception]]:
        """Files that are damaged or from a newer Keepwarm, each with its error."""
        for path, why in self._each():
            if isinstance(why, Exception):
                yield path.name, why

    def _each(self) -> Iterator[tuple[Path, Agent | Exception]]:
        for path in self._directory.glob("*.json"):
            try:
                yield path, self._read(path)
            except FileNotFoundError:
                continue  # deleted by another process
            except UNREADABLE as error:
                yield path, error

    def show(self, agent_id: str) -> Agent:
        path = self._path(agent_id)
        try:
            return self._read(path)
        except FileNotFoundError as error:
            raise UnknownAgent(f"There is no agent {agent_id!r}; `cache ls` lists them.") from error
        except NewerFormat as error:
            raise BadInput(
                f"Agent {agent_id!r} was written by a newer Keepwarm; update this one."
            ) from error
        except UNREADABLE as error:
            raise BadInput(
                f"The file of agent {agent_id!r} is damaged ({error}); delete {path}."
            ) from error

    def _read(self, path: Path) -> Agent:
        return Agent.from_json(read_file(self._disk, path).decode())

    def create(self, agent_id: str, namespace: Namespace, **fields: Any) -> Agent:
        if self._path(agent_id).exists():
            raise BadInput(f"Agent {agent_id!r} already exists; choose another id.")
        now = self._clock()
        return self._save(Agent(agent_id, namespace, created=now, used=now, **fields))

    def advance(self, agent_id: str, namespace: Namespace, tokens: Sequence[int]) -> Agent:
        """Record an agent's conversation at the end of a turn; creates the agent if it is new."""
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
                left=self._existing(_left(agent, _n_kept(agent, namespace, blocks, tokens))),
            )
        )

    def fork(self, agent_id: str, new_id: str) -> Agent:
        """A new agent with the same history. No block is copied."""
        old = self.show(agent_id)
        return self.create(
            new_id,
            old.namespace,
            blocks=old.blocks,
            n_tokens=old.n_tokens,
            turns=old.turns,
            forked_from=agent_id,
            left=tuple(block for block in old.left if block.key in old.blocks),
        )

    def rewind(self, agent_id: str, turn: int) -> Agent:
        """Remove the turns after this one (0: all of them).

        Their blocks stay until they are evicted or the agent is deleted.
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

    def move(self, agent_id: str, namespace: Namespace, tokens: Sequence[int]) -> Agent:
        """Have an agent use the blocks of these tokens, its first ones, in another namespace.

        Its old blocks are deleted, but for those that other agents use.
        """
        agent = self.show(agent_id)
        moved = replace(
            agent,
            namespace=namespace,
            blocks=tuple(ref.key for ref in chain(namespace, tokens)),
            n_tokens=len(tokens),
            turns=tuple(n for n in agent.turns if n <= len(tokens)),
            left=(),
        )
        self._save(moved)
        with as_store_errors(self._disk, f"delete the old blocks of agent {agent_id!r}"):
            keep = self._used_by(list(self.all()))
            delete_branches(self._disk, self._blocks_to_delete(agent, keep), keep)
        return moved

    def _existing(self, left: tuple[AgentBlock, ...]) -> tuple[AgentBlock, ...]:
        """Those still on disk; checked only when there are many.

        One that was replaced by a longer block is listed as that block from then on.
        """
        if len(left) <= MAX_UNCHECKED_LEFT:
            return left
        known = self._disk.have([block.key for block in left])
        gone = [block for block in left if block.key not in known]
        kept = [block for block in left if block.key in known]
        longer = (found.header for found in find_extensions(self._disk, gone))
        kept += [AgentBlock(it.key, it.parent, len(it.tokens) // 4) for it in longer]
        return tuple(dict.fromkeys(kept))

    def update(self, agent_id: str, **changes: Any) -> Agent:
        """Change `pinned`, `quota_bytes` or `retention_s`."""
        return self._save(replace(self.show(agent_id), **changes))

    def delete(self, agent_id: str, progress: Progress = no_progress) -> int:
        """Delete an agent and every block that no other agent uses; the number of blocks.

        This includes blocks that the agent abandoned, and those of anonymous requests that
        continue its own. Afterwards its tokens are only in blocks that other agents use; a block
        of which another agent uses the beginning stays whole.
        """
        agent = self.show(agent_id)
        self._refuse_newer()
        with as_store_errors(self._disk, f"delete agent {agent_id!r}"):
            keep = self._used_by([other for other in self.all() if other.id != agent_id])
            self._disk.pin_only(_owner(agent_id), ())
            keys = self._blocks_to_delete(agent, keep)
            n_deleted = delete_branches(self._disk, keys, keep, progress)
            self._disk.files.remove(self._path(agent_id))
            self._disk.flush()
        return n_deleted

    def _used_by(self, agents: Sequence[Agent]) -> set[BlockKey]:
        """Their blocks; for a tail that is missing, the longer blocks that replaced it."""
        tails = [agent.sized_blocks[-1] for agent in agents if agent.blocks]
        known = self._disk.have([tail.key for tail in tails])
        missing = (tail for tail in tails if tail.key not in known)
        keys = {key for agent in agents for key in agent.blocks}
        return keys | {found.header.key for found in find_extensions(self._disk, missing)}

    def _blocks_to_delete(self, agent: Agent, keep: Collection[BlockKey]) -> list[BlockKey]:
        """What an agent has or had, and every block that continues the end of one of its turns,
        unless other agents share that end.
        """
        blocks = [*agent.sized_blocks, *agent.left]
        found = list(find_extensions(self._disk, [*blocks, *self._ends(agent)]))
        shared = {one.block for one in found if one.header.key in keep}
        longer = [one.header.key for one in found if one.block not in shared]
        return [*(block.key for block in blocks), *longer]

    def _ends(self, agent: Agent) -> Iterator[AgentBlock]:
        """The blocks that ended with a turn; longer ones may have replaced them."""
        parents = (root(agent.namespace), *agent.blocks)
        held = list(find_holders(self._disk, agent.sized_blocks, agent.n_tokens))
        for number, n_tokens in (divmod(turn, BLOCK_TOKENS) for turn in agent.turns):
            if n_tokens and number < len(held):
                tokens = held[number].tokens[: 4 * n_tokens]
                key = block_key(agent.namespace, parents[number], tokens)
                yield AgentBlock(key, parents[number], n_tokens)

    def _refuse_newer(self) -> None:
        """Raise if the blocks of some agent cannot be listed."""
        for name, why in self.unreadable():
            if isinstance(why, NewerFormat):
                raise BadInput(
                    f"{name} was written by a newer Keepwarm, so it is unknown which blocks it "
                    "shares; update this one before deleting agents."
                )

    def expire(self, progress: Progress = no_progress) -> list[str]:
        """Delete the agents that were unused for longer than their retention."""
        gone = self.expired()
        for number, agent_id in enumerate(gone):
            self.delete(agent_id)
            progress(number + 1, len(gone))
        return gone

    def expired(self, grace_s: float = 0.0) -> list[str]:
        """Agents unused for longer than their retention plus a grace period."""
        now = self._clock()
        kept = [a for a in self.all() if a.retention_s is not None and not a.pinned]
        for agent in kept:
            if agent.used > now + CLOCK_TOLERANCE_S:  # the clock was set back since
                self._save(replace(agent, used=now))
        return [a.id for a in kept if now - grace_s - a.used > (a.retention_s or 0.0)]

    @property
    def _directory(self) -> Path:
        return self._disk.root / "agents"

    def check_id(self, agent_id: str) -> None:
        """Raise if this cannot be an agent's id; ids become file names."""
        if not ID.fullmatch(agent_id):
            raise BadInput(
                f"{agent_id!r} is not an agent id; use up to 128 letters, digits and . _ @ -, "
                "beginning with a letter or digit."
            )

    def _path(self, agent_id: str) -> Path:
        self.check_id(agent_id)
        return file_path(self._disk, "agents", agent_id)

    def _save(self, agent: Agent) -> Agent:
        write_file(self._disk, self._path(agent.id), agent.to_json().encode())
        self._pin(agent)
        return agent

    def pin_all(self) -> None:
        """Pin the blocks of all agents again, because a rebuilt index has no pins."""
        for agent in self.all():
            self._pin(agent)

    def _pin(self, agent: Agent) -> None:
        """Pin all blocks or the quota. Only leaves are evicted, so a pin protects all ancestors."""
        last = 0
        if agent.pinned:
            last = len(agent.blocks)
        elif agent.quota_bytes:
            last = self._n_within(agent.blocks, agent.quota_bytes)
        keys = list(self._blocks_to_pin(agent.sized_blocks[:last]))
        self._disk.pin_only(_owner(agent.id), keys)

    def _blocks_to_pin(self, blocks: Sequence[AgentBlock]) -> Iterator[BlockKey]:
        """The last block, stored or not; a longer one in its place; the last before each gap."""
        known = self._disk.have([block.key for block in blocks])
        for number, block in enumerate(blocks, start=1):
            is_there, follows = block.key in known, blocks[number : number + 1]
            if not follows or (is_there and follows[0].key not in known):
                yield block.key
        if blocks and blocks[-1].key not in known:
            longer = find_extensions(self._disk, blocks[-1:])
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
    """How many of its blocks an agent keeps with these tokens; all of them if it continues."""
    n_same = common_prefix(agent.blocks, blocks)
    if n_same != len(agent.blocks) - 1:
        return n_same
    parent = blocks[n_same - 1] if n_same else root(namespace)
    open_tokens = pack(tokens[n_same * BLOCK_TOKENS : agent.n_tokens])
    return n_same + (block_key(namespace, parent, open_tokens) == agent.blocks[-1])


def _left(agent: Agent, n_kept: int) -> tuple[AgentBlock, ...]:
    """Its abandoned blocks, once it keeps only the first `n_kept`."""
    return tuple(dict.fromkeys((*agent.left, *agent.sized_blocks[n_kept:])))


def _same_until(agent: Agent, blocks: Sequence[BlockKey], n_tokens: int) -> bool:
    """Whether the whole blocks of the first tokens are unchanged."""
    n_blocks = n_tokens // BLOCK_TOKENS
    return agent.blocks[:n_blocks] == tuple(blocks[:n_blocks])
