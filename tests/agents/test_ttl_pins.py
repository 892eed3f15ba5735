"""Pins that end by themselves."""

import pytest

from keepwarm.agents.shares import TtlPins
from keepwarm.prefix.blocks import chain
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier
from keepwarm.store.marker import unlock
from tests.store.kit import NAMESPACE, record


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_mark_pins_the_block_it_lies_in_until_its_end(tmp_path):
    """`cache_control` with a ttl: kept for so long, by whatever process looks."""
    tokens, clock = list(range(700)), Clock()
    disk = DiskTier(tmp_path)
    refs = list(chain(NAMESPACE, tokens))
    for ref in refs:
        disk.put(record(ref)).durable.result()
    pins = TtlPins(disk, clock)
    pins.pin(NAMESPACE, tokens, 300, 60)
    pins.pin(NAMESPACE, tokens, 300, 3600)
    assert pinned(disk) == {refs[1].key}
    clock.now += 61
    assert pins.expire() == 1
    assert pinned(disk) == {refs[1].key}, "the longer wish holds"
    disk.close()
    again = DiskTier(tmp_path)
    clock.now += 3600
    assert TtlPins(again, clock).expire() == 1
    assert pinned(again) == set()
    again.close()


def test_a_mark_pins_the_checkpoint_at_its_place_too(tmp_path):
    """Which is a block of its own: the conversation has gone on, and its state with it."""
    tokens = list(range(700))
    disk = DiskTier(tmp_path)
    whole = list(chain(NAMESPACE, tokens))
    *_, ending = chain(NAMESPACE, tokens[:300])
    for ref in whole:
        disk.put(record(ref)).durable.result()
    disk.put(record(ending, Part.STATE)).durable.result()
    TtlPins(disk, Clock()).pin(NAMESPACE, tokens, 300, 60)
    assert pinned(disk) == {whole[1].key, ending.key}
    disk.close()


@pytest.mark.parametrize("place", [0, 999])
def test_a_place_beyond_the_conversation_is_nobodys(place, tmp_path):
    disk, clock = DiskTier(tmp_path), Clock()
    TtlPins(disk, clock).pin(NAMESPACE, [1, 2, 3], place, None)
    clock.now += 1e6
    assert TtlPins(disk, clock).expire() == 0
    disk.close()


@pytest.mark.parametrize("secret", [None, "a passphrase"])
def test_eviction_spares_a_mark_until_its_end_and_no_longer(tmp_path, secret):
    """Nobody has to sweep: what has expired is in nobody's way, in a sealed store neither."""
    clock, limits = Clock(), DiskLimits(INDEX_ROOM + (4 << 20), min_free_bytes=0)
    disk = DiskTier(tmp_path, limits, clock=clock, cipher=unlock(tmp_path, secret))

    def put(tokens):
        clock.now += 1
        made = record(next(chain(NAMESPACE, tokens)), n_bytes=1 << 20)
        assert disk.put(made).stored
        return made.header.key

    marked, other = put([1]), put([2])
    TtlPins(disk, clock).pin(NAMESPACE, [1], 1, 60)
    for n in range(3, 9):
        put([n])
    assert set(disk.have([marked, other])) == {marked}
    clock.now += 60
    put([9])
    assert not disk.have([marked])
    disk.close()


def pinned(disk: DiskTier) -> set[bytes]:
    return {block.key for block in disk.walk() if block.pinned}
