"""K and V in fewer bits, in numpy: a codec says how each is rounded and which blocks are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keepwarm.prefix.blocks import BLOCK_TOKENS

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

SCALE_BITS = 32  # a scale and a bias of each group, in bf16
EXACT_BITS = 16


class Rounding(NamedTuple):
    """Numbers in groups along an axis, each group with a scale and a bias."""

    bits: int
    axis: Literal["token", "channel"]  # a group is of one token, or of one channel
    group: int = 64

    @property
    def bits_per_number(self) -> float:
        return self.bits + SCALE_BITS / self.group


class Codec(NamedTuple):
    """`n_first` blocks of a conversation stay as they are, and `n_last` whole blocks."""

    name: str
    keys: Rounding
    values: Rounding
    n_first: int = 0
    n_last: int = 1

    def lossy_rows(self, n_tokens: int) -> slice:
        n_blocks = n_tokens // BLOCK_TOKENS
        first, last = self.n_first, max(self.n_first, n_blocks - self.n_last)
        return slice(first * BLOCK_TOKENS, last * BLOCK_TOKENS)

    def times_smaller(self, n_tokens: int) -> float:
        """Against 16 bits, where every layer keeps every token."""
        rows = self.lossy_rows(n_tokens)
        n_lossy: int = rows.stop - rows.start
        return n_tokens * EXACT_BITS / (n_lossy * self.bits + (n_tokens - n_lossy) * EXACT_BITS)

    @property
    def bits(self) -> float:
        """Of a number, scales and biases included."""
        return (self.keys.bits_per_number + self.values.bits_per_number) / 2


Q8 = Codec("q8", Rounding(8, "token"), Rounding(8, "token"), n_last=0)
Q4 = Codec("q4", Rounding(4, "channel"), Rounding(4, "token"), n_first=1)
BY_BLOCK = Rounding(4, "channel", BLOCK_TOKENS)
Q4_BY_BLOCK = Codec("q4, K by block", BY_BLOCK, Rounding(4, "token"), n_first=1)
PLAIN_4 = Codec("plain 4 bits", Rounding(4, "token"), Rounding(4, "token"), n_last=0)
CODECS = (Q8, Q4, Q4_BY_BLOCK, PLAIN_4)


class Coded(NamedTuple):
    """Groups lie along the last axis; 4-bit numbers are two to a byte."""

    numbers: Bytes
    scales: Floats
    biases: Floats


def coded(rows: Floats, rounding: Rounding) -> Coded:
    """Of rows (…, tokens, width)."""
    groups = _grouped(rows, rounding)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    biases = as_bf16(low)
    scales = as_bf16((high - biases) / (2**rounding.bits - 1))
    steps = groups - biases
    steps *= 1 / np.where(scales == 0, 1, scales)
    steps += 0.5  # to the nearest
    numbers = steps.clip(0, 2**rounding.bits - 1, out=steps).astype(np.uint8)
    if rounding.bits == 4:
        numbers = numbers[..., ::2] | numbers[..., 1::2] << np.uint8(4)
    return Coded(numbers, scales, biases)


def decoded(found: Coded, rounding: Rounding) -> Floats:
    numbers = found.numbers
    if rounding.bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], -1).reshape(*numbers.shape[:-1], -1)
    groups = numbers.astype(np.float32)
    groups *= found.scales
    groups += found.biases
    rows = groups.reshape(*groups.shape[:-2], -1)
    return rows.swapaxes(-1, -2) if rounding.axis == "channel" else rows


def _grouped(rows: Floats, rounding: Rounding) -> Floats:
    along = rows.swapaxes(-1, -2) if rounding.axis == "channel" else rows
    return along.reshape(*along.shape[:-1], -1, rounding.group)


def as_bf16(numbers: Floats) -> Floats:
    """Rounded to the nearest of 16 bits, to the even one between two."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def rounded(rows: Floats, rounding: Rounding) -> Floats:
    """Rows (…, tokens, width) of whole blocks after both ways, block by block."""
    done = [decoded(coded(block, rounding), rounding) for block in blocks_of(rows)]
    return np.concatenate(done, axis=-2) if done else rows


def blocks_of(rows: Any) -> Iterator[Any]:
    for start in range(0, rows.shape[-2], BLOCK_TOKENS):
        yield rows[..., start : start + BLOCK_TOKENS, :]
