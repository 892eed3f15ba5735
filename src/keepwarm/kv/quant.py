"""Quantised caches that can join a batch, which mlx-lm's QuantizedKVCache cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
)

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.buffers import dynamic_roll


class QuantizedRows(NamedTuple):
    """K or V of some tokens as `mx.quantize` returns them."""

    weights: mx.array
    scales: mx.array
    biases: mx.array

    def map(self, change: Callable[[mx.array], mx.array]) -> QuantizedRows:
        return QuantizedRows(*(change(array) for array in self))

    @property
    def n_rows(self) -> int:
        return self.weights.shape[2]


def quantize_rows(x: mx.array, group_size: int, bits: int) -> QuantizedRows:
    return QuantizedRows(*mx.quantize(x, group_size=group_size, bits=bits))


class QuantKVCache(QuantizedKVCache):
    """mlx-lm's quantised cache with a correct size and `merge`."""

    def size(self) -> int:
        return int(self.offset)

    @classmethod
    def merge(cls, caches: Sequence[QuantizedKVCache]) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.merge(caches)

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(super().nbytes)


def quantize_caches(caches: list[Any], bits: int, group_size: int) -> list[Any]:
    """The same sequence or batch with the layers that keep every token quantised.

    Windows, states and what is quantised already stay the objects they are.
    """
    return [_quantize_cache(cache, bits, group_size) for cache in caches]


def _quantize_cache(cache: Any, bits: int, group_size: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*quantize_caches(list(cache.caches), bits, group_size))
    if type(cache) is BatchKVCache:
        return BatchQuantizedKVCache.of(cache, group_size, bits)
    if type(cache) is not KVCache:
        return cache
    made = QuantKVCache(group_size, bits)
    if cache.keys is not None:
        made.update_and_fetch(*cache.keys_and_values())
    return made


class BatchQuantizedKVCache(BatchKVCache):
    """Quantised rows of several sequences, left-padded to one length.

    It is mlx-lm's BatchKVCache with triples of arrays in place of K and V.
    """

    keys: QuantizedRows | None
    values: QuantizedRows | None
    offset: mx.array
    left_padding: mx.array
    _idx: int
    _right_padding: mx.array | None

    def __init__(self, left_padding: list[int], group_size: int = 64, bits: int = 8) -> None:
        super().__init__(left_padding)
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[QuantizedRows, QuantizedRows]:
        start, n_new = self._idx, keys.shape[2]
        k = quantize_rows(keys, self.group_size, self.bits)
        v = quantize_rows(values, self.group_size, self.bits)
        self.keys = self._with_room(self.keys, k, start)
        self.values = self._with_room(self.values, v, start)
        self._idx += n_new
        self.offset = self.offset + n_new
        for buffer, rows in ((self.keys, k), (self.values, v)):
            for target, new in zip(buffer, rows, strict=True):
                target[..., start : self._idx, :] = new
        return self.keys_and_values()

    def _with_room(
        self, buffer: QuantizedRows | None, rows: QuantizedRows, n: int
    ) -> QuantizedRows:
        """The buffer, grown by whole steps if `rows` do not fit after the first `n`."""
        if buffer is not None and n + rows.n_rows <= buffer.n_rows:
            return buffer
        room = -(-rows.n_rows // self.step) * self.step

        def zeros(x: mx.array) -> mx.array:
            return mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype)

        if buffer is None:
            return rows.map(zeros)
        return buffer.map(lambda x: mx.concatenate([x[..., :n, :], zeros(x)], axis=2))

    def keys_and_values(self) -> tuple[QuantizedRows, QuantizedRows]:
        if self.keys is None or self.values is None:
            raise UnsupportedCache("An empty batch has no keys and values; feed it first.")
        end = self._idx
        return self.keys.map(lambda x: x[..., :end, :]), self.values.map(lambda x: x[..., :end, :])

    def finalize(self) -> None:
        if self._right_padding is None:
            return
        padding = self._right_padding
        self._change(lambda x: dynamic_roll(x, padding[:, None], axis=2))
        self.offset = self.offset - padding
        self.left_padding = self.left_padding + padding
        self._right_padding = None

    def filter(self, batch_indices: Any) -> None:
        self._change(lambda x: x[batch_indices])
        self.offset = self.offset[batch_indices]
        self.left_padding = self.left_padding[batch_indices]
        common = min(_ints(self.left_padding))
        if common > 0:
            self._change(lambda x: x[..., common:, :])
            self._idx -= common
            self.left_padding = self.left_padding - common

    def extend(self, other: BatchQuantizedKVCache) -> None:
        """Append the rows of `other`, both aligned at their ends."""
        end = max(self._idx, other._idx)
        model = self.keys or other.keys
        if model is not None:
            values_model = self.values or other.values
            assert values_model is not None
            self.keys, self.values = (
                _stack(self._aligned(mine, end, like), other._aligned(theirs, end, like))
                for mine, theirs, like in (
                    (self.keys, other.keys, model),
                    (self.values, other.values, values_model),
                )
            )
        self.left_padding = mx.concatenate(
            [self.left_padding + (end - self._idx), other.left_padding + (end - other._idx)]
        )
        self.offset = mx.concatenate([self.offset, other.offset])
        self._idx = end

    def _aligned(self, rows: QuantizedRows | None, end: int, like: QuantizedRows) -> QuantizedRows:
        left = end - self._idx
        n_batch = self.offset.shape[0]

        def pad(x: mx.array) -> mx.array:
            return mx.pad(x[..., : self._idx, :], [(0, 0), (0, 0), (left, 0), (0, 0)])

        if rows is not None:
            return rows.map(pad)
        return like.map(lambda x: mx.zeros((n_batch, x.shape[1], end, x.shape[3]), x.dtype))

    def extract(self, idx: int) -> QuantKVCache:
        cache = QuantKVCache(group_size=self.group_size, bits=self.bits)
        if self.keys is None or self.values is None:
            return cache
        start = max(0, _ints(self.left_padding)[idx])

        def row(x: mx.array) -> mx.array:
            return mx.contiguous(x[idx : idx + 1, :, start : self._idx])

        cache.keys, cache.values = self.keys.map(row), self.values.map(row)
        cache.offset = self._idx - start
        return cache

    @classmethod
    def merge(cls, caches: Sequence[QuantizedKVCache]) -> Self:
        lengths = [int(c.offset) for c in caches]
        end = max(lengths)
        batch = cls([end - n for n in lengths], caches[0].group_size, caches[0].bits)
        if end:
            batch.keys = _merge_rows([c.keys for c in caches], lengths)
            batch.values = _merge_rows([c.values for c in caches], lengths)
            batch.offset = batch.offset + end
            batch._idx = end
        return batch

    @classmethod
    def of(cls, batch: BatchKVCache, group_size: int, bits: int) -> Self:
        """The rows of a batch, quantised; the batch is not changed."""
        if batch._right_padding is not None:
            raise UnsupportedCache("A batch cannot be quantised before finalize; finalize it.")
        made = cls([0], group_size, bits)
        made.left_padding, made.offset = batch.left_padding[...], batch.offset[...]
        if batch.keys is not None:
            keys, values = batch.keys_and_values()
            made.keys = quantize_rows(keys, group_size, bits)
            made.values = quantize_rows(values, group_size, bits)
            made._idx = batch._idx
        return made

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.map(change), self.values.map(change)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for rows in (self.keys, self.values) if rows for x in rows)


def _ints(array: mx.array) -> list[int]:
    values: Any = array.tolist()
    return list(values)


def _stack(a: QuantizedRows, b: QuantizedRows) -> QuantizedRows:
    return QuantizedRows(*(mx.concatenate(list(pair)) for pair in zip(a, b, strict=True)))


def _merge_rows(rows: Sequence[Any], lengths: Sequence[int]) -> QuantizedRows:
    """One left-padded buffer from the rows of single sequences, None for empty ones."""
    end = max(lengths)
    first = next(triple for triple, n in zip(rows, lengths, strict=True) if n)

    def merged(i: int) -> mx.array:
        _, heads, _, width = first[i].shape
        out = mx.zeros((len(rows), heads, end, width), first[i].dtype)
        for row, (triple, n) in enumerate(zip(rows, lengths, strict=True)):
            if n:
                out[row : row + 1, :, end - n :] = triple[i][..., :n, :]
        return out

    return QuantizedRows(*(merged(i) for i in range(3)))
