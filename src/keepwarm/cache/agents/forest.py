"""All that is kept, as a forest: who shares what, where conversations part, where each block lies.

Blocks that follow each other and do not differ in any of this are one run, so that thousands of
them can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from keepwarm.cache.agents.agents import Agent
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.store.tier import StoredBlock

MAX_BLOCKS = 10_000


@dataclass(frozen=True)
class Node:
    """One block, wherever it is kept."""

    key: BlockKey
    parent: BlockKey
    namespace: Namespace
    number: int
    n_tokens: int
    n_bytes: int
    used: float
    tiers: frozenset[str]
    pinned: bool = False  # by itself or by something that follows it
    agents: tuple[str, ...] = ()  # whose conversations it is part of

    def continues(self, before: Node) -> bool:
        """Whether it looks the same as the block before it."""
        same = self.tiers == before.tiers and self.pinned == before.pinned
        return same and self.agents == before.agents


class BlockRun(NamedTuple):
    """Blocks in a row, told apart from others by the key of the first."""

    key: BlockKey
    parent: BlockKey | None  # the first block of the run that it follows
    namespace: Namespace
    number: int  # of the first block
    n_blocks: int
    n_tokens: int
    n_bytes: int
    oldest: float  # least recent use of any of its blocks
    used: float  # most recent one
    tiers: frozenset[str]
    pinned: bool
    agents: tuple[str, ...]
    ends: tuple[str, ...]  # of them, those whose conversation ends here


@dataclass(frozen=True)
class Forest:
    runs: tuple[BlockRun, ...]  # each after the one that it follows
    n_blocks: int
    left_out: int  # blocks, the least recently used


def build_forest(
    tiers: Mapping[str, Iterable[StoredBlock]],
    agents: Iterable[Agent] = (),
    max_blocks: int = MAX_BLOCKS,
) -> Forest:
    """The forest of all blocks in these tiers, as these agents see it."""
    everything = _nodes(tiers)
    nodes = _latest(everything, max_blocks)
    ends = _name(nodes, agents)
    _pin_ancestors(nodes)
    runs = tuple(_runs(nodes, ends))
    return Forest(runs, len(nodes), len(everything) - len(nodes))


def _nodes(tiers: Mapping[str, Iterable[StoredBlock]]) -> dict[BlockKey, Node]:
    """Every block once."""
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
    """The most recently used, each with all that comes before it."""
    kept: dict[BlockKey, Node] = {}
    for node in sorted(nodes.values(), key=lambda node: -node.used):
        new = list(takewhile(lambda one: one.key not in kept, _way_up(nodes, node.key)))
        room = max_blocks - len(kept)
        kept.update((one.key, one) for one in new[::-1][:room])
        if len(new) >= room:
            break
    return kept


def _way_up(nodes: Mapping[BlockKey, Node], key: BlockKey) -> Iterator[Node]:
    """A block and all before it, as far as they are there."""
    while (node := nodes.get(key)) is not None:
        yield node
        key = node.parent


def _name(nodes: dict[BlockKey, Node], agents: Iterable[Agent]) -> dict[BlockKey, tuple[str, ...]]:
    """Write on every block whose it is; answers with who ends where."""
    ends: dict[BlockKey, tuple[str, ...]] = {}
    for agent in agents:
        own = [key for key in agent.blocks if key in nodes]
        for key in own:
            nodes[key] = replace(nodes[key], agents=(*nodes[key].agents, agent.id))
        if own:
            ends[own[-1]] = (*ends.get(own[-1], ()), agent.id)
    return ends


def _pin_ancestors(nodes: dict[BlockKey, Node]) -> None:
    """Only ends are evicted, so a pin protects all that comes before it too."""
    for pinned in [node for node in nodes.values() if node.pinned]:
        for node in _way_up(nodes, pinned.parent):
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
        blocks = _in_a_row(first, children)
        yield _run(blocks, parent, ends)
        after = _latest_last(children.get(blocks[-1].key, []))
        waiting += [(node, first.key) for node in after]


def _latest_last(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.used, node.key))


def _in_a_row(first: Node, children: Mapping[BlockKey, list[Node]]) -> list[Node]:
    blocks = [first]
    while len(after := children.get(blocks[-1].key, [])) == 1 and after[0].continues(blocks[-1]):
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
