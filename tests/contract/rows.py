"""Small K and V to fill caches with."""

from typing import Any

import mlx.core as mx


def rows(
    n: int, *, batch: int = 1, heads: int = 2, width: int = 64, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    """K and V of n tokens, laid out (batch, heads, tokens, width)."""
    keys = mx.random.split(mx.random.key(n), 2)
    k, v = (mx.random.normal((batch, heads, n, width), dtype, key=key) for key in keys)
    return k, v


def positions(n: int, start: int = 0, batch: int = 1) -> tuple[mx.array, mx.array]:
    """Rows that carry their own position, to see where a cache puts them."""
    line = mx.arange(start, start + n, dtype=mx.float32)
    k = mx.broadcast_to(line[None, None, :, None], (batch, 1, n, 1))
    return k, k


def held(keys: mx.array, row: int = 0) -> list[int]:
    """The positions that a cache filled with `positions` holds, in its own order."""
    return keys[row, 0, :, 0].astype(mx.int32).tolist()  # type: ignore[return-value]


def filled(cache: Any, n: int, **how: Any) -> Any:
    """The same cache after n tokens."""
    cache.update_and_fetch(*rows(n, **how))
    return cache
