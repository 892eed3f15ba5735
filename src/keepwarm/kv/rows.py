"""A batch whose rows end where they end, so that each can take back its own number of tokens.

mlx-lm's batch caches have one end for all rows: whoever takes back tokens moves everybody's. Here a
row begins at slot 0 of a common buffer, new tokens go behind its own end, and attention sees the
whole buffer under a mask. The buffer grows by whole steps, so that shapes stay the same for many
tokens: kernels are compiled, and plans made, for shapes. Only one token of one row sees its own
slots without a mask, as alone: there are faster kernels for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from keepwarm.kv.quant import QuantizedRows, QuantKVCache, quantize_rows

STEP = 256
Buffer: TypeAlias = mx.array | QuantizedRows
Single: TypeAlias = KVCache | QuantizedKVCache | RotatingKVCache


def _map(buffer: Buffer, change: Callable[[mx.array], mx.array]) -> Any:
    return change(buffer) if isinstance(buffer, mx.array) else buffer.map(change)


def _n_slots(buffer: Buffer) -> int:
    return int((buffer if isinstance(buffer, mx.array) else buffer.weights).shape[2])


class RowsKVCache:
    """K and V of several sequences; `window`: only so many of the latest tokens are attended to."""

    keys: Buffer | None
    values: Buffer | None
    left_padding = None  # rows have none

    def __init__(self, n_rows: int, window: int | None = None) -> None:
        self.keys = self.values = None
        self.window = window
        self.ends = [0] * n_rows  # the slot behind each row's last token
        self.offset = mx.zeros((n_rows,), mx.int32)  # each row's tokens; the position of its next

    # what a model calls

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Which slots each of `n` new tokens of each row attends to, (rows, 1, n, slots)."""
        del return_array  # it always is one, if any
        if self._is_single(n):
            n_seen = self.ends[0] + 1 - self._first_seen(self.ends[0] + 1)
            first = n_seen - (window_size or n_seen)
            return None if first <= 0 else (mx.arange(n_seen) >= first)[None, None, None]
        self._make_room(n)
        n_slots = self._n_slots or self._capacity(n)
        own = mx.array(self.ends)[:, None, None] + mx.arange(n)[None, :, None]
        slots = mx.arange(n_slots)[None, None]
        mask = slots <= own
        if window := window_size or self.window:
            mask = mask & (slots > own - window)
        return mask[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Buffer, Buffer]:
        n = keys.shape[2]
        self._make_room(n)
        slots = (mx.array(self.ends)[:, None] + mx.arange(n)[None])[:, None, :, None]
        self.keys = self._written(self.keys, keys, slots)
        self.values = self._written(self.values, values, slots)
        self.ends = [end + n for end in self.ends]
        self.offset = self.offset + n
        if self._is_single(n):
            first, end = self._first_seen(self.ends[0]), self.ends[0]
            seen = tuple(_map(x, lambda y: y[:, :, first:end]) for x in (self.keys, self.values))
            # On CUDA MLX would read a slice that begins later from outside the buffer.
            return tuple(_map(x, mx.contiguous) for x in seen) if first else seen
        return self.keys, self.values

    def _is_single(self, n: int) -> bool:
        """One token of one row: it attends to all that it is given."""
        return n == 1 and len(self.ends) == 1

    def _first_seen(self, end: int) -> int:
        """The first slot that a row which ends there needs."""
        return max(0, end - self.window) if self.window else 0

    def _packed(self, new: mx.array) -> Buffer:
        """New tokens as the buffer holds them."""
        return new

    def _written(self, buffer: Buffer | None, new: mx.array, slots: mx.array) -> Buffer:
        packed: Any = self._packed(new)
        if buffer is None:
            n_slots = self._capacity(new.shape[2])
            buffer = _map(packed, lambda x: mx.zeros((*x.shape[:2], n_slots, x.shape[3]), x.dtype))
        if isinstance(buffer, mx.array):
            return _put(buffer, packed, slots)
        return QuantizedRows(*(_put(*pair, slots) for pair in zip(buffer, packed, strict=True)))

    # rows

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Forget the last tokens of each row, as many as its count; nothing is copied."""
        self.ends = [end - n for end, n in zip(self.ends, counts, strict=True)]
        self.offset = self.offset - mx.array(list(counts))

    def filter(self, rows: Sequence[int]) -> None:
        index = mx.array(list(rows))
        self.ends = [self.ends[i] for i in rows]
        n_slots = min(self._capacity(0), self._n_slots)  # a long row may have left
        self._change(lambda x: x[index, :, :n_slots])
        self.offset = self.offset[index]

    def extend(self, other: Self) -> None:
        """Append the rows of `other`."""
        n_slots = max(self._n_slots, other._n_slots)
        for one, like in ((self, other), (other, self)):
            one._fill(like)
            one._grow(n_slots)
        if n_slots:
            self.keys = _stacked(self.keys, other.keys)
            self.values = _stacked(self.values, other.values)
        self.ends += other.ends
        self.offset = mx.concatenate([self.offset, other.offset])

    def extract(self, row: int) -> Single:
        """One row as a cache of its own."""
        single, end = self._single(), self.ends[row]
        start = self._first_seen(end)
        if self.keys is not None and self.values is not None and end:
            single.keys, single.values = (
                _map(x, lambda y: mx.contiguous(y[row : row + 1, :, start:end]))
                for x in (self.keys, self.values)
            )
        offsets: Any = self.offset.tolist()
        single.offset = offsets[row]
        if self.window:
            single._idx = end - start
        return single

    @classmethod
    def merge(cls, caches: Sequence[Single]) -> Self:
        """A batch from single sequences; these are not changed."""
        batch = cls._like(caches[0])
        batch.ends, batch.offset = [], mx.zeros((0,), mx.int32)
        for cache in caches:
            batch.extend(cls._row(cache))
        return batch

    @classmethod
    def _row(cls, cache: Single) -> Self:
        batch = cls._like(cache)
        if cache.offset:
            keys, values = _in_order(cache)
            batch.keys, batch.values = keys, values
            batch.ends = [_n_slots(keys)]
            batch.offset = mx.array([cache.offset], mx.int32)
            batch._grow(batch._capacity(0))
        return batch

    @classmethod
    def _like(cls, cache: Single) -> Self:
        """An empty row."""
        return cls(1, cache.max_size if isinstance(cache, RotatingKVCache) else None)

    def _single(self) -> Single:
        return RotatingKVCache(self.window) if self.window else KVCache()

    # room

    @property
    def _n_slots(self) -> int:
        return 0 if self.keys is None else _n_slots(self.keys)

    def _capacity(self, n: int) -> int:
        """Slots, in whole steps, for `n` more tokens of the longest row."""
        return -(-(max(self.ends, default=0) + n) // STEP) * STEP

    def _make_room(self, n: int) -> None:
        if self.keys is None or max(self.ends) + n <= self._n_slots:
            return
        if self.window and self._n_slots >= self.window + STEP:
            self._drop_old(self.window)
        self._grow(self._capacity(n))

    def _drop_old(self, n_kept: int) -> None:
        """Move the latest tokens of each row to its front: once in about STEP tokens."""
        shifts = [max(0, end - n_kept) for end in self.ends]
        last = self._n_slots - 1
        slots = mx.minimum(mx.arange(self._n_slots)[None] + mx.array(shifts)[:, None], last)
        index = slots[:, None, :, None]
        self._change(lambda x: mx.take_along_axis(x, index, axis=2))
        self.ends = [end - shift for end, shift in zip(self.ends, shifts, strict=True)]

    def _grow(self, n_slots: int) -> None:
        more = n_slots - self._n_slots
        if more > 0:
            self._change(lambda x: mx.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)]))

    def _fill(self, like: Self) -> None:
        """Empty rows beside others: a buffer of theirs."""
        if self.keys is None and like.keys is not None and like.values is not None:
            n = len(self.ends)
            self.keys, self.values = (
                _map(x, lambda y: mx.zeros((n, *y.shape[1:]), y.dtype))
                for x in (like.keys, like.values)
            )

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _map(self.keys, change), _map(self.values, change)

    @property
    def state(self) -> Any:
        """The arrays, to be evaluated."""
        return [] if self.keys is None else [self.keys, self.values, self.offset]


class RowsQuantKVCache(RowsKVCache):
    """The same, quantised."""

    def __init__(self, n_rows: int, group_size: int, bits: int) -> None:
        super().__init__(n_rows)
        self.group_size, self.bits = group_size, bits

    def _packed(self, new: mx.array) -> Buffer:
        return quantize_rows(new, self.group_size, self.bits)

    @classmethod
    def _like(cls, cache: Single) -> Self:
        return cls(1, cache.group_size, cache.bits)

    def _single(self) -> Single:
        return QuantKVCache(self.group_size, self.bits)


def _put(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    return mx.put_along_axis(buffer, mx.broadcast_to(slots, new.shape), new, axis=2)


def _stacked(a: Any, b: Any) -> Any:
    if isinstance(a, mx.array):
        return mx.concatenate([a, b])
    return QuantizedRows(*(mx.concatenate(list(pair)) for pair in zip(a, b, strict=True)))


def _in_order(cache: Single) -> tuple[Buffer, Buffer]:
    """The rows that later tokens can attend to, oldest first."""
    if isinstance(cache, RotatingKVCache):
        keys, values = (cache._temporal_order(x) for x in (cache.keys, cache.values))
        surplus = max(0, keys.shape[2] - cache.max_size)
        return keys[..., surplus:, :], values[..., surplus:, :]
    end = cache.offset
    if isinstance(cache, QuantizedKVCache):
        keys, values = (
            QuantizedRows(*x).map(lambda y: y[..., :end, :]) for x in (cache.keys, cache.values)
        )
        return keys, values
    return cache.keys[..., :end, :], cache.values[..., :end, :]
