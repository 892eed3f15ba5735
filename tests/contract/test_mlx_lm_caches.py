"""mlx-lm's single caches and functions as Keepwarm relies on them."""

import inspect

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    dynamic_roll,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_lm.utils import MODEL_REMAPPING, dequantize_model, load_model, load_tokenizer

from tests.contract.rows import filled, held, positions, rows
from tests.kit.checkpoints import write_checkpoint

STATES = {
    KVCache: ("keys", "values", "offset"),
    RotatingKVCache: ("keys", "values", "offset", "keep", "max_size", "_idx"),
    QuantizedKVCache: ("keys", "values", "offset", "group_size", "bits"),
    ChunkedKVCache: ("keys", "values", "offset", "chunk_size", "start_position"),
    ConcatenateKVCache: ("keys", "values"),
    BatchKVCache: ("keys", "values", "offset", "left_padding", "_idx"),
    BatchRotatingKVCache: (
        *("keys", "values", "offset", "left_padding"),
        *("max_size", "_offset", "_idx", "rotated"),
    ),
    ArraysCache: ("cache", "left_padding", "lengths"),
}
ARGUMENTS = {
    KVCache: (),
    RotatingKVCache: ("max_size", "keep"),
    QuantizedKVCache: ("group_size", "bits"),
    ChunkedKVCache: ("chunk_size",),
    ConcatenateKVCache: (),
    BatchKVCache: ("left_padding",),
    BatchRotatingKVCache: ("max_size", "left_padding"),
    ArraysCache: ("size", "left_padding"),
    CacheList: ("caches",),
}
VALUES = {"max_size": 8, "left_padding": [0], "chunk_size": 8, "size": 2}


def build(cls):
    return cls(**{name: VALUES[name] for name in ARGUMENTS[cls] if name in VALUES})


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_constructor_arguments(cls):
    assert tuple(inspect.signature(cls).parameters) == ARGUMENTS[cls]


@pytest.mark.parametrize("cls", STATES)
def test_state_is_these_attributes_in_this_order(cls):
    """One tuple of arrays and scalars, no `meta_state`; the codec goes by the attributes."""
    cache = build(cls)
    if cls is not ArraysCache:
        filled(cache, 5)
    assert len(cache.state) == len(STATES[cls])
    assert all(a is getattr(cache, n) for a, n in zip(cache.state, STATES[cls], strict=True))
    assert not hasattr(cache, "meta_state")
    copy = cls.from_state(cache.state)
    assert all(getattr(copy, n) is getattr(cache, n) for n in STATES[cls])


@pytest.mark.parametrize(
    "cache", [KVCache(), ConcatenateKVCache(), ChunkedKVCache(64), RotatingKVCache(64)]
)
def test_update_returns_all_rows_and_moves_the_offset(cache):
    """What a model calls on every layer."""
    k, v = rows(10)
    cache.update_and_fetch(k[..., :6, :], v[..., :6, :])
    keys, values = cache.update_and_fetch(k[..., 6:, :], v[..., 6:, :])
    assert mx.array_equal(keys, k)
    assert mx.array_equal(values, v)
    assert cache.offset == 10


def test_kv_buffers_grow_by_256_and_hold_more_rows_than_tokens():
    """So only the first `offset` rows may be kept."""
    cache = filled(KVCache(), 10)
    assert cache.keys.shape == (1, 2, 256, 64)
    assert filled(cache, 250).keys.shape[2] == 10 + 256
    assert cache.nbytes == 2 * (10 + 256) * 2 * 64 * 4


def test_trim_moves_the_offset_and_leaves_the_rows():
    """Trimmed tokens stay in the buffer: what is saved must be cut to the offset."""
    cache = filled(KVCache(), 10)
    assert (cache.trim(4), cache.offset) == (4, 6)
    assert mx.any(cache.keys[..., 6:10, :] != 0)


def test_rotating_cache_is_a_ring_when_decoding_and_longer_after_a_prefill():
    """Hence temporal order before anything is kept."""
    cache = RotatingKVCache(max_size=8)
    k, v = positions(12)
    for i in range(12):
        cache.update_and_fetch(k[..., i : i + 1, :], v[..., i : i + 1, :])
    assert held(cache.keys) == [8, 9, 10, 11, 4, 5, 6, 7]
    assert (cache.offset, cache._idx, cache.is_trimmable()) == (12, 4, False)
    long = RotatingKVCache(max_size=8)
    long.update_and_fetch(*positions(20))
    assert (held(long.keys), long._idx, long.size()) == (list(range(20)), 20, 8)


def test_rotating_cache_keeps_the_first_tokens_with_keep():
    cache = RotatingKVCache(max_size=8, keep=2)
    k, v = positions(12)
    for i in range(12):
        cache.update_and_fetch(k[..., i : i + 1, :], v[..., i : i + 1, :])
    assert held(cache.keys)[:2] == [0, 1]


def test_rotating_cache_can_be_trimmed_only_before_it_is_full():
    assert filled(RotatingKVCache(max_size=8), 7).is_trimmable()
    assert not filled(RotatingKVCache(max_size=8), 8).is_trimmable()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_quantised_cache_holds_triples_of_mx_quantize(bits, group):
    """(weights, scales, biases), the same whether a row came early or late."""
    k, v = rows(10)
    cache = QuantizedKVCache(group_size=group, bits=bits)
    cache.update_and_fetch(k[..., :6, :], v[..., :6, :])
    keys, _ = cache.update_and_fetch(k[..., 6:, :], v[..., 6:, :])
    for got, expected in zip(keys, mx.quantize(k, group_size=group, bits=bits), strict=True):
        assert mx.array_equal(got, expected)
    converted = filled(KVCache(), 10).to_quantized(group_size=group, bits=bits)
    assert isinstance(converted, QuantizedKVCache)
    assert converted.offset == 10


def test_chunked_cache_drops_old_rows_before_a_forward():
    """`start_position` is the position of its first row."""
    cache = ChunkedKVCache(chunk_size=8)
    cache.update_and_fetch(*positions(20))
    cache.maybe_trim_front()
    assert (cache.offset, cache.start_position) == (20, 12)
    assert held(cache.keys) == list(range(12, 20))


def test_arrays_cache_is_a_list_without_an_offset():
    """The token count of a state must be known elsewhere."""
    cache = ArraysCache(size=2)
    assert cache.cache == [None, None]
    assert cache.empty()
    assert not cache.is_trimmable()
    cache[0] = mx.zeros((1, 3))
    assert cache[0] is cache.cache[0]
    assert not hasattr(cache, "offset")


def test_cache_list_joins_its_parts():
    """Trimmable only if all are; its state names the classes."""
    cache = CacheList(filled(KVCache(), 5), ArraysCache(size=2))
    assert [name for _, name in cache.state] == ["KVCache", "ArraysCache"]
    assert isinstance(cache.caches, tuple)
    assert (cache[0].offset, cache.size(), cache.is_trimmable()) == (5, 5, False)


def test_layer_cache_is_five_arrays_and_an_offset():
    """No way in through its own methods, so the codec sets the attributes."""
    assert not any(hasattr(LayerCache, name) for name in ("from_state", "merge", "trim"))
    assert LayerCache.state.fset is None
    arrays = {"window", "compress_kv", "index_k", "pending_kv", "pending_gate"}
    assert set(vars(LayerCache(8))) == arrays | {"window_size", "offset"}


def test_a_turned_batch_ring_is_put_in_the_order_of_time_in_place():
    """`kv.batch.prepare` calls it before a slice."""
    ring = BatchRotatingKVCache(4, [0])
    for position in range(6):
        row = mx.full((1, 1, 1, 1), position, mx.float32)
        ring.update_and_fetch(row, row)
    assert (ring.keys.flatten().tolist(), ring.rotated) == ([4, 5, 2, 3], True)
    ring._temporal_order()
    assert (ring.keys.flatten().tolist(), ring.rotated) == ([2, 3, 4, 5], False)


@pytest.mark.parametrize("name", ["__len__", "__bool__"])
def test_caches_have_no_length_and_no_truth(name):
    """A cache must never be truth-tested; it is true even when empty."""
    assert not any(hasattr(cls, name) for cls in ARGUMENTS)


# --- Functions -------------------------------------------------------------------------------


def test_make_prompt_cache_ignores_max_kv_size_where_the_model_makes_its_own(tiny_model):
    """Only a model without `make_cache` gets a window, and that one has keep = 4."""
    own = make_prompt_cache(tiny_model("llama"), max_kv_size=32)
    assert {type(c) for c in own} == {KVCache}
    bounded = make_prompt_cache(tiny_model("qwen3"), max_kv_size=32)
    assert {(type(c), c.max_size, c.keep) for c in bounded} == {(RotatingKVCache, 32, 4)}
    assert {type(c) for c in make_prompt_cache(tiny_model("qwen3"))} == {KVCache}


def test_masks_of_single_caches_are_none_a_word_or_an_array():
    """An array only where a window cuts, or on request."""
    options = {"return_array": False, "window_size": None}
    cache = filled(KVCache(), 5)
    assert cache.make_mask(1, **options) is None
    assert cache.make_mask(3, **options) == "causal"
    assert cache.make_mask(3, return_array=True, window_size=None).shape == (3, 8)
    window = filled(RotatingKVCache(8), 20)
    assert window.make_mask(1) is None
    assert window.make_mask(3).shape == (3, 7 + 3)
    assert ArraysCache(2).make_mask(3) is None


def test_dynamic_roll_rolls_every_row_by_its_own_shift():
    x = mx.arange(8).reshape(2, 4)
    assert dynamic_roll(x, mx.array([1, 2]), axis=1).tolist() == [[3, 0, 1, 2], [6, 7, 4, 5]]
    assert dynamic_roll(x, mx.array([-1, 0]), axis=1).tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]


def test_a_model_loads_from_a_directory_and_can_be_quantised_back_and_forth(tmp_path):
    """`dequantize_model` replaces the layers in place; the file's config is passed on."""
    directory = write_checkpoint(tmp_path / "tiny")
    model, config = load_model(directory, lazy=True)
    assert isinstance(model, llama.Model)
    paths = [path for path, _ in tree_flatten(model.parameters())]
    same = llama.Model(llama.ModelArgs.from_dict(config))
    assert paths == [path for path, _ in tree_flatten(same.parameters())]
    nn.quantize(model, group_size=32, bits=8)
    assert paths != [path for path, _ in tree_flatten(model.parameters())]
    dequantize_model(model)
    assert paths == [path for path, _ in tree_flatten(model.parameters())]


def test_a_model_is_built_of_classes_that_are_given(tmp_path):
    """Which sees the weights by the names of the file; a type may have its module's name or not."""
    seen = []

    class Model(llama.Model):
        def sanitize(self, weights):
            seen.extend(weights)
            return super().sanitize(weights)

    directory = write_checkpoint(tmp_path / "tiny")
    classes = {"get_model_classes": lambda config: (Model, llama.ModelArgs)}
    model, config = load_model(directory, lazy=True, model_config={"added": 5}, **classes)
    assert (type(model), config["added"]) == (Model, 5)
    assert "model.embed_tokens.weight" in seen
    assert MODEL_REMAPPING["qwen2_5_vl"] == "qwen2_vl"


def test_given_end_tokens_are_added_to_the_tokenizers_own(tmp_path):
    directory = write_checkpoint(tmp_path / "tiny")
    tokenizer = load_tokenizer(directory, {"trust_remote_code": False}, eos_token_ids=5)
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id, 5}
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
