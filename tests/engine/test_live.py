"""Live caches: the longest is found, moved or lent, exact, bounded, and freed when it goes."""

import random
import threading

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from keepwarm import kv
from keepwarm.engine.live import Live, LiveHit
from keepwarm.errors import CacheMismatch
from keepwarm.prefix.blocks import Namespace
from tests.kit.compare import assert_differs, assert_same
from tests.kit.models import LAYER_KINDS, WINDOW
from tests.kit.runs import cold, continue_from, prefill, settle

OURS, THEIRS = Namespace(b"ours"), Namespace(b"theirs")
ALL = 1 << 40
ROW_BYTES = 2 * 4 * 8 * 4  # K and V, four heads of eight floats


def said(n_tokens, seed=0):
    """The first tokens of a conversation: a longer one goes on where a shorter ends."""
    return random.Random(seed).choices(range(128), k=n_tokens)


def rows(n_tokens, room=0):
    """One layer that holds so many tokens, and room for more; evaluated."""
    cache = KVCache()
    cache.keys, cache.values = (mx.random.normal((1, 4, n_tokens + room, 8)) for _ in "kv")
    cache.offset = n_tokens
    return settle([cache])


@pytest.fixture
def live():
    return Live(ALL)


def held(model, tokens):
    """In slices, so that windows and chunks slide as they do in an engine."""
    return prefill(model, make_prompt_cache(model), tokens, step=16)


# What is found.


def test_a_prefix_is_moved_not_copied(live):
    """The arrays are the very same, and the entry is gone."""
    tokens = said(50)
    live.put(OURS, tokens, rows(50))
    before = mx.get_active_memory()
    taken = live.take(OURS, [*tokens, 1, 2])
    assert taken.n_tokens == kv.token_count(taken.caches) == 50
    assert mx.get_active_memory() == before
    assert live.take(OURS, [*tokens, 1, 2]) is None
    assert live.stats[:2] == (0, 0)
    assert (live.stats.moved, live.stats.copied, live.stats.misses) == (1, 0, 1)


@pytest.mark.parametrize(
    ("prompt", "n_tokens"),
    [
        (said(50)[:30], 29),  # rewound: one token is left to feed
        (said(50), 49),  # sent again
        ([*said(50)[:20], 1, 2, 3], 20),  # edited
    ],
)
def test_a_fork_is_a_copy_and_the_original_stays(live, prompt, n_tokens):
    tokens, caches = said(50), rows(50)
    expected = mx.array(caches[0].keys[..., :n_tokens, :])
    live.put(OURS, tokens, caches)
    assert live.n_served(OURS, prompt) == n_tokens
    for _ in range(2):
        taken = live.take(OURS, prompt)
        assert taken.n_tokens == kv.token_count(taken.caches) == n_tokens
        assert mx.array_equal(taken.caches[0].keys[..., :n_tokens, :], expected)
        assert taken.caches[0].keys.shape[2] == n_tokens
    assert live.take(OURS, [*tokens, 1]).n_tokens == 50


def test_writing_to_a_copy_leaves_the_original_alone(live):
    caches = rows(50)
    before = mx.array(caches[0].keys)
    live.put(OURS, said(50), caches)
    copy = live.take(OURS, said(50)[:30])
    copy.caches[0].update_and_fetch(*(mx.ones((1, 4, 5, 8)) for _ in "kv"))
    settle(copy.caches)
    whole = live.take(OURS, [*said(50), 1])
    assert mx.array_equal(whole.caches[0].keys, before)


def test_the_longest_is_taken(live):
    prompt = said(100)
    for n in (20, 60, 40):
        live.put(OURS, [*prompt[:n], 1, 1], rows(n + 2))
    assert live.take(OURS, prompt).n_tokens == 60
    assert live.n_served(OURS, prompt) == 60


def test_nothing_is_taken_that_one_has_already(live):
    live.put(OURS, said(50), rows(50))
    assert live.take(OURS, said(60), beyond=50) is None
    assert live.take(OURS, said(60), beyond=49).n_tokens == 50


@pytest.mark.parametrize("n_same", [1, 63, 64, 150, 199])
def test_every_token_is_compared(live, n_same):
    """A single token that differs ends the match, wherever it stands."""
    prompt = said(300)
    live.put(OURS, said(200), rows(200))
    prompt[n_same] = (prompt[n_same] + 1) % 128
    assert live.n_served(OURS, prompt) == n_same
    assert live.take(OURS, prompt).n_tokens == n_same


def test_namespaces_share_nothing(live):
    """Other KV options are another namespace."""
    live.put(OURS, said(50), rows(50))
    assert live.take(THEIRS, said(60)) is None
    assert live.take(OURS, said(60)).n_tokens == 50


@pytest.mark.parametrize("prompt", [[], [5]])
def test_a_prompt_without_a_token_to_spare_takes_nothing(live, prompt):
    live.put(OURS, [5], rows(1))
    assert live.take(OURS, prompt) is None
    assert live.take(OURS, [5, 6]).n_tokens == 1


def test_caches_must_hold_what_is_named(live):
    with pytest.raises(CacheMismatch, match="token count is 50, expected 51"):
        live.put(OURS, said(51), rows(50))
    assert live.stats.entries == 0


# Exact, whatever the layers are.


@pytest.mark.parametrize("name", [*LAYER_KINDS, "llama4"])
def test_what_is_taken_goes_on_as_a_cold_run(tiny_model, name):
    """Every kind of layer, past its window and its chunk. Rings are written in place and states
    replaced: neither may reach the original, which is moved out last."""
    model, prompt = tiny_model(name), said(90)
    live, expected = Live(ALL), cold(model, prompt, 5)
    live.put(OURS, prompt[:70], held(model, prompt[:70]))
    for keep in (True, True, False):
        taken = live.take(OURS, prompt, keep=keep)
        assert taken.n_tokens == 70
        for token in prompt[70:-6]:
            model(mx.array([[token]]), cache=taken.caches)
        assert_same(expected, continue_from(model, taken.caches, prompt[-6:], 5))
    assert (live.stats.copied, live.stats.moved) == (2, 1)
    wrong = held(model, said(70, seed=5))
    assert_differs(expected, continue_from(model, wrong, prompt[70:], 5))


@pytest.mark.parametrize("name", [*LAYER_KINDS, "llama4"])
def test_a_fork_is_a_cold_run_or_a_miss(tiny_model, name):
    """Rows can be trimmed; rings that have turned and states cannot, and then nothing is lent."""
    model, prompt = tiny_model(name), [*said(50), *said(20, seed=8)]
    live, caches = Live(ALL), held(model, said(80))
    only_rows = kv.layout_of(caches).kinds == {kv.Kind.DELTA}
    live.put(OURS, said(80), caches)
    taken = live.take(OURS, prompt)
    assert (taken is not None) == only_rows
    if taken is not None:
        assert taken.n_tokens == 50
        run = continue_from(model, taken.caches, prompt[50:], 5)
        assert_same(cold(model, prompt, 5), run)
        again = live.take(OURS, [*said(80), 1, 2])
        run = continue_from(model, again.caches, [1, 2], 5)
        assert_same(cold(model, [*said(80), 1, 2], 5), run)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama4"])
def test_a_window_can_be_forked_before_it_slides(tiny_model, name):
    """The copy turns its ring; the original is lent again afterwards and is still right."""
    model, first = tiny_model(name), said(WINDOW - 4)
    prompt = [*first[:20], *said(40, seed=8)]
    live = Live(ALL)
    live.put(OURS, first, held(model, first))
    for _ in range(2):
        taken = live.take(OURS, prompt)
        assert taken.n_tokens == 20
        run = continue_from(model, taken.caches, prompt[20:], 5)
        assert_same(cold(model, prompt, 5), run)


def test_a_row_of_a_batch_goes_on(tiny_model):
    """As a finished request leaves it."""
    model, prompts = tiny_model("qwen3_next"), [said(40), said(65, seed=1)]
    batch = kv.merge([held(model, prompt) for prompt in prompts])
    live = Live(ALL)
    live.put(OURS, prompts[0], kv.extract(batch, 0))
    taken = live.take(OURS, [*prompts[0], 3, 4])
    run = continue_from(model, taken.caches, [3, 4], 5)
    assert_same(cold(model, [*prompts[0], 3, 4], 5), run)


# Memory.


def test_what_is_counted_is_what_is_held(live):
    """Room to grow, and the batch that a row was part of, are not held along."""
    start = mx.get_active_memory()
    live.put(OURS, said(1000), rows(1000, room=3000))
    assert live.stats.n_bytes == 1000 * ROW_BYTES
    assert mx.get_active_memory() - start == pytest.approx(live.stats.n_bytes, rel=0.05)


def test_a_little_room_to_grow_is_kept_and_nothing_copied(live):
    caches = rows(1000, room=24)
    n_held = 1024 * ROW_BYTES
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    live.put(OURS, said(1000), caches)
    assert mx.get_peak_memory() - before < n_held / 10
    assert live.stats.n_bytes == n_held
    assert live.take(OURS, said(1001)).caches[0].keys.shape[-2] == 1024


def test_a_state_does_not_hold_its_batch(tiny_model, live):
    model = tiny_model("mamba2")
    one = held(model, said(20))
    start = mx.get_active_memory()
    batch = kv.merge([one] * 16)
    settle(batch)
    live.put(OURS, said(20), kv.extract(batch, 3))
    del batch
    kept = mx.get_active_memory() - start
    slack = sum(16384 + array.nbytes for cache in one for array in cache.cache)
    assert kept <= live.stats.n_bytes + slack
    assert kept < 4 * live.stats.n_bytes


def test_the_least_recently_used_goes_first():
    live = Live(3 * 100 * ROW_BYTES)
    for seed in range(3):
        live.put(OURS, said(100, seed), rows(100))
    assert live.take(OURS, said(50, 0)).n_tokens == 49
    live.put(OURS, said(100, 3), rows(100))
    there = [live.n_served(OURS, said(100, seed)) > 0 for seed in range(4)]
    assert there == [True, False, True, True]
    assert live.stats.evicted == 1
    assert live.stats.n_bytes == live.max_bytes


def test_what_is_larger_than_all_room_is_not_kept_and_drives_nobody_out():
    live = Live(100 * ROW_BYTES)
    assert live.put(OURS, said(60), rows(60))
    assert not live.put(OURS, said(101, 1), rows(101))
    assert live.stats.entries == 1


def test_a_conversation_that_goes_on_takes_one_place(live):
    for n in (20, 40, 60):
        live.put(OURS, said(60)[:n], rows(n))
    assert live.stats.entries == 1
    live.put(OURS, said(60)[:30], rows(30))
    assert live.stats.n_bytes == 60 * ROW_BYTES
    live.put(OURS, said(60), rows(60))
    assert live.stats.n_bytes == 60 * ROW_BYTES


def test_earlier_states_are_kept_because_nothing_else_serves_them(tiny_model, live):
    model = tiny_model("mamba2")
    for n in (20, 40):
        live.put(OURS, said(40)[:n], held(model, said(40)[:n]))
    assert live.stats.entries == 2
    assert live.take(OURS, [*said(20), 1]).n_tokens == 20


def test_clearing_frees(live):
    """The process really has the memory again, and one model's is not another's."""
    start = mx.get_active_memory()
    for seed in range(4):
        live.put(OURS if seed else THEIRS, said(2000, seed), rows(2000))
    each = 2000 * ROW_BYTES
    assert mx.get_active_memory() - start >= 4 * each
    assert live.clear(OURS) == 3 * each
    assert mx.get_active_memory() - start == pytest.approx(each, rel=0.05)
    assert live.take(THEIRS, said(2001, 0)[:100]).n_tokens == 99
    assert live.clear() == each
    assert mx.get_active_memory() - start < 0.05 * each


def test_shedding_frees_as_much_as_asked_and_no_more(live):
    for seed in range(4):
        live.put(OURS, said(100, seed), rows(100))
    start, each = mx.get_active_memory(), 100 * ROW_BYTES
    assert live.release(each + 1) == 2 * each
    assert start - mx.get_active_memory() >= 2 * each
    assert live.stats.entries == 2
    assert live.release(0) == 0
    assert live.release(ALL) == 2 * each
    assert live.release(1) == 0


def test_a_conversation_is_dropped_with_all_its_models_and_nobody_else(live):
    live.put(OURS, said(30), rows(30), owner="a")
    live.put(THEIRS, said(30), rows(30), owner="a")
    live.put(OURS, said(30, 1), rows(30), owner="b")
    live.put(OURS, said(30, 2), rows(30))
    assert live.release_owned("a") == 60 * ROW_BYTES
    assert live.stats.entries == 2
    assert live.release_owned("nobody") == 0


def test_a_rewound_conversation_leaves_nothing_behind(live):
    """Its cache serves the turns that are left, and goes when the next turn is put."""
    live.put(OURS, said(50), rows(50), owner="a")
    live.put(OURS, said(50, 1), rows(50), owner="b")
    assert live.abandon("a") == 0
    assert live.take(OURS, [*said(30), 1]).n_tokens == 30
    live.put(OURS, [*said(30), *said(10, 2)], rows(40), owner="a")
    assert live.stats[:2] == (2, 90 * ROW_BYTES)
    assert live.n_served(OURS, [*said(50), 1]) == 30
    assert live.n_served(OURS, [*said(50, 1), 1]) == 50


def test_what_cannot_be_trimmed_goes_with_the_rewind(live, tiny_model):
    live.put(OURS, said(50), held(tiny_model("mamba"), said(50)), owner="a")
    n_bytes = live.stats.n_bytes
    assert live.abandon("b") == 0
    assert live.abandon("a") == n_bytes > 0
    assert live.stats[:2] == (0, 0)


def test_shedding_beside_putting_and_taking(live):
    """The watcher's thread against the engine's."""
    stop, failed = threading.Event(), []

    def shed():
        while not stop.wait(0.001):
            try:
                live.release(100 * ROW_BYTES)
            except Exception as error:
                failed.append(error)

    other = threading.Thread(target=shed)
    other.start()
    for seed in range(100):
        live.put(OURS, said(50, seed % 7), rows(50))
        taken = live.take(OURS, said(40, seed % 7))
        assert isinstance(taken, LiveHit | None)
    stop.set()
    other.join()
    assert failed == []
    assert live.stats.n_bytes == 50 * ROW_BYTES * live.stats.entries
