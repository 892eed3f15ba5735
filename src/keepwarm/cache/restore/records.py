"""A block of a live cache as records of a store, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from keepwarm.cache.restore.writing import UNEVEN
from keepwarm.errors import CorruptBlock
from keepwarm.kv.buffers import FileArray, HostArray, dtype_name, from_buffer, to_buffer
from keepwarm.kv.layout import Layout
from keepwarm.kv.rounded import RoundedArray
from keepwarm.kv.slabs import SlabArray
from keepwarm.kv.slices import Block, Rows, SlabRows, check_block
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockRef, Namespace
from keepwarm.records.at_rest import CODEC, ROUNDINGS, WANTED, Rounded, Rounding, fit, rounding_of
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
    if header.w_rows > _n_window_rows(block):
        raise CorruptBlock("?", header.number, "it has fewer window rows than it says")


def block_of(record: Record | RecordView) -> Block:
    """The part of a block that is in one record; nothing is copied."""
    header, arrays = record.header, _arrays_of(record.tensors)
    if codec := header.extra.get(CODEC):
        if codec not in ROUNDINGS:
            raise CorruptBlock("?", header.number, "its codec is not known")
        arrays = _joined_parts(arrays, codec, header.number)
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


def _joined_parts(
    arrays: Mapping[str, HostArray], codec: str, number: int
) -> Mapping[str, HostArray]:
    """Those that were rounded as one array each, the others as they are."""
    made = dict(arrays)
    for name in [name for name in arrays if name.endswith("_weights")]:
        own = name.removesuffix("_weights")
        found = [made.pop(f"{own}_{part}", None) for part in Rounded._fields]
        parts = [part for part in found if part is not None]
        if not (own[-2:] in ("_K", "_V") and _fit(parts, rounding_of(codec, own))):
            raise CorruptBlock("?", number, "the parts of its rows do not fit")
        made[own] = RoundedArray(parts, rounding_of(codec, own))
    return made


def _fit(parts: Sequence[HostArray], rounding: Rounding) -> bool:
    dtypes = [dtype_name(part.dtype) for part in parts]
    has_types = dtypes == ["U32", *2 * dtypes[1:2]]
    return has_types and fit([part.shape for part in parts], rounding)


def _parts(block: Block) -> dict[Part, Mapping[str, Rows]]:
    return {Part.DELTA: block.delta, Part.WINDOW: block.window, Part.STATE: block.state}


def _extra(part: Part, block: Block) -> dict[str, object]:
    if part is not Part.WINDOW:
        return {}
    extra = {"first_rows": dict(block.first_rows), "w_rows": _n_window_rows(block)}
    return extra | ({UNEVEN: True} if block.is_uneven else {})


def _n_window_rows(block: Block) -> int:
    """Of the widest window, which holds most; narrower ones are looked at when it is read."""
    return block.n_tokens - min(block.first_rows.values(), default=block.n_tokens)
