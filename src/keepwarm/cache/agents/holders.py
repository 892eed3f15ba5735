"""Which blocks on disk hold a conversation: its own, or longer ones that stand in for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, block_key
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.record import Header
from keepwarm.store.tier import BlockInfo


class Head(NamedTuple):
    """A block that an agent has, or had, there or not."""

    key: BlockKey
    parent: BlockKey
    n_tokens: int

    @property
    def is_open(self) -> bool:
        """Whether longer blocks may begin as this one does."""
        return self.n_tokens < BLOCK_TOKENS


class Holder(NamedTuple):
    """A block on disk and those of its tokens that are an agent's."""

    key: BlockKey
    tokens: bytes


def header_of(disk: DiskTier, key: BlockKey, known: BlockInfo) -> Header | None:
    record = disk.read(key, next(iter(known.parts)), tensors=())
    return record.header if record is not None else None


class Begun(NamedTuple):
    """A block on disk that begins with all tokens of an open one, whoever made it."""

    head: Head
    header: Header


def begun_with(disk: DiskTier, heads: Iterable[Head]) -> Iterator[Begun]:
    """Every block that goes on from one of these, and the open ones themselves."""
    beside: defaultdict[BlockKey, list[Head]] = defaultdict(list)
    for head in heads:
        if head.is_open:
            beside[head.parent].append(head)
    for parent, some in beside.items():
        for key, known in disk.have(disk.index.lookups.children_of(parent)).items():
            header = header_of(disk, key, known)
            if header is not None:
                yield from (Begun(head, header) for head in some if _begins(header, head))


def _begins(header: Header, head: Head) -> bool:
    """A key is the hash of its tokens, so these need not be known."""
    start = header.tokens[: 4 * head.n_tokens]
    return block_key(header.namespace, header.parent, start) == head.key


def holders(disk: DiskTier, heads: Sequence[Head], n_tokens: int) -> Iterator[Holder]:
    """The blocks that hold so many tokens, as far as they are there.

    An open block may have been outgrown by a longer one, which then stands in for it.
    """
    known = disk.have([head.key for head in heads])
    for number, head in enumerate(heads):
        if head.key in known:
            header = header_of(disk, head.key, known[head.key])
        else:
            header = next((found.header for found in begun_with(disk, [head])), None)
        if header is None:
            return
        yield Holder(header.key, header.tokens[: 4 * (n_tokens - number * BLOCK_TOKENS)])
