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

from keepwarm.errors import BadModelFile, UnsupportedModel

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
LARGEST_RANK = 4
MAX_ITEMS = 1 << 22  # numbers and strings in a header; a vocabulary of a million has fewer
MAX_STRING_BYTES = 1 << 24


class TensorType(NamedTuple):
    name: str
    block: int  # weights in a block
    n_bytes: int  # of a block
    bits: int = 0  # in MLX, if it has the same type: scale * value + bias, in groups of 32

    @property
    def is_quantised(self) -> bool:
        return self.block > 1


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18, 4),
    3: TensorType("Q4_1", 32, 20, 4),
    6: TensorType("Q5_0", 32, 22, 5),
    7: TensorType("Q5_1", 32, 24, 5),
    8: TensorType("Q8_0", 32, 34, 8),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144, 4),
    13: TensorType("Q5_K", 256, 176, 5),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
}
OTHER_TYPES = {15: "Q8_K", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}


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
    if alignment > len(cursor.data):
        raise invalid_file(cursor.path, f"its alignment is {alignment}, beyond its end")
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
            f"{cursor.path} has tensors of type {kind}, which Keepwarm does not read; use another "
            "quantisation, such as Q4_K_M, or the model's MLX directory."
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
