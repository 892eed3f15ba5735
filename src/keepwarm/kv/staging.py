"""Rows copied to a CUDA device out of slabs.

Reader threads leave the rows of a block in a slab, or have read a block that is in one. The thread
that owns MLX has the device copy them, many blocks at once: one operation for each tensor, however
many blocks follow one another.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from keepwarm.kv.buffers import HostArray, word_of
from keepwarm.kv.layout import ROWS, TensorSpec
from keepwarm.kv.slabs import Place, Slab, SlabArray, SlabPool, aligned

PIECE_BYTES = 512 << 20  # copied at once: about 11 ms over a bus of 50 GB/s
WORD = mx.uint64  # a device reads host memory fastest in wide words


class DeviceRows:
    """K or V of one layer in device memory; unwritten rows, and those after `n_rows`, are zeros."""

    def __init__(self, spec: TensorSpec, n_rows: int, zeros: mx.array, staging: Staging) -> None:
        self.spec, self.n_rows = spec, n_rows
        self._staging = staging
        self.array = zeros

    def write(self, at: int, rows: mx.array | HostArray) -> None:
        if isinstance(rows, HostArray):
            self._staging.add(self, at, rows)
        else:
            self.array[..., at : at + rows.shape[ROWS], :] = rows


class Destination(NamedTuple):
    """A tensor in a slab and the rows that it is copied to: those from `row` on, or as many more as
    the copy says."""

    target: DeviceRows
    row: int
    place: Place


class _Copy(NamedTuple):
    """Rows in one slab, of any number of tensors."""

    slab: Slab
    at: int
    n_rows: int  # of every tensor; 0 if they differ
    tensors: Sequence[Destination]

    def precedes(self, other: _Copy) -> bool:
        """Whether the other one has the next rows, in the same places of another slab."""
        is_next = self.n_rows and other.at == self.at + self.n_rows
        return bool(is_next) and self.tensors == other.tensors


class _Open(threading.local):
    """What one thread has written since it last published: its slab, and the tensors added."""

    def __init__(self) -> None:
        self.slab: Slab | None = None
        self.n_bytes = self.used = 0
        self.added: dict[Slab, list[Destination]] = defaultdict(list)


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
        place = Place(staged.start, staged.shape, staged.dtype)
        self._open.added[staged.slab].append(Destination(target, at, place))

    def publish(self) -> None:
        """Pass on what this thread has added: all of it is verified."""
        self._ready.append([_relative(slab, own) for slab, own in self._open.added.items()])
        self.discard()

    def discard(self) -> None:
        self._open.slab, self._open.added = None, defaultdict(list)

    def add_block(self, slab: Slab, at: int, n_rows: int, tensors: Sequence[Destination]) -> None:
        """A record that is in a slab, with so many rows of every tensor; those beyond what a target
        needs are not copied."""
        self._ready.append([_Copy(slab, at, n_rows, tensors)])

    def copy(self, is_complete: bool) -> None:
        """Have the device copy a piece, on the thread that owns MLX; wait for the one before it.

        A piece that is not full is left to grow, unless all rows were added.
        """
        if len(self._ready) < self._piece_records and not is_complete:
            return
        n_records = min(len(self._ready), self._piece_records)
        copies = [copy for _ in range(n_records) for copy in self._ready.popleft()]
        runs = [(run, _stacked(run)) for run in _runs(copies)]
        targets = [array for run, slabs in runs for array in _assign(run, slabs)]
        mx.async_eval([*(slabs for _, slabs in runs), *targets])
        mx.eval(self._copying)  # with all that was enqueued then: its slabs may be written again
        self._copying = [slabs for _, slabs in runs]
        self._held = [copy.slab for copy in copies]

    def wait(self) -> None:
        """Until the device reads no slab of this restore; what was not copied is dropped."""
        self._ready.clear()
        mx.eval(self._copying)
        self._copying, self._held = [], []

    def _staged(self, rows: HostArray) -> SlabArray:
        own = self._open
        if own.slab is None:
            own.slab = self._pool.take(own.n_bytes)
        start, end = own.used, own.used + rows.n_bytes
        memory = own.slab.memory[start:end].view(word_of(rows.dtype)).reshape(rows.shape)
        rows.write_to(memory)
        own.used = aligned(end)
        return SlabArray(own.slab, start, rows.shape, rows.dtype)


def _relative(slab: Slab, tensors: Sequence[Destination]) -> _Copy:
    """Equal places in equal records have equal destinations, but for the row of the copy."""
    at, n_rows = tensors[0].row, {tensor.place.shape[ROWS] for tensor in tensors}
    relative = [tensor._replace(row=tensor.row - at) for tensor in tensors]
    return _Copy(slab, at, n_rows.pop() if len(n_rows) == 1 else 0, relative)


def _runs(copies: Iterable[_Copy]) -> Iterator[Sequence[_Copy]]:
    """Copies into consecutive rows of the same targets, out of equal places in several slabs."""
    ordered = sorted(copies, key=lambda copy: (id(copy.tensors[0].target), copy.at))
    run = ordered[:1]
    for before, copy in pairwise(ordered):
        if not before.precedes(copy):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def _stacked(run: Sequence[_Copy]) -> mx.array:
    """The used bytes of these slabs, a row for each."""
    n_bytes = aligned(max(tensor.place.end for tensor in run[0].tensors))
    return mx.stack([copy.slab.array[:n_bytes].view(WORD) for copy in run])


def _assign(run: Sequence[_Copy], slabs: mx.array) -> Iterator[mx.array]:
    """Copy every tensor of some blocks to its target; `slabs` has a row for each block."""
    n, views = len(run), {t.place.dtype: slabs.view(t.place.dtype) for t in run[0].tensors}
    for target, row, (start, shape, dtype) in run[0].tensors:
        at = run[0].at + row
        n_rows = min(n * shape[ROWS], target.n_rows - at)
        first, n_items = start // dtype.size, math.prod(shape)
        rows = views[dtype][:, first : first + n_items].reshape(n, *shape)
        joined = mx.moveaxis(rows, 0, ROWS)  # behind the axes before the rows
        joined = joined.reshape(*shape[:ROWS], n * shape[ROWS], *shape[ROWS + 1 :])
        target.array[..., at : at + n_rows, :] = joined[..., :n_rows, :]
        yield target.array
