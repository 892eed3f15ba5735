"""What the golden prompt-cache files hold, and how to tell whether a file holds it."""

from pathlib import Path

import mlx.core as mx

from keepwarm.kv.codec import encode
from keepwarm.kv.files.prompt_cache import import_prompt_cache

GOLDEN = Path(__file__).parents[2] / "data" / "prompt-cache"
METADATA = {"model": "tiny", "note": "made by save_prompt_cache"}


def pattern(tokens, heads=2, width=4, dtype=mx.float16):
    """K of these tokens as make_golden.py feeds them; V is its negative."""
    t = mx.array(list(tokens))[:, None]
    return mx.stack([64 * t + 8 * h + mx.arange(width)[None] for h in range(heads)])[None].astype(
        dtype
    )


def state(*shape):
    return mx.arange(1, 1 + shape[1] * shape[2]).reshape(shape).astype(mx.float32)


def kv(tokens, **shape):
    keys = pattern(tokens, **shape)
    return {"keys": keys, "values": -keys}


def quantized(tokens, group_size=32, bits=4):
    keys = pattern(tokens, heads=1, width=32)
    names = ("weights", "scales", "biases")
    return {
        f"{name}_{part}": array
        for name, rows in (("keys", keys), ("values", -keys))
        for part, array in zip(names, mx.quantize(rows, group_size, bits), strict=True)
    }


STATES = {"state0": state(1, 3, 2), "state1": state(1, 2, 4)}
KV_5 = ("KVCache", kv(range(5)), {"offset": 5})
WINDOW_5 = ("RotatingKVCache", kv(range(5)), {"offset": 5, "keep": 0, "max_size": 8})
TWO_STATES = ("ArraysCache", STATES, {"size": 2})
SLID = (
    "ChunkedKVCache",
    kv(range(252, 259), heads=1),
    {"offset": 259, "chunk_size": 4, "start_position": 252},
)

# What every golden file of this name holds, whichever version wrote it: class, tensors, scalars.
HOLDS = {
    "kv": [KV_5, KV_5],
    "kv-bfloat16": [("KVCache", kv(range(5), dtype=mx.bfloat16), {"offset": 5})],
    "kv-trimmed": [KV_5],
    "kv-empty": [("KVCache", {}, {"offset": 0})] * 2,
    "rotating": [WINDOW_5, WINDOW_5],
    "rotating-padded": [WINDOW_5],
    "rotating-turned": [
        ("RotatingKVCache", kv(range(3, 11)), {"offset": 11, "keep": 0, "max_size": 8})
    ],
    "rotating-kept": [
        (
            "RotatingKVCache",
            kv([0, 1, *range(5, 11)]),
            {"offset": 11, "keep": 2, "max_size": 8},
        )
    ],
    "rotating-long": [
        ("RotatingKVCache", kv(range(3, 11)), {"offset": 11, "keep": 0, "max_size": 8})
    ],
    "quantized": [
        ("QuantizedKVCache", quantized(range(5)), {"offset": 5, "group_size": 32, "bits": 4})
    ],
    "chunked": [
        ("ChunkedKVCache", kv(range(5)), {"offset": 5, "chunk_size": 256, "start_position": 0})
    ],
    "chunked-slid": [SLID],
    "chunked-slid-with-kv": [SLID, ("KVCache", kv(range(259), heads=1), {"offset": 259})],
    "arrays": [TWO_STATES],
    "mamba": [TWO_STATES],
    "list": [[TWO_STATES, WINDOW_5]],
}


def assert_holds(encoded, expected):
    if isinstance(expected, list):
        assert encoded.cls == "CacheList"
        for part, wanted in zip(encoded.parts, expected, strict=True):
            assert_holds(part, wanted)
        return
    cls, tensors, scalars = expected
    assert (encoded.cls, dict(encoded.scalars)) == (cls, scalars)
    assert set(encoded.tensors) == set(tensors)
    for name, array in tensors.items():
        got = encoded.tensors[name]
        assert (got.shape, got.dtype) == (array.shape, array.dtype), name
        assert mx.array_equal(got, array), name


def assert_file_holds(path, expected):
    found = import_prompt_cache(path)
    for cache, wanted in zip(found.caches, expected, strict=True):
        assert_holds(encode(cache), wanted)
    return found


def assert_same_encoding(a, b):
    assert (a.cls, a.scalars, set(a.tensors)) == (b.cls, b.scalars, set(b.tensors))
    assert all(mx.array_equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    for part, other in zip(a.parts, b.parts, strict=True):
        assert_same_encoding(part, other)
