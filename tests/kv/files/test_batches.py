"""Batches as files: their rows, side by side, and what export would not read again."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from keepwarm.errors import BadCacheFile, BadInput, UnsupportedCache
from keepwarm.kv.batch import (
    LeftPadding,
    RightPadding,
    batch_size,
    empty_batch,
    extract,
    merge,
    prepare,
)
from keepwarm.kv.codec import encode, live_bytes
from keepwarm.kv.files.dialects import MAX_HEADER_BYTES
from keepwarm.kv.files.prompt_cache import N_ROWS, export_prompt_cache, import_prompt_cache
from keepwarm.kv.kinds import is_empty, token_count
from keepwarm.kv.layout import probe
from keepwarm.kv.make import make_caches
from tests.kit.compare import assert_differs, assert_same
from tests.kit.runs import cold, prompt_of
from tests.kv.files.golden import assert_same_encoding
from tests.kv.test_batch_models import Rows, prefilled_rows

PROMPTS = [prompt_of(70, seed=1), prompt_of(20, seed=2), prompt_of(41, seed=3)]
N = 4


@pytest.fixture
def path(tmp_path):
    return tmp_path / "batch.safetensors"


def layout_of(model):
    return probe(model, make_prompt_cache(model))


@pytest.mark.parametrize("name", ["falcon_h1", "gemma3_text"])
def test_a_batch_outlives_the_process(name, tiny_model, path):
    """Padding is not written; rings, states and composites go on as if never saved."""
    model = tiny_model(name)
    rows = prefilled_rows(model, PROMPTS).step(2)
    export_prompt_cache(path, rows.batch, {"model": name})
    found = import_prompt_cache(path, layout_of(model))
    assert found.metadata == {"model": name}
    seen, rows.batch = [len(s) for s in rows.seen], found.caches
    rows.step(N)
    for row, prompt in enumerate(PROMPTS):
        assert_same(cold(model, prompt, seen[row] + N, step=16), rows.run(row))


def test_the_rows_keep_their_order(tiny_model, path):
    """The control: with two rows exchanged the answers differ."""
    model = tiny_model("llama")
    rows = prefilled_rows(model, PROMPTS)
    export_prompt_cache(path, rows.batch)
    assert path.stat().st_size < live_bytes(rows.batch)
    batch = import_prompt_cache(path).caches
    assert [token_count(extract(batch, i)) for i in range(3)] == [len(p) - 1 for p in PROMPTS]
    exchanged = merge([extract(batch, i) for i in (1, 0, 2)])
    last = [prompt[-1] for prompt in PROMPTS]
    reference = cold(model, PROMPTS[0], N, step=16)
    assert_same(reference, Rows(model, batch, last).step(N).run(0))
    assert_differs(reference, Rows(model, exchanged, last).step(N).run(0))


def test_quantised_rows_are_written_as_they_are(tiny_model, path):
    model = tiny_model("llama")
    rows = prefilled_rows(model, PROMPTS, lambda m: make_caches(m, kv_bits=8, kv_group_size=32))
    export_prompt_cache(path, rows.batch)
    batch = import_prompt_cache(path).caches
    for row in range(3):
        for a, b in zip(extract(rows.batch, row), extract(batch, row), strict=True):
            assert_same_encoding(encode(a), encode(b))


def test_mlx_lm_loads_the_rows(tiny_model, path):
    """Each layer is a CacheList of its rows."""
    model = tiny_model("llama")
    export_prompt_cache(path, prefilled_rows(model, PROMPTS).batch)
    layers = load_prompt_cache(str(path))
    offsets = [tuple(row.offset for row in layer.caches) for layer in layers]
    assert offsets == [tuple(len(p) - 1 for p in PROMPTS)] * len(layers)


def test_an_empty_batch_comes_back_empty(path):
    export_prompt_cache(path, empty_batch([KVCache(), ArraysCache(2)], 3))
    batch = import_prompt_cache(path).caches
    assert batch_size(batch) == 3
    assert all(is_empty(layer) for layer in batch)


def filled(n, n_rows=1, dtype=mx.float32):
    cache = KVCache()
    cache.update_and_fetch(*(mx.ones((n_rows, 1, n, 32), dtype) for _ in range(2)))
    return cache


@pytest.mark.parametrize("padding", [LeftPadding((1, 0)), RightPadding((2, 1))])
def test_announced_padding_is_not_lost_in_a_file(padding, path):
    batch = empty_batch([KVCache()], 2)
    prepare(batch, padding)
    with pytest.raises(UnsupportedCache, match=r"feed the left-padded slice|finalize it"):
        export_prompt_cache(path, batch)


@pytest.mark.parametrize("layers", [[KVCache(), BatchKVCache([0])], [BatchKVCache([0]), KVCache()]])
def test_single_sequences_among_batches_are_refused(layers, path):
    with pytest.raises(UnsupportedCache, match=r"Layer \d: KVCache is not a batch; merge rows"):
        export_prompt_cache(path, layers)


@pytest.mark.parametrize(
    ("caches", "n_rows", "reason"),
    [
        ([CacheList(filled(3), filled(2))], "3", "claims 3 rows, but its layers hold others"),
        ([CacheList(filled(3), filled(2)), filled(3)], "2", "its layers hold others"),
        ([CacheList(filled(3)), CacheList(filled(2))], "1", "its layers disagree"),
        (
            [CacheList(filled(3), filled(2, dtype=mx.float16))],
            "2",
            "its rows do not form a batch: Row 1",
        ),
    ],
)
def test_files_that_only_claim_to_be_batches(caches, n_rows, reason, path):
    save_prompt_cache(str(path), caches, {N_ROWS: n_rows})
    with pytest.raises(BadCacheFile, match=reason):
        import_prompt_cache(path)
    with pytest.raises(BadInput, match="'keepwarm_rows' marks an exported batch; use another"):
        export_prompt_cache(path, [filled(1)], {N_ROWS: "1"})


def six_bits():
    cache = QuantizedKVCache(32, 6)
    cache.keys = cache.values = mx.quantize(mx.ones((1, 1, 3, 32)), group_size=32, bits=6)
    cache.offset = 3
    return cache


@pytest.mark.parametrize(
    ("caches", "metadata", "reason"),
    [
        ([six_bits()], {}, "layer 0: 6 bits in groups of 32 are not supported"),
        ([filled(3), filled(3, n_rows=2)], {}, "layer 1: keys holds 2 sequences"),
        ([filled(3), filled(4)], {}, "its layers disagree"),
        ([filled(3, dtype=mx.int32)], {}, "layer 0: keys cannot be of dtype"),
        ([filled(3)], {"x": "y" * MAX_HEADER_BYTES}, "its header claims"),
    ],
)
def test_what_is_exported_can_be_imported(caches, metadata, reason, path):
    """The same check for both: a file that import would refuse is not written."""
    with pytest.raises(UnsupportedCache, match=f"Nothing was exported.*{path.name}.*{reason}"):
        export_prompt_cache(path, caches, metadata)
    assert not list(path.parent.iterdir())
