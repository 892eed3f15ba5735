"""Rows that were rounded at rest are the same, whoever makes them whole."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from keepwarm import kv
from keepwarm.cache.restore.records import block_of, records_of
from keepwarm.kv.slices import cut_blocks
from keepwarm.prefix.blocks import Namespace, chain
from keepwarm.records.at_rest import at_rest

NAMESPACE = Namespace(bytes(32))
N_TOKENS = 1100
EXACT_BLOCKS = (2, 4)  # the last one is open


def caches_of(dtype: mx.Dtype, n_tokens: int = N_TOKENS) -> list[KVCache]:
    caches = [KVCache(), KVCache()]
    for seed, cache in enumerate(caches):
        keys = mx.random.normal((1, 2, n_tokens, 128), key=mx.random.key(seed)).astype(dtype)
        cache.update_and_fetch(keys, -keys)
    return caches


def records_in(caches, codec):
    n_tokens = caches[0].offset
    refs = list(chain(NAMESPACE, range(n_tokens)))
    for ref, block in zip(refs, cut_blocks(caches, n_tokens), strict=True):
        own = None if ref.number in EXACT_BLOCKS else codec
        yield from (at_rest(record) for record in records_of(NAMESPACE, ref, block, codec=own))


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_a_layer_without_rows_has_none_to_round(codec, pool):
    """Some architectures leave attention out of a layer."""
    filled, empty = [*caches_of(mx.float32)[:1], KVCache()]
    assembly = kv.Assembly(kv.layout_of([filled, empty]), N_TOKENS, pool)
    for record in records_in([filled, empty], codec):
        assembly.add(block_of(record))
    restored, nothing = assembly.finish()
    assert restored.offset == N_TOKENS
    assert nothing.empty()


@pytest.mark.parametrize("n_restored", [N_TOKENS, 1024, 1000, 700, 100])
@pytest.mark.parametrize("codec", ["q8", "q4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_device_makes_the_rows_that_threads_make(dtype, codec, n_restored, pool):
    caches = caches_of(dtype)
    records = list(records_in(caches, codec))[: -(-n_restored // 256)]
    layout, made = kv.layout_of(caches), []
    for slabs in (None, pool):
        assembly = kv.Assembly(layout, n_restored, slabs)
        for record in records:
            assembly.add(block_of(record))
        made.append(assembly.finish())
    tolerance = 1e-5 if dtype == mx.float32 else 0.04  # MLX rounds in between
    for wanted, by_threads, by_device in zip(caches, *made, strict=True):
        for side in ("keys", "values"):
            ours, theirs = getattr(by_threads, side), getattr(by_device, side)
            assert ours.shape == theirs.shape
            assert mx.abs(ours - theirs).max() < tolerance
            exact = getattr(wanted, side)[..., 512 : min(768, n_restored), :]
            assert mx.array_equal(theirs[..., 512 : 512 + exact.shape[2], :], exact)
            assert not theirs[..., n_restored:, :].any()


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_the_device_holds_no_more_than_for_exact_rows(codec, pool):
    """Parts are there for the piece that is made whole, so no lease of memory need count them."""
    n_tokens, held = 32 * 256, []
    caches = caches_of(mx.bfloat16, n_tokens)
    n_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    for own in (None, codec):
        records = list(records_in(caches, own))
        for _ in range(2):  # at first slabs are made
            mx.clear_cache()
            before = mx.get_active_memory()
            assembly = kv.Assembly(kv.layout_of(caches), n_tokens, pool)
            assembly._staging._piece_records = 1
            for record in records:
                assembly.add(block_of(record))
                assembly.advance(is_complete=False)
            mx.synchronize()
            n_held = mx.get_active_memory() - before
            assembly.finish()
            del assembly
        held.append(n_held)
    exact, rounded = held
    assert rounded - exact < 0.15 * n_bytes  # parts of all rows would be 0.28 or 0.53 of them
