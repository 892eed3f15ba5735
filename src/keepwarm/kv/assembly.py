"""Caches rebuilt from blocks, up to any token."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from keepwarm.errors import CorruptBlock
from keepwarm.kv.buffers import (
    HostArray,
    WritableArray,
    host_view,
    uninitialized_arrays,
    word_of,
)
from keepwarm.kv.codec import LAYER_ARRAYS, EncodedCache, decode
from keepwarm.kv.kinds import Cache, Caches, Kind
from keepwarm.kv.layout import ROWS, LayerSpec, Layout, TensorSpec
from keepwarm.kv.rounded import RoundedArray, dequantized
from keepwarm.kv.slabs import Place, Slab, SlabArray, SlabPlan, SlabPool, aligned
from keepwarm.kv.slices import Block, Rows, SlabRows, tensor_name
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.records.at_rest import Rounding

PIECE_BYTES = 512 << 20  # copied at once: about 11 ms over a bus of 50 GB/s
WORD = mx.uint64  # a device reads host memory fastest in wide words


class RowBuffer:
    """K or V of one layer, filled in place, so that a restore holds the rows once.

    Host bytes go straight into MLX's memory: one copy, and several threads may write at once.
    """

    def __init__(self, spec: TensorSpec, n_rows: int, writable: WritableArray) -> None:
        self.spec = spec
        self._n_rows = n_rows
        self.array, self._memory = writable  # complete once all rows are written

    def write(self, at: int, rows: Rows) -> None:
        host = rows if isinstance(rows, HostArray) else HostArray(host_view(rows), rows.dtype)
        end = at + rows.shape[ROWS]
        host.write_to(self._memory[..., at:end, :])
        if end == self._n_rows:  # zero the spare rows: the memory is uninitialized
            self._memory[..., end:, :] = 0


class RowAllocation(NamedTuple):
    """Memory for the rows of one tensor, and spare rows after them."""

    spec: TensorSpec
    n_rows: int
    n_spare: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.with_rows(self.n_rows + self.n_spare)


def allocate_rows(
    allocations: Sequence[RowAllocation], staging: Staging | None = None
) -> Sequence[RowBuffer | DeviceRows]:
    """All at once: one by one it takes MLX three times as long."""
    if staging is not None:
        zeros = [mx.zeros(rows.shape, rows.spec.dtype) for rows in allocations]
        mx.eval(zeros)
        return [
            DeviceRows(r.spec, r.n_rows, array, staging)
            for r, array in zip(allocations, zeros, strict=True)
        ]
    arrays = uninitialized_arrays([(rows.shape, rows.spec.dtype) for rows in allocations])
    return [
        RowBuffer(r.spec, r.n_rows, array) for r, array in zip(allocations, arrays, strict=True)
    ]


# On CUDA reader threads leave the rows of a block in a slab, or have read a block that is in one.
# The thread that owns MLX has the device copy them, many blocks at once: one operation for each
# tensor, however many blocks follow one another.


class DeviceRows:
    """K or V of one layer in device memory; unwritten rows, and those after `n_rows`, are zeros."""

    def __init__(self, spec: TensorSpec, n_rows: int, zeros: mx.array, staging: Staging) -> None:
        self.spec, self.n_rows = spec, n_rows
        self._staging = staging
        self.array = zeros

    def write(self, at: int, rows: mx.array | HostArray) -> None:
        if isinstance(rows, HostArray):
            self._staging.add(self, at, rows)
        else:
            self.array[..., at : at + rows.shape[ROWS], :] = rows


class Destination(NamedTuple):
    """A tensor in a slab and the rows that it is copied to: those from `row` on, or as many more as
    the copy says. One that was rounded is in three places, and the device makes it whole."""

    target: DeviceRows
    row: int
    places: tuple[Place, ...]
    rounding: Rounding | None = None

    @property
    def n_rows(self) -> int:
        return self.places[0].shape[ROWS]


class _Copy(NamedTuple):
    """Rows in one slab, of any number of tensors."""

    slab: Slab
    at: int
    n_rows: int  # of every tensor; 0 if they differ
    tensors: Sequence[Destination]

    def precedes(self, other: _Copy) -> bool:
        """Whether the other one has the next rows, in the same places of another slab."""
        is_next = self.n_rows and other.at == self.at + self.n_rows
        return bool(is_next) and self.tensors == other.tensors


class _Open(threading.local):
    """What one thread has written since it last published: its slab, and the tensors added."""

    def __init__(self) -> None:
        self.slab: Slab | None = None
        self.n_bytes = self.used = 0
        self.added: dict[Slab, list[Destination]] = defaultdict(list)


class Staging:
    """Rows on their way to the arrays of one restore."""

    def __init__(self, pool: SlabPool, record_bytes: int) -> None:
        self._pool = pool
        self._piece_records = max(1, PIECE_BYTES // record_bytes)
        self._open = _Open()
        self._ready: deque[list[_Copy]] = deque()  # record by record
        self._copying: list[mx.array] = []  # the latest piece on the device, and its slabs:
        self._held: list[Slab] = []

    @property
    def is_empty(self) -> bool:
        return not self._ready

    def open(self, n_bytes: int) -> None:
        """Begin a record whose rows take so many bytes. Each thread has one at a time."""
        self._open.n_bytes, self._open.used = n_bytes, 0

    def add(self, target: DeviceRows, at: int, rows: HostArray) -> None:
        rounding = rows.rounding if isinstance(rows, RoundedArray) else None
        parts = rows.parts if isinstance(rows, RoundedArray) else [rows]
        staged = [part if isinstance(part, SlabArray) else self._staged(part) for part in parts]
        places = tuple(Place(part.start, part.shape, part.dtype) for part in staged)
        (slab,) = {part.slab for part in staged}  # places are relative to it
        self._open.added[slab].append(Destination(target, at, places, rounding))

    def publish(self) -> None:
        """Pass on what this thread has added: all of it is verified."""
        self._ready.append([_relative(slab, own) for slab, own in self._open.added.items()])
        self.discard()

    def discard(self) -> None:
        self._open.slab, self._open.added = None, defaultdict(list)

    def add_block(self, slab: Slab, at: int, n_rows: int, tensors: Sequence[Destination]) -> None:
        """A record that is in a slab, with so many rows of every tensor; those beyond what a target
        needs are not copied."""
        self._ready.append([_Copy(slab, at, n_rows, tensors)])

    def copy(self, is_complete: bool) -> None:
        """Have the device copy a piece, on the thread that owns MLX; wait for the one before it.

        A piece that is not full is left to grow, unless all rows were added.
        """
        if len(self._ready) < self._piece_records and not is_complete:
            return
        n_records = min(len(self._ready), self._piece_records)
        copies = [copy for _ in range(n_records) for copy in self._ready.popleft()]
        runs = [(run, _stacked(run)) for run in _runs(copies)]
        targets = [array for run, slabs in runs for array in _assign(run, slabs)]
        mx.async_eval([*(slabs for _, slabs in runs), *targets])
        mx.eval(self._copying)  # with all that was enqueued then: its slabs may be written again
        self._copying = [slabs for _, slabs in runs]
        self._held = [copy.slab for copy in copies]

    def wait(self) -> None:
        """Until the device reads no slab of this restore; what was not copied is dropped."""
        self._ready.clear()
        mx.eval(self._copying)
        self._copying, self._held = [], []

    def _staged(self, rows: HostArray) -> SlabArray:
        own = self._open
        if own.slab is None:
            own.slab = self._pool.take(own.n_bytes)
        start, end = own.used, own.used + rows.n_bytes
        memory = own.slab.memory[start:end].view(word_of(rows.dtype)).reshape(rows.shape)
        rows.write_to(memory)
        own.used = aligned(end)
        return SlabArray(own.slab, start, rows.shape, rows.dtype)


def _relative(slab: Slab, tensors: Sequence[Destination]) -> _Copy:
    """Equal places in equal records have equal destinations, but for the row of the copy."""
    at, n_rows = tensors[0].row, {tensor.n_rows for tensor in tensors}
    relative = [tensor._replace(row=tensor.row - at) for tensor in tensors]
    return _Copy(slab, at, n_rows.pop() if len(n_rows) == 1 else 0, relative)


def _runs(copies: Iterable[_Copy]) -> Iterator[Sequence[_Copy]]:
    """Copies into consecutive rows of the same targets, out of equal places in several slabs."""
    ordered = sorted(copies, key=lambda copy: (id(copy.tensors[0].target), copy.at))
    run = ordered[:1]
    for before, copy in pairwise(ordered):
        if not before.precedes(copy):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def _stacked(run: Sequence[_Copy]) -> mx.array:
    """The used bytes of these slabs, a row for each."""
    places = [place for tensor in run[0].tensors for place in tensor.places]
    n_bytes = aligned(max(place.end for place in places))
    return mx.stack([copy.slab.array[:n_bytes].view(WORD) for copy in run])


def _assign(run: Sequence[_Copy], slabs: mx.array) -> Iterator[mx.array]:
    """Copy every tensor of some blocks to its target; `slabs` has a row for each block."""
    views: dict[mx.Dtype, mx.array] = {}

    def held(place: Place) -> mx.array:
        view = views.setdefault(place.dtype, slabs.view(place.dtype))
        first, n_items = place.start // place.dtype.size, math.prod(place.shape)
        return view[:, first : first + n_items].reshape(len(run), *place.shape)

    for target, row, places, rounding in run[0].tensors:
        parts, at = [held(place) for place in places], run[0].at + row
        rows = parts[0] if rounding is None else dequantized(parts, rounding)
        joined = mx.moveaxis(rows, 0, ROWS)  # behind the axes before the rows
        joined = joined.flatten(ROWS, ROWS + 1)[..., : target.n_rows - at, :]
        target.array[..., at : at + joined.shape[ROWS], :] = joined
        yield target.array


class _LayerAssembly:
    """One layer being restored: which rows it needs, and which are in place."""

    def __init__(self, leaf: LayerSpec, n_tokens: int) -> None:
        self.leaf = leaf
        self.n_tokens = n_tokens
        self.first = leaf.first_row_needed(n_tokens)
        self.filled_blocks: set[int] = set()  # indices of the blocks whose rows are in place
        self.states: dict[str, Rows] = {}
        self.buffers: dict[str, RowBuffer | DeviceRows] = {}

    def allocations(self) -> dict[str, RowAllocation]:
        """The memory that its rows need, by tensor name."""
        if self.leaf.kind is Kind.STATE:
            return {}
        n_rows = self.n_tokens - self.first
        grows = self.leaf.cls in ("KVCache", "QuantizedKVCache")
        n_spare = (-n_rows % BLOCK_TOKENS or BLOCK_TOKENS) if grows else 0
        return {
            name: RowAllocation(spec, n_rows, n_spare) for name, spec in self.leaf.tensors.items()
        }

    def add(self, block: Block) -> bool:
        """Whether all rows that it needs of the block were added."""
        if self.leaf.kind is Kind.STATE:
            self._add_state(block)
        elif self.leaf.kind is Kind.WINDOW:
            if self.leaf.path in block.first_rows:
                return self._add_rows(block, block.window, block.first_rows[self.leaf.path])
        elif block.delta:
            return self._add_rows(block, block.delta, first_row=0)
        return False

    def _add_rows(self, block: Block, tensors: Mapping[str, Rows], first_row: int) -> bool:
        held = block.start + first_row
        start, end = max(block.start, self.first), min(block.end, self.n_tokens)
        if start >= end or held > start or block.index in self.filled_blocks:
            return False
        n_held, where = block.end - held, self._where(block)
        is_whole = end - start == n_held
        for name, spec in self.leaf.tensors.items():
            rows = self._tensor(block, tensors, name)
            spec.check(rows, n_held, where)
            part = rows if is_whole else _between(rows, start - held, end - held)
            self.buffers[name].write(start - self.first, part)
        return end == min(block.start + BLOCK_TOKENS, self.n_tokens)

    def destinations(self, plan: SlabPlan, block: Block) -> Iterator[Destination]:
        """Where the rows of a whole block go that is in a slab; checks it like any other."""
        for name, spec in self.leaf.tensors.items():
            place = plan.places.get((self.leaf.path, name))
            if place is None:
                raise self._lacks(block, name)
            spec.check(place, block.n_tokens, self._where(block))
            target = self.buffers[name]
            assert isinstance(target, DeviceRows)
            yield Destination(target, 0, (place,))

    def _add_state(self, block: Block) -> None:
        if block.end != self.n_tokens or not block.state:
            return
        if self.leaf.has_variable_tensors:
            self.states = self._open_states(block)
            return
        n_rows = self.leaf.state_rows(self.n_tokens)
        for name, spec in self.leaf.tensors.items():
            array = self._tensor(block, block.state, name)
            spec.check(array, n_rows, self._where(block))
            self.states[name] = _detach(array)

    def _open_states(self, block: Block) -> dict[str, Rows]:
        """All arrays in the block; those that the layout knows are checked."""
        for name, spec in self.leaf.tensors.items():
            spec.check(self._tensor(block, block.state, name), None, self._where(block))
        names = {f"state{i}": self._name(block, f"state{i}") for i in range(len(LAYER_ARRAYS))}
        return {n: _detach(block.state[name]) for n, name in names.items() if name in block.state}

    def _tensor(self, block: Block, tensors: Mapping[str, Rows], name: str) -> Rows:
        full_name = self._name(block, name)
        if full_name not in tensors:
            raise self._lacks(block, name)
        return tensors[full_name]

    def _lacks(self, block: Block, name: str) -> CorruptBlock:
        why = f"{self._name(block, name)} is missing"
        return CorruptBlock(self.leaf.path, block.index, why)

    def _name(self, block: Block, name: str) -> str:
        return tensor_name(self.leaf.path, block.index, name)

    def _where(self, block: Block) -> str:
        return f"Layer {self.leaf.path}, block {block.index}"

    def encoded(self) -> EncodedCache:
        """The layer for the codec; raises if rows or states are missing."""
        leaf, last = self.leaf, max(0, self.n_tokens - 1) // BLOCK_TOKENS
        scalars = {**leaf.scalars, "offset": self.n_tokens, "start_position": self.first}
        if self.n_tokens == 0 or not leaf.tensors:
            return EncodedCache(leaf.cls, {}, {**scalars, "offset": 0, "start_position": 0})
        if leaf.kind is Kind.STATE:
            if not self.states:
                why = f"there is no state as of token {self.n_tokens}"
                raise CorruptBlock(leaf.path, last, why)
            return EncodedCache(leaf.cls, {n: _to_mx(a) for n, a in self.states.items()}, scalars)
        for number in range(self.first // BLOCK_TOKENS, last + 1):
            if number not in self.filled_blocks:
                raise self._missing(number)
        arrays = {name: self.buffers[name].array for name in leaf.tensors}
        return EncodedCache(leaf.cls, arrays, scalars)

    def _missing(self, number: int) -> CorruptBlock:
        start = max(self.first, number * BLOCK_TOKENS)
        end = min(self.n_tokens, (number + 1) * BLOCK_TOKENS)
        return CorruptBlock(self.leaf.path, number, f"rows {start} to {end} are missing")


class Assembly:
    """Caches for the first `n_tokens` of a prompt, assembled from blocks in any order.

    Every tensor is checked against the layout. Rows are copied, so a block can be dropped right
    after `add` and memory peaks at the cache itself plus the blocks being added. Create, advance
    and finish it on the thread that owns MLX; several threads may add blocks of host bytes at once.
    With a pool of slabs, `add` only leaves the rows in slabs, and `advance` copies them; then the
    device makes rows whole that were rounded, else the thread that adds them does.
    """

    def __init__(self, layout: Layout, n_tokens: int, pool: SlabPool | None = None) -> None:
        self._layout = layout
        self._n_tokens = n_tokens
        self._destinations: dict[SlabPlan, list[Destination]] = {}
        self._staging = staging = (
            None if pool is None else Staging(pool, max(slab_sizes(layout), default=1))
        )
        self._leaves = {leaf.path: _LayerAssembly(leaf, n_tokens) for leaf in layout.leaves()}
        allocations = [
            (leaf, name, rows)
            for leaf in self._leaves.values()
            for name, rows in leaf.allocations().items()
        ]
        buffers = allocate_rows([rows for *_, rows in allocations], staging)
        for (leaf, name, _), buffer in zip(allocations, buffers, strict=True):
            leaf.buffers[name] = buffer
        self._deltas = [leaf for leaf in self._leaves.values() if leaf.leaf.kind is Kind.DELTA]

    def add(self, block: Block) -> None:
        if self._staging is None:
            self._add_rows(block)
        elif isinstance(block.delta, SlabRows) and self._is_all_needed(block):
            self._add_slab(block, block.delta, self._staging)
        else:
            self._stage(block, self._staging)

    def _add_rows(self, block: Block) -> None:
        """If a layer's rows are bad, those before are dropped: another copy has to fill them."""
        for leaf in [leaf for leaf in self._leaves.values() if leaf.add(block)]:
            leaf.filled_blocks.add(block.index)

    def _stage(self, block: Block, staging: Staging) -> None:
        try:
            staging.open(block.host_bytes)
            self._add_rows(block)
        except BaseException:
            staging.discard()
            raise
        staging.publish()

    def _is_all_needed(self, block: Block) -> bool:
        """Whether delta rows are all that it has, and the first of them go to their place."""
        is_new = not any(block.index in leaf.filled_blocks for leaf in self._deltas)
        is_delta = bool(self._deltas) and not (block.window or block.state)
        return is_delta and is_new and block.start < self._n_tokens

    def _add_slab(self, block: Block, rows: SlabRows, staging: Staging) -> None:
        """The work for each tensor is done once for all blocks with the same places."""
        if rows.plan not in self._destinations:
            self._destinations[rows.plan] = [
                one for leaf in self._deltas for one in leaf.destinations(rows.plan, block)
            ]
        destinations = self._destinations[rows.plan]
        staging.add_block(rows.slab, block.start, block.n_tokens, destinations)
        if block.end >= min(block.start + BLOCK_TOKENS, self._n_tokens):
            for leaf in self._deltas:
                leaf.filled_blocks.add(block.index)

    def advance(self, is_complete: bool) -> bool:
        """Have the device copy a piece of what was added; whether nothing is left to copy.

        `is_complete` says that all blocks were added.
        """
        if self._staging is not None:
            self._staging.copy(is_complete)
        return self._staging is None or self._staging.is_empty

    def abandon(self) -> None:
        """Before its slabs go back to the pool: another engine may write them on its own stream."""
        if self._staging is not None:
            self._staging.wait()

    def finish(self) -> Caches:
        """The caches, evaluated; if rows are missing, raises with layer and block."""
        while not self.advance(is_complete=True):
            continue
        encoded = [self._encoded(layer) for layer in self._layout.layers]
        mx.eval([array for layer in encoded for array in layer.arrays()])
        return [decode(layer) for layer in encoded]

    def _encoded(self, layer: LayerSpec) -> EncodedCache:
        if layer.kind is Kind.COMPOSITE:
            return EncodedCache(layer.cls, parts=tuple(self._encoded(part) for part in layer.parts))
        return self._leaves[layer.path].encoded()


def slab_sizes(layout: Layout) -> list[int]:
    """The bytes of a whole block's rows, by kind of layer."""
    sizes: Counter[Kind] = Counter()
    for leaf in layout.leaves():
        if leaf.kind is not Kind.STATE:
            shapes = [(spec.with_rows(BLOCK_TOKENS), spec.dtype) for spec in leaf.tensors.values()]
            sizes[leaf.kind] += sum(aligned(math.prod(s) * dtype.size) for s, dtype in shapes)
    return list(sizes.values())


def _between(rows: Rows, start: int, end: int) -> Rows:
    return rows[..., start:end, :] if isinstance(rows, mx.array) else rows.rows(start, end)


def _detach(array: Rows) -> Rows:
    """An array that stays valid after the block is dropped."""
    return array if isinstance(array, mx.array) else array.copy()


def _to_mx(array: Rows) -> mx.array:
    return array if isinstance(array, mx.array) else array.to_mx()


def reconstruct_cache(
    layout: Layout, blocks: Iterable[Block], n_tokens: int | None = None
) -> Caches:
    """One cache per layer from blocks in order, up to `n_tokens` (default: all of them).

    Their tensors may be numpy arrays.
    """
    if n_tokens is None:
        blocks = list(blocks)
        n_tokens = blocks[-1].end if blocks else 0
    assembly = Assembly(layout, n_tokens)
    for block in blocks:
        assembly.add(_with_mlx_arrays(block))
    return assembly.finish()


def _with_mlx_arrays(block: Block) -> Block:
    def converted(tensors: Mapping[str, Any]) -> dict[str, Rows]:
        return {
            name: rows if isinstance(rows, mx.array | HostArray) else mx.array(rows)
            for name, rows in tensors.items()
        }

    delta, window, state = map(converted, (block.delta, block.window, block.state))
    return replace(block, delta=delta, window=window, state=state)


def concatenate_cache_blocks(ks: Iterable[Any], vs: Iterable[Any]) -> tuple[mx.array, mx.array]:
    """K and V of consecutive blocks as one pair, evaluated; numpy arrays are accepted."""
    pairs = [(_four_axes(k), _four_axes(v)) for k, v in zip(ks, vs, strict=True)]
    if not pairs:
        raise CorruptBlock("?", 0, "there are no blocks to concatenate")
    n_rows = sum(k.shape[ROWS] for k, _ in pairs)
    buffers = allocate_rows([RowAllocation(_spec_of(array), n_rows) for array in pairs[0]])
    at = 0
    for index, pair in enumerate(pairs):
        for buffer, array in zip(buffers, pair, strict=True):
            buffer.spec.check(array, pair[0].shape[ROWS], f"Block {index}")
            buffer.write(at, array)
        at += pair[0].shape[ROWS]
    keys, values = (buffer.array for buffer in buffers)
    mx.eval(keys, values)
    return keys, values


def create_cache_from_state(k: Any, v: Any) -> Cache:
    """A KVCache that holds `k` and `v`, shaped [1, heads, tokens, width]."""
    keys, values = concatenate_cache_blocks([k], [v])
    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, keys.shape[ROWS]
    return cache


def _four_axes(array: Any) -> mx.array:
    rows = array if isinstance(array, mx.array) else mx.array(array)
    return rows[None] if rows.ndim == 3 else rows


def _spec_of(array: mx.array) -> TensorSpec:
    return TensorSpec((*array.shape[:ROWS], None, *array.shape[ROWS + 1 :]), array.dtype)
