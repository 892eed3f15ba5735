"""Which blocks on disk agents reach: those to pin, to keep, and to delete with an agent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain as joined
from itertools import islice
from typing import NamedTuple

from keepwarm.agents.agent import Agent, Branch, MatchedBranch
from keepwarm.agents.block_refs import find_extensions
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.maintenance import Progress, no_progress
from keepwarm.store.disk.tombstones import Tombstones, delete_everywhere
from keepwarm.store.tier import NamedBlock, agent_owner

MAX_UNCHECKED_LEFT = 64  # abandoned blocks listed without checking that they still exist
MAX_GONE = 1 << 14  # of them, that are not here; each is 150 bytes of the agent's file


def abandoned(matched: MatchedBranch) -> list[NamedBlock]:
    """What a branch had before a turn and has no more."""
    before = matched.before
    if before is None or matched.n_shared == before.n_tokens:
        return []
    kept = set(matched.branch.blocks)
    blocks = [block for block in before.sized_blocks if block.key not in kept]
    return [*blocks, *dropped_ends(before, matched.branch)]


def dropped_ends(before: Branch, after: Branch) -> list[NamedBlock]:
    """The ends of turns that a branch has no more; shared tiers may have answers by them."""
    return [end for end in before.turn_ends() if end.key not in after.ends]


def dropped_by_rewind(before: Agent, after: Agent) -> list[NamedBlock]:
    """Blocks that were in the branch which was rewound, and are in no branch any more."""
    kept = {key for branch in after.branches for key in branch.blocks}
    return [block for block in before.head.sized_blocks if block.key not in kept]


def existing(disk: DiskTier, left: tuple[NamedBlock, ...]) -> tuple[NamedBlock, ...]:
    """Of abandoned blocks those still on disk; checked only when there are many.

    One that was replaced by a longer block is listed as that block from then on. All stay listed
    while there are shared tiers, which may have them, and answers that end there; the last of them.
    """
    if len(left) <= MAX_UNCHECKED_LEFT:
        return left
    known = disk.index.lookups.have([block.key for block in left])  # a failure is not "none"
    gone = [block for block in left if block.key not in known]
    kept = [block for block in left if block.key in known]
    if Tombstones(disk).read_places():
        kept += gone[-MAX_GONE:]
    longer = (found.header for found in find_extensions(disk, gone))
    kept += [NamedBlock(it.key, it.parent, len(it.tokens) // 4) for it in longer]
    return tuple(dict.fromkeys(kept))


def used_by(disk: DiskTier, agents: Iterable[Agent]) -> set[BlockKey]:
    """Their blocks; for a tail that is missing, the longer blocks that replaced it."""
    branches = [branch for agent in agents for branch in agent.branches if branch.blocks]
    tails = [branch.sized_blocks[-1] for branch in branches]
    known = disk.index.lookups.have([tail.key for tail in tails])  # as above
    missing = (tail for tail in tails if tail.key not in known)
    keys = {key for branch in branches for key in branch.blocks}
    return keys | {found.header.key for found in find_extensions(disk, missing)}


def delete_blocks(
    disk: DiskTier,
    agent: Agent,
    keep: Collection[BlockKey],
    progress: Progress = no_progress,
) -> int:
    """Delete what an agent has or had, here and from shared tiers; how many blocks were here."""
    keys, gone = _blocks_to_delete(disk, agent, keep), blocks_to_forget(disk, agent, keep)
    return delete_everywhere(disk, namespaces_of(agent), keys, keep, gone=gone, progress=progress)


def _blocks_to_delete(disk: DiskTier, agent: Agent, keep: Collection[BlockKey]) -> list[BlockKey]:
    """What an agent has or had, and every block that continues the end of one of its turns,
    unless other agents share that end.
    """
    blocks = _own_blocks(agent)
    found = list(find_extensions(disk, [*blocks, *_turn_ends(agent)]))
    shared = {one.block for one in found if one.header.key in keep}
    longer = [one.header.key for one in found if one.block not in shared]
    return [*(block.key for block in blocks), *longer]


def blocks_to_forget(disk: DiskTier, agent: Agent, keep: Collection[BlockKey]) -> list[NamedBlock]:
    """The same for other processes, which find what continues these blocks in their memory."""
    blocks = named_blocks(agent)
    found = find_extensions(disk, blocks)
    shared = {one.block for one in found if one.header.key in keep}
    return [block for block in blocks if block.key not in keep and block not in shared]


def named_blocks(agent: Agent) -> list[NamedBlock]:
    """What it has or had, and the ends of its turns."""
    return list(dict.fromkeys((*_own_blocks(agent), *_turn_ends(agent))))


def namespaces_of(agent: Agent) -> dict[Namespace, None]:
    """Those of all that it has or had."""
    names = (*agent.namespaces, *(branch.namespace for branch in agent.branches))
    return dict.fromkeys(names)


def _own_blocks(agent: Agent) -> list[NamedBlock]:
    """What it has or had."""
    of_branches = joined.from_iterable(each.sized_blocks for each in agent.branches)
    return list(dict.fromkeys((*of_branches, *agent.left)))


def _turn_ends(agent: Agent) -> Iterator[NamedBlock]:
    return joined.from_iterable(branch.turn_ends() for branch in agent.branches)


class Protection(NamedTuple):
    """What an agent's pins and quota keep from being evicted."""

    keys: list[BlockKey]  # to pin: only leaves are evicted, so a pin protects all ancestors
    blocks: Mapping[BlockKey, int]  # of pins, and their bytes; other agents may share them
    n_reserved: int = 0  # for its quota: in full, because its blocks may become others

    @property
    def n_bytes(self) -> int:
        return self.n_reserved + sum(self.blocks.values())


UNPROTECTED = Protection([], {})


class Room(NamedTuple):
    """What an agent's pins may grow to, besides blocks that its key protects anyway."""

    n_bytes: int = 0
    is_free: Callable[[BlockKey], bool] = lambda _: False


def protection(disk: DiskTier, agent: Agent, room: Room | None = None) -> Protection:
    """Of the head, if it is pinned, or within its quota; of pinned branches.

    What is pinned now stays so; pins grow only within `room`.
    """
    n_reserved = agent.quota_bytes or 0
    runs: list[Sequence[NamedBlock]]
    runs = [branch.sized_blocks for branch in agent.branches if branch.pinned]
    if agent.pinned:
        runs.insert(0, agent.head.sized_blocks)
    if room is not None and runs:
        left = room._replace(n_bytes=room.n_bytes - n_reserved)
        runs = _within_room(disk, runs, agent_owner(agent.id), left)
    known = disk.have({block.key for run in runs for block in run})
    blocks = {key: block.n_bytes for key, block in known.items()}
    if n_reserved and not agent.pinned:
        head = agent.head.sized_blocks
        runs.insert(0, head[: _n_within(disk, head, n_reserved)])
    ends = dict.fromkeys(key for run in runs for key in _ends_of_runs(disk, run))
    return Protection(list(ends), blocks, n_reserved)


def _within_room(
    disk: DiskTier, runs: Sequence[Sequence[NamedBlock]], owner: str, room: Room
) -> list[Sequence[NamedBlock]]:
    pinned, left = disk.index.lookups.pinned_by(owner), room.n_bytes
    found: list[Sequence[NamedBlock]] = []
    for run in runs:
        paid = [block for block in run if not room.is_free(block.key)]
        n_paid = _n_within(disk, paid, left)
        n_most = len(run) if n_paid == len(paid) else run.index(paid[n_paid])
        kept = run[: max(n_most, _n_held(run, pinned))]
        known = disk.have([block.key for block in kept])
        left -= sum(each.n_bytes for key, each in known.items() if not room.is_free(key))
        found.append(kept)
    return found


def _n_held(blocks: Sequence[NamedBlock], pinned: set[BlockKey]) -> int:
    """How many leading blocks pins protect."""
    return max((n for n, block in enumerate(blocks, start=1) if block.key in pinned), default=0)


def _ends_of_runs(disk: DiskTier, blocks: Sequence[NamedBlock]) -> Iterator[BlockKey]:
    """The last block, stored or not; a longer one in its place; the last before each gap."""
    known = disk.have([block.key for block in blocks])
    for number, block in enumerate(blocks, start=1):
        is_there, follows = block.key in known, blocks[number : number + 1]
        if not follows or (is_there and follows[0].key not in known):
            yield block.key
    if blocks and blocks[-1].key not in known:
        longer = find_extensions(disk, blocks[-1:])
        yield from (found.header.key for found in islice(longer, 1))


def _n_within(disk: DiskTier, blocks: Sequence[NamedBlock], n_bytes: int) -> int:
    """How many leading blocks are no more than so many bytes."""
    known = disk.have([block.key for block in blocks])
    total = 0
    for n, block in enumerate(blocks):
        total += known[block.key].n_bytes if block.key in known else 0
        if total > n_bytes:
            return n
    return len(blocks)
