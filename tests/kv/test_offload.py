"""Blocks that leave the device through slabs are those that `cut_blocks` makes."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from keepwarm import kv
from keepwarm.cache.restore.records import records_of
from keepwarm.kv.slabs import SlabArray
from keepwarm.kv.slices import Block, cut_blocks, offload_blocks
from keepwarm.prefix.blocks import Namespace, chain
from keepwarm.records.record import encode_record
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import prefill, prompt_of

NAMESPACE = Namespace(bytes(32))
N_TOKENS = 700


def files_of(tokens: list[int], blocks: list[Block]) -> list[bytes]:
    """The record files of these blocks."""
    refs = {ref.number: ref for ref in chain(NAMESPACE, tokens)}
    records = [r for block in blocks for r in records_of(NAMESPACE, refs[block.index], block)]
    return [b"".join(map(bytes, encode_record(record))) for record in records]


@pytest.mark.parametrize("architecture", CACHE_KINDS)
def test_the_same_records(architecture, tiny_model, pool):
    model, tokens = tiny_model(architecture), prompt_of(N_TOKENS)
    caches = prefill(model, kv.make_caches(model), tokens, 64)
    cut = list(cut_blocks(caches, N_TOKENS))
    offloaded = list(offload_blocks(pool, caches, N_TOKENS, range(3), with_state=True))
    assert all(isinstance(rows, SlabArray) for block in offloaded for rows in block.delta.values())
    assert files_of(tokens, offloaded) == files_of(tokens, cut)
    (middle,) = offload_blocks(pool, caches, N_TOKENS, range(1, 2), with_state=False)
    assert files_of(tokens, [middle]) == files_of(tokens, [cut[1]])


def test_the_same_records_of_quantized_caches(tiny_model, pool):
    """Their tensors have several dtypes."""
    model, tokens = tiny_model("llama"), prompt_of(N_TOKENS)
    caches = prefill(model, kv.make_caches(model, kv_bits=4, kv_group_size=32), tokens, 128)
    cut = list(cut_blocks(caches, N_TOKENS))
    offloaded = list(offload_blocks(pool, caches, N_TOKENS, range(3), with_state=False))
    assert files_of(tokens, offloaded) == files_of(tokens, cut)


def test_what_the_cache_does_next_does_not_change_them(tiny_model, pool):
    """The bytes are read only after the cache was trimmed, overwritten and extended."""
    model, tokens = tiny_model("llama"), prompt_of(N_TOKENS)
    caches = prefill(model, kv.make_caches(model), tokens, 128)
    wanted = files_of(tokens, list(cut_blocks(caches, N_TOKENS)))
    offloaded = list(offload_blocks(pool, caches, N_TOKENS, range(3), with_state=False))
    for cache in caches:
        cache.trim(N_TOKENS)
    prefill(model, caches, prompt_of(N_TOKENS, seed=1), 128)
    others = [
        list(offload_blocks(pool, caches, N_TOKENS, range(3), with_state=False)) for _ in range(3)
    ]
    assert files_of(tokens, offloaded) == wanted
    assert files_of(tokens, others[0]) != wanted


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_another_thread_reads_their_bytes(dtype, pool):
    """The copy has begun when they are handed over; an array that is still lazy belongs to the
    thread that made it. bfloat16 comes in 16-bit words: numpy has none."""
    rows = mx.random.normal((1, 2, 256, 8)).astype(dtype)
    caches = [kv.create_cache_from_state(rows, rows)]
    (block,) = offload_blocks(pool, caches, 256, range(1), with_state=False)
    held = next(iter(block.delta.values()))
    with ThreadPoolExecutor(1) as writer:
        words = writer.submit(lambda: held.words).result()
    assert np.array_equal(words, np.asarray(rows.view(mx.uint16) if dtype == mx.bfloat16 else rows))
