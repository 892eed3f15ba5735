"""A coded record is the same record in fewer bytes, and anything else is refused."""

import struct
import tracemalloc
import zlib
from itertools import count

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.records.cipher import Cipher
from keepwarm.records.header import ITEM_BYTES
from keepwarm.records.record import MAX_HEADER_BYTES, Record, Tensor, encode_record
from keepwarm.remote.compression import (
    FRONT,
    MAGIC,
    MAX_RECORD_BYTES,
    code_record,
    decode_record,
    find_start,
    undo_code,
)
from tests.store.kit import content, encode, first_block, record, tensor

REF = first_block(list(range(5)))
SLOW = 1.0  # bytes in a second: any byte is worth some time
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=6)


def alike(name, n_items, seed=0):
    """Numbers of about the same size, as those of a model are."""
    drawn = np.random.default_rng(seed).normal(size=n_items).astype(np.float32)
    words = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return Tensor(name, "BF16", (n_items,), memoryview(words.tobytes()))


def made_of(*tensors):
    return Record(record(REF).header, tensors)


def coded(made, bytes_per_s=SLOW, **options):
    return b"".join(code_record(made, encode_record(made), bytes_per_s, **options))


def restored(data):
    return decode_record(undo_code(memoryview(data)))


TYPICAL = made_of(alike("L0_B0_K", 6000), tensor("odd", "U8", (333,)), alike("L0_B0_V", 4001, 1))


def test_a_coded_record_is_much_smaller_and_the_same_bytes():
    data = coded(TYPICAL)
    assert data.startswith(MAGIC)
    assert len(data) < 0.75 * len(encode(TYPICAL))
    assert bytes(undo_code(memoryview(data))) == encode(TYPICAL)
    assert content(restored(data)) == content(TYPICAL)


@given(TENSORS, st.integers(0, 3000))
def test_every_dtype_and_shape_comes_back(kinds, n_alike):
    """Beside numbers enough that it is coded, in any order."""
    more = [tensor(f"T{n}", dtype, shape) for n, (dtype, shape) in enumerate(kinds)]
    made = made_of(*more[:2], alike("L0_B0_K", n_alike), *more[2:])
    data = coded(made)
    assert bytes(undo_code(memoryview(data))) == encode(made)
    enough = 2 * n_alike > 3 * sum(one.n_bytes for one in more) + 5000
    assert data.startswith(MAGIC) or not enough


@pytest.mark.parametrize("dtype", sorted({"F16", "F32", "U8", "U16", "I16"}))
def test_only_bf16_is_coded(dtype):
    """The same bytes under another name stay as they are."""
    ours = alike("L0_B0_K", 8000)
    shape = (16_000 // ITEM_BYTES[dtype],)
    made = made_of(Tensor("L0_B0_K", dtype, shape, ours.data))
    assert coded(made) == encode(made)
    assert coded(made_of(ours)) != encode(made_of(ours))


def test_what_saves_less_than_a_tenth_stays_as_it_is():
    noise = made_of(tensor("L0_B0_K", "BF16", (8000,)))
    assert coded(noise) == encode(noise)
    little = made_of(alike("L0_B0_K", 2000), tensor("L0_B0_S0", "F32", (4000,)))
    assert coded(little) == encode(little)
    assert coded(made_of()) == encode(made_of())


def test_it_is_coded_only_if_that_takes_less_time_than_it_saves():
    """On a clock by which decoding a sample of 20,000 bytes takes a second and saves 6,000."""
    made = made_of(alike("L0_B0_K", 10_000))
    assert coded(made, 5000, clock=count().__next__) != encode(made)
    assert coded(made, 10_000, clock=count().__next__) == encode(made)


@pytest.mark.parametrize("at", [0, 3, 6, 7, 8, 15, 16, 23, 24, 31, 32, 500, -4000, -2000, -3])
def test_a_flipped_byte_is_found(at):
    data = bytearray(coded(TYPICAL))
    data[at] ^= 0x10
    with pytest.raises(BadRecord):
        restored(data)


@given(st.integers(0, 1 << 30), st.integers(1, 255))
def test_any_flipped_byte_is_found(at, bits):
    data = bytearray(coded(TYPICAL))
    data[at % len(data)] ^= bits
    try:
        found = restored(data)
    except BadRecord:
        return
    assert content(found) == content(TYPICAL)  # padding bits at the end of a stream say nothing


@given(st.integers(0, 1 << 30))
def test_a_truncated_code_is_found(n_bytes):
    data = coded(TYPICAL)
    with pytest.raises(BadRecord):
        restored(data[: n_bytes % len(data)])


def test_bytes_after_the_end_are_found():
    with pytest.raises(BadRecord, match="the code is not one of"):
        restored(coded(TYPICAL) + b"x")


def with_front(data, version=1, n_bytes=None):
    claimed = FRONT.unpack_from(data)[2] if n_bytes is None else n_bytes
    front = MAGIC + bytes([version]) + struct.pack("<Q", claimed)
    return front + xxhash.xxh3_64(front).digest() + data[FRONT.size :]


@pytest.mark.parametrize(
    "n_bytes", [0, 7, 8, len(encode(TYPICAL)) - 1, len(encode(TYPICAL)) + 2, 1 << 29, 1 << 60]
)
def test_a_wrong_claim_is_refused(n_bytes):
    with pytest.raises(BadRecord):
        restored(with_front(coded(TYPICAL), n_bytes=n_bytes))


def test_a_claim_of_more_than_a_record_may_have_is_refused():
    data = memoryview(with_front(coded(TYPICAL), n_bytes=MAX_RECORD_BYTES + 1))
    with pytest.raises(BadRecord, match="claims"):
        find_start(data, len(data))


def peak_of(data):
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord):
            undo_code(memoryview(data))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def stream_of(n_bytes):
    press = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return press.compress(bytes(n_bytes)) + press.flush()


def test_a_stream_longer_than_claimed_is_not_inflated():
    """64 MiB in a stream of 64 KiB, in the place of 10,001 bytes."""
    data = coded(TYPICAL)
    n_before = FRONT.size + len(encode(TYPICAL)) - 10_001
    bomb = stream_of(64 << 20)
    assert len(bomb) < 1 << 17
    assert peak_of(data[:n_before] + bomb) < 1 << 20


def test_a_claim_of_much_more_than_is_there_allocates_nothing():
    """A header with digests that fit, of numbers whose low bytes are not there."""
    made = made_of(alike("L0_B0_K", 1))
    n_items = 16 << 20
    huge = made_of(Tensor("L0_B0_K", "BF16", (n_items,), memoryview(bytes(2 * n_items))))
    length, header, _ = encode_record(huge)
    n_bytes = 8 + len(header) + 2 * n_items
    data = with_front(coded(made), n_bytes=n_bytes)[: FRONT.size] + length + header
    assert peak_of(data + stream_of(n_items)) < 1 << 20


def test_a_newer_code_is_told_from_a_flipped_bit():
    data = coded(TYPICAL)
    with pytest.raises(NewerFormat):
        restored(with_front(data, version=2))
    with pytest.raises(BadRecord, match="digest"):
        restored(data[:7] + b"\2" + data[8:])


def test_no_record_begins_like_a_coded_one():
    assert struct.unpack("<Q", MAGIC + b"\0")[0] > MAX_HEADER_BYTES
    data = memoryview(encode(TYPICAL))
    assert undo_code(data) is data


def test_the_header_is_read_from_the_first_bytes():
    data, plain = coded(TYPICAL), encode(TYPICAL)
    n_header = 8 + len(encode_record(TYPICAL)[1])
    start = find_start(memoryview(data)[: FRONT.size + n_header], len(data))
    assert (bytes(start.data), start.n_bytes) == (plain[:n_header], len(plain))


def test_an_encrypted_record_is_never_coded():
    sealed = b"".join(encode_record(TYPICAL, Cipher(bytes(32))))
    with pytest.raises(BadRecord, match="encrypted"):
        restored(MAGIC + with_front(bytes(FRONT.size), n_bytes=len(sealed))[7:] + sealed)
