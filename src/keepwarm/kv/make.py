"""Empty caches for a model, with the KV options applied to the layers that allow them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from keepwarm.errors import BadInput
from keepwarm.kv.kinds import Cache, Caches
from keepwarm.kv.quant import QuantKVCache
from keepwarm.records.at_rest import AT_REST

BITS = (2, 4, 8)  # mlx-lm sizes its buffers wrongly for 3, 5 and 6 bits and wide heads
GROUP_SIZES = (32, 64, 128)
KV_SIZES = range(1, 1 << 31)  # MLX counts in 32 bits


def make_caches(
    model: Any,
    *,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    at_rest: str = "exact",
) -> Caches:
    """One empty cache per layer, of the class the model asks for.

    `max_kv_size` bounds, and `kv_bits` quantises, the layers that keep every token; window and
    state layers are bounded already and do not change. Unlike in mlx-lm, `max_kv_size` keeps no
    first tokens, so that a request gets the same answer alone and in a batch. `at_rest` says how
    rows are stored, and changes no cache.
    """
    if at_rest not in AT_REST:
        raise BadInput(f"at_rest is {at_rest!r}; it must be one of {', '.join(AT_REST)}.")
    if at_rest != "exact" and kv_bits is not None:
        raise BadInput("at_rest and kv_bits cannot be combined; what is quantised stays so.")
    if max_kv_size is not None and kv_bits is not None:
        raise BadInput("max_kv_size and kv_bits cannot be combined; choose one.")
    if max_kv_size is not None and max_kv_size not in KV_SIZES:
        raise BadInput(
            f"max_kv_size is {max_kv_size}; it must be from {KV_SIZES[0]} to {KV_SIZES[-1]}."
        )
    if kv_bits is not None and kv_bits not in BITS:
        raise BadInput(f"kv_bits is {kv_bits}; it must be one of {', '.join(map(str, BITS))}.")
    if kv_bits is not None and kv_group_size not in GROUP_SIZES:
        raise BadInput(
            f"kv_group_size is {kv_group_size}; "
            f"it must be one of {', '.join(map(str, GROUP_SIZES))}."
        )
    caches: Caches = make_prompt_cache(model)
    if max_kv_size is not None:
        replacement = partial(RotatingKVCache, max_size=max_kv_size, keep=0)
    elif kv_bits is not None:
        replacement = partial(QuantKVCache, group_size=kv_group_size, bits=kv_bits)
    else:
        return caches
    return [_replace(cache, replacement) for cache in caches]


def _replace(cache: Cache, make: Callable[[], Cache]) -> Cache:
    """A new cache for a layer that keeps every token; other caches as they are."""
    if isinstance(cache, CacheList):
        return CacheList(*(_replace(part, make) for part in cache.caches))
    return make() if type(cache) is KVCache else cache
