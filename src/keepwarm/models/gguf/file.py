"""The GGUF format: a header of metadata and tensor shapes, then the tensors.

Not read with `mx.load`, which opens the file for writing (so a read-only file fails) and trusts
every count and offset in it (a bad one ends the process).
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from keepwarm.errors import BadModelFile, UnsupportedModel

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
LARGEST_RANK = 4
MAX_ITEMS = 1 << 22  # numbers and strings in a header; a vocabulary of a million has fewer
MAX_STRING_BYTES = 1 << 24

Bytes = npt.NDArray[Any]


class TensorType(NamedTuple):
    name: str
    block: int  # weights in a block
    n_bytes: int  # of a block
    bits: int  # of a quantised weight, or 0


TYPES = {
    0: TensorType("F32", 1, 4, 0),
    1: TensorType("F16", 1, 2, 0),
    2: TensorType("Q4_0", 32, 18, 4),
    3: TensorType("Q4_1", 32, 20, 4),
    8: TensorType("Q8_0", 32, 34, 8),
}
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip


class GGUFTensor(NamedTuple):
    shape: tuple[int, ...]  # rows first, as in MLX
    type: TensorType
    start: int  # in the file

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) // self.type.block * self.type.n_bytes


class GGUFHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads forward in a file and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self._n_items = 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self.data) - self.at:
            raise _truncated(self.path)
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at]

    def numbers(self, code: str, n: int) -> tuple[Any, ...]:
        # The length is checked before the format is built: n comes from the file.
        self._n_items += n
        if self._n_items > MAX_ITEMS:
            raise invalid_file(self.path, f"its header has more than {MAX_ITEMS} values")
        return struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize(f"<{code}")))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        n_bytes = self.number("Q")
        if n_bytes > MAX_STRING_BYTES:
            raise invalid_file(self.path, f"its header has a string of {n_bytes} bytes")
        try:
            return self.take(n_bytes).decode()
        except UnicodeDecodeError as error:
            raise invalid_file(self.path, "a name in its header is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind == ARRAY:
            kind, n = self.number("I"), self.number("Q")
            if kind in SCALARS:
                return list(self.numbers(SCALARS[kind], n))
            if kind == STRING:
                return [self.string() for _ in range(n)]
        elif kind == STRING:
            return self.string()
        elif kind in SCALARS:
            return self.number(SCALARS[kind])
        raise invalid_file(self.path, f"its header has a value of unknown type {kind}")


def read_header(path: Path) -> GGUFHeader:
    """Metadata and tensor shapes, after checking that all tensors lie inside the file."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BadModelFile(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read_header(_Cursor(path, data))
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}.") from error


def _read_header(cursor: _Cursor) -> GGUFHeader:
    cursor.take(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{cursor.path} is GGUF version {version}; only 2 and 3 are supported."
        )
    n_tensors, n_values = cursor.numbers("Q", 2)
    metadata = {}
    for _ in range(n_values):
        name = cursor.string()
        metadata[name] = cursor.value()
    infos = [_read_info(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise invalid_file(cursor.path, f"its alignment is {alignment!r}, not a power of two")
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: tensor._replace(start=base + tensor.start) for name, tensor in infos}
    if len(tensors) < n_tensors:
        raise invalid_file(cursor.path, "two of its tensors have the same name")
    if any(tensor.start + tensor.n_bytes > len(cursor.data) for tensor in tensors.values()):
        raise _truncated(cursor.path)
    return GGUFHeader(metadata, tensors)


def _read_info(cursor: _Cursor) -> tuple[str, GGUFTensor]:
    name, rank = cursor.string(), cursor.number("I")
    if not 1 <= rank <= LARGEST_RANK:
        raise invalid_file(cursor.path, f"tensor {name} has {rank} dimensions")
    shape = cursor.numbers("Q", rank)[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in TYPES:
        kind = OTHER_TYPES.get(number, f"number {number}")
        raise UnsupportedModel(
            f"{cursor.path} has tensors of type {kind}; "
            "only F32, F16, Q4_0, Q4_1 and Q8_0 are supported."
        )
    if not all(shape) or shape[-1] % TYPES[number].block:
        raise invalid_file(cursor.path, f"tensor {name} has the invalid shape {shape}")
    return name, GGUFTensor(shape, TYPES[number], offset)


def invalid_file(path: Path, why: str) -> BadModelFile:
    return BadModelFile(f"{path} is not a valid GGUF model: {why}; download it again.")


def _truncated(path: Path) -> BadModelFile:
    return BadModelFile(
        f"{path} is truncated: it is shorter than its header says; download it again."
    )


def to_arrays(tensor: GGUFTensor, data: Bytes) -> dict[str, mx.array]:
    """The tensor as MLX stores it: packed weights, scales and biases if it is quantised."""
    raw = data[tensor.start : tensor.start + tensor.n_bytes]
    if not tensor.type.bits:
        dtype = np.float32 if tensor.type.name == "F32" else np.float16
        return {"weight": mx.array(raw.view(dtype).reshape(tensor.shape))}
    blocks = raw.reshape(-1, tensor.type.n_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale may be any fp16 number
        scales, biases, values = _split_blocks(tensor.type.name, blocks)
    rows = tensor.shape[:-1]
    return {
        "weight": mx.array(values.view(np.uint32).reshape(*rows, -1)),
        "scales": mx.array(scales.reshape(*rows, -1)),
        "biases": mx.array(biases.reshape(*rows, -1)),
    }


def _split_blocks(kind: str, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, bias and packed values of each block: a weight is scale * value + bias."""
    scales = blocks[:, :2].copy().view(np.float16)
    if kind == "Q8_0":
        return scales, scales * np.float16(-128), blocks[:, 2:] ^ 0x80
    if kind == "Q4_0":
        return scales, scales * np.float16(-8), _reorder(blocks[:, 2:])
    return scales, blocks[:, 2:4].copy().view(np.float16), _reorder(blocks[:, 4:])


def _reorder(packed: Bytes) -> Bytes:
    """GGUF's byte j holds weights j and j + 16; MLX's holds neighbours."""
    values = np.concatenate([packed & 15, packed >> 4], axis=1)
    ordered: Bytes = values[:, 0::2] | values[:, 1::2] << 4
    return ordered
