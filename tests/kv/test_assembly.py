"""Rows may be there before the memory for them is."""

import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from keepwarm import kv
from keepwarm.cache.records import block_of, records_of
from keepwarm.errors import CacheError
from keepwarm.kv import assembly
from keepwarm.prefix.blocks import Namespace, chain
from tests.kit.runs import prefill, prompt_of

NAMESPACE = Namespace(bytes(32))


@pytest.fixture
def caches(tiny_model):
    model = tiny_model("llama")
    return prefill(model, kv.make_caches(model), prompt_of(300), 64)


@pytest.fixture
def blocks(caches):
    refs = chain(NAMESPACE, prompt_of(300))
    pairs = zip(refs, kv.cut(caches, 300), strict=True)
    return [block_of(record) for pair in pairs for record in records_of(NAMESPACE, *pair)]


def test_who_adds_a_block_waits_for_its_memory(caches, blocks):
    late = kv.Assembly(kv.layout_of(caches), 300, later=True)
    with ThreadPoolExecutor(2) as pool:
        added = [pool.submit(late.add, block) for block in blocks]
        time.sleep(0.05)
        assert not any(future.done() for future in added)
        late.allocate()
        for future in added:
            future.result(timeout=30)
    for ours, theirs in zip(late.finish(), caches, strict=True):
        pairs = zip(kv.encode(ours).arrays(), kv.encode(theirs).arrays(), strict=True)
        assert all(mx.array_equal(a, b) for a, b in pairs)


def test_who_waits_for_memory_that_never_comes_is_told(caches, blocks, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(assembly, "row_buffers", full)
    never = kv.Assembly(kv.layout_of(caches), 300, later=True)
    with ThreadPoolExecutor(1) as pool:
        added = pool.submit(never.add, blocks[0])
        with pytest.raises(MemoryError):
            never.allocate()
        with pytest.raises(CacheError, match="no memory for the rows of layer 0"):
            added.result(timeout=30)
