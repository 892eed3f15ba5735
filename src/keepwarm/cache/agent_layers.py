"""The stored blocks of a conversation, layer by layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from keepwarm.agents.agent import Agent
from keepwarm.agents.block_refs import Holder
from keepwarm.agents.rewriting import PrefixBlock, prefix_records
from keepwarm.cache.restore.records import block_of
from keepwarm.kv.slices import Block, Rows
from keepwarm.records.record import Record
from keepwarm.store.disk.disk import DiskTier

LAYER = re.compile(r"L(\d+)")


class AgentBlocks(NamedTuple):
    """What is stored of an agent: its blocks in order, by layer, of the first `n_tokens` tokens."""

    layers: dict[int, list[Block]]
    n_tokens: int
    metadata: Mapping[str, str]


def load_blocks(disk: DiskTier, agent: Agent, holders: Sequence[Holder]) -> AgentBlocks:
    """The blocks that hold an agent's tokens, cut to these."""
    tokens = b"".join(holder.tokens for holder in holders)
    held = [PrefixBlock(holder.key, number) for number, holder in enumerate(holders)]
    layers = _by_layer(prefix_records(disk, held, tokens))
    return AgentBlocks(layers, len(tokens) // 4, agent.metadata)


def _by_layer(records: Iterable[Record]) -> dict[int, list[Block]]:
    """Each layer's part of every block, as MLX arrays; the records are in order."""
    layers: defaultdict[int, list[Block]] = defaultdict(list)
    for _, parts in groupby(records, key=lambda record: record.header.number):
        blocks = [block_of(record) for record in parts]
        for layer in sorted({_layer(name) for block in blocks for name in _names(block)}):
            layers[layer].append(_of_layer(blocks, layer))
    return dict(sorted(layers.items()))


def _of_layer(parts: list[Block], layer: int) -> Block:
    """One layer of a block whose parts are in several records."""

    def own(kind: str) -> dict[str, mx.array]:
        tensors = [item for part in parts for item in getattr(part, kind).items()]
        return {name: _to_mx(rows) for name, rows in tensors if _layer(name) == layer}

    firsts = {path: n for part in parts for path, n in part.first_rows.items()}
    return Block(
        parts[0].index,
        parts[0].n_tokens,
        delta=own("delta"),
        window=own("window"),
        first_rows={path: n for path, n in firsts.items() if _layer(f"L{path}") == layer},
        state=own("state"),
    )


def _to_mx(rows: Rows) -> mx.array:
    return rows if isinstance(rows, mx.array) else rows.to_mx()


def _names(block: Block) -> Iterable[str]:
    return (*block.delta, *block.window, *block.state)


def _layer(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else -1
