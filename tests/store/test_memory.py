"""The memory tier: bytes are shared, counted, and really freed."""

import gc
import random
import weakref

import numpy as np
import pytest

from keepwarm.prefix.blocks import chain, root
from keepwarm.records.record import Part, Record, Tensor
from keepwarm.store import memory
from keepwarm.store.eviction import DISK_HALF_LIFE_S
from keepwarm.store.index.index import Index
from keepwarm.store.memory import BlockTable, MemoryTier
from tests.store.kit import NAMESPACE, first_block, record, refs_of, tokens_of

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


def test_a_larger_window_record_counts_once(tier):
    (ref,) = refs_of(1)
    tier.put(record(ref, Part.WINDOW, MIB, w_rows=10))
    tier.put(record(ref, Part.WINDOW, 2 * MIB, w_rows=20))
    assert tier.stats().n_bytes == 2 * MIB


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
    tier.delete_all([key])
    gc.collect()
    assert array() is None
    assert tier.stats().n_bytes == 0


# The same answers as the index on disk gives


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_HALF_LIFE_S", DISK_HALF_LIFE_S)
    made = Index(tmp_path / "index.sqlite")
    yield made
    made.close()


REFS = [*refs_of(6), *refs_of(4, seed=1)]
REFS += [list(chain(NAMESPACE, tokens_of(n)))[-1] for n in (30, 300, 400, 500, 700)]
REFS += [list(chain(NAMESPACE, tokens_of(n) + tokens_of(90, seed=n)))[-1] for n in (290, 410)]


def compare(table, index):
    """Every look-up, of every block."""
    lookups, keys = index.lookups, [ref.key for ref in REFS]
    assert table.have(keys) == lookups.have(keys)
    assert table.n_bytes == lookups.n_bytes()
    assert sorted(table.walk()) == sorted(index.walk())
    parents = [root(NAMESPACE), *keys]
    assert sorted(table.states(parents)) == sorted(lookups.states(parents))
    for ref in REFS:
        assert set(table.children(ref.parent, ref.tokens)) == set(
            lookups.children(ref.parent, ref.tokens)
        )
        for find in ("shorter_siblings", "superseded", "descendants", "children_of"):
            found = getattr(table, find)(ref.key), getattr(lookups, find)(ref.key)
            assert set(found[0]) == set(found[1]), find
        mine, theirs = table.checkpoints(ref.key), lookups.checkpoints(ref.key)
        assert (sorted(mine[0]), mine[1]) == (sorted(theirs[0]), theirs[1])


def change(table, index, dice, now):
    """One change of both."""
    ref, part = dice.choice(REFS), dice.choice(list(Part))
    deed = dice.choices(("put", "delete part", "delete", "touch"), (12, 3, 1, 4))
    match deed[0]:
        case "put":
            made = record(ref, part, n_bytes=dice.choice([64, 1024]), w_rows=ref.n_tokens)
            table.put(made, now)
            index.add(made.header, made.n_bytes, now)
        case "delete part":
            table.delete_part(ref.key, part)
            index.delete_part(ref.key, part)
        case "delete":
            table.delete([ref.key])
            index.mark_deleting([ref.key])
            index.delete_marked([ref.key])
        case "touch":
            table.touch([ref.key], now)
            index.touch([ref.key], now)


@pytest.mark.parametrize("seed", range(6))
def test_block_table_after_random_changes_answers_as_the_index_on_disk(seed, index):
    dice, table, now = random.Random(seed), BlockTable(), 0.0
    for step in range(200):
        now += dice.choice([0.0, 1.0, 300.0])
        change(table, index, dice, now)
        if step % 10 == 0:
            compare(table, index)
        if step % 25 == 0:
            n_bytes, spared = dice.choice([500, 3000]), {dice.choice(REFS).key}
            list(index.walk())  # which writes the uses that wait for the next change
            victims = [one.key for one in index.find_victims(n_bytes, spared, now)]
            index.mark_deleting(victims)
            index.delete_marked(victims)
            assert table.evict(n_bytes, spared, now) == victims
    compare(table, index)
    assert len(table._order) <= 2 * len(table.blocks) + 64, "outdated entries are bounded"
