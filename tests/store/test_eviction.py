"""The order of eviction."""

import math
import shutil

import pytest

from keepwarm.prefix.blocks import chain
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier
from keepwarm.store.eviction import (
    DOUBLE_COST_AT,
    SHORT_BRANCH,
    Checkpoint,
    after_use,
    find_surplus,
    prefill_saved,
)
from keepwarm.store.eviction import MEMORY_HALF_LIFE_S as HALF_LIFE_S
from keepwarm.store.memory import MemoryTier
from tests.contract.test_tiers import MAKERS
from tests.store.kit import (
    NAMESPACE,
    BrokenFiles,
    chain_of,
    disk_use,
    first_block,
    keys_of,
    record,
    refs_of,
    tokens_of,
)

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


@pytest.mark.parametrize(
    ("used", "value", "now", "uses"),
    [(50.0, 0.0, 50.0, 2), (50.0, HALF_LIFE_S, 50.0, 3), (0.0, 0.0, HALF_LIFE_S, 1.5),
     (0.0, 100.0, 1e9, 1), (1e9, 0.0, 0.0, 2)],
    ids=["at one moment", "and once more", "half after the half-life", "old", "clock set back"],
)  # fmt: skip
def test_after_use_adds_uses_that_fade(used, value, now, uses):
    assert after_use(used, value, now, HALF_LIFE_S) == pytest.approx(HALF_LIFE_S * math.log2(uses))


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


def test_a_refused_chain_is_taken_when_there_is_room(tier, clock):
    made = chain_of(20, n_bytes=SIZE)
    tier.put(other := single(1))
    tier.touch([other.header.key])
    assert put_all(tier, made) == [True] * 15 + [False] * 5
    tier.delete_all([other.header.key])
    clock.now += 1
    assert put_all(tier, made)[15:17] == [True, False]


def test_a_short_branch_that_is_replaced_goes_first(tier, clock):
    """An answer that the client rendered anew: the old blocks are recent, and useless."""
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


# What a use saves


def test_the_first_block_spares_one_and_later_ones_more():
    assert prefill_saved(0, 256, 100, 0, 0) == 1
    assert prefill_saved(DOUBLE_COST_AT, 256, 100, 0, 0) == 2
    assert prefill_saved(10, 256, 100, 0, 0) == prefill_saved(10, 20, 8, 0, 0), (
        "for the bytes it takes"
    )
    assert prefill_saved(3, 256, 100, 50, 0) == prefill_saved(3, 256, 100, 0, 0), (
        "rows of both kinds are needed"
    )


def test_a_state_spares_all_tokens_before_it():
    assert prefill_saved(31, 256, 0, 0, 77) == pytest.approx(32, rel=0.01)
    assert prefill_saved(31, 256, 0, 77, 0) == pytest.approx(32, rel=0.01), (
        "window rows alone do too"
    )
    assert prefill_saved(31, 256, 10, 0, 70) == pytest.approx(32 / 8, rel=0.01), "for all its bytes"
    assert prefill_saved(3, 256, 10, 0, 1000) == prefill_saved(3, 256, 10, 0, 0), (
        "a huge one is worth no less"
    )


def test_of_two_used_alike_the_one_that_spares_more_stays(tier):
    states = [record(ref, Part.STATE, n_bytes=SIZE) for ref in refs_of(8)]
    put_all(tier, [states[0], states[7], *(single(n) for n in range(14))])
    tier.put(record(first_block([99]), Part.STATE, n_bytes=SIZE))
    assert held(tier, [states[0], states[7]]) == [True, True]
    tier.put(record(refs_of(4, seed=5)[3], Part.STATE, n_bytes=SIZE))
    assert held(tier, [states[7]]) == [True]


def test_the_deep_end_of_a_prompt_outlives_a_short_one_of_the_same_moment(clock):
    """Seconds of prefill: a token late in a prompt attends to all before it."""
    tier = MemoryTier(40 * SIZE, clock)
    put_all(tier, deep := chain_of(39, n_bytes=SIZE))
    tier.put(short := single(1))
    tier.put(next_one := record(refs_of(3, seed=4)[2], n_bytes=SIZE))
    assert all(held(tier, deep))
    assert held(tier, [short, next_one]) == [False, True]
    tier.close()


# On disk


@pytest.fixture
def disk(tmp_path, clock):
    """Room for some 40 blocks of 64 KiB beside the index."""
    limits = DiskLimits(INDEX_ROOM + (4 << 20), min_free_bytes=0)
    made = DiskTier(tmp_path / "store", limits, BrokenFiles(), clock)
    yield made
    made.close()


BIG = 1 << 16


def test_a_long_prompt_seen_once_does_not_erode_a_hot_one(disk, clock):
    """A system prompt that is used twice a minute, and then a prompt of a whole book."""
    hot = chain_of(10, seed=1, n_bytes=BIG)
    put_all(disk, hot)
    for _ in range(20):
        clock.now += 30
        disk.touch(keys_of(hot))
    clock.now += 120
    book = chain_of(200, seed=2, n_bytes=BIG)
    stored = put_all(disk, book)
    assert all(held(disk, hot))
    n_stored = stored.index(False)
    assert 10 < n_stored < 60
    assert not any(stored[n_stored:]), "what follows a refused block is of no use"
    assert held(disk, book) == stored, "nor was its own head given up for its end"
    assert disk.stats().refused == 200 - n_stored


def test_nothing_goes_for_a_record_that_would_not_fit_anyway(tmp_path, clock, monkeypatch):
    """The disk is full of other things; to empty the cache would not help."""
    tier = DiskTier(tmp_path / "store", DiskLimits(None, 1 << 30), BrokenFiles(), clock)
    usage, room = shutil.disk_usage(tmp_path), 1 << 40

    def left(path):
        return usage._replace(free=room - disk_use(path / "blocks"))

    monkeypatch.setattr(shutil, "disk_usage", left)
    put_all(tier, made := chain_of(5, n_bytes=BIG))
    clock.now += 60
    room = (1 << 30) - 100 * BIG
    assert not tier.put(single(1)).stored
    assert all(held(tier, made))
    assert tier.stats().evicted == 0
    room = (1 << 30) + disk_use(tmp_path / "store" / "blocks")
    assert tier.put(single(1)).stored
    assert tier.stats().evicted == 1
    tier.close()


def test_one_batch_goes_where_deletions_leave_no_more_space(tmp_path, clock, monkeypatch):
    """A snapshot holds what is deleted: to empty the cache would not help."""
    tier = DiskTier(tmp_path / "store", DiskLimits(None, 1 << 30), BrokenFiles(), clock)
    usage = shutil.disk_usage(tmp_path)
    free = 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    put_all(tier, [single(number) for number in range(40)])
    free, n_evicted = 1 << 30, []  # a whole record is missing
    for seconds in (60, 30, 40, 0):
        clock.now += seconds
        assert not tier.put(single(1000 + len(n_evicted))).stored
        n_evicted.append(tier.stats().evicted)
    first = n_evicted[0]
    assert 0 < first < 5
    assert n_evicted == [first, first, 2 * first, 2 * first]
    free = 1 << 40
    assert tier.put(single(2000)).stored, "the snapshot is gone"
    tier.close()


# Checkpoints


def parts_of(tier, ref):
    """Of a block, when the tier has deleted what it is to delete; none if it is gone."""
    return next((set(block.n_bytes) for block in tier.walk() if block.key == ref.key), set())


def states(tier, refs):
    return [Part.STATE in parts_of(tier, ref) for ref in refs]


def keep_states(tier, refs, n_rows, every=range(1000)):
    """A conversation whose every block, or some, end with a state as large as so many blocks."""
    for ref in refs:
        tier.put(record(ref, n_bytes=BIG))
        if ref.number in every:
            tier.put(record(ref, Part.STATE, n_bytes=n_rows * BIG))
            tier.delete_superseded(ref.key)


@pytest.fixture(params=["memory", "disk", "sealed"])
def roomy(request, tmp_path):
    made = MAKERS[request.param](tmp_path, 64 << 20)
    yield made
    made.close()


def test_the_nearest_go_first_then_the_ends_of_blocks_then_the_smallest_gaps():
    places = [256, 500, 512, 2048, 2100, 2600, 9000, 9010, 9060, 9070]
    made = [Checkpoint(at, bytes([n]), bytes([n]), 10, held=False) for n, at in enumerate(places)]
    assert [state.at for state in find_surplus(made, 100)] == []
    assert [state.at for state in find_surplus(made, 70)] == [512, 9010, 256]
    left = [512, 9010, 256, 2048, 2600, 2100]
    found = [state.at for state in find_surplus(made, 10)]
    assert found == left, "three are always kept, and the first end of a message"
    made[4] = made[4]._replace(held=True)
    assert 2100 not in [state.at for state in find_surplus(made, 10)]
    assert find_surplus(made, 0) == [], "there is nothing to weigh them against"


def test_where_conversations_part_as_many_bytes_are_kept_again():
    """And three in any case: an answer that comes back in other words parts at every turn."""
    places = range(100, 1300, 100)
    made = [Checkpoint(at, b"", b"", 10, held=False, is_fork=at < 1000) for at in places]
    assert find_surplus(made, 60) == []
    assert [state.at for state in find_surplus(made, 50)] == [100, 300]
    assert len(find_surplus(made, 1)) == len(made) - 6
    made[0] = made[0]._replace(held=True)
    assert [state.at for state in find_surplus(made, 50)] == [200, 400]


def test_the_end_of_a_first_prompt_outlives_short_turns():
    """It is asked again, after a restart: before, the end of its answer of five tokens stayed."""
    made = [Checkpoint(at, b"", b"", 10, held=False) for at in (599, 604, 643, 648)]
    assert [state.at for state in find_surplus(made, 10)] == [604]


@pytest.mark.parametrize(
    ("forks", "opening", "stays"),
    [((), 813, True), ((), 255, False), ((300,), 813, True), ((300,), 540, False)],
    ids=["a system prompt", "a short one", "parts from another", "soon after"],
)
def test_the_first_end_of_a_message_stays_for_the_next_conversation(forks, opening, stays):
    """The second one with a system prompt of 813 tokens computed it again, where a state is as
    large as 228 rows: of the first one's states only those of its question and answer stayed."""
    made = [Checkpoint(at, b"", b"", 228, held=False, is_fork=True) for at in forks]
    places = (opening, opening + 20, opening + 36, opening + 40)
    made += [Checkpoint(at, b"", b"", 228, held=False) for at in places]
    deleted = [state.at for state in find_surplus(made, opening + 40)]
    assert (opening not in deleted) is stays


def test_states_take_no_more_than_rows_and_the_last_three_stay(roomy):
    """A state of Qwen3-Next is as large as 12 blocks of rows."""
    refs = refs_of(24)
    keep_states(roomy, refs, n_rows=12)
    kept = states(roomy, refs)
    assert kept[-3:] == [True, True, True]
    assert sum(kept) == 3
    assert all(Part.DELTA in parts_of(roomy, ref) for ref in refs)
    assert len([s for s in roomy.walk() if Part.STATE in s.n_bytes]) == 3


def test_a_checkpoint_where_conversations_part_stays(roomy):
    """All agents begin at the end of the system prompt."""
    shared = tokens_of(512)
    one, two = (list(chain(NAMESPACE, shared + tokens_of(2048, seed))) for seed in (1, 2))
    keep_states(roomy, one[:2], n_rows=8)
    keep_states(roomy, one[2:], n_rows=8, every=())
    keep_states(roomy, two[2:], n_rows=8)
    assert states(roomy, two)[1]
    assert sum(states(roomy, two)) == 4


def test_a_checkpoint_inside_a_block_stays_where_conversations_part(roomy):
    """Also if neither of them fills that block; one where nobody parted goes."""
    shared = tokens_of(256 + 100)
    prompts = [shared + tokens_of(60, seed) for seed in (1, 2)]
    keep_states(roomy, list(chain(NAMESPACE, shared))[:1], n_rows=8, every=())
    for prompt, ends in zip(prompts, [(160,), (100, 116, 132, 148, 160)], strict=True):
        for n_tokens in ends:
            keep_states(roomy, list(chain(NAMESPACE, prompt[: 256 + n_tokens]))[1:], n_rows=8)
    kept = [block.n_tokens for block in roomy.walk() if Part.STATE in block.n_bytes]
    assert sorted(kept) == [100, 132, 148, 160, 160]


def test_a_cancelled_turn_leaves_the_end_of_the_one_before(roomy):
    """Where it is asked again in other words it goes on from there."""
    tokens = tokens_of(256 * 12)
    ends = (300, 900, 1500, 2100, 2200)  # of four turns' answers and prompts, the last cancelled
    for n_tokens in ends:
        keep_states(roomy, list(chain(NAMESPACE, tokens[:n_tokens]))[:-1], 20, every=())
        keep_states(roomy, list(chain(NAMESPACE, tokens[:n_tokens]))[-1:], 20)
    last = [list(chain(NAMESPACE, tokens[:n]))[-1] for n in ends]
    assert [bool(parts_of(roomy, ref)) for ref in last] == [True, False, True, True, True]


def test_an_old_checkpoint_inside_a_block_goes_with_its_tail(roomy):
    """Its rows are served by the longer block, so nothing of it is left."""
    tokens = tokens_of(256 * 12)
    tails = [list(chain(NAMESPACE, tokens[: 256 * n + 100]))[n] for n in range(12)]
    whole = list(chain(NAMESPACE, tokens))
    for tail, ref in zip(tails, whole, strict=True):
        keep_states(roomy, [tail], n_rows=4)
        keep_states(roomy, [ref], n_rows=4, every=())
    left = [tail.number for tail in tails if parts_of(roomy, tail)]
    assert left[-2:] == [10, 11]
    assert len(left) == 4, "the first with a block before it too"
    assert roomy.stats().blocks == 12 + len(left)


@pytest.mark.parametrize("roomy", ["disk", "sealed"], indirect=True)
def test_a_pinned_checkpoint_stays(roomy):
    refs = refs_of(12)
    roomy.pin(refs[4].key, "agent")
    keep_states(roomy, refs, n_rows=20)
    assert [n for n, kept in enumerate(states(roomy, refs)) if kept] == [4, 9, 10, 11]


def test_models_without_rows_keep_all_checkpoints(roomy):
    alone = refs_of(5, seed=9)
    for ref in alone:
        roomy.put(record(ref, Part.STATE))
        roomy.delete_superseded(ref.key)
    assert all(states(roomy, alone))
