"""Rows in 8 bits: as MLX would have quantised them, and never further off than one step."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from keepwarm.cache.restore.records import block_of
from keepwarm.errors import BadRecord, CorruptBlock
from keepwarm.kv.buffers import from_buffer, to_buffer
from keepwarm.prefix.blocks import Namespace, block_key, pack, root
from keepwarm.records.at_rest import WANTED, Rounded, at_rest, fits, restored, rounded
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_restores_the_same_rows(dtype):
    rows = rows_of(dtype)
    record = at_rest(record_of(Tensor("L0_B0_K", *to_buffer(rows)), **{WANTED: "q8"}))
    assert record.header.extra == {"codec": "q8", "axis": "token"}
    parts = {t.name: from_buffer(t.dtype, t.shape, t.data) for t in record.tensors}
    arrays = [parts[f"L0_B0_K_{name}"] for name in Rounded._fields]
    ours = restored(Rounded(*(array.words for array in arrays)), dtype)
    theirs = mx.dequantize(*(array.to_mx() for array in arrays), group_size=64, bits=8)
    ours = as_floats(from_buffer(dtype, rows.shape, ours.tobytes()).to_mx())
    scales = np.repeat(as_floats(arrays[1].to_mx()), 64, axis=-1)
    unit = {"BF16": 2**-8, "F16": 2**-11, "F32": 2**-22}[dtype]  # MLX rounds in between
    assert (np.abs(ours - as_floats(theirs)) <= 4 * unit * np.abs(ours).max()).all()
    allowed = scales + 2 * unit * np.abs(as_floats(rows))
    assert (np.abs(ours - as_floats(rows)) <= allowed).all()
    assert np.array_equal(ours[0, 0, 0, 64:], as_floats(rows)[0, 0, 0, 64:])
    assert record.n_bytes < (0.54 if dtype != "F32" else 0.29) * rows.nbytes


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
    assert at_rest(record_of(tensor, **{WANTED: "q8"})).tensors == [tensor]


def test_a_number_that_is_none_is_not_rounded():
    words = np.zeros((1, 1, 4, 64), np.float32)
    words[0, 0, 1, 7] = np.nan
    assert rounded(words, "F32") is None


def test_parts_of_other_shapes_do_not_fit():
    assert fits((1, 2, 256, 32), (1, 2, 256, 2), (1, 2, 256, 2))
    assert not fits((1, 2, 256, 32), (1, 2, 256, 2), (1, 2, 255, 2))
    assert not fits((1, 2, 256, 30), (1, 2, 256, 2), (1, 2, 256, 2))
    assert not fits((), (), ())


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
