"""Whether a block is one that a model could have made."""

from __future__ import annotations

from collections.abc import Mapping

from keepwarm.errors import CacheMismatch, CorruptBlock
from keepwarm.kv.codec import LAYER_ARRAYS
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout
from keepwarm.kv.slices import Block, Rows, tensor_name


def check_block(layout: Layout, block: Block) -> None:
    """Raise unless the block has exactly the tensors of its layers, each of the right shape and
    dtype. A part may be missing as a whole: a record holds one part.
    """
    known: set[str] = set()
    for leaf in layout.leaves():
        known |= _check_layer(leaf, block)
    unknown = {*block.delta, *block.window, *block.state} - known
    if unknown:
        raise CorruptBlock("?", block.index, f"{min(unknown)} is not a tensor of this model")


def _check_layer(leaf: LayerSpec, block: Block) -> set[str]:
    """The names of the layer's tensors in the block, after checking them."""
    tensors, n_rows = _part_of(leaf, block)
    if not tensors:
        return set()
    if leaf.has_variable_tensors:
        return _check_variable(leaf, block)
    where = f"Layer {leaf.path}, block {block.index}"
    names = {name: tensor_name(leaf.path, block.index, name) for name in leaf.tensors}
    for name, spec in leaf.tensors.items():
        if names[name] not in tensors:
            raise CorruptBlock(leaf.path, block.index, f"{names[name]} is missing")
        spec.check(tensors[names[name]], n_rows, where)
    return set(names.values())


def _part_of(leaf: LayerSpec, block: Block) -> tuple[Mapping[str, Rows], int | None]:
    """Where the layer's tensors are in the block, and how many rows they have."""
    if leaf.kind is Kind.STATE:
        return block.state, leaf.state_rows(block.end)
    if leaf.kind is Kind.WINDOW:
        first_row = block.first_rows.get(leaf.path)
        return ({}, 0) if first_row is None else (block.window, block.n_tokens - first_row)
    return block.delta, block.n_tokens


def _check_variable(leaf: LayerSpec, block: Block) -> set[str]:
    """Arrays that grow; of those that one token does not show, only the axes are known."""
    where, found = f"Layer {leaf.path}, block {block.index}", set()
    for name in (f"state{number}" for number in range(len(LAYER_ARRAYS))):
        full_name = tensor_name(leaf.path, block.index, name)
        array = block.state.get(full_name)
        if array is None and name in leaf.tensors:
            raise CorruptBlock(leaf.path, block.index, f"{full_name} is missing")
        if array is None:
            continue
        if name in leaf.tensors:
            leaf.tensors[name].check(array, None, where)
        elif array.ndim != 3 or array.shape[0] != 1:
            raise CacheMismatch(where, "the shape", "(1, rows, width)", array.shape)
        found.add(full_name)
    return found
