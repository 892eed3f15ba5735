"""A live cache as blocks of 256 tokens.

Tensors are named `L{layer}_B{block}_K` and `_V` (`_K_weights`, `_K_scales`, `_K_biases` when
quantised) and `_S{i}` for state arrays; `{layer}` is `3.1` for the second part of a composite.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from keepwarm.errors import CacheMismatch, CorruptBlock, UnsupportedCache
from keepwarm.kv.buffers import HostArray, Shape
from keepwarm.kv.codec import LAYER_ARRAYS, Tensors, encode, rows_in_order
from keepwarm.kv.kinds import (
    Caches,
    Kind,
    is_batched,
    kind_of,
    leaves,
    token_count,
)
from keepwarm.kv.layout import ROWS, LayerSpec, Layout
from keepwarm.kv.slabs import Place, Slab, SlabArray, SlabPlan, SlabPool, TensorPath, aligned
from keepwarm.prefix.blocks import BLOCK_TOKENS

Rows: TypeAlias = mx.array | HostArray

SUFFIXES = {"keys": "K", "values": "V"}


def tensor_name(path: str, block: int, tensor: str) -> str:
    """`keys_scales` of layer 2 in block 7 is `L2_B7_K_scales`; `state0` is `L2_B7_S0`."""
    return f"L{path}_B{block}_{_suffix(tensor)}"


@functools.cache
def _suffix(tensor: str) -> str:
    stem, _, rest = tensor.partition("_")
    suffix = SUFFIXES.get(stem) or f"S{stem.removeprefix('state')}"
    return f"{suffix}_{rest}" if rest else suffix


class SlabRows(Mapping[str, SlabArray]):
    """The tensors of one kind of a block, in one slab, by name.

    They are made when first asked for: a block has hundreds, and most are kept, evicted or restored
    as a whole.
    """

    def __init__(self, slab: Slab, plan: SlabPlan, number: int) -> None:
        self.slab, self.plan = slab, plan
        self._number = number

    @functools.cached_property
    def _arrays(self) -> dict[str, SlabArray]:
        return {
            tensor_name(path, self._number, name): SlabArray(self.slab, *place)
            for (path, name), place in self.plan.places.items()
        }

    def __getitem__(self, name: str) -> SlabArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self.plan.places)


@dataclass(frozen=True)
class Block:
    """The cache content of tokens `start … end`, by kind of layer.

    `window` holds the rows that were still in the window when the block was cut; `first_rows` is,
    by path of the window layer, the first such row of the block. In an uneven block some layers
    have fewer than others. `state` is as of `end`.
    """

    index: int
    n_tokens: int
    delta: Mapping[str, Rows] = field(default_factory=dict)
    window: Mapping[str, Rows] = field(default_factory=dict)
    first_rows: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Rows] = field(default_factory=dict)
    is_uneven: bool = False

    @property
    def start(self) -> int:
        return self.index * BLOCK_TOKENS

    @property
    def end(self) -> int:
        return self.start + self.n_tokens

    def arrays(self) -> list[mx.array]:
        """The MLX arrays, to be evaluated."""
        tensors = (*self.delta.values(), *self.window.values(), *self.state.values())
        return [array for array in tensors if isinstance(array, mx.array)]

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def host_bytes(self) -> int:
        """What its rows take in a slab."""
        rows = (*self.delta.values(), *self.window.values())
        return sum(aligned(array.n_bytes) for array in rows if isinstance(array, HostArray))


class _Rows(NamedTuple):
    """K and V of one layer in token order; the first row belongs to token `first`."""

    first: int
    tensors: Tensors

    def between(self, start: int, end: int) -> Tensors:
        a, b = start - self.first, end - self.first
        return {name: rows[..., a:b, :] for name, rows in self.tensors.items()}

    def cut(self, start: int, end: int) -> Tensors:
        return {name: mx.contiguous(rows) for name, rows in self.between(start, end).items()}


_RowsByPath: TypeAlias = dict[str, tuple[Kind, _Rows]]


def cut_blocks(
    caches: Caches, n_tokens: int | None = None, first_block: int = 0
) -> Iterator[Block]:
    """Blocks of a single-sequence cache from `first_block` on, evaluated, one at a time.

    `n_tokens` is what the cache represents; only a model with state layers alone needs it. The last
    block ends with the cache and carries the state. Rows are copied, so that a block does not keep
    the whole cache in memory. Call it on the thread that owns the cache.
    """
    total = _agreed_count(caches, n_tokens)
    rows, states = _rows_and_states(caches, total)
    for index in range(first_block, -(-total // BLOCK_TOKENS)):
        block = _cut_one(index, min(BLOCK_TOKENS, total - index * BLOCK_TOKENS), rows)
        if states and block.end == total:
            block = Block(**{**vars(block), "state": _name_states(index, states)})
        mx.eval(block.arrays())
        yield block


# Tensors copied off a CUDA device while it computes. The rows of all blocks that a slice completed
# are gathered on the device, in one operation for each tensor, not for each tensor of each block.
# That, and the copies over the bus into one slab for each block, is only enqueued: what changes the
# cache comes after it on the stream, and the reader of the bytes waits for them.


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


class _Cut(NamedTuple):
    """Tensors of one kind for some consecutive blocks."""

    kind: Kind
    numbers: range
    tensors: Mapping[TensorPath, mx.array]


def offload_blocks(
    pool: SlabPool, caches: Caches, n_tokens: int, numbers: range, with_state: bool
) -> Iterator[Block]:
    """These blocks as `cut_blocks` makes them, in slabs that the device may still be writing."""
    rows, states = _rows_and_states(caches, _agreed_count(caches, n_tokens))
    cuts = [*_delta_cuts(rows, numbers, n_tokens), *_window_cuts(rows, numbers, n_tokens)]
    if with_state:
        cuts.append(_Cut(Kind.STATE, numbers[-1:], _by_path(states)))
    cuts = [cut for cut in cuts if cut.tensors and cut.numbers]
    gathered = [gather(cut.tensors, len(cut.numbers)) for cut in cuts]
    parts: dict[tuple[Kind, int], Mapping[str, Rows]] = {}
    for cut, some in zip(cuts, gathered, strict=True):
        plan = pool.shared(some.plan)
        for number, slab in zip(cut.numbers, some.copy_to(pool), strict=True):
            parts[cut.kind, number] = SlabRows(slab, plan, number)
    for number in numbers:
        start, end = _bounds(number, n_tokens)
        delta, window, state = (
            parts.get((kind, number), {}) for kind in (Kind.DELTA, Kind.WINDOW, Kind.STATE)
        )
        first_rows = _first_rows(rows, start, end)
        is_uneven = _is_uneven(rows, first_rows)
        yield Block(number, end - start, delta, window, first_rows, state, is_uneven)


def _delta_cuts(rows: _RowsByPath, numbers: range, n_tokens: int) -> Iterator[_Cut]:
    """All whole blocks together, and the open one."""
    n_whole = n_tokens // BLOCK_TOKENS
    whole = range(numbers.start, min(numbers.stop, n_whole))
    for some in (whole, range(max(numbers.start, n_whole), numbers.stop)):
        if some:
            start, end = some.start * BLOCK_TOKENS, min(some.stop * BLOCK_TOKENS, n_tokens)
            deltas = {p: held for p, (kind, held) in rows.items() if kind is Kind.DELTA}
            tensors = {path: held.between(start, end) for path, held in deltas.items()}
            yield _Cut(Kind.DELTA, some, _by_path(tensors))


def _window_cuts(rows: _RowsByPath, numbers: range, n_tokens: int) -> Iterator[_Cut]:
    for number in numbers:
        start, end = _bounds(number, n_tokens)
        tensors = {
            path: rows[path][1].between(start + first, end)
            for path, first in _first_rows(rows, start, end).items()
        }
        yield _Cut(Kind.WINDOW, range(number, number + 1), _by_path(tensors))


def _first_rows(rows: _RowsByPath, start: int, end: int) -> dict[str, int]:
    """The first row of a block that each window layer has; layers without any are left out."""
    first = {
        path: max(start, held.first) for path, (kind, held) in rows.items() if kind is Kind.WINDOW
    }
    return {path: row - start for path, row in first.items() if row < end}


def _is_uneven(rows: _RowsByPath, first_rows: Mapping[str, int]) -> bool:
    n_windows = sum(kind is Kind.WINDOW for kind, _ in rows.values())
    return len({*first_rows.values()}) > 1 or 0 < len(first_rows) < n_windows


def _bounds(number: int, n_tokens: int) -> tuple[int, int]:
    return number * BLOCK_TOKENS, min((number + 1) * BLOCK_TOKENS, n_tokens)


def _by_path(tensors: Mapping[str, Tensors]) -> dict[TensorPath, mx.array]:
    return {(path, name): array for path, own in tensors.items() for name, array in own.items()}


def _agreed_count(caches: Caches, n_tokens: int | None) -> int:
    counted = token_count(caches)
    if counted is None and n_tokens is None:
        raise UnsupportedCache(
            "State layers do not know how many tokens they represent; pass n_tokens."
        )
    if None not in (counted, n_tokens) and counted != n_tokens:
        raise CacheMismatch("The cache", "the token count", n_tokens, counted)
    return n_tokens if counted is None and n_tokens is not None else counted or 0


def _rows_and_states(caches: Caches, total: int) -> tuple[_RowsByPath, dict[str, Tensors]]:
    rows: _RowsByPath = {}
    states: dict[str, Tensors] = {}
    for path, cache in leaves(caches):
        if is_batched(cache):
            raise UnsupportedCache(f"Layer {path} is a batch; extract a row first.")
        if kind_of(cache) is Kind.STATE:
            states[path] = encode(cache).tensors
        elif tensors := rows_in_order(cache):
            n_rows = next(iter(tensors.values())).shape[ROWS]
            rows[path] = (kind_of(cache), _Rows(total - n_rows, tensors))
    return rows, states


def _cut_one(index: int, n_tokens: int, rows: _RowsByPath) -> Block:
    start, end = index * BLOCK_TOKENS, index * BLOCK_TOKENS + n_tokens
    first_rows = _first_rows(rows, start, end)
    parts: dict[Kind, dict[str, mx.array]] = {Kind.DELTA: {}, Kind.WINDOW: {}}
    for path, (kind, held) in rows.items():
        if kind is Kind.WINDOW and path not in first_rows:
            continue
        first = start + first_rows.get(path, 0)
        for name, array in held.cut(first, end).items():
            parts[kind][tensor_name(path, index, name)] = array
    is_uneven = _is_uneven(rows, first_rows)
    delta, window = parts[Kind.DELTA], parts[Kind.WINDOW]
    return Block(index, n_tokens, delta, window, first_rows, is_uneven=is_uneven)


def _name_states(index: int, states: Mapping[str, Tensors]) -> Tensors:
    return {
        tensor_name(path, index, name): mx.contiguous(array)
        for path, tensors in states.items()
        for name, array in tensors.items()
    }


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
