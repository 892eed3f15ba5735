"""All stored blocks as a forest: which agents share them, where conversations fork, which tiers.

Consecutive blocks with the same agents, tiers and pins are one run, so that the dashboard can draw
thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from keepwarm.agents.agent import Agent
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.store.tier import StoredBlock

MAX_BLOCKS = 10_000


@dataclass(frozen=True)
class Node:
    """One block, with all tiers it is in."""

    key: BlockKey
    parent: BlockKey
    namespace: Namespace
    number: int
    n_tokens: int
    n_bytes: int
    used: float
    tiers: frozenset[str]
    pinned: bool = False  # itself or a descendant
    agents: tuple[str, ...] = ()  # ids of the agents that use it

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
    tiers: frozenset[str]
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
    max_blocks: int = MAX_BLOCKS,
) -> Forest:
    """The forest of all blocks in these tiers, labelled with these agents."""
    everything = _nodes(tiers)
    nodes = _latest(everything, max_blocks)
    ends = _add_agents(nodes, agents)
    _pin_ancestors(nodes)
    runs = tuple(_runs(nodes, ends))
    return Forest(runs, len(nodes), len(everything) - len(nodes))


def _nodes(tiers: Mapping[str, Iterable[StoredBlock]]) -> dict[BlockKey, Node]:
    """Every block once, tiers merged."""
    nodes: dict[BlockKey, Node] = {}
    for tier, blocks in tiers.items():
        for block in blocks:
            here = _node(block, tier)
            other = nodes.get(block.key)
            nodes[block.key] = here if other is None else _merged(other, here)
    return nodes


def _node(block: StoredBlock, tier: str) -> Node:
    return Node(
        block.key,
        block.parent,
        block.namespace,
        block.number,
        block.n_tokens,
        sum(block.n_bytes.values()),
        block.used,
        frozenset({tier}),
        block.pinned,
    )


def _merged(a: Node, b: Node) -> Node:
    return replace(
        a,
        n_bytes=max(a.n_bytes, b.n_bytes),
        used=max(a.used, b.used),
        tiers=a.tiers | b.tiers,
        pinned=a.pinned or b.pinned,
    )


def _latest(nodes: Mapping[BlockKey, Node], max_blocks: int) -> dict[BlockKey, Node]:
    """The most recently used blocks, each with its ancestors."""
    kept: dict[BlockKey, Node] = {}
    for node in sorted(nodes.values(), key=lambda node: -node.used):
        new = list(takewhile(lambda one: one.key not in kept, _ancestors(nodes, node.key)))
        room = max_blocks - len(kept)
        kept.update((one.key, one) for one in new[::-1][:room])
        if len(new) >= room:
            break
    return kept


def _ancestors(nodes: Mapping[BlockKey, Node], key: BlockKey) -> Iterator[Node]:
    """A block and its ancestors, up to the first missing one."""
    while (node := nodes.get(key)) is not None:
        yield node
        key = node.parent


def _add_agents(
    nodes: dict[BlockKey, Node], agents: Iterable[Agent]
) -> dict[BlockKey, tuple[str, ...]]:
    """Add to every block the agents that use it; returns whose heads end where."""
    ends: dict[BlockKey, tuple[str, ...]] = {}
    for agent in agents:
        for key in {key for branch in agent.branches for key in branch.blocks if key in nodes}:
            nodes[key] = replace(nodes[key], agents=(*nodes[key].agents, agent.id))
        if own := [key for key in agent.blocks if key in nodes]:
            ends[own[-1]] = (*ends.get(own[-1], ()), agent.id)
    return ends


def _pin_ancestors(nodes: dict[BlockKey, Node]) -> None:
    """Only leaves are evicted, so a pin protects its ancestors too."""
    for pinned in [node for node in nodes.values() if node.pinned]:
        for node in _ancestors(nodes, pinned.parent):
            if node.pinned:
                break
            nodes[node.key] = replace(node, pinned=True)


def _runs(
    nodes: Mapping[BlockKey, Node], ends: Mapping[BlockKey, tuple[str, ...]]
) -> Iterator[BlockRun]:
    children: dict[BlockKey, list[Node]] = {}
    for node in nodes.values():
        children.setdefault(node.parent, []).append(node)
    roots = [node for node in nodes.values() if node.parent not in nodes]
    waiting: list[tuple[Node, BlockKey | None]] = [(node, None) for node in _latest_last(roots)]
    while waiting:
        first, parent = waiting.pop()
        blocks = _consecutive(first, children)
        yield _run(blocks, parent, ends)
        after = _latest_last(children.get(blocks[-1].key, []))
        waiting += [(node, first.key) for node in after]


def _latest_last(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.used, node.key))


def _consecutive(first: Node, children: Mapping[BlockKey, list[Node]]) -> list[Node]:
    blocks = [first]
    while len(after := children.get(blocks[-1].key, [])) == 1 and after[0].extends_run_of(
        blocks[-1]
    ):
        blocks += after
    return blocks


def _run(
    blocks: list[Node], parent: BlockKey | None, ends: Mapping[BlockKey, tuple[str, ...]]
) -> BlockRun:
    first = blocks[0]
    return BlockRun(
        key=first.key,
        parent=parent,
        namespace=first.namespace,
        number=first.number,
        n_blocks=len(blocks),
        n_tokens=sum(block.n_tokens for block in blocks),
        n_bytes=sum(block.n_bytes for block in blocks),
        oldest=min(block.used for block in blocks),
        used=max(block.used for block in blocks),
        tiers=first.tiers,
        pinned=first.pinned,
        agents=first.agents,
        ends=tuple(name for block in blocks for name in ends.get(block.key, ())),
    )
