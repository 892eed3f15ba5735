"""What is evicted first: the order that the worth of blocks gives."""

import math

import pytest

from keepwarm.prefix.blocks import chain
from keepwarm.store.eviction import MEMORY_HALF_LIFE_S as HALF_LIFE_S
from keepwarm.store.eviction import SHORT_BRANCH, after_use
from keepwarm.store.memory import MemoryTier
from tests.store.kit import NAMESPACE, chain_of, first_block, keys_of, record, tokens_of

SIZE = 1024


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(clock):
    made = MemoryTier(16 * SIZE, clock)
    yield made
    made.close()


def single(n):
    return record(first_block([n]), n_bytes=SIZE)


def forked(n_shared, n_blocks, seed):
    """A chain that shares its first tokens with that of seed 0, and goes on by itself."""
    tokens = tokens_of(n_shared) + tokens_of(256 * n_blocks - n_shared, seed)
    return [record(ref, n_bytes=SIZE) for ref in chain(NAMESPACE, tokens)]


def put_all(tier, records):
    return [tier.put(r).stored for r in records]


def held(tier, records):
    found = tier.have(keys_of(records))
    return [key in found for key in keys_of(records)]


@pytest.mark.parametrize("n_uses", [2, 3, 10])
def test_uses_at_one_moment_add_up(n_uses):
    value = 0.0
    for _ in range(n_uses - 1):
        value = after_use(50.0, value, 50.0, HALF_LIFE_S)
    assert value == pytest.approx(HALF_LIFE_S * math.log2(n_uses))


def test_a_use_counts_half_after_the_half_life():
    assert after_use(0.0, 0.0, HALF_LIFE_S, HALF_LIFE_S) == pytest.approx(HALF_LIFE_S * math.log2(1.5))


def test_old_uses_count_for_nothing():
    assert after_use(0.0, 100.0, 1e9, HALF_LIFE_S) == 0.0


def test_a_clock_set_back_is_no_error():
    assert 0 < after_use(1e9, 0.0, 0.0, HALF_LIFE_S) <= 65 * HALF_LIFE_S


def test_no_use_lowers_a_priority():
    """The order is one of time: the priority of a block only rises as it is used."""
    used, value = 0.0, 0.0
    for now in (0.0, 1.0, 30.0, 31.0, 500.0):
        before, value = used + value, after_use(used, value, now, HALF_LIFE_S)
        used = now
        assert used + value >= before


def test_a_block_used_often_outlives_one_used_since(tier, clock):
    often, once, rest = single(1), single(2), [single(n) for n in range(10, 24)]
    put_all(tier, [often, *rest])
    for _ in range(3):
        tier.touch(keys_of([often]))
    clock.now += 1
    tier.put(once)
    tier.touch(keys_of(rest))
    clock.now += 1
    assert tier.put(single(99)).stored
    assert held(tier, [often, once]) == [True, False]


def test_frequency_fades(tier, clock):
    often, rest = single(1), [single(n) for n in range(10, 25)]
    tier.put(often)
    for _ in range(100):
        tier.touch(keys_of([often]))
    clock.now += 10 * HALF_LIFE_S
    put_all(tier, rest)
    clock.now += 1
    assert tier.put(single(99)).stored
    assert held(tier, [often, *rest]) == [False] + [True] * 15


def test_what_is_used_again_and_again_is_not_washed_out_by_what_is_seen_once(tier, clock):
    kept = [single(n) for n in range(16)]
    put_all(tier, kept)
    tier.touch(keys_of(kept))
    clock.now += 1
    assert put_all(tier, [single(n) for n in range(100, 150)]) == [False] * 50
    assert all(held(tier, kept))


def test_the_new_is_let_in_once_the_old_has_rested(tier, clock):
    put_all(tier, kept := [single(n) for n in range(16)])
    tier.touch(keys_of(kept))
    clock.now += HALF_LIFE_S + 1
    assert tier.put(single(100)).stored


def test_a_prompt_larger_than_the_tier_keeps_its_head(tier):
    """What follows a block without room cannot be reached: it must not push out the head."""
    made = chain_of(40, n_bytes=SIZE)
    assert put_all(tier, made) == [True] * 16 + [False] * 24
    assert held(tier, made) == [True] * 16 + [False] * 24


def test_a_refused_chain_is_taken_when_there_is_room(tier, clock):
    made = chain_of(20, n_bytes=SIZE)
    tier.put(other := single(1))
    tier.pin(other.header.key, "agent")
    assert put_all(tier, made) == [True] * 15 + [False] * 5
    tier.unpin(other.header.key, "agent")
    clock.now += 1
    assert put_all(tier, made)[15:17] == [True, False]


def test_a_short_branch_that_is_replaced_goes_first(tier, clock):
    """An answer that the client rendered anew: its blocks are newer than others, and useless."""
    others = [single(n) for n in range(6)]
    put_all(tier, others)
    clock.now += 1
    old = forked(4 * 256 + 100, 7, seed=1)
    put_all(tier, old)
    new = forked(4 * 256 + 50, 7, seed=2)
    put_all(tier, new)
    clock.now += 1
    put_all(tier, [single(n) for n in range(50, 53)])
    assert held(tier, old) == [True] * 4 + [False] * 3
    assert all(held(tier, others))
    assert all(held(tier, new))


def test_a_long_branch_is_a_conversation_of_its_own(clock):
    """Two agents with one system prompt: the second does not push out the first."""
    tier = MemoryTier(64 * SIZE, clock)
    first = forked(2 * 256 + 100, 3 + SHORT_BRANCH, seed=1)
    put_all(tier, [single(n) for n in range(64 - len(first) - 5)])
    clock.now += 1
    put_all(tier, first)
    second = forked(2 * 256 + 50, 7, seed=2)
    put_all(tier, second)
    clock.now += 1
    put_all(tier, [single(n) for n in range(200, 210)])
    assert all(held(tier, first))
    assert all(held(tier, second))
    tier.close()


def test_a_replaced_branch_that_is_used_again_is_as_good_as_any(tier, clock):
    old, new = forked(300, 3, seed=1), forked(290, 3, seed=2)
    put_all(tier, old + new)
    clock.now += 1
    tier.touch(keys_of(old))
    put_all(tier, [single(n) for n in range(12)])
    clock.now += 1
    put_all(tier, [single(90), single(91)])
    assert all(held(tier, old))
    assert held(tier, new) == [True, False, False]


def test_heads_that_many_descend_from_outlive_their_branches(tier, clock):
    """A use of a block is a use of its ancestors."""
    branches = [forked(2 * 256, 4, seed) for seed in (1, 2, 3)]
    for branch in branches:
        put_all(tier, branch)
        tier.touch(keys_of(branch))
        clock.now += 5
    clock.now += 100
    put_all(tier, [single(n) for n in range(14)])
    assert held(tier, branches[0])[:2] == [True, True]
    assert not any(held(tier, branches[0])[2:] + held(tier, branches[1])[2:])


def test_tails_go_before_heads(tier, clock):
    put_all(tier, made := chain_of(16, n_bytes=SIZE))
    clock.now += 1
    put_all(tier, [single(n) for n in range(5)])
    assert held(tier, made) == [True] * 11 + [False] * 5
