"""Rows that were rounded at rest, made whole again: by the processor, or by the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from keepwarm.kv.buffers import HostArray, dtype_name
from keepwarm.records.at_rest import GROUP, Rounded, Rounding, restore_to, restored


class RoundedArray(HostArray):
    """An array in three parts. Each access to `words` reads them and makes the rows."""

    def __init__(self, parts: Sequence[HostArray], rounding: Rounding) -> None:
        self.parts, self.rounding = parts, rounding
        weights, scales, _ = parts
        self.shape = (*weights.shape[:-1], rounding.width(weights.shape[-1]))
        self.dtype = scales.dtype

    @property
    def words(self) -> np.ndarray[Any, Any]:
        return restored(self._read(), dtype_name(self.dtype), self.rounding)

    def write_to(self, memory: np.ndarray[Any, Any]) -> None:
        restore_to(memory, self._read(), dtype_name(self.dtype), self.rounding)

    def _read(self) -> Rounded:
        weights, scales, biases = self.parts
        # Parts of a file are read into the same buffer, the largest last.
        small = [part.words.copy() for part in (scales, biases)]
        return Rounded(weights.words, *small)


def dequantized(parts: Sequence[mx.array], rounding: Rounding) -> mx.array:
    """The rows of whole blocks, by the device."""
    *before, n_rows, n_groups = parts[1].shape
    width = GROUP * n_groups
    if rounding.axis == "channel":
        parts = [part.reshape(*before, n_rows // GROUP, width, -1) for part in parts]
    weights, scales, biases = parts
    rows = mx.dequantize(weights, scales, biases, group_size=GROUP, bits=rounding.bits)
    if rounding.axis == "channel":
        rows = mx.swapaxes(rows, -1, -2)
    return rows.reshape(*before, n_rows, width)
