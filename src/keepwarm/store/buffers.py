"""Whole records in memory, as they come over a network."""

from __future__ import annotations

import struct
from io import BytesIO

from keepwarm.errors import BadRecord
from keepwarm.store.record import (
    MAX_HEADER_BYTES,
    Record,
    Tensor,
    open_record,
    read_record,
    tensor_digest,
)
from keepwarm.store.seal import Seal


def decode_record(data: memoryview, seal: Seal | None = None) -> Record:
    """The record, verified as one on disk is; its tensors share the memory, unless sealed."""
    if len(data) < 8:
        raise BadRecord("the file is cut short")
    if seal is not None:
        file = BytesIO(data)
        return read_record(file, open_record(file, len(data), seal))
    n_header = min(struct.unpack_from("<Q", data)[0], MAX_HEADER_BYTES)
    opened = open_record(BytesIO(data[: 8 + n_header]), len(data))
    tensors = []
    for entry in opened.entries:
        start, end = opened.data_start + entry.start, opened.data_start + entry.end
        tensor = Tensor(entry.name, entry.dtype, entry.shape, data[start:end])
        if tensor_digest(tensor) != entry.digest:
            raise BadRecord(f"{entry.name} does not match its digest")
        tensors.append(tensor)
    return Record(opened.header, tuple(tensors))
