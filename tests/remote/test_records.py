"""Plain records in a place that others can write to: only those of the fleet are used."""

from base64 import b64encode

import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.records.record import Part, encode_record
from keepwarm.remote.lookup import ABSENT_S
from keepwarm.remote.records import FleetKey, RemoteNames, RemoteRecord, parse_last
from tests.remote.conftest import CLASS, SOON
from tests.remote.test_tier import question
from tests.store.kit import NAMESPACE, content, record, refs_of, tokens_of

KEY = FleetKey(b"k" * 32)
(REF,) = refs_of(1)
PLAIN_NAME, NAME = (
    RemoteNames(CLASS, has_mac).of(RemoteRecord.of(record(REF).header)) for has_mac in (False, True)
)


def found(tier):
    tier.look_up(question(tokens_of(BLOCK_TOKENS)), CallDeadline(SOON))
    return tier.read(REF.key, Part.DELTA)


def bytes_of(place, name):
    return bytes(place.read(name, lambda n: memoryview(bytearray(n)), SOON))


def test_machines_with_one_key_share(machine, place):
    one = record(REF)
    assert machine(fleet_key=KEY).put(one).stored
    assert content(found(machine(fleet_key=KEY))) == content(one)
    data = b"".join(encode_record(one))
    assert bytes_of(place, NAME) == data + KEY.mac(NAME, [data])
    assert found(machine()) is None


def test_a_forged_record_with_digests_that_fit_is_a_miss_and_deleted_after_two(
    machine, place, clock
):
    there = machine(fleet_key=KEY)
    machine(fleet_key=KEY).put(record(REF))
    place.put(NAME, [*encode_record(record(REF)), bytes(32)], SOON, replace=True)
    for n_left in (1, 0):
        assert found(there) is None
        assert there.take_fault(REF.key, Part.DELTA) == "damaged"
        assert len([size for size in place.sizes([NAME], SOON) if size]) == n_left
        clock.now += ABSENT_S
    assert there.stats().quarantined == 2
    assert not there.is_open


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
    place.put(NAME, [bytes_of(place, theirs)], SOON)
    there = machine(fleet_key=KEY)
    assert found(there) is None
    assert there.stats().quarantined == 1


def test_a_key_is_base64_of_32_bytes():
    assert FleetKey.parse("") is None
    assert FleetKey.parse(b64encode(b"k" * 32).decode()).mac("a", []) == KEY.mac("a", [])
    for text in ("secret", b64encode(b"k" * 31).decode(), "é"):
        with pytest.raises(BadInput, match="openssl rand -base64 32"):
            FleetKey.parse(text)


def test_names_tell_key_part_tokens_and_rows():
    one = RemoteRecord.of(record(refs_of(2)[1], Part.WINDOW, w_rows=40).header)
    name = RemoteNames(CLASS).of(one)
    folder = f"{CLASS}/{NAMESPACE.hex()}/{one.parent.hex()}"
    assert name == f"{folder}/256.{one.key.hex()}.w.40"
    assert parse_last(name) == (one.key, Part.WINDOW, 256, 40, False)
    assert parse_last(name + ".mac") == (one.key, Part.WINDOW, 256, 40, True)


ZEROS = "0" * 40


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "a/00.d", f"a/{ZEROS}.d", f"a/256.{ZEROS}", f"a/256.{ZEROS}.x.0", "x.d",
     f"257.{ZEROS}.d.0", f"000.{ZEROS}.d.0", f"010.{ZEROS}.w.11", f"256.{ZEROS}.d.0.md5"],
)  # fmt: skip
def test_other_names_are_not_ours(name):
    assert parse_last(name) is None


@pytest.mark.parametrize("lie", [{"n_tokens": 255}, {"w_rows": 9}])
def test_a_name_that_tells_other_tokens_or_rows_than_the_record_is_a_miss(machine, place, lie):
    one = RemoteRecord.of(record(REF, Part.WINDOW, w_rows=8).header)
    name = RemoteNames(CLASS).of(one._replace(**lie))
    place.put(name, encode_record(record(REF, Part.WINDOW, w_rows=8)), SOON)
    tier = machine()
    tier._known.add([one._replace(**lie, n_bytes=1)])
    assert tier.read(REF.key, Part.WINDOW) is None
    assert tier.stats().quarantined == 1
