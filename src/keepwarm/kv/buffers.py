"""Arrays as bytes that a file can take, and bytes as arrays again.

numpy has no bfloat16, so such an array is looked at as 16-bit words; no number changes.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import mmap
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np

from keepwarm.errors import CacheMismatch

NAMES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32",
    mx.uint64: "U64", mx.int64: "I64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
WORDS = {"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
         "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "I32": np.int32,
         "F32": np.float32, "U64": np.uint64, "I64": np.int64}  # fmt: skip
HUGE_PAGE = 2 << 20
MAX_PIECES = 512  # that one call to the system takes
MADV_COLLAPSE = 25  # since Linux 6.1; Python has no name for it yet

Shape: TypeAlias = tuple[int, ...]


class ArrayBytes(NamedTuple):
    """The bytes of an array; they stay valid, and the array alive, as long as this does."""

    dtype: str
    shape: Shape
    data: memoryview


class HostArray:
    """An array that still lies in bytes of ours, not of MLX: shape and dtype as MLX would say."""

    def __init__(self, words: np.ndarray[Any, Any], dtype: mx.Dtype) -> None:
        self.shape: Shape = tuple(words.shape)
        self.dtype = dtype
        self._words = words

    @property
    def words(self) -> np.ndarray[Any, Any]:
        return self._words

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def rows(self, start: int, end: int) -> HostArray:
        return HostArray(self.words[..., start:end, :], self.dtype)

    def copy(self) -> HostArray:
        """The same in bytes of its own, whatever becomes of those it lies in."""
        return HostArray(self.words.copy(), self.dtype)

    def write_to(self, memory: np.ndarray[Any, Any]) -> None:
        """Put all of it there."""
        memory[...] = self.words

    def to_mx(self) -> mx.array:
        """A copy that MLX owns."""
        words = mx.array(self.words)
        return words.view(mx.bfloat16) if self.dtype == mx.bfloat16 else words


class ByteSource(Protocol):
    """Where the bytes of an array come from when they are asked for."""

    @property
    def data(self) -> memoryview:
        """All of them, good until others are asked for."""

    def read_into(self, pieces: Sequence[Any]) -> None:
        """Put them there, one piece of memory after the other, without another copy where that can
        be."""


class FileArray(HostArray):
    """An array whose bytes lie in a file. Each look at its words reads them."""

    def __init__(self, dtype: str, shape: Shape, source: ByteSource) -> None:
        self.shape, self.dtype = shape, DTYPES[dtype]  # and no words yet
        self._name, self._source = dtype, source

    @property
    def words(self) -> np.ndarray[Any, Any]:
        return _words(self._name, self.shape, self._source.data)

    def write_to(self, memory: np.ndarray[Any, Any]) -> None:
        """Rows of one sequence in a larger array lie in one piece for every head."""
        if not memory.size:
            return
        if memory.flags.c_contiguous:
            self._source.read_into([memory])
        elif memory.ndim == 4 and memory.shape[0] == 1 and memory.shape[1] <= MAX_PIECES:
            self._source.read_into(list(memory[0]))
        else:
            super().write_to(memory)


def to_buffer(array: mx.array | HostArray) -> ArrayBytes:
    """The bytes of an evaluated array in C order; shared with it where it is contiguous."""
    if isinstance(array, HostArray):
        return _array_bytes(array.words, array.dtype)
    return _array_bytes(np.asarray(_numpys(array)), array.dtype)


def _array_bytes(words: np.ndarray[Any, Any], dtype: mx.Dtype) -> ArrayBytes:
    flat = np.ascontiguousarray(words).reshape(-1)
    return ArrayBytes(_name_of(dtype), words.shape, flat.data.cast("B"))


def _name_of(dtype: mx.Dtype) -> str:
    if dtype not in NAMES:
        raise CacheMismatch("The array", "the dtype", "one that safetensors has", dtype)
    return NAMES[dtype]


def from_buffer(dtype: str, shape: Shape, data: Any) -> HostArray:
    """Look at bytes as an array; nothing is copied."""
    return HostArray(_words(dtype, shape, data), DTYPES[dtype])


def _words(dtype: str, shape: Shape, data: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, WORDS[dtype]).reshape(shape)


def word_of(dtype: mx.Dtype) -> Any:
    """What numpy takes for one item of it."""
    return WORDS[_name_of(dtype)]


def host_view(array: mx.array) -> np.ndarray[Any, Any]:
    """The memory of an evaluated array, to be written to before anybody reads the array.

    The host reaches it on every backend: on CUDA it is managed memory.
    """
    return np.asarray(_numpys(array))


def _numpys(array: mx.array) -> mx.array:
    """The same memory as an array that numpy knows."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


class WritableArray(NamedTuple):
    """An array, and its memory as the host writes it before anybody reads the array."""

    array: mx.array
    memory: np.ndarray[Any, Any]


class _HeaderOnlyFile(io.BytesIO):
    """A safetensors file that is all header: whoever reads its tensors gets no bytes."""

    def __init__(self, wanted: Sequence[tuple[Shape, mx.Dtype]]) -> None:
        self._n_bytes, entries = 0, {}
        for number, (shape, dtype) in enumerate(wanted):
            start, self._n_bytes = self._n_bytes, self._n_bytes + math.prod(shape) * dtype.size
            offsets = [start, self._n_bytes]
            entries[str(number)] = {
                "dtype": _name_of(dtype), "shape": shape, "data_offsets": offsets,
            }  # fmt: skip
        text = json.dumps(entries).encode()
        super().__init__(struct.pack("<Q", len(text)) + text)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return super().seek(offset + (self._n_bytes if whence == io.SEEK_END else 0), whence)

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(buffer) or memoryview(buffer).nbytes


def uninitialized_arrays(wanted: Sequence[tuple[Shape, mx.Dtype]]) -> list[WritableArray]:
    """Evaluated arrays of whatever their memory holds, to be written by the host.

    `mx.empty` fills with zeros, in one thread: the first use of so much memory costs more than
    reading it from a warm file. So MLX is made to load them from a file that has no bytes.
    """
    if not wanted:
        return []
    loaded: Any = mx.load(_HeaderOnlyFile(wanted), format="safetensors")
    arrays: list[mx.array] = [loaded[str(number)] for number in range(len(wanted))]
    views = [_numpys(array) for array in arrays]
    mx.eval(views)  # together: one by one it takes five times as long
    made = [WritableArray(a, np.asarray(view)) for a, view in zip(arrays, views, strict=True)]
    _ask_for_huge_pages([writable.memory for writable in made])
    return made


def _ask_for_huge_pages(memories: Sequence[np.ndarray[Any, Any]]) -> None:
    """Linux hands out memory in pages of 4 KiB, or of 2 MiB where it is asked to: the first use of
    it then takes a tenth of the time. A mere wish.

    The allocator keeps notes in front of an array, so its first page is there already, a small
    one. The 2 MiB around it, part of the array before it mostly, are put together all the same.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    madvise, starts = _madvise(), []
    for memory in memories:
        start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        n_bytes = memory.ctypes.data + memory.nbytes - start
        if n_bytes >= HUGE_PAGE and not madvise(start, n_bytes, advice):
            starts.append(start)
    for start in starts:
        madvise(start // HUGE_PAGE * HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE)


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
