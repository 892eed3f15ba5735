"""Deleting blocks for good from a place that machines share."""

import pytest

from keepwarm.prefix.blocks import BLOCK_TOKENS, chain
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part
from keepwarm.remote.deleter import erase_from_tier
from keepwarm.remote.handshake import STORE_META
from keepwarm.remote.records import FleetKey, RemoteNames, RemoteRecord, parse_last
from keepwarm.store.tier import NamedBlock
from tests.contract.shared import names_in
from tests.remote.conftest import CLASS, SOON
from tests.store.kit import NAMESPACE, record, tokens_of

TOKENS = tokens_of(2 * BLOCK_TOKENS + 50)
FIRST, SECOND, TAIL = chain(NAMESPACE, TOKENS)


def named(ref):
    return NamedBlock(ref.key, ref.parent, ref.n_tokens)


def ending(tokens):
    """The last block of a prompt."""
    *_, last = chain(NAMESPACE, tokens)
    return last


LONGER = ending([*TOKENS, 1, 2, 3])  # begins as the tail does
SHORTER = ending(TOKENS[: BLOCK_TOKENS + 90])  # the second block, when it was open
OTHER = ending([*TOKENS[: BLOCK_TOKENS + 10], 5, 6, 7])  # parts inside of it
BESIDE = ending([*TOKENS[: 2 * BLOCK_TOKENS + 40], 9])  # parts inside of the tail
ALL = [FIRST, SECOND, TAIL, LONGER, SHORTER, OTHER, BESIDE]


def there(place, refs, compute_class=CLASS, part=Part.DELTA, has_mac=False):
    """Which of these blocks a place has."""
    names = RemoteNames(compute_class, has_mac)
    rows = BLOCK_TOKENS if part is Part.WINDOW else 0
    records = (RemoteRecord(NAMESPACE, r.parent, r.key, part, r.n_tokens, rows) for r in refs)
    wanted = [names.of(one) for one in records]
    sizes = place.sizes(wanted, SOON)
    return [ref for ref, size in zip(refs, sizes, strict=True) if size]


@pytest.fixture(params=["plain", "signed", "sealed"])
def trust(request):
    signed = {"fleet_key": FleetKey(b"k" * 32)}
    return {"plain": {}, "signed": signed, "sealed": {"cipher": Cipher(b"s" * 32)}}[request.param]


def test_blocks_go_with_their_copies_and_leave_no_trace(machine, place, trust):
    tier = machine(**trust)
    for ref in ALL:
        assert tier.put(record(ref)).stored
    tier.put(record(SECOND, Part.WINDOW))
    machine("cpu-mlx-0.2", **trust).put(record(TAIL))
    doomed = [named(SECOND), named(TAIL)]
    assert erase_from_tier(tier, [NAMESPACE], doomed, keep=())
    has_mac = "fleet_key" in trust
    assert there(place, ALL, has_mac=has_mac) == [FIRST, OTHER, BESIDE]
    assert there(place, [SECOND], part=Part.WINDOW, has_mac=has_mac) == []
    assert there(place, [TAIL], "cpu-mlx-0.2", has_mac=has_mac) == []
    assert not tier.have([SECOND.key, TAIL.key])
    names = RemoteNames(CLASS)
    for ref in (SECOND, TAIL):
        listed = place.list_names(names.folder(NAMESPACE, ref.parent), SOON)
        left = {parse_last(one.name).key for one in listed}
        assert left == {(OTHER if ref is SECOND else BESIDE).key}


def test_what_agents_of_this_machine_have_stays(machine, place):
    tier = machine()
    for ref in ALL:
        tier.put(record(ref))
    keep = {FIRST.key, SECOND.key, SHORTER.key, LONGER.key}
    assert erase_from_tier(tier, [NAMESPACE], [named(SECOND), named(TAIL)], keep)
    assert there(place, ALL) == [FIRST, SECOND, LONGER, SHORTER, OTHER, BESIDE]


@pytest.mark.parametrize("address", ["directory"], indirect=True)
def test_sizes_are_taken_from_the_list(machine, monkeypatch):
    tier = machine()
    for ref in ALL:
        tier.put(record(ref))
    asked, sizes = [], tier.backend.sizes
    monkeypatch.setattr(
        tier.backend, "sizes", lambda names, s: asked.extend(names) or sizes(names, s)
    )
    assert erase_from_tier(tier, [NAMESPACE], [named(SECOND), named(TAIL)], keep=())
    assert asked == [STORE_META]
    assert there(tier.backend, ALL) == [FIRST, OTHER, BESIDE]


@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_erase_removes_a_listed_name_whose_record_redis_has_evicted(machine):
    tier, names = machine(), RemoteNames(CLASS)
    tier.put(record(FIRST))
    evict(tier, names.of(RemoteRecord.of(record(FIRST).header)))
    assert erase_from_tier(tier, [NAMESPACE], [named(FIRST)], ())
    assert tier.backend.list_names(names.folder(NAMESPACE, FIRST.parent), SOON) == []


@pytest.mark.parametrize("address", ["redis"], indirect=True)
@pytest.mark.parametrize("is_listed_again", [False, True])
def test_erase_deletes_all_records_of_a_block_whose_list_redis_has_evicted(
    machine, trust, is_listed_again
):
    """Of every part, and with any number of window rows; also if another was listed since."""
    tier = machine(**trust)
    made = [record(TAIL), record(TAIL, Part.STATE), record(TAIL, Part.WINDOW)]
    made += [record(SECOND, Part.WINDOW, w_rows=rows) for rows in (0, 1, 255, 256)]
    for one in made:
        tier.put(one)
        evict(tier, f"{RemoteNames(CLASS).folder(NAMESPACE, one.header.parent)}/")
    if is_listed_again:
        tier.put(record(SECOND, Part.WINDOW, w_rows=7))
    assert len(names_in(tier.backend)) == len(made) + is_listed_again
    assert erase_from_tier(tier, [NAMESPACE], [named(SECOND), named(TAIL)], ())
    assert names_in(tier.backend) == []


def evict(tier, key):
    assert tier.backend._call([[b"UNLINK", f"keepwarm:{key}".encode()]], SOON) == [1]


def test_a_place_that_does_not_answer_is_to_be_tried_again(machine, clock):
    tier = machine()
    tier.put(record(FIRST))
    tier.health.failed()
    tier.health.failed()
    tier.health.failed()
    assert not erase_from_tier(tier, [NAMESPACE], [named(FIRST)], ())
