"""Plain records in a place that others can write to: only those of the fleet are used."""

from base64 import b64encode

import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.records.record import Part, encode_record
from keepwarm.remote.known import ABSENT_S
from keepwarm.remote.names import MAC, RecordPlace, RemoteNames
from keepwarm.remote.trust import FleetKey
from tests.remote.conftest import CLASS, SOON
from tests.remote.test_tier import question
from tests.store.kit import content, record, refs_of, tokens_of

KEY = FleetKey(b"k" * 32)
(REF,) = refs_of(1)
NAME = RemoteNames(CLASS).of(RecordPlace.of(record(REF).header))


def found(tier):
    tier.look_up(question(tokens_of(BLOCK_TOKENS)), CallDeadline(SOON))
    return tier.read(REF.key, Part.DELTA)


def bytes_of(place, name):
    return bytes(place.read(name, lambda n: memoryview(bytearray(n)), SOON))


def test_machines_with_one_key_share(machine, place):
    one = record(REF)
    assert machine(fleet_key=KEY).put(one).stored
    assert content(found(machine(fleet_key=KEY))) == content(one)
    assert bytes_of(place, NAME) == b"".join(encode_record(one)), "it is beside the record"
    assert content(found(machine())) == content(one), "who trusts everybody needs no key"


def test_a_forged_record_with_digests_that_fit_is_a_miss_and_deleted_after_two(
    machine, place, clock
):
    there = machine(fleet_key=KEY)
    machine(fleet_key=KEY).put(record(REF))
    place.put(NAME, encode_record(record(REF)), SOON, REF.tokens, replace=True)
    for n_left in (1, 0):
        assert found(there) is None
        assert there.take_fault(REF.key, Part.DELTA) == "damaged"
        assert len([size for size in place.sizes([NAME], SOON) if size]) == n_left
        clock.now += ABSENT_S
    assert place.sizes([NAME + MAC], SOON) == [None]
    assert there.stats().quarantined == 2
    assert not there.is_open


def test_another_key_is_no_key(machine, place):
    machine(fleet_key=FleetKey(b"x" * 32)).put(record(REF))
    there = machine(fleet_key=KEY)
    assert found(there) is None
    assert there.stats().quarantined == 1


def test_a_record_without_a_mac_is_absent_until_one_of_the_fleet_puts_it(machine, place):
    machine().put(record(REF))
    there, one = machine(fleet_key=KEY), record(REF)
    assert found(there) is None
    assert there.stats().quarantined == 0
    assert there.has(one.header) is False
    assert there.put(one).stored
    assert content(found(machine(fleet_key=KEY))) == content(one)


def test_a_mac_is_for_one_class(machine, place):
    """The class is in no record: who copies both would have a machine compute with other
    numbers."""
    machine("cpu-mlx-0.2", fleet_key=KEY).put(record(REF))
    theirs = NAME.replace(CLASS, "cpu-mlx-0.2")
    for name in (NAME, NAME + MAC):
        place.put(name, [bytes_of(place, name.replace(NAME, theirs))], SOON, REF.tokens)
    there = machine(fleet_key=KEY)
    assert found(there) is None
    assert there.stats().quarantined == 1


def test_a_key_is_base64_of_32_bytes():
    assert FleetKey.parse("") is None
    assert FleetKey.parse(b64encode(b"k" * 32).decode()).mac("a", []) == KEY.mac("a", [])
    for text in ("secret", b64encode(b"k" * 31).decode(), "é"):
        with pytest.raises(BadInput, match="openssl rand -base64 32"):
            FleetKey.parse(text)
