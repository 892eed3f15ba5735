"""A cache encoded as tensors and decoded continues exactly as the original would have."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.batch import LeftPadding, RightPadding, merge, prepare
from keepwarm.kv.codec import CODECS, EncodedCache, copy_caches, decode, encode, live_bytes
from keepwarm.kv.kinds import KINDS, is_empty, token_count
from keepwarm.kv.quant import QuantKVCache
from keepwarm.prefix.blocks import BLOCK_TOKENS
from tests.kit.compare import assert_same
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import continue_from, prefill, prompt_of

DTYPES = [mx.float32, mx.bfloat16]
HEADS, K_WIDTH, V_WIDTH = 2, 64, 32

SINGLES = {
    "kv": KVCache,
    "concatenate": ConcatenateKVCache,
    "quantised 8": lambda: QuantKVCache(group_size=32, bits=8),
    "quantised 4": lambda: QuantKVCache(group_size=32, bits=4),
    "mlx-lm's quantised": lambda: QuantizedKVCache(group_size=32, bits=4),
    "rotating": lambda: RotatingKVCache(8),
    "rotating keep": lambda: RotatingKVCache(8, keep=3),
    "chunked": lambda: ChunkedKVCache(8),
}
every_single = pytest.mark.parametrize("name", SINGLES)


def rows(n, dtype=mx.float32, n_rows=1, seed=0):
    """K and V of different widths, as MLA has them."""
    k, v = mx.random.split(mx.random.key(seed))
    return (
        mx.random.normal((n_rows, HEADS, n, K_WIDTH), key=k).astype(dtype),
        mx.random.normal((n_rows, HEADS, n, V_WIDTH), key=v).astype(dtype),
    )


def fed(cache, *slices, dtype=mx.float32, n_rows=1):
    for seed, n in enumerate(slices):
        feed(cache, n, dtype, n_rows, seed)
    return cache


def feed(cache, n, dtype=mx.float32, n_rows=1, seed=0):
    """One slice, as a model feeds it: mask first, and llama4's trim before that."""
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    return cache.update_and_fetch(*rows(n, dtype, n_rows, seed))


def flat(keys_and_values):
    for part in keys_and_values:
        yield from [part] if isinstance(part, mx.array) else part


def assert_goes_on_alike(original, again, dtype=mx.float32):
    """Decode a while and prefill a while: what attention is given stays bit-equal."""
    for seed, n in enumerate([1, 1, 1, 5, 1, 20, 1, 1], start=100):
        a, b = (list(flat(feed(cache, n, dtype, 1, seed))) for cache in (original, again))
        if isinstance(original, RotatingKVCache) and n == 1:
            a, b = sorted_rows(a), sorted_rows(b)
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype
            assert mx.array_equal(x, y)
        assert original.offset == again.offset


def sorted_rows(keys_and_values):
    """K and V in one new order: a single token attends to its whole ring, wherever that begins."""
    rows = keys_and_values[0][0, 0].tolist()
    order = mx.array(sorted(range(len(rows)), key=rows.__getitem__))
    return [array[:, :, order] for array in keys_and_values]


def test_every_known_class_has_a_codec():
    assert CODECS.keys() == KINDS.keys()


@every_single
@pytest.mark.parametrize("slices", [(), (5,), (3, 1, 1), (20,), (7, 1, 1, 1, 1, 1), (300, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_cache_goes_on_after_a_round_trip(name, slices, dtype):
    """Empty, growing, rotated, after a long slice."""
    original = fed(SINGLES[name](), *slices, dtype=dtype)
    again = decode(encode(original))
    expected = QuantKVCache if isinstance(original, QuantizedKVCache) else type(original)
    assert type(again) is expected
    assert is_empty(again) == (not slices)
    assert again.offset == sum(slices)
    assert token_count([again]) == (sum(slices) or None)
    if name in ("kv", "quantised 4", "quantised 8"):
        assert again.size() == sum(slices)
    for setting in ("keep", "max_size", "chunk_size", "group_size", "bits"):
        assert getattr(again, setting, None) == getattr(original, setting, None)
    assert_goes_on_alike(original, again, dtype)


@every_single
def test_a_round_trip_after_a_trim_has_no_forgotten_row(name):
    """Rows of trimmed tokens stay in mlx-lm's buffer and must not be saved."""
    original = fed(SINGLES[name](), 5, 1)
    original.trim(4)
    encoded = encode(original)
    assert {array.shape[2] for array in encoded.arrays()} == {2}
    again = decode(encoded)
    assert again.offset == 2
    if name != "concatenate":  # its own trim is undone by the next token, which the codec mends
        assert_goes_on_alike(original, again)
    else:
        feed(again, 1)
        assert again.offset == again.keys.shape[2] == 3


def test_trimmed_to_nothing_is_empty():
    cache = fed(KVCache(), 5)
    cache.trim(5)
    encoded = encode(cache)
    assert (dict(encoded.tensors), encoded.scalars["offset"]) == ({}, 0)
    assert_goes_on_alike(cache, decode(encoded))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 10, BLOCK_TOKENS, BLOCK_TOKENS + 1])
def test_only_live_tokens_are_counted(n, dtype):
    """Bytes are tokens times bytes a token, whatever the buffer's growth."""
    plain = [fed(KVCache(), n, dtype=dtype), fed(ConcatenateKVCache(), n, dtype=dtype)]
    a_token = HEADS * (K_WIDTH + V_WIDTH) * dtype.size
    assert KVCache.step == BLOCK_TOKENS
    assert live_bytes(plain) == 2 * n * a_token
    assert encode(plain[0]).n_bytes == n * a_token
    window = fed(RotatingKVCache(8), n, dtype=dtype)
    assert encode(window).n_bytes == min(n, 8) * a_token
    quantised = fed(QuantKVCache(group_size=32, bits=4), n, dtype=dtype)
    groups = (K_WIDTH + V_WIDTH) // 32
    assert encode(quantised).n_bytes == n * HEADS * groups * (32 // 2 + 2 * dtype.size)


def test_a_copy_holds_live_rows_only_and_leaves_the_original_alone():
    """10 tokens do not cost the memory of 256."""
    originals = [fed(KVCache(), 10), fed(RotatingKVCache(8), 9, 1)]
    before = copy.deepcopy(originals)
    copies = copy_caches(originals)
    assert [c.nbytes for c in copies] == [live_bytes([c]) for c in originals]
    for c in copies:
        feed(c, 3, seed=9)
    for a, b in zip(originals, before, strict=True):
        assert_goes_on_alike(a, b)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_quantised_triples_are_never_dequantised(bits, group):
    """Uint32 weights, scales and biases, bit for bit."""
    cache = QuantKVCache(group_size=group, bits=bits)
    k, _ = rows(7)
    cache.update_and_fetch(k, k)
    tensors = encode(cache).tensors
    expected = mx.quantize(k, group_size=group, bits=bits)
    for name in ("keys", "values"):
        got = [tensors[f"{name}_{part}"] for part in ("weights", "scales", "biases")]
        assert got[0].dtype == mx.uint32
        assert all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    again = encode(decode(encode(cache))).tensors
    assert all(mx.array_equal(again[name], tensors[name]) for name in tensors)


def test_a_ring_is_saved_in_the_order_of_time():
    cache = RotatingKVCache(8)
    for i in range(12):
        cache.update_and_fetch(mx.full((1, 1, 1, 1), i), mx.full((1, 1, 1, 1), -i))
    assert cache.keys[0, 0, :, 0].tolist() == [8, 9, 10, 11, 4, 5, 6, 7]
    tensors = encode(cache).tensors
    assert tensors["keys"][0, 0, :, 0].tolist() == [*range(4, 12)]
    assert tensors["values"][0, 0, :, 0].tolist() == [-i for i in range(4, 12)]


def test_states_round_trip():
    """Arrays of any shape and dtype, missing ones too."""
    cache = ArraysCache(3)
    cache[0], cache[2] = mx.random.normal((1, 3, 5)).astype(mx.bfloat16), mx.arange(4)[None]
    again = decode(encode(cache))
    assert again[1] is None
    assert all(mx.array_equal(again[i], cache[i]) for i in (0, 2))
    assert again[0].dtype == mx.bfloat16
    fresh = decode(encode(ArraysCache(3)))
    assert (fresh.cache, fresh.left_padding, fresh.lengths) == ([None] * 3, None, None)


def test_composites_round_trip_with_composites_inside():
    state = ArraysCache(1)
    state[0] = mx.ones((1, 2))
    original = CacheList(fed(KVCache(), 4), CacheList(state, fed(RotatingKVCache(8), 9, 1)))
    again = decode(encode(original))
    assert type(again) is CacheList
    assert type(again[1]) is CacheList
    assert encode(again).n_bytes == encode(original).n_bytes == live_bytes([original])
    assert mx.array_equal(again[1][0][0], state[0])
    assert_goes_on_alike(original[0], again[0])
    assert_goes_on_alike(original[1][1], again[1][1])


@pytest.mark.parametrize("name", CACHE_KINDS)
def test_every_model_goes_on_from_a_copy_of_its_cache(name, tiny_model):
    """All classes as models use them, decoded a little."""
    model, prompt = tiny_model(name), prompt_of(60)
    live = prefill(model, make_prompt_cache(model), prompt[:45], step=16)
    prefill(model, live, prompt[45:50], step=1)
    copies = copy_caches(live)
    assert [type(c) for c in copies] == [type(c) for c in live]
    run = continue_from(model, copies, prompt[50:], 4)
    assert_same(continue_from(model, live, prompt[50:], 4), run)


# Batches that were fed are saved and go on in test_batch_properties.py.
BATCHED = [KVCache, lambda: RotatingKVCache(8), lambda: QuantKVCache(group_size=32, bits=4)]


@pytest.mark.parametrize("fresh", BATCHED)
def test_left_padding_that_was_announced_survives(fresh):
    batch = merge([[fresh()], [fresh()]])
    prepare(batch, LeftPadding((0, 3)))
    (again,) = copy_caches(batch)
    assert again.left_padding.tolist() == [0, 3]
    assert again.offset.tolist() == [0, -3]


def test_a_batch_of_states_keeps_its_padding():
    (batch,) = merge([[ArraysCache(2)], [ArraysCache(2)]])
    prepare([batch], LeftPadding((0, 3)))
    again = decode(encode(batch))
    assert again.batch_size == 2
    assert again.make_mask(4).tolist() == [[True] * 4, [False, False, False, True]]


@pytest.mark.parametrize("fresh", [*BATCHED, lambda: ArraysCache(1)])
def test_a_batch_between_prepare_and_finalize_is_refused(fresh):
    batch = merge([[fresh()], [fresh()]])
    prepare(batch, RightPadding((2, 1)))
    with pytest.raises(UnsupportedCache, match="between prepare and finalize"):
        encode(batch[0])


class Derived(KVCache):
    """Stands for a new class, whose attributes the codec does not know."""


def test_unknown_classes_are_refused_by_name():
    """A subclass of a known class too, alone and inside a composite."""
    for cache in (Derived(), CacheList(KVCache(), Derived())):
        with pytest.raises(UnsupportedCache, match=r"test_codec\.Derived is not a cache class kno"):
            encode(cache)
    with pytest.raises(UnsupportedCache, match="MambaCache is not a cache class known"):
        decode(EncodedCache("MambaCache"))
    with pytest.raises(UnsupportedCache, match="NoneType"):
        encode(None)


def test_encoding_changes_nothing():
    """Encoding a batch with a rotated ring does not change the ring."""
    (batch,) = merge([[fed(RotatingKVCache(8), 9)], [fed(RotatingKVCache(8), 2)]])
    feed(batch, 1, n_rows=2)
    state = batch.state
    encode(batch)
    assert all(a is b for a, b in zip(state, batch.state, strict=True))
