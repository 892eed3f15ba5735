"""A record is read back as written, and anything else is refused."""

import json
import os
import struct
import threading
import time
import tracemalloc
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, pack, unpack
from keepwarm.prefix.fingerprint import FORMAT_VERSION
from keepwarm.records.header import ITEM_BYTES, _known_table, label
from keepwarm.records.record import (
    MAX_HEADER_BYTES,
    Header,
    Part,
    Record,
    _fill_all,
    check_identity,
    encode_record,
    open_record,
    read_tensors,
    tensor_digest,
)
from tests.store.kit import NAMESPACE, content, decode, encode, first_block, record, tensor

REF = first_block(list(range(5)))
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NOT_IN = {"numpy": "BF16", "mlx": "F64"}


def small(*tensors, **changes):
    """A record of one or two tiny tensors."""
    header = Header(NAMESPACE, REF.key, REF.parent, Part.DELTA, 0, REF.tokens)
    return Record(replace(header, **changes), tensors or (tensor("L0_B0_K", "U8", (3,)),))


def split(data):
    """The header as a dict, what Keepwarm says in it, and the data."""
    (n_header,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + n_header])
    return head, json.loads(head["__metadata__"]["keepwarm"]), data[8 + n_header :]


def dumps(value):
    return json.dumps(value, separators=(",", ":"))


def forge(head, said, data, pad=True):
    """A file with a matching digest, as an attacker who knows the format would write it."""
    table = {name: entry for name, entry in head.items() if name != "__metadata__"}
    words = said if isinstance(said, str) else dumps(said)
    digest = xxhash.xxh3_128(f"{words}\n{dumps(table)}".encode()).hexdigest()
    text = dumps({"__metadata__": {"keepwarm": words, "digest": digest}, **table}).encode()
    text += b" " * (-len(text) % 8) if pad else b""
    return struct.pack("<Q", len(text)) + text + data


def test_forging_an_honest_record_gives_that_record():
    """The control of every forged file below."""
    data = encode(small())
    assert forge(*split(data)) == data


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=5))
def test_every_dtype_and_shape_comes_back(specs):
    """Native dtypes, bf16 and empty tensors among them."""
    made = small(*(tensor(f"L{i}_B0_K", dtype, shape) for i, (dtype, shape) in enumerate(specs)))
    opened, tensors = decode(encode(made))
    assert opened.header == made.header
    assert content(Record(opened.header, tensors)) == content(made)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=256),
    st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.booleans()), max_size=3),
    st.sampled_from(Part),
    st.integers(0, 1 << 20),
)
def test_every_header_comes_back(tokens, extra, part, number):
    extra.pop("w_rows", None)
    made = small(tokens=pack(tokens), extra=extra, part=part, number=number)
    assert decode(encode(made))[0].header == made.header


def test_header_extra_with_an_unknown_entry_is_kept_verified_and_needed_by_nobody():
    """For what later versions say of a record that earlier ones can do without."""
    made = small(extra={"later": {"codec": "none"}})
    opened, tensors = decode(encode(made))
    assert opened.header.extra == {"later": {"codec": "none"}}
    assert tensors == made.tensors
    with pytest.raises(BadRecord, match="digest"):
        decode(encode(made).replace(b"none", b"some"))


@pytest.mark.parametrize("reader", NOT_IN)
def test_record_with_every_dtype_is_opened_by_safetensors_and_by_mlx(reader, tmp_path):
    """Readable without our code."""
    dtypes = [dtype for dtype in ITEM_BYTES if dtype != NOT_IN[reader]]
    made = small(*(tensor(f"T_{dtype}", dtype, (2, 3)) for dtype in dtypes))
    path = tmp_path / "block.safetensors"
    path.write_bytes(encode(made))
    if reader == "mlx":
        found = mx.load(str(path))
        found["T_BF16"] = found["T_BF16"].view(mx.uint16)
    else:
        found = safetensors.numpy.load_file(path)
    for one in made.tensors:
        assert found[one.name].shape == (2, 3)
        assert np.asarray(found[one.name]).tobytes() == bytes(one.data)


def test_tensors_are_not_copied_on_their_way_out():
    made = record(REF, n_bytes=4096)
    assert [p for p in encode_record(made) if isinstance(p, memoryview)] == [
        t.data for t in made.tensors
    ]


def test_only_the_named_tensors_are_read():
    """A range read: no byte of another tensor is asked for."""
    made = small(*(tensor(f"L{i}_B0_K", "U8", (100,)) for i in range(5)))
    data = encode(made)
    file = Watched(data)
    opened = open_record(file, len(data))
    file.asked.clear()
    (found,) = read_tensors(file, opened, ["L3_B0_K"])
    assert bytes(found.data) == bytes(made.tensors[3].data)
    assert file.asked == [(opened.data_start + 300, 100)]


def test_a_file_that_gives_its_bytes_in_drops_is_read_whole():
    """A read may be short without an end: over a network, or beyond 2 GiB."""
    made = record(REF, n_bytes=64)
    data = encode(made)
    file = Drops(data)
    opened = open_record(file, len(data))
    assert content(Record(opened.header, read_tensors(file, opened))) == content(made)


class Watched(BytesIO):
    """Notes which bytes are asked for."""

    def __init__(self, data):
        super().__init__(data)
        self.asked = []

    def readinto(self, buffer):
        self.asked.append((self.tell(), len(buffer)))
        return super().readinto(buffer)


class Drops(BytesIO):
    def read(self, n=-1):
        return super().read(min(n, 7) if n >= 0 else 7)

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:7])


@pytest.mark.parametrize("sizes", [[10], [3, 0, 7], [1] * 10], ids=str)
@pytest.mark.parametrize("n_at_once", [1, 4, 10])
def test_pieces_are_filled_however_little_one_read_gives(sizes, n_at_once):
    source, sink = os.pipe()
    encode_record = [np.zeros(n, np.uint8) for n in sizes]
    with os.fdopen(source, "rb", buffering=0) as file, os.fdopen(sink, "wb", buffering=0) as other:

        def write():
            for at in range(0, 10, n_at_once):
                other.write(bytes(range(at, min(10, at + n_at_once))))
                time.sleep(0.005)
            other.close()

        writer = threading.Thread(target=write)
        writer.start()
        _fill_all(encode_record, 10, file)
        writer.join()
        assert np.concatenate(encode_record).tolist() == list(range(10))
        with pytest.raises(BadRecord, match="cut short"):
            _fill_all(encode_record, 10, file)


# Digests


@pytest.mark.parametrize(
    "other",
    [
        tensor("L0_B0_K", "U8", (3,)),
        tensor("L0_B0_V", "U8", (4,)),
        tensor("L0_B0_K", "I8", (4,)),
        tensor("L0_B0_K", "U8", (4, 1)),
    ],
    ids=["bytes", "name", "dtype", "shape"],
)
def test_a_digest_covers_name_dtype_shape_and_bytes(other):
    ours = tensor("L0_B0_K", "U8", (4,))
    same = other.data if len(other.data) != len(ours.data) else ours.data
    assert tensor_digest(other._replace(data=same)) != tensor_digest(ours)


@given(name=st.text(), dtype=st.text(), shape=st.lists(st.integers(0, 1 << 47), max_size=5))
def test_a_label_is_written_as_json_is(name, dtype, shape):
    """Digests of files that exist hang on it."""
    assert label(name, dtype, tuple(shape)).decode() == dumps([name, dtype, shape])


def test_every_flipped_bit_is_noticed():
    """Every bit of every byte."""
    data = encode(small(tensor("L0_B0_K", "U8", (3,))))
    unseen = [
        (at, bit)
        for at in range(len(data))
        for bit in range(8)
        if passes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
    ]
    assert not unseen


def test_every_truncation_is_noticed():
    """At every single byte, and every lengthening by one."""
    data = encode(record(REF, n_bytes=16))
    assert passes(data)
    assert not [n for n in range(len(data)) if passes(data[:n])]
    assert not passes(data + b"\0")


def passes(data):
    try:
        decode(data)
    except BadRecord:
        return False
    return True


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_but_a_bad_record(data):
    assert not passes(data)


@given(st.data())
def test_no_forged_json_raises_anything_but_a_bad_record(data):
    """Digests are no secret: whatever an honest digest covers must still be checked."""
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    value = data.draw(st.recursive(leaf, lambda v: st.lists(v, max_size=3), max_leaves=5))
    head, said, body = split(encode(small()))
    entry = head["L0_B0_K"]
    where = data.draw(st.sampled_from([(entry, k) for k in entry] + [(said, k) for k in said]))
    where[0][where[1]] = value
    try:
        opened, tensors = decode(forge(head, said, body))
    except (BadRecord, NewerFormat):
        return
    assert opened.header.w_rows == 0
    assert [t.n_bytes for t in tensors] == [3]


# Malicious files


def forged(change, data=None):
    head, said, body = split(encode(small()))
    change(head, said)
    return forge(head, said, body if data is None else data)


def entry(**words):
    """Changes the entry of the only tensor."""
    return lambda head, said: head["L0_B0_K"].update(words)


def said(**words):
    return lambda head, text: text.update(words)


def second_tensor(start, end):
    def change(head, text):
        head["L1_B0_K"] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        text["digests"]["L1_B0_K"] = "0" * 32

    return change


HUGE = 1 << 40
HOSTILE = {
    "a gap before the first tensor": (entry(data_offsets=[1, 4]), "offsets"),
    "overlapping tensors": (second_tensor(2, 4), "offsets"),
    "a gap between tensors": (second_tensor(4, 5), "offsets"),
    "offsets that run backwards": (entry(data_offsets=[3, 0]), "offsets"),
    "a negative offset": (entry(data_offsets=[-3, 0]), "."),
    "offsets as fractions": (entry(data_offsets=[0.0, 3.0]), "."),
    "a huge offset": (entry(data_offsets=[0, HUGE]), "offsets"),
    "a negative shape": (entry(shape=[-3]), "."),
    "two negative shapes": (entry(shape=[-3, -1]), "."),
    "a shape of fractions": (entry(shape=[3.0]), "."),
    "a shape of words": (entry(shape="3"), "."),
    "a shape of truths": (entry(shape=[3, True]), "."),
    "a huge shape": (entry(shape=[HUGE], data_offsets=[0, HUGE]), "bytes"),
    "a huge empty shape": (entry(shape=[1 << 62, 0], data_offsets=[0, 0]), "."),
    "a huge product": (entry(shape=[1 << 62, 1 << 62]), "."),
    "an unknown dtype": (entry(dtype="F8_E4M3"), "."),
    "a dtype that is a list": (entry(dtype=["U8"]), "."),
    "no digest for a tensor": (said(digests={}), "."),
    "digests as a list": (said(digests=["0"]), "."),
    "a digest of another": (said(digests={"L0_B0_K": "0" * 32}), "L0_B0_K"),
    "tokens not base64": (said(tokens="!!!!"), "."),
    "tokens half a word": (said(tokens="AAAA"), "."),
    "no tokens": (said(tokens=""), "."),
    "more tokens than a block has": (said(tokens="AAAA" * 344), "."),
    "a short key": (said(key="00" * 19), "19 bytes instead of 20"),
    "a long namespace": (said(namespace="00" * 33), "33 bytes instead of 32"),
    "a key not in hex": (said(key="zz" * 20), "."),
    "an unknown part": (said(part="x"), "."),
    "a number that is none": (said(number="one"), "."),
    "a negative number": (said(number=-1), "."),
    "a huge number": (said(number=1 << 70), "."),
    "an endless number": (said(number=float("inf")), "."),
    "window rows that are no number": (said(part="w", extra={"w_rows": "x"}), "."),
    "negative window rows": (said(part="w", extra={"w_rows": -1}), "."),
    "more window rows than tokens": (said(part="w", extra={"w_rows": 6}), "."),
    "extra that is a number": (said(extra=7), "."),
    "a version and a half": (said(version=FORMAT_VERSION + 0.5), "out of range"),
    "version nought": (said(version=0), "out of range"),
    "a version in words": (said(version="1"), "."),
    "a half version": (said(version=0.5), "."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_forged_record_is_refused_with_a_reason(name):
    """Wrong names, wrong places, sizes that would fill the memory."""
    change, reason = HOSTILE[name]
    data = forged(change)
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord, match=reason):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_newer_version_is_not_called_bad():
    """It is a miss here, and intact for its writer; a flipped version is bad."""
    newer = replace(record(REF).header, version=FORMAT_VERSION + 1)
    data = encode(Record(newer, ()))
    with pytest.raises(NewerFormat, match=f"version {FORMAT_VERSION + 1} is newer"):
        decode(data)
    said = f'{{\\"version\\":{FORMAT_VERSION + 1},'.encode()
    assert data.count(said) == 1
    flipped = data.replace(said, said.replace(b":2", b":3"))
    with pytest.raises(BadRecord, match="does not match its digest"):
        decode(flipped)


@pytest.mark.parametrize("n", [MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_is_refused_before_it_is_read(n):
    file = BytesIO(struct.pack("<Q", n) + bytes(64))
    with pytest.raises(BadRecord, match=f"claims {n} bytes"):
        open_record(file, 1 << 50)
    assert file.tell() == 8


@pytest.mark.parametrize("text", ["[", '{"a":', "9"])
@pytest.mark.parametrize("n", [1000, 100_000])
def test_json_that_is_deep_or_a_huge_number_is_refused(text, n):
    """As the header, and as what an honest digest covers."""
    head, _, body = split(encode(small()))
    for data in (struct.pack("<Q", n * len(text)) + n * text.encode(), forge(head, n * text, body)):
        with pytest.raises(BadRecord):
            decode(data)


@pytest.mark.parametrize(
    "table",
    [
        '{"L0_B0_K":ENTRY,"L0_B0_K":ENTRY}',
        '{"L0_B0_K":{"dtype":"U8","dtype":"U8","shape":[3],"data_offsets":[0,3]}}',
        '{"L0_B0_K":{"dtype": "U8","shape":[3],"data_offsets":[0,3]}}',
        '{"L0_B0_\\u004b":ENTRY}',
        '{"__metadata__":ENTRY}',
        '{"L0_B0_K":ENTRY,"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[3,3]}}',
        '{"L0_B0_K":ENTRY},"__metadata__":{}',
    ],
)
def test_a_table_that_readers_may_take_differently_is_refused(table):
    """Its digest fits: who can write may have made it."""
    head, said, body = split(encode(small()))
    entry = dumps(head["L0_B0_K"])
    assert passes(tabled(said, '{"L0_B0_K":ENTRY}'.replace("ENTRY", entry), body))
    with pytest.raises(BadRecord, match=r"canonical|cannot be read"):
        decode(
            tabled(
                said | {"digests": {"__metadata__": "0" * 32} | said["digests"]},
                table.replace("ENTRY", entry),
                body,
            )
        )


def tabled(said, table, body):
    """A file with this text as its table."""
    words = dumps(said)
    digest = xxhash.xxh3_128(f"{words}\n{table}".encode()).hexdigest()
    front = dumps({"__metadata__": {"keepwarm": words, "digest": digest}})
    text = f"{front[:-1]},{table[1:]}".encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


# Files of every version


FORMATS = Path(__file__).parents[1] / "data" / "format"
GOLDEN = [(path, name) for path in sorted(FORMATS.glob("v*/expected.json"))
          for name in json.loads(path.read_text())]  # fmt: skip


@pytest.mark.parametrize(("path", "name"), GOLDEN, ids=lambda value: getattr(value, "name", value))
def test_files_of_every_version_are_read(path, name):
    """What was written by any version so far is read by this one."""
    expected = json.loads(path.read_text())[name]
    opened, tensors = decode(path.with_name(f"{name}.safetensors").read_bytes())
    header = opened.header
    check_identity(header, BlockKey(bytes.fromhex(expected["key"])), Part(expected["part"]))
    assert header.namespace.hex() == expected["namespace"]
    assert header.parent.hex() == expected["parent"]
    assert (header.number, header.version) == (expected["number"], expected["version"])
    assert unpack(header.tokens) == expected["tokens"]
    assert dict(header.extra) == expected["extra"]
    found = [[t.name, t.dtype, list(t.shape), sha256(t.data).hexdigest()] for t in tensors]
    assert found == expected["tensors"]


@pytest.mark.parametrize("name", [name for path, name in GOLDEN if path.parent.name == "v1"])
def test_the_writer_still_writes_its_version(name):
    """Byte for byte: a change of the format needs a new number and new files beside these."""
    data = (FORMATS / "v1" / f"{name}.safetensors").read_bytes()
    opened, tensors = decode(data)
    assert encode(Record(opened.header, tensors)) == data


def test_tables_of_usual_length_are_parsed_once_and_others_are_not_remembered():
    """Anybody who may write to a shared place could fill memory with long ones."""
    usual, long = (
        Record(record(REF).header, tuple(tensor(f"T{n}", "U8", (1,)) for n in range(n_tensors)))
        for n_tensors in (16, 1000)
    )
    _known_table.cache_clear()
    for made, n_known in ((usual, 1), (usual, 1), (long, 1)):
        data = encode(made)
        assert [t.name for t in decode(data)[1]] == [t.name for t in made.tensors]
        assert _known_table.cache_info().currsize == n_known
