"""Arrays as bytes for files, and bytes as arrays.

numpy has no bfloat16, so such an array is viewed as 16-bit words; no value changes.
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
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import dynamic_roll as roll_rows

from keepwarm.errors import CacheMismatch
from keepwarm.records.record import UnreadTensor

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
MAX_PIECES = 512  # of one system call
MADV_COLLAPSE = 25  # since Linux 6.1; Python has no constant for it

Shape: TypeAlias = tuple[int, ...]


class ArrayBytes(NamedTuple):
    """The bytes of an array, which this object keeps alive."""

    dtype: str
    shape: Shape
    data: memoryview


class HostArray:
    """An array in host bytes that MLX does not own, with the shape and dtype of MLX."""

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
        """The same array in its own bytes."""
        return HostArray(self.words.copy(), self.dtype)

    def write_to(self, memory: np.ndarray[Any, Any]) -> None:
        """Copy the whole array to `memory`."""
        memory[...] = self.words

    def to_mx(self) -> mx.array:
        """A copy that MLX owns."""
        words = mx.array(self.words)
        return words.view(mx.bfloat16) if self.dtype == mx.bfloat16 else words


class FileArray(HostArray):
    """An array whose bytes are in a file. Each access to `words` reads them."""

    def __init__(self, dtype: str, shape: Shape, source: UnreadTensor) -> None:
        self.shape, self.dtype = shape, dtype_of(dtype)
        self._name, self._source = dtype, source

    @property
    def words(self) -> np.ndarray[Any, Any]:
        return _words(self._name, self.shape, self._source.data)

    def write_to(self, memory: np.ndarray[Any, Any]) -> None:
        """Rows of one sequence in a larger array are contiguous for each head."""
        if not memory.size:
            return
        if memory.flags.c_contiguous:
            self._source.read_into([memory])
        elif memory.ndim == 4 and memory.shape[0] == 1 and memory.shape[1] <= MAX_PIECES:
            self._source.read_into(list(memory[0]))
        else:
            super().write_to(memory)


def to_buffer(array: mx.array | HostArray) -> ArrayBytes:
    """The bytes of an evaluated array in C order; shared with it if it is contiguous."""
    if isinstance(array, HostArray):
        return _array_bytes(array.words, array.dtype)
    return _array_bytes(np.asarray(_as_numpy_dtype(array)), array.dtype)


def _array_bytes(words: np.ndarray[Any, Any], dtype: mx.Dtype) -> ArrayBytes:
    flat = np.ascontiguousarray(words).reshape(-1)
    return ArrayBytes(dtype_name(dtype), words.shape, flat.data.cast("B"))


def dtype_name(dtype: mx.Dtype) -> str:
    if dtype not in NAMES:
        raise CacheMismatch("The array", "the dtype", "one that safetensors has", dtype)
    return NAMES[dtype]


def from_buffer(dtype: str, shape: Shape, data: Any) -> HostArray:
    """View bytes as an array; nothing is copied."""
    return HostArray(_words(dtype, shape, data), dtype_of(dtype))


def dtype_of(name: str) -> mx.Dtype:
    if name not in DTYPES:
        raise CacheMismatch("A tensor", "the dtype", "one of MLX", name)
    return DTYPES[name]


def _words(dtype: str, shape: Shape, data: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, WORDS[dtype]).reshape(shape)


def word_of(dtype: mx.Dtype) -> Any:
    """The numpy type of one item."""
    return WORDS[dtype_name(dtype)]


def host_view(array: mx.array) -> np.ndarray[Any, Any]:
    """The memory of an evaluated array, to be written before the array is read.

    The host can access it on every backend: on CUDA it is managed memory.
    """
    return np.asarray(_as_numpy_dtype(array))


def _as_numpy_dtype(array: mx.array) -> mx.array:
    """The same memory with a dtype that numpy has."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


class WritableArray(NamedTuple):
    """An array and its memory, which the host writes before the array is read."""

    array: mx.array
    memory: np.ndarray[Any, Any]


class _HeaderOnlyFile(io.BytesIO):
    """A safetensors file with a header and no data: reading a tensor leaves memory unchanged."""

    def __init__(self, wanted: Sequence[tuple[Shape, mx.Dtype]]) -> None:
        self._n_bytes, entries = 0, {}
        for number, (shape, dtype) in enumerate(wanted):
            start, self._n_bytes = self._n_bytes, self._n_bytes + math.prod(shape) * dtype.size
            offsets = [start, self._n_bytes]
            entries[str(number)] = {
                "dtype": dtype_name(dtype), "shape": shape, "data_offsets": offsets,
            }  # fmt: skip
        text = json.dumps(entries).encode()
        super().__init__(struct.pack("<Q", len(text)) + text)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return super().seek(offset + (self._n_bytes if whence == io.SEEK_END else 0), whence)

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(buffer) or memoryview(buffer).nbytes


def uninitialized_arrays(wanted: Sequence[tuple[Shape, mx.Dtype]]) -> list[WritableArray]:
    """Evaluated arrays with arbitrary content, to be written by the host.

    `mx.empty` fills with zeros on one thread, and that first use of the memory costs more than
    reading the data from a warm file. So MLX loads them from a file that has no data.
    """
    if not wanted:
        return []
    loaded: Any = mx.load(_HeaderOnlyFile(wanted), format="safetensors")
    arrays: list[mx.array] = [loaded[str(number)] for number in range(len(wanted))]
    views = [_as_numpy_dtype(array) for array in arrays]
    mx.eval(views)  # together: one by one it takes five times as long
    made = [WritableArray(a, np.asarray(view)) for a, view in zip(arrays, views, strict=True)]
    _advise_huge_pages([writable.memory for writable in made])
    return made


def _advise_huge_pages(memories: Sequence[np.ndarray[Any, Any]]) -> None:
    """Ask Linux for pages of 2 MiB instead of 4 KiB: the first use takes a tenth of the time.

    Best effort; failure is ignored. The allocator writes its own data just before an array, so the
    array's first page exists already as a small one. The 2 MiB around it, which mostly belong to
    the previous array, are collapsed into a huge page too.
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


def dynamic_roll(x: mx.array, shifts: mx.array, axis: int) -> mx.array:
    """Roll each row of `x` along `axis` by its own shift, which may be negative or zero.

    `shifts` has one entry per row, and a trailing axis of one for each axis between the first and
    `axis`: shape (B, 1) rolls axis 2 of (B, heads, tokens, width).
    """
    if shifts.ndim != axis:
        raise CacheMismatch("dynamic_roll", "the number of axes of shifts", axis, shifts.ndim)
    rolled: mx.array = roll_rows(_widened(x, axis), shifts, axis)
    return rolled.view(x.dtype)


def _widened(x: mx.array, axis: int) -> mx.array:
    """The same bytes in fewer numbers, which MLX gathers one by one: 3 times faster for bf16."""
    n_bytes = x.shape[-1] * x.dtype.size if axis < x.ndim - 1 else 0
    fits = n_bytes > 0 and n_bytes % mx.uint64.size == 0
    return x.view(mx.uint64) if fits else x
