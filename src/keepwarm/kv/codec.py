"""A cache object as named tensors and scalars, and back.

Only this module reads and sets a cache's attributes. Tensors hold live tokens only, in their native
dtype; rotating rows are in token order. Nothing is dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import mlx.core as mx
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

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.kinds import Cache, Caches, kind_of
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantizedRows, QuantKVCache
from keepwarm.kv.rows import RowsKVCache, RowsQuantKVCache

Scalar: TypeAlias = int | bool
Tensors: TypeAlias = Mapping[str, mx.array]

SPARE_SHARE = 8  # an eighth of the rows, at most, may be spare in a cache that is kept
QUANT_PARTS = QuantizedRows._fields
LAYER_ARRAYS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


@dataclass(frozen=True)
class EncodedCache:
    """One layer's cache as tensors and scalars. An empty cache has no tensors."""

    cls: str
    tensors: Tensors = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    parts: tuple[EncodedCache, ...] = ()

    def arrays(self) -> list[mx.array]:
        """All tensors, including those of the parts, to be evaluated."""
        return [*self.tensors.values(), *(a for part in self.parts for a in part.arrays())]

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def encode(cache: Cache) -> EncodedCache:
    """Tensors and scalars from which `decode` makes an equal cache. Does not change the cache."""
    kind_of(cache)
    return CODECS[type(cache)].encode(cache)


def decode(encoded: EncodedCache) -> Cache:
    """A cache that continues exactly as the encoded one would have."""
    codec = _BY_NAME.get(encoded.cls)
    if codec is None:
        raise UnsupportedCache(f"{encoded.cls} is not a cache class known to Keepwarm.")
    return codec.decode(encoded)


def rows_in_order(cache: Cache) -> Tensors:
    """All rows of K and V that the cache still holds, oldest first.

    After a long slice that is more than the window of a rotating cache; blocks use all of them.
    """
    if isinstance(cache, RotatingKVCache) and cache.keys is not None:
        return {name: cache._temporal_order(getattr(cache, name)) for name in ("keys", "values")}
    return encode(cache).tensors


def evaluate(caches: Caches) -> Caches:
    """Evaluate every array, so that the caches may cross threads; returns the same caches."""
    mx.eval([cache.state for cache in caches])
    return caches


def copy_caches(caches: Caches) -> Caches:
    """Equal caches, without spare rows; the originals are not changed.

    Memory is shared until either is written, but array objects are not: mlx-lm writes into them.
    """
    return [decode(_share_memory(encode(cache))) for cache in caches]


def _share_memory(encoded: EncodedCache) -> EncodedCache:
    tensors = {name: array[...] for name, array in encoded.tensors.items()}
    return replace(encoded, tensors=tensors, parts=tuple(map(_share_memory, encoded.parts)))


def detached(caches: Caches) -> Caches:
    """Equal caches whose arrays are no views, of a batch for instance, and have little or no room
    to grow. What is like this already is not copied; the given caches must not be used any more.
    """
    return [_detached(cache) for cache in caches]


def held_bytes(caches: Caches) -> int:
    """Bytes of detached caches, with their spare rows."""
    return sum(_held_bytes(cache) for cache in caches)


def _held_bytes(cache: Cache) -> int:
    if not _has_little_room(cache):
        return encode(cache).n_bytes
    n_bytes: int = cache.keys.nbytes + cache.values.nbytes
    return n_bytes


def _has_little_room(cache: Cache) -> bool:
    """Spare rows cost less than copying the others, now and when the next turn grows it."""
    if type(cache) is not KVCache or cache.keys is None:
        return False
    n_rows: int = cache.keys.shape[-2]
    n_spare: int = n_rows - cache.offset
    return n_spare <= n_rows // SPARE_SHARE


def _detached(cache: Cache) -> Cache:
    if not _has_little_room(cache):
        return decode(_contiguous(encode(cache)))
    cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)
    mx.eval(cache.keys, cache.values)
    return cache


def _contiguous(encoded: EncodedCache) -> EncodedCache:
    tensors = {name: mx.contiguous(array) for name, array in encoded.tensors.items()}
    mx.eval(list(tensors.values()))  # layer by layer, so that there are never two whole caches
    return replace(encoded, tensors=tensors, parts=tuple(map(_contiguous, encoded.parts)))


def live_bytes(caches: Caches) -> int:
    """Bytes of live tokens; `nbytes` of mlx-lm also counts spare rows."""
    return sum(encode(cache).n_bytes for cache in caches)


def _rows(cache: Cache, end: int | None = None) -> dict[str, mx.array]:
    """K and V up to row `end`, by name; a quantised cache has six tensors."""
    if cache.keys is None or end == 0:
        return {}
    found: dict[str, mx.array] = {}
    for name, rows in (("keys", cache.keys), ("values", cache.values)):
        if isinstance(rows, mx.array):
            found[name] = rows[..., :end, :]
        else:
            found |= {
                f"{name}_{p}": x[..., :end, :] for p, x in zip(QUANT_PARTS, rows, strict=True)
            }
    return found


def _set_rows(cache: Cache, tensors: Tensors) -> Cache:
    """Set the attributes `keys` and `values`."""
    if "keys" in tensors:
        cache.keys, cache.values = tensors["keys"], tensors["values"]
    elif tensors:
        cache.keys, cache.values = (
            QuantizedRows(*(tensors[f"{name}_{p}"] for p in QUANT_PARTS))
            for name in ("keys", "values")
        )
    return cache


def _encode_kv(cache: KVCache | ConcatenateKVCache) -> EncodedCache:
    # After mlx-lm's trim there are more rows than `offset`; the offset is right.
    return EncodedCache(type(cache).__name__, _rows(cache, cache.offset), {"offset": cache.offset})


def _decode_kv(encoded: EncodedCache) -> KVCache | ConcatenateKVCache:
    empty = KVCache() if encoded.cls == "KVCache" else ConcatenateKVCache()
    cache = _set_rows(empty, encoded.tensors)
    cache.offset = encoded.scalars["offset"]
    return cache


def _encode_quantized(cache: QuantizedKVCache) -> EncodedCache:
    scalars = {"offset": cache.offset, "group_size": cache.group_size, "bits": cache.bits}
    return EncodedCache("QuantizedKVCache", _rows(cache, cache.offset), scalars)


def _decode_quantized(encoded: EncodedCache) -> QuantKVCache:
    scalars = encoded.scalars
    cache = QuantKVCache(group_size=scalars["group_size"], bits=scalars["bits"])
    cache.offset = scalars["offset"]
    _set_rows(cache, encoded.tensors)
    return cache


def _encode_rotating(cache: RotatingKVCache) -> EncodedCache:
    tensors = {}
    if cache.keys is not None:
        tensors = {n: _last_window(cache, rows) for n, rows in rows_in_order(cache).items()}
    scalars = {"offset": cache.offset, "keep": cache.keep, "max_size": cache.max_size}
    return EncodedCache("RotatingKVCache", tensors, scalars)


def _last_window(cache: RotatingKVCache, rows: mx.array) -> mx.array:
    """The rows that later tokens can attend to; a long prefill leaves more than the window."""
    surplus = rows.shape[2] - cache.max_size
    if surplus <= 0:
        return rows
    if cache.keep == 0:
        return rows[..., surplus:, :]
    kept, rest = rows[..., : cache.keep, :], rows[..., cache.keep + surplus :, :]
    return mx.concatenate([kept, rest], axis=2)


def _decode_rotating(encoded: EncodedCache) -> RotatingKVCache:
    scalars = encoded.scalars
    cache = RotatingKVCache(max_size=scalars["max_size"], keep=scalars["keep"])
    _set_rows(cache, encoded.tensors)
    cache.offset = scalars["offset"]
    cache._idx = 0 if cache.keys is None else cache.keys.shape[2]
    return cache


def _encode_chunked(cache: ChunkedKVCache) -> EncodedCache:
    n_rows = cache.offset - cache.start_position
    scalars = {
        "offset": cache.offset,
        "chunk_size": cache.chunk_size,
        "start_position": cache.start_position,
    }
    return EncodedCache("ChunkedKVCache", _rows(cache, n_rows), scalars)


def _decode_chunked(encoded: EncodedCache) -> ChunkedKVCache:
    scalars = encoded.scalars
    cache = _set_rows(ChunkedKVCache(scalars["chunk_size"]), encoded.tensors)
    cache.offset = scalars["offset"]
    cache.start_position = scalars["start_position"]
    return cache


def _encode_arrays(cache: ArraysCache) -> EncodedCache:
    require_finalized(cache)
    tensors = {f"state{i}": array for i, array in enumerate(cache.cache) if array is not None}
    if cache.left_padding is not None:
        tensors["left_padding"] = cache.left_padding
    return EncodedCache("ArraysCache", tensors, {"size": len(cache.cache)})


def _decode_arrays(encoded: EncodedCache) -> ArraysCache:
    cache = ArraysCache(encoded.scalars["size"])
    for i in range(encoded.scalars["size"]):
        cache[i] = encoded.tensors.get(f"state{i}")
    cache.left_padding = encoded.tensors.get("left_padding")
    return cache


def _encode_layer_cache(cache: LayerCache) -> EncodedCache:
    arrays = {f"state{i}": getattr(cache, name) for i, name in enumerate(LAYER_ARRAYS)}
    tensors = {name: array for name, array in arrays.items() if array is not None}
    scalars = {"offset": cache.offset, "window_size": cache.window_size}
    return EncodedCache("LayerCache", tensors, scalars)


def _decode_layer_cache(encoded: EncodedCache) -> LayerCache:
    cache = LayerCache(encoded.scalars["window_size"])
    cache.offset = encoded.scalars["offset"]
    for i, name in enumerate(LAYER_ARRAYS):
        setattr(cache, name, encoded.tensors.get(f"state{i}"))
    return cache


def _encode_list(cache: CacheList) -> EncodedCache:
    return EncodedCache("CacheList", parts=tuple(encode(part) for part in cache.caches))


def _decode_list(encoded: EncodedCache) -> CacheList:
    return CacheList(*(decode(part) for part in encoded.parts))


def _encode_batch(cache: BatchKVCache | BatchQuantizedKVCache) -> EncodedCache:
    require_finalized(cache)
    tensors = _rows(cache, cache._idx)
    scalars = {"idx": cache._idx}
    if isinstance(cache, BatchQuantizedKVCache):
        scalars |= {"group_size": cache.group_size, "bits": cache.bits}
    return EncodedCache(type(cache).__name__, tensors | _row_positions(cache), scalars)


def _decode_batch(encoded: EncodedCache) -> BatchKVCache:
    return _set_batch(BatchKVCache([0]), encoded)


def _decode_batch_quantized(encoded: EncodedCache) -> BatchQuantizedKVCache:
    scalars = encoded.scalars
    cache = BatchQuantizedKVCache([0], scalars["group_size"], scalars["bits"])
    _set_batch(cache, encoded)
    return cache


def _encode_batch_rotating(cache: BatchRotatingKVCache) -> EncodedCache:
    require_finalized(cache)
    scalars = {
        "max_size": cache.max_size,
        "idx": cache._idx,
        "n_fed": cache._offset,
        "rotated": cache.rotated,
    }
    # A rotated ring is full; otherwise the rows end at idx.
    rows = _rows(cache, None if cache.rotated else cache._idx)
    return EncodedCache("BatchRotatingKVCache", rows | _row_positions(cache), scalars)


def _decode_batch_rotating(encoded: EncodedCache) -> BatchRotatingKVCache:
    cache = _set_batch(BatchRotatingKVCache(encoded.scalars["max_size"], [0]), encoded)
    cache._offset = encoded.scalars["n_fed"]
    cache.rotated = bool(encoded.scalars["rotated"])
    return cache


def _encode_rows(cache: RowsKVCache) -> EncodedCache:
    tensors = _rows(cache) | {"offset": cache.offset, "ends": mx.array(cache.ends)}
    scalars: dict[str, Scalar] = {"max_size": cache.window or 0}
    if isinstance(cache, RowsQuantKVCache):
        scalars = {"group_size": cache.group_size, "bits": cache.bits}
    return EncodedCache(type(cache).__name__, tensors, scalars)


def _decode_rows(encoded: EncodedCache) -> RowsKVCache:
    tensors, scalars = dict(encoded.tensors), encoded.scalars
    ends: list[int] = tensors.pop("ends").tolist()  # type: ignore[assignment]
    cache = RowsKVCache(len(ends), scalars.get("max_size") or None)
    if encoded.cls == "RowsQuantKVCache":
        cache = RowsQuantKVCache(len(ends), scalars["group_size"], scalars["bits"])
    cache.ends, cache.offset = ends, tensors.pop("offset")
    _set_rows(cache, tensors)
    return cache


def _row_positions(cache: Cache) -> dict[str, mx.array]:
    return {"offset": cache.offset, "left_padding": cache.left_padding}


def _set_batch(cache: Cache, encoded: EncodedCache) -> Cache:
    tensors = dict(encoded.tensors)
    cache.offset, cache.left_padding = tensors.pop("offset"), tensors.pop("left_padding")
    cache._idx = encoded.scalars["idx"]
    return _set_rows(cache, tensors)


def require_finalized(cache: Cache) -> None:
    """Raise if a batch is between prepare and finalize, with right padding."""
    if any(getattr(cache, n, None) is not None for n in ("_right_padding", "_lengths", "lengths")):
        raise UnsupportedCache("A batch cannot be used between prepare and finalize; finalize it.")


class Codec(NamedTuple):
    encode: Callable[[Cache], EncodedCache]
    decode: Callable[[EncodedCache], Cache]


CODECS: dict[type, Codec] = {
    KVCache: Codec(_encode_kv, _decode_kv),
    ConcatenateKVCache: Codec(_encode_kv, _decode_kv),
    QuantizedKVCache: Codec(_encode_quantized, _decode_quantized),
    QuantKVCache: Codec(_encode_quantized, _decode_quantized),
    RotatingKVCache: Codec(_encode_rotating, _decode_rotating),
    ChunkedKVCache: Codec(_encode_chunked, _decode_chunked),
    ArraysCache: Codec(_encode_arrays, _decode_arrays),
    LayerCache: Codec(_encode_layer_cache, _decode_layer_cache),
    CacheList: Codec(_encode_list, _decode_list),
    BatchKVCache: Codec(_encode_batch, _decode_batch),
    BatchQuantizedKVCache: Codec(_encode_batch, _decode_batch_quantized),
    BatchRotatingKVCache: Codec(_encode_batch_rotating, _decode_batch_rotating),
    RowsKVCache: Codec(_encode_rows, _decode_rows),
    RowsQuantKVCache: Codec(_encode_rows, _decode_rows),
}
_BY_NAME = {cls.__name__: codec for cls, codec in CODECS.items()}
