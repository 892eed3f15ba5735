"""Named conversations: which blocks an agent has, where its turns end, its pin and its limits.

An agent is a file, `agents/<id>.json`, published like a block (sealed, and under a hidden name, in
a sealed store). It names blocks and copies none, so a fork or a rewind costs a small file.
"""

from __future__ import annotations

import heapq
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from keepwarm.agents.agent import (
    Agent,
    Branch,
    BranchMatcher,
    EndedTurn,
    MatchedBranch,
    check_metadata,
)
from keepwarm.agents.reachability import (
    UNPROTECTED,
    Protection,
    Room,
    abandoned,
    blocks_to_forget,
    delete_blocks,
    dropped_ends,
    existing,
    namespaces_of,
    protection,
    used_by,
)
from keepwarm.agents.shares import AgentLimits, AgentShares
from keepwarm.agents.texts import AgentTexts, TurnFiles
from keepwarm.errors import BadInput, BadRecord, NewerFormat, StoreFailed, UnknownAgent
from keepwarm.files import SharedLock
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain
from keepwarm.prefix.turn import KeptTurn
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.maintenance import (
    Progress,
    file_path,
    no_progress,
    read_file,
    write_file,
)
from keepwarm.store.eviction import CLOCK_TOLERANCE_S
from keepwarm.store.tier import agent_owner, as_store_errors

MAX_SIDES = 8  # branches beside the head and those that are pinned
MAX_RESPONSE_BYTES = 64 << 20  # on disk, of all agents
UNRECORDED = "turn"  # owner of blocks of turns that ended after their agent was deleted
TENANT = r"[0-9a-f]{16}\."  # before the names of its agents
ID = re.compile(rf"({TENANT})?[A-Za-z0-9][A-Za-z0-9._@-]{{0,127}}")
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, BadRecord, NewerFormat)


class Agents:
    """All agents of one store directory."""

    def __init__(
        self,
        disk: DiskTier,
        clock: Callable[[], float] = time.time,
        retention_s: float | None = None,
    ) -> None:
        """`retention_s` is that of new agents."""
        self._disk = disk
        self._retention_s = retention_s
        self._ephemeral: dict[str, Agent] = {}
        self._clock = clock
        self._lock = SharedLock(disk.root / "tmp" / "agents")  # while a file is changed
        self.turns = TurnFiles(disk)
        self.responses = AgentTexts(disk, MAX_RESPONSE_BYTES, clock)
        self._shares: AgentShares | None = None

    def limit(self, limits: AgentLimits) -> None:
        """From now on: for a server, whose keys share the store."""
        self._shares = AgentShares(limits, self._protected)

    def in_use(self) -> Iterator[Agent]:
        """All agents but damaged ones; raises if one cannot be read, or only by a newer Keepwarm:
        its blocks may be those that are about to be deleted.
        """
        yield from self._known()
        yield from list(self._ephemeral.values())  # requests add some meanwhile

    def all(self, prefix: str = "", after: str = "") -> Iterator[Agent]:
        """Readable agents and ephemeral ones whose ids begin so, in the order of their ids, read
        as they are asked for; `unreadable` lists the others.
        """
        by_id = attrgetter("id")
        recorded = self._recorded(prefix, after)
        if self._disk.cipher is not None:  # names of files are hidden, so theirs is another order
            recorded = iter(sorted(recorded, key=by_id))
        found = heapq.merge(recorded, sorted(self._ephemeral.values(), key=by_id), key=by_id)
        return (each for each in found if each.id.startswith(prefix) and each.id > after)

    def _recorded(self, prefix: str = "", after: str = "") -> Iterator[Agent]:
        return (agent for _, agent in self._each(prefix, after) if isinstance(agent, Agent))

    def is_ephemeral(self, agent_id: str) -> bool:
        return agent_id in self._ephemeral

    def unreadable(self) -> Iterator[tuple[str, Exception]]:
        """Files that are damaged or from a newer Keepwarm, each with its error."""
        for path, why in self._each():
            if isinstance(why, Exception):
                yield path.name, why

    def _each(self, prefix: str = "", after: str = "") -> Iterator[tuple[Path, Agent | Exception]]:
        """Where file names are hidden, all."""
        if self._disk.cipher is not None:
            prefix, after = "", ""
        for agent_id in sorted(self._recorded_ids(prefix, after)):
            path = self._directory / f"{agent_id}.json"
            try:
                yield path, self._read(path)
            except FileNotFoundError:
                continue  # deleted by another process
            except UNREADABLE as error:
                yield path, error

    def _recorded_ids(self, prefix: str, after: str) -> Iterator[str]:
        """From the names of files alone; there may be thousands for a page of twenty."""
        with suppress(FileNotFoundError), os.scandir(self._directory) as files:
            for file in files:
                agent_id = file.name.removesuffix(".json")
                is_agent = agent_id != file.name and not file.is_dir(follow_symlinks=False)
                if is_agent and agent_id.startswith(prefix) and agent_id > after:
                    yield agent_id

    def version(self, agent_id: str) -> tuple[int, int] | None:
        """Another one when its file was written again; None if it has none."""
        with suppress(FileNotFoundError):
            file = self._path(agent_id).stat()
            return file.st_ino, file.st_mtime_ns
        return None

    def show(self, agent_id: str) -> Agent:
        path = self._path(agent_id)
        if (ephemeral := self._ephemeral.get(agent_id)) is not None:
            return ephemeral
        try:
            agent = self._read(path)
        except FileNotFoundError as error:
            raise UnknownAgent(
                f"There is no agent {agent_id!r}; list the agents to see their ids."
            ) from error
        except NewerFormat as error:
            raise BadInput(
                f"Agent {agent_id!r} was written by a newer Keepwarm; update this one."
            ) from error
        except OSError as error:
            raise _unread(path, error) from error
        except UNREADABLE as error:
            raise BadInput(
                f"The file of agent {agent_id!r} is damaged ({error}); delete {path}."
            ) from error
        if agent.id != agent_id:  # on a file system that takes ids of other case for the same
            raise BadInput(
                f"The file of agent {agent_id!r} is that of {agent.id!r}; use this id, or one "
                "that differs in more than case."
            )
        return agent

    def _read(self, path: Path) -> Agent:
        return Agent.from_json(read_file(self._disk, path).decode())

    def create(self, agent_id: str, head: Branch, **fields: Any) -> Agent:
        """A new agent; `fields` are those of `Agent`."""
        check_metadata(fields.get("metadata", {}))
        now = self._clock()
        with self._changing():
            self._check_new(agent_id)
            head = replace(head, used=now)
            made = {"created": now, "used": now, "retention_s": self._retention_s}
            agent = Agent(agent_id, head, **made | fields)
            self._check_protection(Agent(agent_id, head), agent)
            return self._save(agent)

    def advance(
        self,
        agent_id: str,
        namespace: Namespace,
        tokens: Sequence[int],
        n_prompt: int | None = None,
        *,
        model: str = "",
        client: str = "",
        called: bool = False,
        continues: bool = False,
        messages: KeptTurn | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Agent | None:
        """Record a turn, in the branch that it continues or in a new one; `n_prompt` of its tokens
        are the prompt. Creates the agent if it is new. `continues`: it was asked of the agent, so
        it is the head, whatever its tokens.

        None if the turn is not wanted any more: the agent was deleted meanwhile. Then the blocks
        that the turn left are deleted too. None also if it were one agent too many.
        """
        n_prompt = len(tokens) if n_prompt is None else n_prompt
        turn = EndedTurn(namespace, tokens, n_prompt, model, called, continues)
        with self._changing():
            if is_wanted():
                return self._record(agent_id, turn, messages, client)
            dropped = Agent("", Branch.of(namespace, tokens))
            keep = self._forget(dropped, UNRECORDED)
        with as_store_errors(self._disk, f"delete a turn of agent {agent_id!r}"):
            self._delete_blocks(dropped, UNRECORDED, keep)
        return None

    def _record(
        self, agent_id: str, turn: EndedTurn, messages: KeptTurn | None, client: str
    ) -> Agent | None:
        now = self._clock()
        try:
            agent = self.show(agent_id)
        except UnknownAgent:
            if self._shares is not None and not self._shares.has_room(agent_id):
                return None
            head, retention_s = Branch(turn.namespace), self._retention_s
            agent = Agent(agent_id, head, retention_s=retention_s, created=now)
        matched = BranchMatcher(self._disk, turn, now).match(agent.head, agent.sides)
        if messages is not None and not agent.ephemeral:
            *_, end = chain(turn.namespace, turn.tokens)
            self.turns.keep(agent_id, turn.tokens, end.key, messages)
        if messages is not None and matched.is_head and not agent.head.main:
            opening = ": ".join(filter(None, (client, messages.opening())))
            agent = replace(agent, opening=opening)
        return self._save(replace(self._with_branch(agent, matched), used=now))

    def _with_branch(self, agent: Agent, matched: MatchedBranch) -> Agent:
        """The agent with a new or continued branch; the least recently used ones go, but for those
        that are pinned.
        """
        branch, head = matched.branch, matched.branch if matched.is_head else agent.head
        others = [each for each in agent.branches if each.number != branch.number]
        sides = [each for each in (*others, branch) if each.number != head.number]
        sides.sort(key=lambda each: (not each.pinned, -each.used))
        n_kept = MAX_SIDES + sum(each.pinned for each in sides)
        left = [*agent.left, *abandoned(matched)]
        for old in sides[n_kept:]:
            left += [*old.sized_blocks, *old.turn_ends()]
        return replace(
            agent,
            head=head,
            sides=tuple(sides[:n_kept]),
            left=existing(self._disk, tuple(dict.fromkeys(left))),
            namespaces=tuple(namespaces_of(agent)),
        )

    def _check_number(self, agent_id: str, n_new: int = 1) -> None:
        if self._shares is not None:
            self._shares.check_number(agent_id, n_new)

    def _check_protection(self, before: Agent, after: Agent) -> None:
        """Refuse what protects more than before, and more than there is room for."""
        if self._shares is None:
            return
        held, found = protection(self._disk, before), protection(self._disk, after)
        if found.n_bytes > held.n_bytes or found.n_reserved > held.n_reserved:
            self._shares.check_bytes(after.id, found)

    def check_new(self, agent_id: str) -> None:
        """Raise if no agent with this id can be made."""
        with self._changing():
            self._check_new(agent_id)

    def _check_new(self, agent_id: str) -> None:
        self._refuse_known(agent_id)
        self._check_number(agent_id)

    def _refuse_known(self, agent_id: str) -> None:
        if self.is_ephemeral(agent_id) or self._path(agent_id).exists():
            raise BadInput(f"Agent {agent_id!r} already exists; choose another id.")

    def fork(self, agent_id: str, new_id: str, branch: int | None = None) -> Agent:
        """A new agent with the history of the head, or of a branch. No block is copied."""
        return self.fork_all(agent_id, [new_id], branch)[0]

    def fork_all(
        self,
        agent_id: str,
        new_ids: Sequence[str],
        branch: int | None = None,
        *,
        ephemeral: bool = False,
    ) -> list[Agent]:
        """Several new agents with the same history, or none if one of them cannot be made."""
        if len(set(new_ids)) < len(new_ids):
            raise BadInput("Two of the new agents have the same id; give each its own.")
        now = self._clock()
        with self._changing():
            old = self.show(agent_id)
            for new_id in new_ids:
                self._refuse_known(new_id)
            self._check_number(new_ids[0], len(new_ids))
            child = old.forked(branch, now, self._retention_s, ephemeral=ephemeral)
            try:
                for new_id in () if ephemeral else new_ids:
                    self.turns.copy(agent_id, new_id, (*child.head.ends, *child.blocks[-1:]))
                return [self._save(replace(child, id=new_id)) for new_id in new_ids]
            except BaseException:
                for new_id in new_ids:
                    self._remove(new_id)
                raise

    def rewind(self, agent_id: str, turn: int, branch: int | None = None) -> Agent:
        """Remove the turns after this one (0: all of them), and go on there: a branch that is
        named becomes the head.

        Their blocks stay until they are evicted or the agent is deleted.
        """
        with self._changing():
            agent = self.show(agent_id).on(branch)
            if not 0 <= turn <= len(agent.turns):
                raise BadInput(
                    f"{agent_id!r} has {len(agent.turns)} turns; there is no turn {turn}."
                )
            head = replace(agent.head.first(turn), used=self._clock())
            n_kept = head.n_tokens // BLOCK_TOKENS
            is_all = head.n_tokens == agent.n_tokens
            blocks = () if is_all else agent.head.sized_blocks[n_kept:]
            left = (*agent.left, *blocks, *dropped_ends(agent.head, head))
            return self._save(replace(agent, head=head, left=tuple(dict.fromkeys(left))))

    def update(self, agent_id: str, **changes: Any) -> Agent:
        """Change `pinned`, `quota_bytes`, `retention_s` or `metadata`."""
        check_metadata(changes.get("metadata", {}))
        with self._changing():
            agent = self.show(agent_id)
            changed = replace(agent, **changes)
            self._check_protection(agent, changed)
            return self._save(changed)

    def pin(self, agent_id: str, pinned: bool = True, branch: int | None = None) -> Agent:
        """Protect the blocks of the head, whichever branch that is, or of one branch."""
        if branch is None:
            return self.update(agent_id, pinned=pinned)
        with self._changing():
            agent = self.show(agent_id)
            wanted = replace(agent.branch(branch), pinned=pinned)
            head, *sides = (wanted if b.number == branch else b for b in agent.branches)
            changed = replace(agent, head=head, sides=tuple(sides))
            self._check_protection(agent, changed)
            return self._save(changed)

    def delete(self, agent_id: str, progress: Progress = no_progress) -> int:
        """Delete an agent and every block that no other agent uses; the number of blocks.

        This includes blocks that the agent abandoned, and those of anonymous requests that
        continue its own. Afterwards its tokens are only in blocks that other agents use; a block
        of which another agent uses the beginning stays whole.
        """
        return self._delete_if(lambda _: True, agent_id, progress) or 0

    def _delete_if(
        self, is_due: Callable[[Agent], bool], agent_id: str, progress: Progress = no_progress
    ) -> int | None:
        """The same, or None if the agent is not due at the moment from which its turns are lost."""
        owner, n_deleted = agent_owner(agent_id), 0
        with self._changing():
            agent = self.show(agent_id)
            if not is_due(agent):
                return None
            keep = self._forget(agent, owner)
        while True:
            n_deleted += self._delete_blocks(agent, owner, keep, progress)
            with self._changing():
                before, agent = agent, self._now(agent)
                if agent == before:
                    self._remove(agent_id)
                    self._disk.forget(owner, ())  # by requests that read it since
                    break
                keep = self._forget(agent, owner)  # a turn has ended meanwhile, and goes too
        with as_store_errors(self._disk, f"delete agent {agent_id!r}"):
            self._disk.flush()
        return n_deleted

    def _now(self, agent: Agent) -> Agent:
        """What an agent is by now; the same if another process has just deleted it."""
        try:
            return self.show(agent.id)
        except UnknownAgent:
            return agent

    def _forget(self, agent: Agent, owner: str) -> set[BlockKey]:
        """Have all processes forget what is the owner's, and blocks that no other agent uses;
        returns the blocks that others use. No turn can end meanwhile: it is recorded before, or not
        at all.
        """
        keep = used_by(self._disk, (each for each in self._known() if each.id != agent.id))
        self._disk.forget(owner, blocks_to_forget(self._disk, agent, keep))
        return keep

    def _delete_blocks(
        self, agent: Agent, owner: str, keep: set[BlockKey], progress: Progress = no_progress
    ) -> int:
        """Delete what was forgotten; the number of blocks."""
        with as_store_errors(self._disk, "delete the blocks of an agent"):
            self._disk.pin_only(owner, ())
            return delete_blocks(self._disk, agent, keep, progress)

    def _remove(self, agent_id: str) -> None:
        """Remove all of an agent but its blocks."""
        self._disk.pin_only(agent_owner(agent_id), ())
        self.turns.remove(agent_id)
        self.responses.remove_agent(agent_id)
        self._disk.files.remove(self._path(agent_id))
        self._ephemeral.pop(agent_id, None)
        if self._shares is not None:
            self._shares.drop(agent_id)

    def delete_all(self) -> int:
        """Delete the files of all agents, damaged ones too, but not their blocks; how many."""
        with self._changing():
            recorded = dict(self._each())
            for path, why in recorded.items():
                _refuse_newer(path, why)
            self.responses.remove_all()
            for path, found in recorded.items():
                if isinstance(found, Agent):
                    self._remove(found.id)
                else:
                    self._disk.files.remove(path)
            for agent_id in list(self._ephemeral):
                self._remove(agent_id)
            self._remove_leftovers()
        return len(recorded)

    def _remove_leftovers(self) -> None:
        """Delete messages and pins of agents whose files are gone."""
        ids = [agent.id for agent in self._recorded()]
        self.turns.remove_others(ids)
        self._disk.index.unpin_others(map(agent_owner, ids))

    def _known(self) -> Iterator[Agent]:
        """Those of `in_use` that are recorded."""
        for path, found in self._each():
            _refuse_newer(path, found)
            if isinstance(found, OSError):
                raise _unread(path, found)
            if isinstance(found, Agent):
                yield found

    def expire(self, due: Sequence[str], progress: Progress = no_progress) -> list[str]:
        """Delete those of the agents that are still unused for longer than their retention."""
        gone = []
        for number, agent_id in enumerate(due, start=1):
            with suppress(UnknownAgent):  # another process has deleted it
                if self._delete_if(self._is_expired, agent_id) is not None:
                    gone.append(agent_id)
            progress(number, len(due))
        return gone

    def delete_empty(self) -> list[str]:
        """Delete the agents of whose conversation nothing is stored any more, and what is left of
        those whose files are gone, unless some file is damaged: it may be theirs.
        """
        with self._changing():
            if all(isinstance(found, Agent) for _, found in self._each()):
                self._remove_leftovers()
        with as_store_errors(self._disk, "look for empty agents"):
            empty = [agent.id for agent in self._recorded() if self._is_empty(agent)]
        return [a for a in empty if self._delete_if(self._is_empty, a) is not None]

    def _is_empty(self, agent: Agent) -> bool:
        blocks = used_by(self._disk, [agent])
        return agent.n_tokens > 0 and not self._disk.index.lookups.have(blocks)

    def expired(self, grace_s: float = 0.0) -> list[str]:
        """Agents unused for longer than their retention plus a grace period."""
        agents = list(self.all())
        for agent in agents:
            if agent.used > self._clock() + CLOCK_TOLERANCE_S:  # the clock was set back since
                self.update(agent.id, used=self._clock())
        return [agent.id for agent in agents if self._is_expired(agent, grace_s)]

    def _is_expired(self, agent: Agent, grace_s: float = 0.0) -> bool:
        is_pinned = agent.pinned or any(branch.pinned for branch in agent.branches)
        if agent.retention_s is None or is_pinned:
            return False
        return self._clock() - grace_s - agent.used > agent.retention_s

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
        if agent.ephemeral:
            self._ephemeral[agent.id] = agent
            if self._shares is not None:
                self._shares.note(agent.id, UNPROTECTED)
            return agent
        room = self._room(agent)  # as long as its file is that of the pins there are
        write_file(self._disk, self._path(agent.id), agent.to_json().encode())
        self._pin(agent, room)
        return agent

    def pin_all(self) -> bool:
        """Pin the blocks of all agents again, because a rebuilt index has no pins; False if some
        cannot be read now, or by this Keepwarm.
        """
        found = [agent for _, agent in self._each()]
        for agent in found:
            if isinstance(agent, Agent):
                self._pin(agent)
        return not any(isinstance(why, OSError | NewerFormat) for why in found)

    def _room(self, agent: Agent) -> Room | None:
        if self._shares is None or not agent.is_protected:
            return None
        return self._shares.room(agent.id)

    def _pin(self, agent: Agent, room: Room | None = None) -> None:
        found = protection(self._disk, agent, room)
        self._disk.pin_only(agent_owner(agent.id), found.keys)
        if self._shares is not None:
            self._shares.note(agent.id, found)

    def _protected(self) -> dict[str, Protection]:
        """What the pins there are, and quotas, protect: of each agent."""
        return {each.id: protection(self._disk, each, Room()) for each in self.all()}

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """While inside, no other process changes an agent."""
        with as_store_errors(self._disk, "change an agent"), self._lock.hold():
            yield


def _refuse_newer(path: Path, found: Agent | Exception) -> None:
    """Raise if the blocks of an agent cannot be listed."""
    if isinstance(found, NewerFormat):
        raise BadInput(
            f"{path.name} was written by a newer Keepwarm, so it is unknown which blocks it "
            "shares; update this one before deleting agents."
        )


def _unread(path: Path, error: OSError) -> StoreFailed:
    return StoreFailed(
        f"The file {path} of an agent could not be read ({error.strerror}); look at its disk and "
        "permissions, then try again."
    )
