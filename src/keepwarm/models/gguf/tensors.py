"""Tensors of GGUF files as MLX arrays.

MLX's quantised weights are scale * value + bias in groups of 32. Types of that form stay packed,
with the same values. The others, such as Q6_K with its groups of 16, are decoded by llama.cpp's
own package; a GPU then keeps them at 8 bits, which moves a weight of Q6_K by at most a quarter of
its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from keepwarm.models.gguf.file import GGUFTensor, TensorType

Bytes = npt.NDArray[Any]
Arrays = dict[str, mx.array]

GROUP = 32
PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
OTHER_BITS = 8  # on a GPU, of types that MLX has no equal for
WORKERS = 8  # NumPy works without Python's lock
PIECE_WEIGHTS = 1 << 22  # decoded at once: what is in between takes several times the memory


def held_bits(kind: TensorType, *, on_gpu: bool) -> int:
    """Bits of a weight while MLX has it; 0 if it is not quantised then."""
    return kind.bits or (OTHER_BITS if kind.is_quantised and on_gpu else 0)


def held_bytes(tensor: GGUFTensor, *, on_gpu: bool) -> int:
    """Bytes of the arrays, at most."""
    n_weights = prod(tensor.shape)
    if not tensor.type.is_quantised:
        return tensor.n_bytes
    if bits := held_bits(tensor.type, on_gpu=on_gpu):
        return n_weights * bits // 8 + n_weights // GROUP * 2 * (2 if on_gpu else 4)
    return n_weights * 4


def to_arrays(tensor: GGUFTensor, data: Bytes, workers: Executor, *, on_gpu: bool) -> Arrays:
    """The tensor as MLX stores it: packed weights, scales and biases if it is quantised.

    The workers decode several pieces at once; their arrays are made on this thread.
    """
    decode = partial(_decoded, tensor.type, on_gpu=on_gpu)
    pieces = [
        _arrays(tensor.type, parts, on_gpu)
        for some in _batches(list(_pieces(tensor, data)))
        for parts in workers.map(decode, some)
    ]
    joined = {part: mx.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}
    shaped = {part: array.reshape(*tensor.shape[:-1], -1) for part, array in joined.items()}
    mx.eval(shaped)
    return shaped


def _batches(pieces: list[Bytes]) -> Iterator[list[Bytes]]:
    """So many that every worker has one, and no more are decoded ahead."""
    yield from (pieces[at : at + WORKERS] for at in range(0, len(pieces), WORKERS))


def _pieces(tensor: GGUFTensor, data: Bytes) -> Iterator[Bytes]:
    """Some rows at a time, as bytes."""
    raw = data[tensor.start : tensor.start + tensor.n_bytes]
    rows = raw.reshape(-1, tensor.shape[-1] // tensor.type.block * tensor.type.n_bytes)
    n_rows = max(1, PIECE_WEIGHTS // tensor.shape[-1])
    yield from (rows[at : at + n_rows] for at in range(0, len(rows), n_rows))


def _arrays(kind: TensorType, parts: dict[str, Bytes], on_gpu: bool) -> Arrays:
    arrays = {name: mx.array(part) for name, part in parts.items()}
    if not kind.is_quantised:
        return {"weight": arrays["weight"].view(PLAIN[kind.name])}
    if kind.bits or not on_gpu:
        return arrays
    weight, scales, *biases = mx.quantize(arrays["weight"], group_size=GROUP, bits=OTHER_BITS)
    narrow = {"scales": scales, "biases": biases[0]}
    return {"weight": weight} | {part: a.astype(mx.float16) for part, a in narrow.items()}


def _decoded(kind: TensorType, rows: Bytes, *, on_gpu: bool) -> dict[str, Bytes]:
    with np.errstate(all="ignore"):  # a scale may be any fp16 number
        if not kind.is_quantised:
            return {"weight": rows.view(f"u{kind.n_bytes}")}
        return _packed(kind, rows, on_gpu) if kind.bits else {"weight": _dense(kind, rows)}


def _dense(kind: TensorType, rows: Bytes) -> Bytes:
    from gguf import GGMLQuantizationType, quants

    decoded: Bytes = quants.dequantize(rows, GGMLQuantizationType[kind.name])
    return decoded


def _packed(kind: TensorType, rows: Bytes, on_gpu: bool) -> dict[str, Bytes]:
    """Neighbours in one byte, as MLX has them, with a scale and a bias for each 32."""
    split = _split_k if kind.block == 256 else _split
    scales, biases, values = split(kind.name, rows.reshape(-1, kind.n_bytes))
    if on_gpu:  # with fp32 scales it would compute everything in fp32
        scales, biases = scales.astype(np.float16), biases.astype(np.float16)
    words = _pack(values.reshape(-1, 8), kind.bits).reshape(-1).view(np.uint32)
    parts = {"weight": words, "scales": scales, "biases": biases}
    return {name: part.reshape(len(rows), -1) for name, part in parts.items()}


def _split(kind: str, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, bias and values of each block of 32: a weight is scale * value + bias."""
    scales = _halves(blocks[:, :2])
    if kind == "Q8_0":
        return scales, scales * np.float16(-128), blocks[:, 2:] ^ 0x80
    if kind == "Q4_0":
        return scales, scales * np.float16(-8), _nibbles(blocks[:, 2:])
    if kind == "Q5_0":
        return scales, scales * np.float16(-16), _fifth(blocks[:, 2:6]) | _nibbles(blocks[:, 6:])
    biases = _halves(blocks[:, 2:4])
    if kind == "Q5_1":
        return scales, biases, _fifth(blocks[:, 4:8]) | _nibbles(blocks[:, 8:])
    return scales, biases, _nibbles(blocks[:, 4:])


def _split_k(kind: str, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """The same for Q4_K and Q5_K: 256 weights in 8 groups, whose scales are quantised too.

    fp32, because the product of the two scales of a group needs more digits than fp16 has.
    """
    scale, low = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    scales, lows = _six_bits(blocks[:, 4:16])
    at = 16 if kind == "Q4_K" else 48
    quarters = blocks[:, at:].reshape(-1, 4, 32)  # each byte: the same place of two groups
    values = np.stack([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)
    if kind == "Q5_K":
        group = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
        values |= (blocks[:, 16:48].reshape(-1, 1, 32) >> group & 1) << 4
    wide = np.float32
    return scale.astype(wide) * scales, -(low.astype(wide) * lows), values


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of 6 bits each, from 12 bytes."""
    scale, low, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([scale & 63, both & 15 | scale >> 2 & 48], axis=1)
    lows = np.concatenate([low & 63, both >> 4 | low >> 2 & 48], axis=1)
    return scales, lows


def _halves(packed: Bytes) -> Bytes:
    return packed.copy().view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """Byte j holds weights j and j + 16."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth(packed: Bytes) -> Bytes:
    """The fifth bit of 32 weights, in its place."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _pack(values: Bytes, bits: int) -> Bytes:
    """Rows of 8 values, `bits` each, in as many bytes; the first value is the lowest."""
    if bits == 8:
        return values
    if bits == 4:
        pairs: Bytes = values[:, 0::2] | values[:, 1::2] << 4
        return pairs
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    words: Bytes = np.bitwise_or.reduce(values.astype(np.uint64) << shifts, axis=1)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].copy()
