"""Pins that end by themselves."""

from keepwarm.cache.marks import Marks
from keepwarm.prefix.blocks import chain
from keepwarm.store.disk import DiskTier
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
    marks = Marks(disk, clock)
    marks.hold(NAMESPACE, tokens, 300, 60)
    marks.hold(NAMESPACE, tokens, 300, 3600)
    assert pinned(disk) == {refs[1].key}
    clock.now += 61
    assert marks.sweep() == 1
    assert pinned(disk) == {refs[1].key}, "the longer wish holds"
    disk.close()
    again = DiskTier(tmp_path)
    clock.now += 3600
    assert Marks(again, clock).sweep() == 1
    assert pinned(again) == set()
    again.close()


def test_a_place_beyond_the_conversation_is_nobodys(tmp_path):
    disk = DiskTier(tmp_path)
    Marks(disk).hold(NAMESPACE, [1, 2, 3], 999, None)
    assert disk.index.pinners("mark:") == []
    disk.close()


def pinned(disk: DiskTier) -> set[bytes]:
    return {block.key for block in disk.walk() if block.pinned}
