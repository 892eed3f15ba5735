"""K and V of a block in fewer bits, as they lie in memory, on disk and in shared tiers.

A tensor becomes three, as `mx.quantize` names and packs them: numbers, as many to a word of 32 bits
as fit, and a scale and a bias for every group of 64 numbers, in the tensor's own type. A group is
of one token, or of one channel of 64 tokens that follow one another; those are kept channel by
channel, in as many rows as the tokens would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keepwarm.errors import BadRecord, CorruptBlock
from keepwarm.records.header import HasBytes
from keepwarm.records.record import Header, Record, Tensor

EXACT, Q8, Q4 = AT_REST = ("exact", "q8", "q4")
WANTED, CODEC = "at_rest", "codec"  # in the `extra` of a header: before, and after
GROUP = 64
WORD_BITS = 32
WORDS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = "np.ndarray[Any, Any]"


class Rounding(NamedTuple):
    bits: int
    axis: str = "token"  # a group is of one `token`, or of one `channel`

    def width(self, n_words: int) -> int:
        return n_words * WORD_BITS // self.bits


ROUNDINGS = {
    Q8: {"K": Rounding(8), "V": Rounding(8)},
    Q4: {"K": Rounding(4, "channel"), "V": Rounding(4)},
}


class Rounded(NamedTuple):
    """Numbers of a tensor; all three have a row for each row of it."""

    weights: Array
    scales: Array
    biases: Array


def at_rest(record: Record) -> Record:
    """The record as it is kept: rounded, if its header wants that. Takes milliseconds, so never on
    the engine's thread.
    """
    extra = dict(record.header.extra)
    if WANTED not in extra:
        return record
    if (codec := extra.pop(WANTED)) not in ROUNDINGS:
        raise BadRecord(f"{codec!r} is not a codec of rounded rows.")
    tensors = list(_rounded(codec, record.tensors))
    if len(tensors) > len(record.tensors):
        axes = {side: rounding.axis for side, rounding in ROUNDINGS[codec].items()}
        extra = {CODEC: codec, "axis": axes, **extra}
    return replace(record, header=replace(record.header, extra=extra), tensors=tensors)


def check_codec(header: Header, codec: str | None) -> None:
    """Raise unless the rows of a record are exact, or rounded as its namespace says."""
    if any(header.extra.get(name, codec) != codec for name in (WANTED, CODEC)):
        raise CorruptBlock("?", header.number, f"its codec is not {codec or EXACT}")


def is_rounded(header: Header) -> bool:
    """Whether the rows of a record are rounded, or will be when it is written."""
    return bool(header.extra.keys() & {WANTED, CODEC})


def rounding_of(codec: str, name: str) -> Rounding:
    """How a tensor of that name, such as `L0_B3_K`, is rounded."""
    return ROUNDINGS[codec][name.rpartition("_")[2]]


def _rounded(codec: str, tensors: Iterable[HasBytes]) -> Iterator[HasBytes]:
    """A tensor without whole groups, or with numbers that are not finite, stays as it is."""
    for tensor in tensors:
        parts = None
        if (
            tensor.dtype in WORDS
            and tensor.n_bytes
            and not any(n % GROUP for n in tensor.shape[-2:])
        ):
            words = np.frombuffer(tensor.data, WORDS[tensor.dtype]).reshape(tensor.shape)
            parts = rounded(words, tensor.dtype, rounding_of(codec, tensor.name))
        if parts is None:
            yield tensor
            continue
        for name, part in parts._asdict().items():
            dtype = "U32" if name == "weights" else tensor.dtype
            data = np.ascontiguousarray(part).reshape(-1).data.cast("B")
            yield Tensor(f"{tensor.name}_{name}", dtype, part.shape, data)


def rounded(words: Array, dtype: str, rounding: Rounding) -> Rounded | None:
    """None if that is not possible: a number is not finite."""
    *rows, width = words.shape
    if rounding.axis == "channel":
        words = _turned(words, GROUP, width)
    groups = _widened(words, dtype).reshape(-1, GROUP)
    lowest, highest = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    if not (np.isfinite(lowest).all() and np.isfinite(highest).all()):
        return None
    largest = (1 << rounding.bits) - 1
    scales = _narrowed((highest - lowest) / largest, dtype)
    steps = _widened(scales, dtype)
    groups -= lowest
    groups *= 1 / np.where(steps == 0, 1, steps)
    groups += 0.5  # to the nearest
    numbers = groups.clip(0, largest, out=groups).astype(np.uint8)
    if rounding.bits == 4:
        pairs = numbers.view(np.uint16)
        numbers = (pairs | pairs >> np.uint16(4)).astype(np.uint8)
    small = (*rows, width // GROUP)
    return Rounded(
        numbers.view(np.uint32).reshape(*rows, width * rounding.bits // WORD_BITS),
        scales.reshape(small),
        _narrowed(lowest, dtype).reshape(small),
    )


def restored(parts: Rounded, dtype: str, rounding: Rounding) -> Array:
    """The words of the tensor, of what `rounded` has made."""
    weights = parts.weights
    words = np.empty((*weights.shape[:-1], rounding.width(weights.shape[-1])), WORDS[dtype])
    restore_to(words, parts, dtype, rounding)
    return words


def restore_to(words: Array, parts: Rounded, dtype: str, rounding: Rounding) -> None:
    """Write them to this memory, the rows of which may be apart."""
    is_float = dtype == "F32"
    numbers: Array = words if is_float else np.empty(words.shape, np.float32)
    scales, biases = (_widened(part, dtype) for part in parts[1:])
    if rounding.axis == "channel":
        *before, n_rows, width = numbers.shape
        _unpack_channels(parts.weights, numbers, rounding.bits)
        groups = numbers.reshape(*before, n_rows // GROUP, GROUP, width)
        scales, biases = (part.reshape(*before, -1, 1, width) for part in (scales, biases))
    else:
        groups = numbers.reshape(*parts.scales.shape, GROUP)
        groups[...] = _unpacked(parts.weights, rounding.bits).reshape(groups.shape)
        scales, biases = scales[..., None], biases[..., None]
    groups *= scales
    groups += biases
    if not is_float:
        _narrow(numbers, dtype, words)


def _unpack_channels(weights: Array, numbers: Array, bits: int) -> None:
    """Words are turned, which hold some tokens of a channel each: they are fewer than numbers."""
    *before, n_rows, width = numbers.shape
    n_words, n_each = GROUP * bits // WORD_BITS, WORD_BITS // bits
    turned = _turned(weights.reshape(*before, -1, n_words), width, n_words)
    tokens = numbers.reshape(*before, n_rows // GROUP, n_words, n_each, width)
    for place in range(n_each):
        tokens[..., place, :] = turned >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)


def _unpacked(weights: Array, bits: int) -> Array:
    """One number a byte."""
    packed = weights.reshape(-1).view(np.uint8)
    if bits == 4:
        pairs = packed.astype(np.uint16)
        pairs |= pairs << np.uint16(4)
        packed = (pairs & np.uint16(0x0F0F)).view(np.uint8)
    return packed


def _turned(words: Array, n_rows: int, width: int) -> Array:
    """Every so many rows of such a width, with the two axes in turn."""
    return words.reshape(*words.shape[:-2], -1, n_rows, width).swapaxes(-1, -2).copy()


def first_rows_of(record: Record, n_tokens: int) -> Iterable[HasBytes]:
    """The tensors of a record, so that the first rows of each are those of its first tokens: what
    is rounded by channel is made whole, unless no group is cut.
    """
    made = {tensor.name: tensor for tensor in record.tensors}
    codec = record.header.extra.get(CODEC, "")
    owns = [name.removesuffix("_weights") for name in made if name.endswith("_weights")]
    try:
        for own in owns if codec and n_tokens % GROUP else ():
            if (rounding := rounding_of(codec, own)).axis == "channel":
                parts = [made.pop(f"{own}_{part}") for part in Rounded._fields]
                made[own] = _whole(own, parts, rounding)
    except (KeyError, ValueError) as error:  # a stranger's, which no restore has checked
        raise BadRecord("the parts of its rows do not fit") from error
    return made.values()


def _whole(name: str, parts: Sequence[HasBytes], rounding: Rounding) -> Tensor:
    dtypes = np.uint32, *2 * (WORDS[parts[1].dtype],)
    pairs = zip(parts, dtypes, strict=True)
    words = (np.frombuffer(part.data, dtype).reshape(part.shape) for part, dtype in pairs)
    rows = restored(Rounded(*words), parts[1].dtype, rounding)
    return Tensor(name, parts[1].dtype, rows.shape, rows.reshape(-1).data.cast("B"))


def fit(shapes: Sequence[Shape], rounding: Rounding) -> bool:
    """Whether parts of these shapes can be those of one tensor."""
    if len(shapes) != len(Rounded._fields) or len(shapes[0]) < 2:
        return False
    weights, scales, biases = shapes
    groups, rest = divmod(rounding.width(weights[-1]), GROUP)
    is_whole = not rest and (rounding.axis == "token" or not weights[-2] % GROUP)
    return is_whole and scales == biases == (*weights[:-1], groups)


def _widened(words: Array, dtype: str) -> Array:
    """As float32, in memory of its own."""
    if dtype == "BF16":
        bits = words.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return words.astype(np.float32)


def _narrowed(numbers: Array, dtype: str) -> Array:
    """The nearest of a type; overwrites the numbers."""
    words = np.empty(numbers.shape, WORDS[dtype])
    _narrow(numbers, dtype, words)
    return words


def _narrow(numbers: Array, dtype: str, words: Array) -> None:
    if dtype != "BF16":
        words[...] = numbers
        return
    bits = numbers.view(np.uint32)
    bits += np.uint32(0x8000)
    np.right_shift(bits, np.uint32(16), out=words)
