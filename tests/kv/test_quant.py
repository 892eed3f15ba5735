"""Quantised caches: alone as mlx-lm's, and in a batch as if each were alone.

The models here have quantised weights. A fast BLAS gives other last bits for several rows than for
one, and where K or V lies between two steps of its quantisation such a bit becomes a visible step
(3e-3 was seen). Quantised products do not go through the BLAS, and each row is summed by itself.
"""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.assembly import reconstruct_cache
from keepwarm.kv.batch import RightPadding, empty_batch, extract, filter_rows, merge, prepare
from keepwarm.kv.codec import copy_caches, encode
from keepwarm.kv.kinds import token_count
from keepwarm.kv.layout import probe
from keepwarm.kv.make import make_caches
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache, quantize_caches
from keepwarm.kv.slices import cut_blocks
from tests.kit.compare import assert_differs, assert_same
from tests.kit.models import tiny
from tests.kit.runs import Job, batched, cold, continue_from, prefill, prompt_of
from tests.kv.test_batch_models import Rows, held_by, prefilled_rows

N = 5
PROMPTS = [prompt_of(70, seed=1), prompt_of(20, seed=2), prompt_of(41, seed=3)]
LATE = prompt_of(50, seed=4)
every_setting = pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])


def with_quantised_weights(name):
    model = tiny(name)
    nn.quantize(model, group_size=32, bits=8)
    mx.eval(model)
    return model


@pytest.fixture(scope="module")
def model():
    return with_quantised_weights("llama")


def quantised(bits, group):
    return lambda model: make_caches(model, kv_bits=bits, kv_group_size=group)


def alone(model, fresh, prompt, n=N):
    """The quantised cold run, in mlx-lm's own class."""
    caches = [QuantizedKVCache(c.group_size, c.bits) for c in fresh(model)]
    return continue_from(model, caches, prompt, n, step=16)


def rows_of(n, n_rows=1, seed=0):
    k = mx.random.normal((n_rows, 2, n, 64), key=mx.random.key(seed))
    return k, -k


@every_setting
def test_alone_it_is_mlx_lms_cache_bit_for_bit(bits, group, model):
    """And quantising has an effect at all."""
    fresh = quantised(bits, group)
    reference = alone(model, fresh, PROMPTS[0])
    caches = fresh(model)
    assert {type(c) for c in caches} == {QuantKVCache}
    run = continue_from(model, caches, PROMPTS[0], N, step=16)
    assert_same(reference, run, bitwise=True)
    for ours, theirs in zip(caches, reference.cache, strict=True):
        assert (ours.bits, ours.group_size) == (bits, group)
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert all(mx.array_equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(AssertionError, match="Δlogprob"):
        assert_same(cold(model, PROMPTS[0], N, step=16), run)


@every_setting
def test_rows_of_a_quantised_batch_are_as_if_alone(bits, group, model):
    """Merged, joined, left, extracted and saved, against mlx-lm's single runs."""
    fresh = quantised(bits, group)
    rows = prefilled_rows(model, PROMPTS, fresh).step(2)
    rows.join([held_by(model, LATE, fresh)], LATE[-1:])
    rows.step(1)
    rows.keep([3, 0, 2])
    rows.batch = copy_caches(rows.batch)
    rows.step(N)
    assert {type(c) for c in rows.batch} == {BatchQuantizedKVCache}
    for row, prompt in enumerate([LATE, PROMPTS[0], PROMPTS[2]]):
        run = rows.run(row)
        assert_same(alone(model, fresh, prompt, len(run.tokens)), run)
    single = extract(rows.batch, 1)
    rest = [rows.next[1], *LATE[:5]]
    held = [*PROMPTS[0], *(token for token, _ in rows.seen[1][:-1])]
    assert {c.offset for c in single} == {len(held)}
    assert_same(alone(model, fresh, [*held, *rest]), continue_from(model, single, rest, N))


@every_setting
def test_a_generator_takes_quantised_rows(bits, group, model):
    """Prompts padded together, a row with history, one that leaves, one that joins late."""
    fresh = quantised(bits, group)
    history = held_by(model, PROMPTS[2], fresh)
    jobs = [
        Job(PROMPTS[0], 2 * N, cache=fresh(model)),
        Job(PROMPTS[1], 2, cache=fresh(model)),
        Job(PROMPTS[2][-1:], N, PROMPTS[2][:-1], history),
        Job(LATE, N, cache=fresh(model), joins_at=3),
    ]
    runs = batched(model, jobs, step=16)
    for run, job, prompt in zip(runs, jobs, [*PROMPTS, LATE], strict=True):
        assert_same(alone(model, fresh, prompt, job.n), run)
        assert {type(c) for c in run.cache} == {QuantKVCache}
        assert {c.offset for c in run.cache} == {len(prompt) + job.n}
    assert {c.offset for c in history} == {len(PROMPTS[2]) - 1}
    wrong = Job(PROMPTS[2][-1:], N, PROMPTS[2][:-1], held_by(model, LATE, fresh))
    assert_differs(alone(model, fresh, PROMPTS[2]), *batched(model, [wrong]))


@every_setting
def test_quantised_blocks_rebuild_a_cache_for_a_batch(bits, group, model):
    """Triples are cut and joined as they are."""
    fresh = quantised(bits, group)
    prompt = prompt_of(300, seed=6)
    live = prefill(model, fresh(model), prompt[:-1], step=100)
    restored = reconstruct_cache(probe(model, fresh(model)), list(cut_blocks(live)))
    batch = merge([restored, held_by(model, LATE, fresh)])
    run = Rows(model, batch, [prompt[-1], LATE[-1]]).step(N).run(0)
    reference = continue_from(model, live, prompt[-1:], N)
    assert_same(reference, run)


def row_arrays(caches):
    return [array for cache in caches for array in encode(cache).arrays()]


def test_a_batch_is_quantised_row_by_row(model):
    """As if its rows had been quantised alone, and it goes on so; the original is not changed."""
    singles = [held_by(model, prompt) for prompt in PROMPTS]
    batch = merge(singles)
    made = quantize_caches(batch, 8, 32)
    expected = merge([quantize_caches(row, 8, 32) for row in singles])
    assert {type(c) for c in made} == {BatchQuantizedKVCache}
    for row in range(len(PROMPTS)):
        pairs = zip(*(row_arrays(extract(rows, row)) for rows in (made, expected)), strict=True)
        assert all(mx.array_equal(a, b) for a, b in pairs)
    runs = [Rows(model, rows, [p[-1] for p in PROMPTS]).step(N) for rows in (made, expected)]
    for row, prompt in enumerate(PROMPTS):
        assert_same(runs[1].run(row), runs[0].run(row), bitwise=True)
        assert token_count(extract(batch, row)) == len(prompt) - 1


def test_an_empty_batch_is_quantised_too():
    (made,) = quantize_caches(empty_batch([KVCache()], 2), 8, 32)
    made.update_and_fetch(*rows_of(3, n_rows=2))
    assert made.offset.tolist() == [3, 3]
    padded = empty_batch([KVCache()], 2)
    prepare(padded, RightPadding((2, 1)))
    with pytest.raises(UnsupportedCache, match="cannot be quantised before finalize"):
        quantize_caches(padded, 8, 32)


def test_only_layers_that_keep_every_token_are_quantised():
    """Parts of a composite too; what is left stays the object it is."""
    window, state, done = RotatingKVCache(8), ArraysCache(1), QuantKVCache(32, 4)
    full = KVCache()
    full.update_and_fetch(*rows_of(3))
    made = quantize_caches([CacheList(full, window, CacheList(state, KVCache())), done], 8, 32)
    (first, kept_window, inner), last = made[0].caches, made[1]
    assert (kept_window, inner[0], last) == (window, state, done)
    assert [type(c) for c in (first, inner[1])] == [QuantKVCache] * 2
    assert [(c.offset, c.bits, c.group_size) for c in (first, inner[1])] == [(3, 8, 32), (0, 8, 32)]
    expected = mx.quantize(rows_of(3)[0], group_size=32, bits=8)
    assert all(
        mx.array_equal(a, b) for a, b in zip(first.keys_and_values()[0], expected, strict=True)
    )


def test_rows_that_leave_take_common_padding_with_them():
    """Else a batch would only ever grow."""
    rows = [QuantKVCache(32, 8) for _ in range(3)]
    for row, n in zip(rows, (2, 9, 5), strict=True):
        row.update_and_fetch(*rows_of(n, seed=n))
    batch = merge([[row] for row in rows])
    filter_rows(batch, [2, 0])
    (cache,) = batch
    assert (cache.size(), cache.keys.n_rows, cache.values.n_rows) == (5, 5, 5)
    assert (cache.left_padding.tolist(), cache.offset.tolist()) == ([0, 3], [5, 2])
    for row, n in enumerate((5, 2)):
        expected = mx.quantize(rows_of(n, seed=n)[0], group_size=32, bits=8)
        (single,) = extract(batch, row)
        assert all(mx.array_equal(a, b) for a, b in zip(single.keys, expected, strict=True))


def test_sizes_are_true():
    """mlx-lm answers 0 tokens when full and fails to count bytes when empty."""
    cache = QuantKVCache(group_size=64, bits=4)
    assert (cache.size(), cache.nbytes, cache.empty()) == (0, 0, True)
    cache.update_and_fetch(*rows_of(10))
    assert (cache.size(), cache.empty()) == (10, False)
    a_row = 2 * (64 // 8 * 4 + 2 * 4)  # heads x (eight 4-bit weights a word, scale and bias)
    assert cache.nbytes == 2 * 256 * a_row
    batch = BatchQuantizedKVCache.merge([cache, QuantKVCache(64, 4)])
    assert (batch.size(), batch.nbytes) == (10, 2 * 2 * 10 * a_row)
    batch.update_and_fetch(*rows_of(1, n_rows=2))
    assert batch.extract(0).nbytes == 2 * 11 * a_row  # live rows only, no room of the batch
    batch.trim(1)
    assert (batch.trim(3), batch.size(), batch.offset.tolist()) == (3, 7, [7, -3])
    assert batch.is_trimmable()


def test_an_empty_batch_says_that_it_is_empty():
    (batch,) = empty_batch([QuantKVCache()], 2)
    assert (batch.empty(), batch.size(), batch.nbytes) == (True, 0, 0)
    with pytest.raises(UnsupportedCache, match="An empty batch has no keys"):
        batch.keys_and_values()


def test_a_batch_grows_by_whole_steps_and_keeps_every_row():
    """Over the end of its buffer, by single tokens and by slices."""
    (batch,) = empty_batch([QuantKVCache(64, 8)], 2)
    fed = [rows_of(n, n_rows=2, seed=i)[0] for i, n in enumerate([255, 1, 1, 300, 1])]
    n_rows = []
    for k in fed:
        keys, _ = batch.update_and_fetch(k, -k)
        n_rows.append(batch.keys.n_rows // batch.step)
    assert n_rows[:3] == [1, 1, 2], "a buffer that is just full has not grown"
    expected = mx.quantize(mx.concatenate(fed, axis=2), group_size=64, bits=8)
    assert all(mx.array_equal(a, b) for a, b in zip(keys, expected, strict=True))
    assert batch.keys.n_rows < 558 + 2 * batch.step
