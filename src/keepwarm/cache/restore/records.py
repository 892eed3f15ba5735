"""A block of a live cache as records of a store, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from keepwarm.errors import CorruptBlock
from keepwarm.kv.buffers import FileArray, HostArray, dtype_name, from_buffer, to_buffer
from keepwarm.kv.layout import Layout
from keepwarm.kv.slabs import SlabArray
from keepwarm.kv.slices import Block, Rows, SlabRows, check_block
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockRef, Namespace
from keepwarm.records.at_rest import CODEC, PER_WORD, Q8, WANTED, Array, Rounded, fits, restored
from keepwarm.records.header import HasBytes, LazyTensors
from keepwarm.records.record import (
    Header,
    Part,
    PrefillTime,
    Record,
    RecordView,
    Tensor,
    UnreadTensor,
)


def records_of(
    namespace: Namespace,
    ref: BlockRef,
    block: Block,
    prefill: PrefillTime | None = None,
    codec: str | None = None,
) -> Iterator[Record]:
    """One record for each part that is not empty; bytes are shared with the block. The codec is
    that of rows on disk; an open block, windows and states are never rounded.

    A block without rows, before a state or a window, is a window record with zero rows: its tokens
    are needed to tell which conversation the state belongs to.
    """
    parts = {part: tensors for part, tensors in _parts(block).items() if tensors}
    for part, tensors in (parts or {Part.WINDOW: {}}).items():
        extra = _extra(part, block)
        if codec and part is Part.DELTA and ref.n_tokens == BLOCK_TOKENS:
            extra = {WANTED: codec}
        header = Header(namespace, ref.key, ref.parent, part, ref.number, ref.tokens, extra)
        yield Record(header, _tensors_of(tensors), prefill)


def check_record(layout: Layout, record: Record | RecordView) -> None:
    """Raise unless a record is one that this model could have made."""
    header, block = record.header, block_of(record)
    check_block(layout, block)
    if header.part is not Part.WINDOW and not record.tensors:
        raise CorruptBlock("?", header.number, "it has no tensors")
    if header.w_rows != _n_window_rows(block):
        raise CorruptBlock("?", header.number, "it has other window rows than it says")


def block_of(record: Record | RecordView) -> Block:
    """The part of a block that is in one record; nothing is copied."""
    header, arrays = record.header, _arrays_of(record.tensors)
    if codec := header.extra.get(CODEC):
        if codec != Q8:
            raise CorruptBlock("?", header.number, "its codec is not known")
        arrays = _restored_arrays(arrays, header.number)
    return Block(
        index=header.number,
        n_tokens=len(header.tokens) // 4,
        delta=arrays if header.part is Part.DELTA else {},
        window=arrays if header.part is Part.WINDOW else {},
        first_rows=_first_rows(header),
        state=arrays if header.part is Part.STATE else {},
    )


def _first_rows(header: Header) -> dict[str, int]:
    n_tokens, rows_by_layer = len(header.tokens) // 4, header.extra.get("first_rows", {})
    if not isinstance(rows_by_layer, dict) or not all(
        type(n) is int for n in rows_by_layer.values()
    ):
        raise CorruptBlock("?", header.number, "its first rows are not numbers")
    if not all(0 <= n < n_tokens for n in rows_by_layer.values()):
        raise CorruptBlock("?", header.number, "its first rows are not in the block")
    return dict(rows_by_layer)


class SlabTensor:
    """A tensor in a slab; `data` waits until the device has written it."""

    def __init__(self, name: str, array: SlabArray) -> None:
        self.name, self.array = name, array
        self.dtype, self.shape, self.n_bytes = dtype_name(array.dtype), array.shape, array.n_bytes

    @property
    def data(self) -> memoryview:
        return self.array.data


class SlabTensors(LazyTensors):
    """The tensors of a record whose rows are in one slab."""

    def __init__(self, rows: SlabRows) -> None:
        super().__init__(rows.plan.n_bytes)
        self.rows = rows

    def make(self) -> tuple[SlabTensor, ...]:
        return tuple(SlabTensor(name, array) for name, array in self.rows.items())


def _tensors_of(rows: Mapping[str, Rows]) -> Sequence[HasBytes]:
    if isinstance(rows, SlabRows):
        return SlabTensors(rows)
    # NOTE: not a tuple made from a generator: CPython resizes it in place, which fails if another
    # thread walks all objects meanwhile, as a debugger does.
    return [Tensor(name, *to_buffer(array)) for name, array in rows.items()]


def _arrays_of(tensors: Sequence[HasBytes | UnreadTensor]) -> Mapping[str, HostArray]:
    if isinstance(tensors, SlabTensors):
        return tensors.rows
    return {tensor.name: _array_of(tensor) for tensor in tensors}


def _array_of(tensor: HasBytes | UnreadTensor) -> HostArray:
    if isinstance(tensor, SlabTensor):
        return tensor.array
    if isinstance(tensor, UnreadTensor):
        return FileArray(tensor.dtype, tensor.shape, tensor)
    return from_buffer(tensor.dtype, tensor.shape, tensor.data)


class RestoredArray(HostArray):
    """Rows that were rounded. Each access to `words` reads the parts and makes the rows."""

    def __init__(self, parts: Sequence[HostArray]) -> None:
        self._parts = parts
        weights, scales, _ = parts
        self.shape = (*weights.shape[:-1], weights.shape[-1] * PER_WORD)
        self.dtype = scales.dtype

    @property
    def words(self) -> Array:
        weights, scales, biases = self._parts
        # Parts of a file are read into the same buffer, the largest last.
        small = [part.words.copy() for part in (scales, biases)]
        return restored(Rounded(weights.words, *small), dtype_name(self.dtype))


def _restored_arrays(arrays: Mapping[str, HostArray], number: int) -> Mapping[str, HostArray]:
    """Those that were rounded as one array each, the others as they are."""
    made = dict(arrays)
    for name in [name for name in arrays if name.endswith("_weights")]:
        own = name.removesuffix("_weights")
        parts = [made.pop(f"{own}_{part}", None) for part in Rounded._fields]
        made[own] = RestoredArray(_fitting([part for part in parts if part is not None], number))
    return made


def _fitting(parts: Sequence[HostArray], number: int) -> Sequence[HostArray]:
    dtypes = [dtype_name(part.dtype) for part in parts]
    is_whole = len(parts) == len(Rounded._fields) and dtypes == ["U32", *2 * dtypes[1:2]]
    if not (is_whole and fits(*(part.shape for part in parts))):
        raise CorruptBlock("?", number, "the parts of its rows do not fit")
    return parts


def _parts(block: Block) -> dict[Part, Mapping[str, Rows]]:
    return {Part.DELTA: block.delta, Part.WINDOW: block.window, Part.STATE: block.state}


def _extra(part: Part, block: Block) -> dict[str, object]:
    if part is not Part.WINDOW:
        return {}
    return {"first_rows": dict(block.first_rows), "w_rows": _n_window_rows(block)}


def _n_window_rows(block: Block) -> int:
    return block.n_tokens - max(block.first_rows.values(), default=block.n_tokens)
