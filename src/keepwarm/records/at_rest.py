"""K and V of a block in 8 bits, as they lie on disk and in shared tiers.

A tensor becomes three, as `mx.quantize` names and packs them: numbers of 8 bits, four to a word,
and a scale and a bias for every 64 numbers of a token, in the tensor's own type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keepwarm.errors import BadRecord
from keepwarm.records.header import HasBytes
from keepwarm.records.record import Record, Tensor

EXACT, Q8 = AT_REST = ("exact", "q8")
WANTED, CODEC = "at_rest", "codec"  # in the `extra` of a header: before, and after
GROUP = 64
PER_WORD = 4
LARGEST = 255
WORDS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = "np.ndarray[Any, Any]"


class Rounded(NamedTuple):
    """Numbers of a tensor; all three have a row for each row of it."""

    weights: Array
    scales: Array
    biases: Array


def at_rest(record: Record) -> Record:
    """The record as it is written: rounded, if its header wants that. Takes milliseconds, so never
    on the engine's thread.
    """
    extra = dict(record.header.extra)
    if WANTED not in extra:
        return record
    if (codec := extra.pop(WANTED)) != Q8:
        raise BadRecord(f"{codec!r} is no codec of rows at rest.")
    header = replace(record.header, extra={CODEC: codec, "axis": "token", **extra})
    return replace(record, header=header, tensors=list(_rounded(record.tensors)))


def _rounded(tensors: Iterable[HasBytes]) -> Iterator[HasBytes]:
    """A tensor without whole groups, or with numbers that are not finite, stays as it is."""
    for tensor in tensors:
        parts = None
        if tensor.dtype in WORDS and tensor.n_bytes and tensor.shape[-1] % GROUP == 0:
            words = np.frombuffer(tensor.data, WORDS[tensor.dtype]).reshape(tensor.shape)
            parts = rounded(words, tensor.dtype)
        if parts is None:
            yield tensor
            continue
        for name, part in parts._asdict().items():
            dtype = "U32" if name == "weights" else tensor.dtype
            data = np.ascontiguousarray(part).reshape(-1).data.cast("B")
            yield Tensor(f"{tensor.name}_{name}", dtype, part.shape, data)


def rounded(words: Array, dtype: str) -> Rounded | None:
    """None if that is not possible: a number is not finite."""
    rows = words.shape[:-1]
    groups = _widened(words, dtype).reshape(-1, GROUP)
    lowest, highest = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    if not (np.isfinite(lowest).all() and np.isfinite(highest).all()):
        return None
    scales = _narrowed((highest - lowest) / LARGEST, dtype)
    steps = _widened(scales, dtype)
    groups -= lowest
    groups *= 1 / np.where(steps == 0, 1, steps)
    groups += 0.5  # to the nearest
    numbers = groups.clip(0, LARGEST, out=groups).astype(np.uint8)
    weights = numbers.view(np.uint32).reshape(*rows, words.shape[-1] // PER_WORD)
    small = (*rows, words.shape[-1] // GROUP)
    return Rounded(weights, scales.reshape(small), _narrowed(lowest, dtype).reshape(small))


def restored(parts: Rounded, dtype: str) -> Array:
    """The words of the tensor, of what `rounded` has made."""
    weights, scales, biases = parts
    groups = weights.view(np.uint8).reshape(-1, GROUP).astype(np.float32)
    groups *= _widened(scales, dtype).reshape(-1, 1)
    groups += _widened(biases, dtype).reshape(-1, 1)
    return _narrowed(groups, dtype).reshape(*weights.shape[:-1], weights.shape[-1] * PER_WORD)


def fits(weights: Shape, scales: Shape, biases: Shape) -> bool:
    """Whether parts of these shapes can be those of one tensor."""
    groups, rest = divmod(weights[-1] * PER_WORD, GROUP) if weights else (0, 1)
    return rest == 0 and scales == biases == (*weights[:-1], groups)


def _widened(words: Array, dtype: str) -> Array:
    """As float32, in memory of its own."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.astype(np.float32)


def _narrowed(numbers: Array, dtype: str) -> Array:
    """The nearest of a type; overwrites the numbers."""
    if dtype != "BF16":
        return numbers.astype(WORDS[dtype])
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    bits += np.uint32(0x8000)
    high: Array = bits.view(np.uint16)[..., 1::2]
    return high
