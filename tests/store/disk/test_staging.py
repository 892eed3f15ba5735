"""Records that become findable together, or not at all."""

import errno

import pytest

from keepwarm.records.record import Part
from keepwarm.store.disk.disk import StagedRecords
from tests.store.kit import BrokenFiles, chain_of, record, refs_of, wanting_q8


class FailsLater(BrokenFiles):
    """Names the first files and no more."""

    left = 2

    def publish(self, temp, target):
        if self.left == 0:
            self.break_(errno.EROFS, "publish")
        self.left -= 1
        super().publish(temp, target)


@pytest.fixture
def disk(open_tier):
    return open_tier()


def test_nobody_finds_them_before_they_are_published(disk):
    records = chain_of(3)
    with StagedRecords(disk) as staged:
        assert all(staged.add(record) for record in records)
        assert not list(disk.walk())
        assert disk.index.lookups.n_bytes() >= sum(record.n_bytes for record in records)
        staged.publish()
    assert {block.key for block in disk.walk()} == {record.header.key for record in records}
    assert not list(disk.scratch.path.glob("*.tmp"))


def test_what_is_not_published_is_withdrawn(disk):
    with StagedRecords(disk) as staged:
        assert staged.add(chain_of(1)[0])
    assert disk.index.lookups.n_bytes() == 0
    assert not list(disk.scratch.path.glob("*.tmp"))


def test_if_one_fails_those_before_it_are_deleted_again_and_nothing_else(disk):
    """Another part of such a block was there before."""
    first, *rest = refs_of(4)
    disk.put(record(first, Part.STATE))
    n_bytes = disk.index.lookups.n_bytes()
    disk.records.files = FailsLater()
    with StagedRecords(disk) as staged:
        assert all(staged.add(record(ref)) for ref in (first, *rest))
        with pytest.raises(OSError, match="Read-only"):
            staged.publish()
    assert disk.records.files.left == -1, "two were published before"
    assert [(block.key, set(block.n_bytes)) for block in disk.walk()] == [(first.key, {Part.STATE})]
    assert disk.index.lookups.n_bytes() == n_bytes
    assert not list(disk.scratch.path.glob("*.tmp"))


def test_what_was_there_before_is_not_lost(disk):
    """One record is rounded, and replaces the exact one."""
    first, *rest = refs_of(4)
    disk.put(record(first))
    disk.records.files = FailsLater()
    with StagedRecords(disk) as staged:
        assert all(staged.add(one) for one in (wanting_q8(first), *map(record, rest)))
        with pytest.raises(OSError, match="Read-only"):
            staged.publish()
    (left,) = disk.walk()
    assert left.key == first.key
    assert disk.read(first.key, Part.DELTA).header.extra["codec"] == "q8"


def test_a_record_without_room_is_not_staged(open_tier):
    with StagedRecords(open_tier(max_bytes=1 << 20)) as staged:
        assert not staged.add(chain_of(1, n_bytes=2 << 20)[0])
