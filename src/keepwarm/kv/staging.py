"""Rows copied to a CUDA device out of slabs.

Reader threads leave the rows of a block in a slab, or have read a block that is in one. The thread
that owns MLX has the device copy them, many blocks at once: one operation for each tensor, however
many blocks follow one another.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from keepwarm.kv.buffers import HostArray, word_of
from keepwarm.kv.layout import ROWS, TensorSpec
from keepwarm.kv.slabs import Slab, SlabArray, SlabPool, aligned

PIECE_BYTES = 256 << 20  # copied at once: about 6 ms over a bus of 50 GB/s


class DeviceRows:
    """K or V of one layer in device memory; unwritten rows are zeros."""

    def __init__(self, spec: TensorSpec, zeros: mx.array, staging: Staging) -> None:
        self.spec = spec
        self._staging = staging
        self.array = zeros

    def write(self, at: int, rows: mx.array | HostArray) -> None:
        if isinstance(rows, HostArray):
            self._staging.add(self, at, rows)
        else:
            self.array[..., at : at + rows.shape[ROWS], :] = rows


class _Copy(NamedTuple):
    target: DeviceRows
    at: int
    rows: SlabArray

    def precedes(self, other: _Copy) -> bool:
        """Whether the other one has the next rows, in the same place of another slab."""
        ours, theirs = self.rows, other.rows
        return (
            other.at == self.at + ours.shape[ROWS]
            and theirs.start == ours.start
            and theirs.shape == ours.shape
            and theirs.slab.array.nbytes == ours.slab.array.nbytes
        )


class _Open(threading.local):
    """What one thread has written since it last published: its slab, and the copies out of it."""

    def __init__(self) -> None:
        self.slab: Slab | None = None
        self.n_bytes = self.used = 0
        self.copies: list[_Copy] = []


class Staging:
    """Rows on their way to the arrays of one restore."""

    def __init__(self, pool: SlabPool, record_bytes: int) -> None:
        self._pool = pool
        self._piece_records = max(1, PIECE_BYTES // record_bytes)
        self._open = _Open()
        self._ready: deque[list[_Copy]] = deque()  # record by record
        self._copying: list[mx.array] = []  # the latest piece on the device, and its slabs:
        self._held: list[Slab] = []

    @property
    def is_empty(self) -> bool:
        return not self._ready

    def open(self, n_bytes: int) -> None:
        """Begin a record whose rows take so many bytes. Each thread has one at a time."""
        self._open.n_bytes, self._open.used = n_bytes, 0

    def add(self, target: DeviceRows, at: int, rows: HostArray) -> None:
        staged = rows if isinstance(rows, SlabArray) else self._staged(rows)
        self._open.copies.append(_Copy(target, at, staged))

    def publish(self) -> None:
        """Pass on what this thread has added: all of it is verified."""
        self._ready.append(self._open.copies)
        self.discard()

    def discard(self) -> None:
        self._open.slab, self._open.copies = None, []

    def copy(self, is_complete: bool) -> None:
        """Have the device copy a piece, on the thread that owns MLX; wait for the one before it.

        A piece that is not full is left to grow, unless all rows were added.
        """
        if len(self._ready) < self._piece_records and not is_complete:
            return
        n_records = min(len(self._ready), self._piece_records)
        copies = [copy for _ in range(n_records) for copy in self._ready.popleft()]
        stacked: dict[tuple[int, ...], mx.array] = {}
        for run in _runs(copies):
            key = tuple(id(copy.rows.slab) for copy in run)
            if key not in stacked:
                stacked[key] = mx.stack([copy.rows.slab.array for copy in run])
            _assign(run, stacked[key])
        mx.async_eval([*stacked.values(), *(copy.target.array for copy in copies)])
        mx.eval(self._copying)  # its slabs may be written again
        self._copying, self._held = [*stacked.values()], [copy.rows.slab for copy in copies]

    def _staged(self, rows: HostArray) -> SlabArray:
        own = self._open
        if own.slab is None:
            own.slab = self._pool.take(own.n_bytes)
        start, end = own.used, own.used + rows.n_bytes
        memory = own.slab.memory[start:end].view(word_of(rows.dtype)).reshape(rows.shape)
        rows.write_to(memory)
        own.used = aligned(end)
        return SlabArray(own.slab, start, rows.shape, rows.dtype)


def _runs(copies: Iterable[_Copy]) -> Iterator[Sequence[_Copy]]:
    """Copies into consecutive rows of one target, out of equal places in several slabs."""
    by_target: dict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        by_target[id(copy.target)].append(copy)
    for own in by_target.values():
        own.sort(key=lambda copy: copy.at)
        run = own[:1]
        for before, copy in pairwise(own):
            if not before.precedes(copy):
                yield run
                run = []
            run.append(copy)
        yield run


def _assign(run: Sequence[_Copy], slabs: mx.array) -> None:
    """Copy one tensor of some blocks; `slabs` has a row of bytes for each block."""
    (target, at, first), n = run[0], len(run)
    start, n_items = first.start // first.dtype.size, first.n_bytes // first.dtype.size
    rows = slabs.view(first.dtype)[:, start : start + n_items].reshape(n, *first.shape)
    joined = mx.moveaxis(rows, 0, ROWS)  # behind the axes before the rows
    n_rows = n * first.shape[ROWS]
    joined = joined.reshape(*first.shape[:ROWS], n_rows, *first.shape[ROWS + 1 :])
    target.array[..., at : at + n_rows, :] = joined
