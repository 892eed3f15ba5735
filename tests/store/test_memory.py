"""The memory tier: bytes are shared, counted, and really freed."""

import gc
import random
import sqlite3
import weakref
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import psutil
import pytest

from keepwarm.prefix.blocks import chain, root
from keepwarm.store.memory import MAX_CHANGES, MemoryTier
from keepwarm.store.record import Part, Record, Tensor
from tests.store.kit import NAMESPACE, chain_of, first_block, keys_of, record, refs_of, tokens_of

MIB = 1 << 20


@pytest.fixture
def tier():
    made = MemoryTier(8 * MIB)
    yield made
    made.close()


def big(n, n_bytes=MIB):
    """A record of an array of its own, and a way to see whether that is still alive."""
    array = np.full(n_bytes, n % 251, np.uint8)
    made = Record(
        record(first_block([n])).header, (Tensor("L0_B0_K", "U8", (n_bytes,), array.data),)
    )
    return made, weakref.ref(array)


def test_bytes_are_shared_and_not_copied(tier):
    made, _ = big(1)
    tier.put(made)
    found = tier.read(made.header.key, Part.DELTA)
    assert found.tensors[0].data is made.tensors[0].data


def test_evicted_bytes_are_given_back(tier):
    """Eviction frees the bytes it reports."""
    alive = []
    for n in range(40):
        made, array = big(n)
        alive.append(array)
        tier.put(made)
        del made
    gc.collect()
    n_alive = sum(array() is not None for array in alive)
    assert n_alive == tier.stats().blocks <= 8
    assert tier.stats().evicted == 40 - n_alive
    assert tier.stats().n_bytes == n_alive * MIB


def resident_memory() -> tuple[int, int]:
    """What a full tier adds to this process, and what is left of it once all is deleted."""
    process = psutil.Process()
    tier = MemoryTier(256 * MIB)
    before = process.memory_info().rss
    for n in range(16):
        tier.put(big(n, 12 * MIB)[0])
    full = process.memory_info().rss - before
    for stored in list(tier.walk()):
        tier.delete(stored.key)
    gc.collect()
    after = process.memory_info().rss - before
    tier.close()
    return full, after


def test_process_memory_falls_with_the_budget():
    """Asserted on a process of its own; one that has run for long keeps what it is given."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        full, after = pool.submit(resident_memory).result()
    assert full > 150 * MIB
    assert after < 40 * MIB


def test_the_budget_is_one_of_bytes(tier):
    for n in range(30):
        tier.put(record(first_block([n]), n_bytes=MIB))
        assert tier.stats().n_bytes <= 8 * MIB
    assert tier.stats().blocks == 8


def test_a_larger_window_record_counts_once(tier):
    (ref,) = refs_of(1)
    tier.put(record(ref, Part.WINDOW, MIB, w_rows=10))
    tier.put(record(ref, Part.WINDOW, 2 * MIB, w_rows=20))
    assert tier.stats().n_bytes == 2 * MIB


def test_what_does_not_fit_beside_pinned_blocks_is_refused(tier):
    for n in range(6):
        tier.put(record(first_block([n]), n_bytes=MIB))
        tier.pin(first_block([n]).key, "agent")
    assert not tier.put(record(first_block([99]), n_bytes=3 * MIB)).stored
    assert tier.put(record(first_block([98]), n_bytes=2 * MIB)).stored
    assert tier.stats().blocks == 7


def test_nothing_is_left_after_close(tier):
    made, array = big(1)
    tier.put(made)
    del made
    tier.close()
    gc.collect()
    assert array() is None
    assert tier.children(root(NAMESPACE), first_block([1]).tokens) == []


def test_a_deleted_record_is_given_back_at_once(tier):
    made, array = big(1)
    tier.put(made)
    key = made.header.key
    del made
    tier.delete(key)
    gc.collect()
    assert array() is None
    assert tier.stats().n_bytes == 0


def test_clock_decides_what_is_old():
    now = iter(range(1000))
    tier = MemoryTier(3 * MIB, clock=lambda: next(now))
    made = [record(first_block([n]), n_bytes=MIB) for n in range(4)]
    for one in made[:3]:
        tier.put(one)
    tier.touch(keys_of(made[:1]))
    tier.put(made[3])
    assert set(tier.have(keys_of(made))) == set(keys_of([made[0], made[2], made[3]]))
    tier.close()


def test_what_is_known_without_asking_is_what_the_index_says(tier):
    (ref,), shown = refs_of(1), set()
    for part, w_rows in (("w", 3), ("d", None), ("w", 8), ("s", None)):
        tier.put(record(ref, Part(part), w_rows=w_rows))
        assert tier.have([ref.key]) == tier.index.lookups.have([ref.key])
        shown |= set(tier.have([ref.key]).values())
    assert len(shown) == 4


# The index follows later


@pytest.fixture
def statements(tier):
    """What the index is asked from now on, by any thread."""
    seen = []
    tier.index.database._db.set_trace_callback(seen.append)
    return seen


def test_nothing_is_asked_of_the_index_to_put_a_record(tier, statements):
    """It is the thread that runs the model that puts it."""
    made = chain_of(4)
    for one in made:
        tier.put(one)
        tier.delete_outgrown(one.header.key)
    tier.touch(keys_of(made))
    assert not statements
    assert set(tier.have(keys_of(made))) == set(keys_of(made))
    last = made[-1].header
    assert [child.key for child in tier.children(last.parent, last.tokens)] == [last.key]
    assert statements


@pytest.mark.parametrize("seed", range(8))
def test_the_index_says_what_is_held_whatever_was_done(seed):
    dice, refs = random.Random(seed), refs_of(6)
    refs += [list(chain(NAMESPACE, tokens_of(n)))[-1] for n in (300, 400, 700)]  # of the same
    tier = MemoryTier(20 * 1024)
    deeds = (
        lambda ref: tier.put(record(ref, dice.choice(list(Part)), n_bytes=1024)),
        lambda ref: tier.delete_outgrown(ref.key),
        lambda ref: tier.delete_part(ref.key, dice.choice(list(Part))),
        lambda ref: tier.delete(ref.key),
        lambda ref: tier.touch([ref.key]),
        lambda ref: tier.children(ref.parent, ref.tokens),
        lambda _: tier.release(2048),
    )
    for _ in range(300):
        dice.choices(deeds, weights=(12, 4, 2, 1, 2, 1, 1))[0](dice.choice(refs))
        if dice.random() < 0.1:
            keys = [ref.key for ref in refs]
            assert tier.index.lookups.have(keys) == tier.have(keys)
            assert tier.index.lookups.n_bytes() == tier.stats().n_bytes <= 20 * 1024
    tier.close()


def test_the_index_is_never_far_behind(tier):
    for n in range(2 * MAX_CHANGES):
        tier.put(record(first_block([n]), n_bytes=16))
        assert len(tier._late.changes) <= MAX_CHANGES


def test_a_record_without_a_row_is_not_kept(tier, monkeypatch):
    """It would never be evicted."""

    def fail(*_):
        raise sqlite3.OperationalError("out of memory")

    made = record(first_block([1]))
    with monkeypatch.context() as broken:
        broken.setattr(tier.index, "add", fail)
        tier.put(made)
        assert tier.children(made.header.parent, made.header.tokens) == []
    assert tier.stats().errors == 1
    assert not tier.have([made.header.key])
    assert tier.stats().n_bytes == 0
    assert tier.put(made).stored
    assert tier.children(made.header.parent, made.header.tokens)
