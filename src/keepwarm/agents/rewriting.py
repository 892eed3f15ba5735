"""Stored records rewritten: cut to the tokens of a prefix, under the keys of another namespace."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from keepwarm.errors import BadCacheFile, BadRecord
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, root
from keepwarm.records.at_rest import first_rows_of
from keepwarm.records.header import ITEM_BYTES, HasBytes
from keepwarm.records.record import Header, Part, Record, Tensor
from keepwarm.store.disk.disk import DiskTier


class PrefixBlock(NamedTuple):
    """A block on disk that holds part of a prefix, and its position in the chain."""

    key: BlockKey
    number: int


def prefix_blocks(
    disk: DiskTier, name: Namespace, tokens: bytes, keys: Sequence[BlockKey]
) -> list[PrefixBlock]:
    """The blocks of a prefix and the checkpoints inside them.

    A model with state layers can continue only from a checkpoint.
    """
    held = [PrefixBlock(key, number) for number, key in enumerate(keys)]
    numbers = {parent: number for number, parent in enumerate([root(name), *keys])}
    for state in disk.states(list(numbers)):
        number = numbers[state.parent]
        start, end = number * BLOCK_TOKENS, number * BLOCK_TOKENS + state.n_tokens
        own = tokens[4 * start : 4 * end]
        if state.key not in keys and block_key(name, state.parent, own) == state.key:
            held.append(PrefixBlock(state.key, number))
    return held


def prefix_records(
    disk: DiskTier,
    held: Sequence[PrefixBlock],
    tokens: bytes,
    tensors: Collection[str] | None = None,
) -> Iterator[Record]:
    """The records of these blocks, cut to the tokens of the prefix."""
    known = disk.have([block.key for block in held])
    for key, number in held:
        if key in known:
            parts = [part for part in Part if part in known[key].parts]
            found = [r for part in parts if (r := disk.read(key, part, tensors)) is not None]
            yield from _first_tokens(found, len(tokens) // 4 - number * BLOCK_TOKENS)


def _first_tokens(records: Sequence[Record], n_tokens: int) -> Iterator[Record]:
    """The parts of one block cut to its first tokens; if none is left, the tokens alone."""
    firsts = [first for r in records if (first := trimmed(r, n_tokens)) is not None]
    yield from firsts or [_only_tokens(record.header, n_tokens) for record in records[:1]]


def _only_tokens(header: Header, n_tokens: int) -> Record:
    """A block without rows is a window record with zero rows."""
    return Record(replace(_shorter(header, n_tokens), part=Part.WINDOW, extra={"w_rows": 0}), ())


def _shorter(header: Header, n_tokens: int) -> Header:
    tokens = header.tokens[: 4 * n_tokens]
    key = block_key(header.namespace, header.parent, tokens)
    return replace(header, key=key, tokens=tokens)


def trimmed(record: Record, n_tokens: int) -> Record | None:
    """A record cut to its first tokens, so that no later token is exported.

    None for a state, which belongs to the last token, and for window rows that begin later.
    """
    header = record.header
    n_held = len(header.tokens) // 4
    if n_held <= n_tokens:
        return record
    firsts = header.extra.get("first_rows", {}).values()
    w_rows = header.w_rows - (n_held - n_tokens)
    is_cut_off = w_rows <= 0 or max(firsts, default=0) >= n_tokens
    if header.part is Part.STATE or (header.part is Part.WINDOW and is_cut_off):
        return None
    extra = dict(header.extra) | ({"w_rows": w_rows} if header.part is Part.WINDOW else {})
    whole = first_rows_of(record, n_tokens)
    tensors = tuple(_without_last_rows(tensor, n_held - n_tokens) for tensor in whole)
    return Record(replace(_shorter(header, n_tokens), extra=extra), tensors)


def _without_last_rows(tensor: HasBytes, n_rows: int) -> Tensor:
    """Rows are the second-to-last dimension in K and V of every kind."""
    *outer, rows, inner = tensor.shape if len(tensor.shape) > 1 else (0, 0)
    left = rows - n_rows
    if left <= 0:
        raise BadCacheFile(f"{tensor.name} cannot be cut to fewer rows; export more tokens.")
    row_bytes = inner * ITEM_BYTES[tensor.dtype]
    words = np.frombuffer(tensor.data, np.uint8).reshape(math.prod(outer), rows, row_bytes)
    data = memoryview(words[:, :left].tobytes())
    return Tensor(tensor.name, tensor.dtype, (*outer, left, inner), data)


def renamed(records: Iterable[Record], old: Namespace, new: Namespace) -> Iterator[Record]:
    """The same records under the keys of another namespace; parents come before children.

    Raises for a record of a third namespace, so that no tenant imports blocks into another's.
    """
    parents = {root(old): (root(new), 0)}  # by old parent: new parent, number of its children
    for record in records:
        header = record.header
        parent, number = parents.get(header.parent, (None, 0))
        if parent is None or header.namespace != old or header.number != number:
            raise BadRecord("a block does not follow an earlier one")
        key = block_key(new, parent, header.tokens)
        if len(header.tokens) == 4 * BLOCK_TOKENS:
            parents[header.key] = (key, number + 1)
        yield replace(record, header=replace(header, namespace=new, key=key, parent=parent))
