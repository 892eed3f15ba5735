"""All stored blocks as a forest: which agents share them, where conversations fork, which tiers.

Consecutive blocks with the same agents, tiers and pins are one run, so that the dashboard can draw
thousands of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from keepwarm.agents.agent import Agent, Branch
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace
from keepwarm.store.tier import StoredBlock

MAX_BLOCKS = 10_000


@dataclass
class Node:
    """One block, with all tiers it is in."""

    block: StoredBlock
    n_bytes: int = 0
    used: float = 0.0
    tiers: set[str] = field(default_factory=set)
    pinned: bool = False  # itself or a descendant
    agents: list[str] = field(default_factory=list)  # ids of the agents that use it

    def add(self, block: StoredBlock, tier: str) -> None:
        """The same block in another tier."""
        self.n_bytes = max(self.n_bytes, sum(block.n_bytes.values()))
        self.used = max(self.used, block.used)
        self.tiers.add(tier)
        self.pinned = self.pinned or block.pinned

    def extends_run_of(self, before: Node) -> bool:
        """Whether it has the same tiers, pin and agents as the block before it."""
        same = self.tiers == before.tiers and self.pinned == before.pinned
        return same and self.agents == before.agents


class BlockRun(NamedTuple):
    """Consecutive blocks, identified by the key of the first."""

    key: BlockKey
    parent: BlockKey | None  # key of the run before it
    namespace: Namespace
    number: int  # of the first block
    n_blocks: int
    n_tokens: int
    n_bytes: int
    oldest: float  # least recent use of its blocks
    used: float  # most recent use
    tiers: frozenset[str]  # none: it is still to be computed
    pinned: bool
    agents: tuple[str, ...]
    ends: tuple[str, ...]  # of these agents, those that end here


@dataclass(frozen=True)
class Forest:
    runs: tuple[BlockRun, ...]  # parents before children
    n_blocks: int
    left_out: int  # number of least recently used blocks


def build_forest(
    tiers: Mapping[str, Iterable[StoredBlock]],
    agents: Iterable[Agent] = (),
    prompts: Iterable[Branch] = (),
    max_blocks: int = MAX_BLOCKS,
) -> Forest:
    """The forest of all blocks in these tiers, labelled with these agents, and of those that these
    prompts will have; at most `max_blocks` of each."""
    everything = _nodes(tiers)
    planned: dict[BlockKey, Node] = {}
    for prompt in prompts:
        _plan(planned, everything, prompt)
    nodes = _latest(everything, max_blocks) | _latest(planned, max_blocks)
    ends = _add_agents(nodes, agents)
    _pin_ancestors(nodes)
    runs = tuple(_runs(nodes, ends))
    n_blocks = sum(1 for node in nodes.values() if node.tiers)
    return Forest(runs, n_blocks, len(everything) - n_blocks)


def _nodes(tiers: Mapping[str, Iterable[StoredBlock]]) -> dict[BlockKey, Node]:
    """Every block once, tiers merged."""
    nodes: dict[BlockKey, Node] = {}
    for tier, blocks in tiers.items():
        for block in blocks:
            nodes.setdefault(block.key, Node(block)).add(block, tier)
    return nodes


def _plan(planned: dict[BlockKey, Node], stored: Mapping[BlockKey, Node], prompt: Branch) -> None:
    """Adds its whole blocks, also those that are in no tier yet; an open one will be another."""
    for number, (key, parent, n_tokens) in enumerate(prompt.sized_blocks):
        if n_tokens == BLOCK_TOKENS:
            block = StoredBlock(
                key, parent, prompt.namespace, number, n_tokens, {}, time.time(), pinned=False
            )
            planned.setdefault(key, stored.get(key) or Node(block, used=block.used))


def _latest(nodes: Mapping[BlockKey, Node], max_blocks: int) -> dict[BlockKey, Node]:
    """The most recently used blocks, each with its ancestors."""
    kept: dict[BlockKey, Node] = {}
    for node in sorted(nodes.values(), key=lambda node: -node.used):
        up = _ancestors(nodes, node.block.key)
        new = list(takewhile(lambda one: one.block.key not in kept, up))
        room = max_blocks - len(kept)
        kept.update((one.block.key, one) for one in new[::-1][:room])
        if len(new) >= room:
            break
    return kept


def _ancestors(nodes: Mapping[BlockKey, Node], key: BlockKey) -> Iterator[Node]:
    """A block and its ancestors, up to the first missing one."""
    while (node := nodes.get(key)) is not None:
        yield node
        key = node.block.parent


def _add_agents(
    nodes: dict[BlockKey, Node], agents: Iterable[Agent]
) -> dict[BlockKey, tuple[str, ...]]:
    """Add to every block the agents that use it; returns whose heads end where."""
    ends: dict[BlockKey, tuple[str, ...]] = {}
    for agent in agents:
        for key in {key for branch in agent.branches for key in branch.blocks if key in nodes}:
            nodes[key].agents.append(agent.id)
        if own := [key for key in agent.blocks if key in nodes]:
            ends[own[-1]] = (*ends.get(own[-1], ()), agent.id)
    return ends


def _pin_ancestors(nodes: dict[BlockKey, Node]) -> None:
    """Only leaves are evicted, so a pin protects its ancestors too."""
    for pinned in [node for node in nodes.values() if node.pinned]:
        for node in _ancestors(nodes, pinned.block.parent):
            if node.pinned:
                break
            node.pinned = True


def _runs(
    nodes: Mapping[BlockKey, Node], ends: Mapping[BlockKey, tuple[str, ...]]
) -> Iterator[BlockRun]:
    children: dict[BlockKey, list[Node]] = {}
    for node in nodes.values():
        children.setdefault(node.block.parent, []).append(node)
    roots = [node for node in nodes.values() if node.block.parent not in nodes]
    waiting: list[tuple[Node, BlockKey | None]] = [(node, None) for node in _latest_last(roots)]
    while waiting:
        first, parent = waiting.pop()
        blocks = _consecutive(first, children)
        yield _run(blocks, parent, ends)
        after = _latest_last(children.get(blocks[-1].block.key, []))
        waiting += [(node, first.block.key) for node in after]


def _latest_last(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.used, node.block.key))


def _consecutive(first: Node, children: Mapping[BlockKey, list[Node]]) -> list[Node]:
    blocks = [first]
    while len(after := children.get(blocks[-1].block.key, [])) == 1 and after[0].extends_run_of(
        blocks[-1]
    ):
        blocks += after
    return blocks


def _run(
    blocks: list[Node], parent: BlockKey | None, ends: Mapping[BlockKey, tuple[str, ...]]
) -> BlockRun:
    first = blocks[0]
    return BlockRun(
        key=first.block.key,
        parent=parent,
        namespace=first.block.namespace,
        number=first.block.number,
        n_blocks=len(blocks),
        n_tokens=sum(node.block.n_tokens for node in blocks),
        n_bytes=sum(block.n_bytes for block in blocks),
        oldest=min(block.used for block in blocks),
        used=max(block.used for block in blocks),
        tiers=frozenset(first.tiers),
        pinned=first.pinned,
        agents=tuple(first.agents),
        ends=tuple(name for node in blocks for name in ends.get(node.block.key, ())),
    )
