"""Demoted window rows are evicted from memory first."""

import pytest

from keepwarm.records.record import Part
from keepwarm.store.memory import MemoryTier
from tests.store.kit import record, refs_of

KIB = 1 << 10


@pytest.fixture
def memory():
    tier = MemoryTier(8 * KIB)
    yield tier
    tier.close()


def fill(memory, n_blocks=4):
    """Blocks of 2 KiB, half of it window rows, demoted: the tier is full."""
    refs = refs_of(n_blocks)
    for ref in refs:
        for part in (Part.DELTA, Part.WINDOW):
            memory.put(record(ref, part, KIB))
        memory.demote_window(ref.key)
    return refs


def parts(memory, refs):
    known = memory.have([ref.key for ref in refs])
    return ["".join(sorted(known[ref.key].parts)) if ref.key in known else "" for ref in refs]


def newcomer(memory):
    (ref,) = refs_of(1, seed=9)
    assert memory.put(record(ref, n_bytes=KIB)).stored
    return ref


def test_the_oldest_demoted_rows_make_room(memory):
    refs = fill(memory)
    newcomer(memory)
    assert parts(memory, refs) == ["d", "dw", "dw", "dw"]
    assert memory.stats().evicted == 0
    assert memory.stats().n_bytes == 8 * KIB


def test_promoted_rows_are_not_evicted_first(memory):
    refs = fill(memory)
    memory.promote_window(refs[0].key)
    assert memory.demoted_windows([ref.key for ref in refs[:2]]) == {refs[1].key}
    newcomer(memory)
    assert parts(memory, refs) == ["dw", "d", "dw", "dw"]


def test_rows_of_a_block_in_use_stay(memory):
    refs = fill(memory)
    memory.touch([refs[0].key])
    newcomer(memory)
    assert parts(memory, refs) == ["dw", "d", "dw", "dw"]


def test_under_pressure_they_are_evicted_first_too(memory):
    refs = fill(memory)
    assert memory.release(2 * KIB) == 2 * KIB
    assert parts(memory, refs) == ["d", "d", "dw", "dw"]


def test_when_none_is_left_blocks_are_evicted(memory):
    refs = fill(memory)
    assert memory.release(6 * KIB) >= 6 * KIB
    assert parts(memory, refs)[-1] == ""
    assert memory.stats().evicted > 0


def test_a_deleted_block_is_not_counted_as_demoted(memory):
    refs = fill(memory)
    memory.delete_all([refs[0].key])
    memory.delete_all([refs[1].key])
    assert memory.release(KIB) == KIB
    assert parts(memory, refs) == ["", "", "d", "dw"]


def test_rows_that_are_replaced_make_room_once(memory):
    refs = refs_of(4)
    for ref in refs:
        memory.put(record(ref, Part.DELTA, KIB))
        memory.put(record(ref, Part.WINDOW, KIB, w_rows=10))
        memory.demote_window(ref.key)
    assert memory.put(record(refs[0], Part.WINDOW, 2 * KIB, w_rows=20)).stored
    assert memory.stats().n_bytes <= 8 * KIB
    assert parts(memory, refs) == ["dw", "d", "dw", "dw"]
