"""Tensors of blocks copied off a CUDA device while it computes.

The rows of all blocks that a slice completed are gathered on the device, in one operation for each
tensor, not for each tensor of each block. That, and the copies over the bus into one slab for each
block, is only enqueued: what changes the cache comes after it on the stream, and the reader of the
bytes waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from keepwarm.kv.buffers import Shape
from keepwarm.kv.layout import ROWS
from keepwarm.kv.slabs import Place, Slab, SlabPlan, SlabPool, TensorPath, aligned


class _Group(NamedTuple):
    """Tensors of one dtype, side by side in every slab; `bytes` has a row for each block."""

    start: int
    bytes: mx.array


class Gathered(NamedTuple):
    """The tensors of consecutive blocks in one array for each dtype."""

    n_blocks: int
    plan: SlabPlan
    groups: Sequence[_Group]

    def copy_to(self, pool: SlabPool) -> list[Slab]:
        """Begin to copy every block into a slab of its own."""
        slabs = [pool.take(self.plan.slab_bytes) for _ in range(self.n_blocks)]
        for number, slab in enumerate(slabs):
            for start, rows in self.groups:
                slab.array[start : start + rows.shape[1]] = rows[number]
        mx.async_eval([slab.array for slab in slabs])
        return slabs


def gather(tensors: Mapping[TensorPath, mx.array], n_blocks: int = 1) -> Gathered:
    """Rows are divided among the blocks; a single block may have tensors of any shape."""
    places: dict[TensorPath, Place] = {}
    groups: list[_Group] = []
    at = 0
    for dtype, names in _by_dtype(tensors).items():
        flat = _by_block([tensors[name] for name in names], n_blocks)
        groups.append(_Group(at, flat.view(mx.uint8)))
        for name in names:
            shape = _shape_in_block(tensors[name].shape, n_blocks)
            places[name] = Place(at, shape, dtype)
            at = places[name].end
        at = aligned(at)
    return Gathered(n_blocks, SlabPlan({name: places[name] for name in tensors}), groups)


def _by_dtype(tensors: Mapping[TensorPath, mx.array]) -> Mapping[mx.Dtype, Sequence[TensorPath]]:
    names: dict[mx.Dtype, list[TensorPath]] = defaultdict(list)
    for name, array in tensors.items():
        names[array.dtype].append(name)
    return names


def _by_block(arrays: list[mx.array], n_blocks: int) -> mx.array:
    """One row for each block, with its part of every array, in few operations if all are alike."""
    if n_blocks > 1 and len({array.shape for array in arrays}) == 1:
        return _divided(mx.stack(arrays), n_blocks)
    return mx.concatenate([_divided(array, n_blocks) for array in arrays], axis=1)


def _divided(array: mx.array, n_blocks: int) -> mx.array:
    """One row for each block."""
    if n_blocks == 1:
        return array.reshape(1, -1)
    n_rows, width = array.shape[-2:]
    split = array.reshape(-1, n_blocks, n_rows // n_blocks, width)
    return mx.swapaxes(split, 0, 1).reshape(n_blocks, -1)


def _shape_in_block(shape: Shape, n_blocks: int) -> Shape:
    return (*shape[:ROWS], shape[ROWS] // n_blocks, *shape[ROWS + 1 :]) if n_blocks > 1 else shape
