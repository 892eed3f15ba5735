"""A block of a live cache as records of a store, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keepwarm.kv.buffers import from_buffer, to_buffer
from keepwarm.kv.slices import Block, Rows
from keepwarm.prefix.blocks import BlockRef, Namespace
from keepwarm.store.record import Header, Part, Record, Tensor


def records_of(namespace: Namespace, ref: BlockRef, block: Block) -> Iterator[Record]:
    """One record for each part that holds something; bytes are shared with the block."""
    for part, tensors in _parts(block).items():
        if tensors:
            header = Header(
                namespace, ref.key, ref.parent, part, ref.number, ref.tokens, _extra(part, block)
            )
            buffers = ((name, to_buffer(array)) for name, array in tensors.items())
            yield Record(header, tuple(Tensor(name, *buffer) for name, buffer in buffers))


def block_of(record: Record) -> Block:
    """What one record knows of its block. Nothing is copied: the bytes stay the record's."""
    header = record.header
    arrays = {t.name: from_buffer(t.dtype, t.shape, t.data) for t in record.tensors}
    return Block(
        index=header.number,
        n_tokens=len(header.tokens) // 4,
        delta=arrays if header.part is Part.DELTA else {},
        window=arrays if header.part is Part.WINDOW else {},
        first_rows={path: int(n) for path, n in header.extra.get("first_rows", {}).items()},
        state=arrays if header.part is Part.STATE else {},
    )


def _parts(block: Block) -> dict[Part, Mapping[str, Rows]]:
    return {Part.DELTA: block.delta, Part.WINDOW: block.window, Part.STATE: block.state}


def _extra(part: Part, block: Block) -> dict[str, object]:
    if part is not Part.WINDOW:
        return {}
    w_rows = block.n_tokens - max(block.first_rows.values())
    return {"first_rows": dict(block.first_rows), "w_rows": w_rows}
