"""The kind of cache a layer has, from its class and attributes.

delta      one row of K and V per token; a row depends on its prefix alone, so any slice is valid
window     the same, but only the last rows are held, and only they are needed to continue
state      all tokens so far folded into arrays; valid only at the token where it was taken
composite  several caches in one layer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, TypeAlias

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
)
from mlx_lm.models.deepseek_v41 import LayerCache

from keepwarm.errors import CacheMismatch, UnsupportedCache
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache
from keepwarm.kv.rows import RowsKVCache, RowsQuantKVCache

Cache: TypeAlias = Any  # one layer's cache, of a class of mlx-lm or of `kv.quant`
Caches: TypeAlias = list[Any]  # one cache per layer


class Kind(Enum):
    DELTA = "delta"
    WINDOW = "window"
    STATE = "state"
    COMPOSITE = "composite"


KINDS: dict[type, Kind] = {
    KVCache: Kind.DELTA,
    QuantizedKVCache: Kind.DELTA,
    QuantKVCache: Kind.DELTA,
    ConcatenateKVCache: Kind.DELTA,
    BatchKVCache: Kind.DELTA,
    BatchQuantizedKVCache: Kind.DELTA,
    RowsKVCache: Kind.DELTA,
    RowsQuantKVCache: Kind.DELTA,
    RotatingKVCache: Kind.WINDOW,
    BatchRotatingKVCache: Kind.WINDOW,
    ChunkedKVCache: Kind.WINDOW,
    ArraysCache: Kind.STATE,
    LayerCache: Kind.STATE,
    CacheList: Kind.COMPOSITE,
}

BATCHED = (BatchKVCache, BatchQuantizedKVCache, BatchRotatingKVCache, RowsKVCache)


def kind_of(cache: Cache) -> Kind:
    """The kind of one layer's cache; raises for an unknown class."""
    kind = KINDS.get(type(cache))
    if kind is None:
        name = f"{type(cache).__module__}.{type(cache).__qualname__}"
        raise UnsupportedCache(
            f"{name} is not a cache class known to Keepwarm; this model cannot be cached."
        )
    if isinstance(cache, RowsKVCache) and cache.window:
        return Kind.WINDOW
    # With keep > 0 the rows a token attends to depend on how the prompt was sliced.
    return Kind.STATE if isinstance(cache, RotatingKVCache) and cache.keep else kind


def leaves(caches: Sequence[Cache], prefix: str = "") -> Iterator[tuple[str, Cache]]:
    """Every cache that holds arrays, with its path: "7", or "7.1" inside a composite."""
    for index, cache in enumerate(caches):
        path = f"{prefix}{index}"
        if kind_of(cache) is Kind.COMPOSITE:
            yield from leaves(cache.caches, prefix=f"{path}.")
        else:
            yield path, cache


def is_empty(cache: Cache) -> bool:
    """Whether nothing has been fed to this layer yet."""
    if kind_of(cache) is Kind.COMPOSITE:
        return all(is_empty(part) for part in cache.caches)
    if isinstance(cache, ArraysCache):
        return all(array is None for array in cache.cache)
    if isinstance(cache, LayerCache):
        return bool(cache.empty())
    return cache.keys is None


def is_batched(cache: Cache) -> bool:
    """Whether it holds rows of several sequences, or padding."""
    if kind_of(cache) is Kind.COMPOSITE:
        return any(is_batched(part) for part in cache.caches)
    if isinstance(cache, ArraysCache):
        padded = cache.left_padding is not None or cache.lengths is not None
        return padded or cache.batch_size > 1
    return isinstance(cache, BATCHED)


def token_count(caches: Sequence[Cache]) -> int | None:
    """Tokens that single-sequence caches represent; None if no layer knows.

    From the offsets, because mlx-lm's `size()` returns 0 for half of its classes.
    """
    count: int | None = None
    for path, cache in leaves(caches):
        if is_batched(cache):
            raise UnsupportedCache(f"Layer {path} is a batch; extract a row first.")
        if isinstance(cache, ArraysCache) or is_empty(cache):
            continue
        if count is not None and cache.offset != count:
            raise CacheMismatch(f"Layer {path}", "the token count", count, cache.offset)
        count = int(cache.offset)
    return count
