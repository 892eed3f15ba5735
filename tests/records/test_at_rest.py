"""Rows in fewer bits: as MLX would have quantised them, and never further off than one step."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from keepwarm.agents.rewriting import trimmed
from keepwarm.cache.restore.records import block_of
from keepwarm.errors import BadRecord, CorruptBlock
from keepwarm.kv.buffers import from_buffer, to_buffer
from keepwarm.kv.rounded import dequantized
from keepwarm.prefix.blocks import Namespace, block_key, pack, root
from keepwarm.records.at_rest import WANTED, Rounding, at_rest, fit, rounded
from keepwarm.records.record import Header, Part, Record, Tensor

DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
NAMESPACE = Namespace(bytes(32))
TOKENS = pack(range(256))


def rows_of(dtype: str) -> mx.array:
    """With a channel that is much larger, as keys have, and a group of equal numbers."""
    mx.random.seed(7)
    rows = mx.random.normal((1, 2, 256, 128))
    rows[..., 5] = 30 + rows[..., 5]
    rows[0, 0, 0, 64:] = 0.25
    return rows.astype(DTYPES[dtype])


def record_of(*tensors: Tensor, **extra: str) -> Record:
    parent = root(NAMESPACE)
    key = block_key(NAMESPACE, parent, TOKENS)
    return Record(Header(NAMESPACE, key, parent, Part.DELTA, 0, TOKENS, extra), tensors)


def as_floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("side", ["K", "V"])
@pytest.mark.parametrize("codec", ["q8", "q4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_restores_the_same_rows(dtype, codec, side):
    rows, name = rows_of(dtype), f"L0_B0_{side}"
    record = at_rest(record_of(Tensor(name, *to_buffer(rows)), **{WANTED: codec}))
    found = block_of(record).delta[name]
    apart = np.zeros((1, 2, 300, 128), found.words.dtype)  # as a cache with more rows
    found.write_to(apart[..., :256, :])
    assert np.array_equal(apart[..., :256, :], found.words)
    assert not apart[..., 256:, :].any()
    ours = as_floats(from_buffer(dtype, rows.shape, found.words.tobytes()).to_mx())
    theirs = as_floats(dequantized([part.to_mx() for part in found.parts], found.rounding))
    unit = {"BF16": 2**-8, "F16": 2**-11, "F32": 2**-22}[dtype]  # MLX rounds in between
    assert (np.abs(ours - theirs) <= 4 * unit * np.abs(ours).max()).all()
    largest = 2 * 30 / (255 if codec == "q8" else 15)  # step, in a group with the large channel
    assert (np.abs(ours - as_floats(rows)) <= largest).all()
    if side == "V":
        assert np.array_equal(ours[0, 0, 0, 64:], as_floats(rows)[0, 0, 0, 64:])
    n_bits = found.rounding.bits + 2 * 8 * rows.dtype.size / 64
    assert record.n_bytes == rows.size * n_bits / 8


def test_keys_of_4_bits_are_rounded_by_channel():
    """The large channel, which every token has, does not cost the others."""
    rows = rows_of("F32")
    record = at_rest(record_of(Tensor("L0_B0_K", *to_buffer(rows)), **{WANTED: "q4"}))
    assert record.header.extra == {"codec": "q4", "axis": {"K": "channel", "V": "token"}}
    off = np.abs(block_of(record).delta["L0_B0_K"].words - as_floats(rows))
    assert off.max() < 0.5  # a step of a token's group would be 2


@pytest.mark.parametrize("codec", ["q8", "q4"])
@pytest.mark.parametrize("n_tokens", [192, 100])
def test_the_first_rows_of_a_rounded_record_are_its_own(codec, n_tokens):
    """Also where the cut falls into groups of tokens."""
    tensors = [Tensor(f"L0_B0_{side}", *to_buffer(rows_of("BF16"))) for side in "KV"]
    record = at_rest(record_of(*tensors, **{WANTED: codec}))
    rows, first = block_of(record).delta, block_of(trimmed(record, n_tokens)).delta
    assert first.keys() == rows.keys()
    for name, held in rows.items():
        assert np.array_equal(first[name].words, held.words[..., :n_tokens, :])


@pytest.mark.parametrize("name", ["L0_B0_Q_weights", "L0_B0_K_weights"])
def test_rounded_rows_that_do_not_fit_are_not_cut(name):
    words = mx.zeros((1, 2, 256, 4), mx.uint32)
    with pytest.raises(BadRecord, match="do not fit"):
        trimmed(record_of(Tensor(name, *to_buffer(words)), codec="q4"), 100)


def test_only_what_wants_it_is_rounded_and_only_once():
    plain = record_of(Tensor("L0_B0_K", *to_buffer(rows_of("BF16"))))
    assert at_rest(plain) is plain
    once = at_rest(record_of(*plain.tensors, **{WANTED: "q8"}))
    assert len(once.tensors) == 3
    assert at_rest(once) is once


@pytest.mark.parametrize("codec", ["exact", "q9"])
def test_a_codec_that_is_not_known_is_refused(codec):
    plain = record_of(Tensor("L0_B0_K", *to_buffer(rows_of("BF16"))), **{WANTED: codec})
    with pytest.raises(BadRecord, match=codec):
        at_rest(plain)


@pytest.mark.parametrize("rows", [mx.zeros((1, 2, 256, 80)), mx.full((1, 2, 256, 64), np.inf)])
def test_what_cannot_be_rounded_stays(rows):
    tensor = Tensor("L0_B0_K", *to_buffer(rows))
    kept = at_rest(record_of(tensor, **{WANTED: "q8"}))
    assert kept.tensors == [tensor]
    assert not kept.header.extra  # nothing counts it as rounded


def test_a_number_that_is_none_is_not_rounded():
    words = np.zeros((1, 1, 4, 64), np.float32)
    words[0, 0, 1, 7] = np.nan
    assert rounded(words, "F32", Rounding(8)) is None


def test_parts_of_other_shapes_do_not_fit():
    small = (1, 2, 256, 2)
    assert fit([(1, 2, 256, 32), small, small], Rounding(8))
    assert fit([(1, 2, 256, 16), small, small], Rounding(4, "channel"))
    assert not fit([(1, 2, 256, 32), small, small], Rounding(4))
    assert not fit([(1, 2, 256, 32), small, (1, 2, 255, 2)], Rounding(8))
    assert not fit([(1, 2, 256, 30), small, small], Rounding(8))
    assert not fit([(1, 2, 40, 16), (1, 2, 40, 2), (1, 2, 40, 2)], Rounding(4, "channel"))
    assert not fit([(), (), ()], Rounding(8))


@pytest.mark.parametrize("change", ["codec", "missing", "dtype"])
def test_a_record_that_a_stranger_made_is_refused(change):
    made = at_rest(record_of(Tensor("L0_B0_K", *to_buffer(rows_of("F32"))), **{WANTED: "q8"}))
    assert block_of(made).delta["L0_B0_K"].shape == (1, 2, 256, 128)
    if change == "codec":
        wrong = replace(made, header=replace(made.header, extra={"codec": "q9"}))
    elif change == "missing":
        wrong = replace(made, tensors=made.tensors[:2])
    else:
        wrong = replace(made, tensors=[made.tensors[0]._replace(dtype="F32"), *made.tensors[1:]])
    with pytest.raises(CorruptBlock):
        block_of(wrong)
