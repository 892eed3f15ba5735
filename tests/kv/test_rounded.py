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


def caches_of(dtype: mx.Dtype) -> list[KVCache]:
    caches = [KVCache(), KVCache()]
    for seed, cache in enumerate(caches):
        keys = mx.random.normal((1, 2, N_TOKENS, 128), key=mx.random.key(seed)).astype(dtype)
        cache.update_and_fetch(keys, -keys)
    return caches


def records_in(caches, codec):
    refs = list(chain(NAMESPACE, range(N_TOKENS)))
    for ref, block in zip(refs, cut_blocks(caches, N_TOKENS), strict=True):
        own = None if ref.number in EXACT_BLOCKS else codec
        yield from (at_rest(record) for record in records_of(NAMESPACE, ref, block, codec=own))


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_a_layer_without_rows_has_none_to_round(codec):
    """Some architectures leave attention out of a layer."""
    filled, empty = [*caches_of(mx.float32)[:1], KVCache()]
    assembly = kv.Assembly(kv.layout_of([filled, empty]), N_TOKENS, at_rest=codec)
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
    for way in ((None, None), (None, codec), (pool, codec)):
        assembly = kv.Assembly(layout, n_restored, *way)
        for record in records:
            assembly.add(block_of(record))
        made.append(assembly.finish())
    tolerance = 1e-5 if dtype == mx.float32 else 0.04  # MLX rounds in between
    for wanted, by_threads, *by_device in zip(caches, *made, strict=True):
        for found in by_device:
            for side in ("keys", "values"):
                ours, theirs = getattr(by_threads, side), getattr(found, side)
                assert ours.shape == theirs.shape
                assert mx.abs(ours - theirs).max() < tolerance
                exact = getattr(wanted, side)[..., 512 : min(768, n_restored), :]
                assert mx.array_equal(theirs[..., 512 : 512 + exact.shape[2], :], exact)
                assert not theirs[..., n_restored:, :].any()
