"""Which blocks on disk hold a conversation: its own, or longer ones that begin with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, block_key
from keepwarm.records.record import Header
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import BlockInfo, NamedBlock


class Holder(NamedTuple):
    """A block on disk and those of its tokens that are an agent's."""

    key: BlockKey
    tokens: bytes


def read_header(disk: DiskTier | MemoryTier, key: BlockKey, known: BlockInfo) -> Header | None:
    record = disk.read(key, next(iter(known.parts)), tensors=())
    return record.header if record is not None else None


class Extension(NamedTuple):
    """A stored block that begins with all tokens of an open one."""

    block: NamedBlock
    header: Header


def find_extensions(
    disk: DiskTier | MemoryTier, blocks: Iterable[NamedBlock]
) -> Iterator[Extension]:
    """Every block of a tier that begins with one of the open ones, these included."""
    by_parent: defaultdict[BlockKey, list[NamedBlock]] = defaultdict(list)
    for block in blocks:
        if block.is_open:
            by_parent[block.parent].append(block)
    for parent, siblings in by_parent.items():
        for key, known in disk.have(disk.children_of(parent)).items():
            header = read_header(disk, key, known)
            if header is not None:
                yield from (
                    Extension(block, header) for block in siblings if _begins(header, block)
                )


def _begins(header: Header, block: NamedBlock) -> bool:
    """Compares keys, which are hashes of tokens: the block's own tokens need not be known."""
    start = header.tokens[: 4 * block.n_tokens]
    return block_key(header.namespace, header.parent, start) == block.key


def find_block_refs(
    disk: DiskTier, blocks: Sequence[NamedBlock], n_tokens: int
) -> Iterator[Holder]:
    """The blocks on disk that hold these tokens, up to the first missing one.

    An open block may have been replaced by a longer one, which then takes its place.
    """
    known = disk.have([block.key for block in blocks])
    for number, block in enumerate(blocks):
        if block.key in known:
            header = read_header(disk, block.key, known[block.key])
        else:
            header = next((found.header for found in find_extensions(disk, [block])), None)
        if header is None:
            return
        yield Holder(header.key, header.tokens[: 4 * (n_tokens - number * BLOCK_TOKENS)])
