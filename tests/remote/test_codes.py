"""Records of bf16 in a place behind a slow line: fewer bytes there, and the same records here."""

import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part, Record, encode_record
from keepwarm.remote.compression import MAGIC, memory_for, undo_code
from keepwarm.remote.deleter import erase_from_tier
from keepwarm.remote.lookup import ABSENT_S
from keepwarm.remote.records import HEADER_GUESS, FleetKey, RemoteNames, RemoteRecord
from keepwarm.store.tier import NamedBlock
from tests.remote.conftest import CLASS, SOON
from tests.remote.test_compression import alike, with_front
from tests.remote.test_tier import question
from tests.store.kit import content, encode, record, refs_of, tokens_of

SLOW, FAST = 1e4, 1e12  # bytes in a second: coding pays, or does not
KEY = FleetKey(b"k" * 32)
(REF,) = refs_of(1)


def numbers(ref, part=Part.DELTA, n_tensors=2, n_items=20_000, **options):
    """A record of a layer or more whose keys and values are bf16."""
    tensors = (alike(f"L{n}_B{ref.number}_K", n_items, n) for n in range(n_tensors))
    return Record(record(ref, part, **options).header, tuple(tensors))


def name_of(made):
    return RemoteNames(CLASS).of(RemoteRecord.of(made.header))


def bytes_of(place, made):
    return bytes(place.read(name_of(made), lambda n: memoryview(bytearray(n)), SOON))


def ask(tier, n_tokens=BLOCK_TOKENS, **options):
    tier.look_up(question(tokens_of(n_tokens), **options), CallDeadline(SOON))


def found(tier):
    ask(tier)
    return tier.read(REF.key, Part.DELTA)


@pytest.fixture
def slow(machine):
    def opener(bytes_per_s=SLOW, **options):
        tier = machine(**options)
        tier.speed.bytes_per_s = tier.speed.put_bytes_per_s = bytes_per_s
        return tier

    return opener


def test_what_one_machine_codes_another_reads(slow, place):
    one, there = slow(), slow(FAST)
    made = [numbers(ref) for ref in refs_of(3, n_last=90)]
    assert all(one.put(each).stored for each in made)
    ask(there, 2 * BLOCK_TOKENS + 91)
    known = there.have([each.header.key for each in made])
    for each in made:
        assert bytes_of(place, each).startswith(MAGIC)
        assert content(there.read(each.header.key, Part.DELTA)) == content(each)
        n_bytes = known[each.header.key].n_bytes
        assert n_bytes == len(bytes_of(place, each)) < 0.75 * each.n_bytes, "what will be sent"
    assert there.stats().quarantined == 0


def test_over_a_fast_line_they_are_sent_as_they_are(slow, place):
    made = numbers(REF)
    put = slow(FAST).put(made)
    assert (put.stored, put.n_saved) == (True, 0)
    assert bytes_of(place, made) == encode(made)
    assert content(found(slow())) == content(made)


@pytest.mark.parametrize("put_s", [0.0, 100.0])
def test_only_a_line_that_is_slow_both_ways_is_slow(machine, clock, put_s, monkeypatch):
    """A trial that seemed slow is not enough: the first record shows how fast the line sends."""
    tier = machine()
    tier.speed.bytes_per_s = SLOW
    put = tier.backend.put

    def slowly(*args, **options):
        clock.now += put_s
        return put(*args, **options)

    monkeypatch.setattr(tier.backend, "put", slowly)
    first, second = (numbers(ref, n_tensors=8) for ref in refs_of(2))
    assert tier.put(first).n_saved == 0
    assert bool(tier.put(second).n_saved) is bool(put_s)


def test_the_writer_knows_how_many_bytes_it_sent(slow, place):
    made, tier = numbers(REF), slow()
    put = tier.put(made)
    assert put.n_saved == len(encode(made)) - len(bytes_of(place, made)) > 0.25 * made.n_bytes
    assert tier.have([REF.key])[REF.key].n_bytes == made.n_bytes - put.n_saved


def test_sealed_records_are_not_coded_nor_read_as_such(slow, place, monkeypatch):
    calls = []
    monkeypatch.setattr("keepwarm.remote.tier.code_record", lambda *_: calls.append("code"))
    monkeypatch.setattr("keepwarm.remote.records.undo_code", lambda *_: calls.append("undo"))
    made, cipher = numbers(REF), Cipher(b"s" * 32)
    tier = slow(cipher=cipher)
    assert tier.put(made).n_saved == 0
    assert not bytes_of(place, made).startswith(MAGIC)
    there = slow(cipher=cipher)
    assert content(found(there)) == content(made)
    sealed = bytes_of(place, made)
    front = with_front(bytes(24), n_bytes=len(sealed))
    place.put(name_of(made), [front, sealed], SOON, replace=True)
    other = slow(cipher=cipher)
    assert found(other) is None
    assert other.take_fault(REF.key, Part.DELTA) == "damaged"
    assert calls == []


def test_a_mac_is_of_the_bytes_that_are_sent_and_checked_before_they_are_decoded(
    slow, place, monkeypatch
):
    made = numbers(REF)
    assert slow(fleet_key=KEY).put(made).n_saved
    assert content(found(slow(fleet_key=KEY))) == content(made)
    there = slow(fleet_key=KEY)
    ask(there)
    name = f"{name_of(made)}.mac"
    place.put(name, [bytes(place.read(name, memory_for, SOON)), b"x"], SOON, replace=True)
    calls = []
    monkeypatch.setattr("keepwarm.remote.records.undo_code", calls.append)
    assert there.read(REF.key, Part.DELTA) is None
    assert calls == []
    assert there.take_fault(REF.key, Part.DELTA) == "damaged"


def flipped(at):
    return lambda data: data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


BAD = {
    "header": flipped(300),
    "high bytes": flipped(-900),
    "cut in the front": lambda data: data[:20],
    "claims more": lambda data: with_front(data, n_bytes=1 << 29),
}


@pytest.mark.parametrize("change", BAD.values(), ids=list(BAD))
def test_bad_bytes_are_a_miss_and_deleted_when_they_are_bad_twice(slow, place, clock, change):
    made, there = numbers(REF), slow(FAST)
    assert slow().put(made).n_saved
    place.put(name_of(made), [change(bytes_of(place, made))], SOON, replace=True)
    before = there.speed.bytes_per_s
    for n_left in (1, 0):
        assert found(there) is None
        assert there.take_fault(REF.key, Part.DELTA) == "damaged"
        assert len([n for n in place.sizes([name_of(made)], SOON) if n]) == n_left
        clock.now += ABSENT_S
    assert there.stats().quarantined == 2
    assert there.is_trusted
    assert there.speed.bytes_per_s == before, "it came in time"


@pytest.mark.parametrize("n_tensors", [2, 1000])
def test_coded_records_are_erased_with_their_copies(slow, place, n_tensors):
    """Their headers tell tokens, also one that is longer than what is read at first."""
    tier, refs = slow(), (refs_of(1, n_last=50)[0], REF)
    short, long = (numbers(ref, n_tensors=n_tensors, n_items=2000) for ref in refs)
    assert (len(encode_record(long)[1]) > HEADER_GUESS) is (n_tensors > 2)
    for made in (short, long):
        assert tier.put(made).n_saved
    block = NamedBlock(short.header.key, REF.parent, 50)
    assert erase_from_tier(tier, [long.header.namespace], [block], ())
    assert place.sizes([name_of(short), name_of(long)], SOON) == [None, None]


def test_decoding_is_a_part_of_the_rate(slow, clock, monkeypatch):
    """So that a plan knows how long loading takes."""
    made, there = numbers(REF, n_tensors=12), slow()
    slow().put(made)

    def slowly(data):
        clock.now += 2.0
        return undo_code(data)

    monkeypatch.setattr("keepwarm.remote.records.undo_code", slowly)
    there.speed.begin_anew()
    assert content(found(there)) == content(made)
    assert there.speed.load_s(there.have([REF.key])[REF.key].n_bytes) == pytest.approx(2.0, rel=0.1)
