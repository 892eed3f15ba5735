"""Make the golden prompt-cache files with the mlx-lm that runs this script.

    python make_golden.py [directory]      (default: beside this script)

K of token t, head h, column d is 64 t + 8 h + d, V its negative, rounded to float16 (or to bfloat16
where the name says so); states count up from 1. Only mlx-lm's own functions touch the caches.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import cache as m

HEADS, WIDTH = 2, 4
METADATA = {"model": "tiny", "note": "made by save_prompt_cache"}


def rows(start, n_tokens, heads=HEADS, width=WIDTH, dtype=mx.float16):
    t = mx.arange(start, start + n_tokens)[:, None]
    keys = mx.stack([64 * t + 8 * h + mx.arange(width)[None] for h in range(heads)])[None]
    return keys.astype(dtype), (-keys).astype(dtype)


def fed(cache, *lengths, **shape):
    """Feed slices of these lengths, as prefill and decode do."""
    start = 0
    for n_tokens in lengths:
        if hasattr(cache, "maybe_trim_front"):
            cache.maybe_trim_front()
        cache.update_and_fetch(*rows(start, n_tokens, **shape))
        start += n_tokens
    return cache


def states(cache, *shapes):
    for i, shape in enumerate(shapes):
        cache[i] = mx.arange(1, 1 + shape[1] * shape[2]).reshape(shape).astype(mx.float32)
    return cache


def trimmed(cache, n_tokens):
    cache.trim(n_tokens)
    return cache


def decoded(n_tokens):
    return (1,) * n_tokens


def files():
    """What is saved under which name; a later version must read every one as the test says."""
    two_states = ((1, 3, 2), (1, 2, 4))
    yield "kv", lambda: [fed(m.KVCache(), 5), fed(m.KVCache(), 4, 1)]
    yield "kv-bfloat16", lambda: [fed(m.KVCache(), 5, dtype=mx.bfloat16)]
    yield "kv-trimmed", lambda: [trimmed(fed(m.KVCache(), 7), 2)]
    yield "kv-empty", lambda: [m.KVCache(), m.KVCache()]
    yield "rotating", lambda: [fed(m.RotatingKVCache(8), 5), fed(m.RotatingKVCache(8), 2, 3)]
    yield "rotating-padded", lambda: [fed(m.RotatingKVCache(8), 4, 1)]
    yield "rotating-turned", lambda: [fed(m.RotatingKVCache(8), 5, *decoded(6))]
    yield "rotating-kept", lambda: [fed(m.RotatingKVCache(8, keep=2), 5, *decoded(6))]
    yield "rotating-long", lambda: [fed(m.RotatingKVCache(8), 11)]
    yield "quantized", lambda: [fed(m.QuantizedKVCache(32, 4), 5, heads=1, width=32)]
    yield "chunked", lambda: [fed(m.ChunkedKVCache(256), 5)]
    yield "chunked-slid", lambda: [fed(m.ChunkedKVCache(4), 256, 3, heads=1)]
    yield (
        "chunked-slid-with-kv",
        lambda: [fed(m.ChunkedKVCache(4), 256, 3, heads=1), fed(m.KVCache(), 259, heads=1)],
    )
    yield "arrays", lambda: [states(m.ArraysCache(2), *two_states)]
    if hasattr(m, "MambaCache"):
        yield "mamba", lambda: [states(m.MambaCache(), *two_states)]
    yield (
        "list",
        lambda: [m.CacheList(states(m.ArraysCache(2), *two_states), fed(m.RotatingKVCache(8), 5))],
    )
    yield "batch", lambda: [m.BatchKVCache.merge([fed(m.KVCache(), 5), fed(m.KVCache(), 3)])]


def main():
    here = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    release = version("mlx-lm")
    for name, make in files():
        path = here / f"{release}-{name}.safetensors"
        try:
            m.save_prompt_cache(str(path), make(), METADATA)
        except (AttributeError, ValueError) as error:
            print(f"{path.name}: this version cannot save it: {error!r}")  # noqa: T201
            path.unlink(missing_ok=True)
            continue
        print(f"{path.name}: {path.stat().st_size} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
