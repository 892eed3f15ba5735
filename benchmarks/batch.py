"""Batches: memory per live token, and the speed of operations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import dynamic_roll as mlx_lm_roll

from benchmarks.caches import Shape, random_rows
from benchmarks.kv import copy_into, repeats_for
from benchmarks.measure import Density, Record, Skipped, Speed, Task, reason_to_skip, seconds_of
from benchmarks.requests.measure import release_memory
from keepwarm import kv

Measured: TypeAlias = Callable[[str, float, Callable[[], object]], Record]
Roll: TypeAlias = Callable[[mx.array, mx.array, int], mx.array]

# A batch costs each layer the same, so a few layers stand for all of them.
LAYERS = Shape("4 llama-8b layers", n_layers=4, n_heads=8, width=128)
WINDOWED = Shape(
    "6 gemma-3-12b layers", n_layers=6, n_heads=8, width=256, window=1024, global_every=6
)
SMALL = Shape("2 small layers", n_layers=2, n_heads=2, width=32, window=300, global_every=2)
PLAIN = Shape("4 small layers", n_layers=4, n_heads=2, width=32)

N_ROWS = (1, 2, 4, 8)
WIDE = mx.uint64  # four bf16 numbers in one


def tasks(folder: Path, max_tokens: int, quick: bool) -> Iterator[Task]:
    for shape in (SMALL,) if quick else (LAYERS, WINDOWED):
        for n_rows in N_ROWS:
            label = f"{shape.name}, batch of {n_rows}: memory"
            yield Task(label, partial(densities, shape, n_rows, min(2048, max_tokens)))
    shape, n_tokens = PLAIN if quick else LAYERS, min(8192, max_tokens)
    yield Task(f"{shape.name}, batch of 8: speed", partial(speeds, shape, n_tokens, folder))


def densities(shape: Shape, n_rows: int, n_tokens: int) -> list[Record]:
    """Rows of equal length, and rows of mixed lengths, which need padding."""
    mixed = tuple(n_tokens * (i + 1) // n_rows for i in range(n_rows))
    equal = (n_tokens,) * n_rows
    kinds = [equal] if n_rows == 1 else [equal, mixed]
    return [record for lengths in kinds for record in density(shape, lengths)]


def density(shape: Shape, lengths: tuple[int, ...]) -> list[Record]:
    """Bytes that MLX holds for a batch, after the merge and one token later."""
    feed_one(kv.merge([shape.filled(1)]), shape)  # allocations made once do not count
    release_memory()
    before = mx.get_active_memory()
    batch = evaluated(kv.merge([shape.filled(n) for n in lengths]))
    release_memory()
    records = [_density(shape, lengths, "merged", before)]
    feed_one(batch, shape)
    release_memory()
    longer = tuple(n + 1 for n in lengths)
    return [*records, _density(shape, longer, "one token later", before)]


def _density(shape: Shape, lengths: tuple[int, ...], when: str, before: int) -> Record:
    live = sum(map(shape.live_bytes, lengths))
    return Density(shape.name, lengths, when, live, mx.get_active_memory() - before)


def feed_one(batch: kv.Caches, shape: Shape) -> None:
    """Update the caches as one decode step does."""
    rows = mx.repeat(random_rows(shape.n_heads, 1, shape.width), kv.batch_size(batch), axis=0)
    for layer in batch:
        layer.update_and_fetch(rows, rows)
    evaluated(batch)


def speeds(shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    """Each operation on a batch of 8, which stays unchanged."""
    n_bytes = 8 * shape.live_bytes(n_tokens)
    case = f"{shape.name}, batch of 8"
    why = reason_to_skip(3 * n_bytes, 0, folder)
    if why:
        return [Skipped(case, why)]

    def speed(what: str, moved: float, work: Callable[[], object]) -> Record:
        seconds = seconds_of(work, repeats_for(n_bytes))
        return Speed(case, n_tokens, what, int(moved * n_bytes), seconds)

    row = shape.filled(n_tokens)
    return [*_growing(row, speed), *_changing(evaluated(kv.merge([row] * 8)), speed)]


def _growing(row: kv.Caches, speed: Measured) -> list[Record]:
    seven, one = (evaluated(kv.merge([row] * n)) for n in (7, 1))
    return [
        speed("merge", 1, lambda: evaluated(kv.merge([row] * 8))),
        speed("join", 1, lambda: joined(seven, one)),
    ]


def _changing(batch: kv.Caches, speed: Measured) -> list[Record]:
    """Counts the bytes of the result; a plain copy of the whole batch is the reference."""
    n_bytes = sum(buffer.nbytes for buffer in buffers_of(batch))
    return [
        speed("copy, fresh", 1, lambda: copy_into(np.empty(n_bytes, np.uint8), buffers_of(batch))),
        speed("leave", 7 / 8, lambda: filtered(batch, (0, 1, 2, 3, 4, 5, 6))),
        speed("filter", 4 / 8, lambda: filtered(batch, (0, 2, 4, 6))),
        speed("extract", 1 / 8, lambda: evaluated(kv.extract(batch, 3))),
        speed("roll", 1, lambda: rolled(batch, kv.dynamic_roll)),
        speed("roll, mlx-lm", 1, lambda: rolled(batch, mlx_lm_roll)),
        speed("roll, slices", 1, lambda: rolled(batch, sliced_roll)),
    ]


def buffers_of(batch: kv.Caches) -> list[mx.array]:
    return [buffer for layer in batch for buffer in (layer.keys, layer.values)]


def evaluated(caches: kv.Caches) -> kv.Caches:
    mx.eval([layer.state for layer in caches])
    return caches


def joined(batch: kv.Caches, other: kv.Caches) -> kv.Caches:
    """A new batch with the rows of both."""
    batch = kv.copy_caches(batch)
    kv.extend(batch, other)
    return evaluated(batch)


def filtered(batch: kv.Caches, keep: Sequence[int]) -> kv.Caches:
    batch = kv.copy_caches(batch)
    kv.filter_rows(batch, keep)
    return evaluated(batch)


def rolled(batch: kv.Caches, roll: Roll) -> list[mx.array]:
    """Roll every buffer, each row by its own shift, as after right padding."""
    n_rows = kv.batch_size(batch)
    shifts = mx.array([100 * i for i in range(n_rows)])[:, None]
    buffers = [roll(buffer, shifts, 2) for buffer in buffers_of(batch)]
    mx.eval(buffers)
    return buffers


def sliced_roll(x: mx.array, shifts: mx.array, axis: int) -> mx.array:
    """The same roll as two slices per row of 64-bit numbers, close to what a kernel would do."""
    amounts: list[int] = np.asarray(shifts).reshape(-1).tolist()
    wide = x.view(WIDE)
    rows = [_turned(wide[i : i + 1], n, axis) for i, n in enumerate(amounts)]
    return mx.concatenate(rows).view(x.dtype)


def _turned(row: mx.array, n: int, axis: int) -> mx.array:
    head, tail = mx.split(row, [row.shape[axis] - n % row.shape[axis]], axis)
    return mx.concatenate([tail, head], axis)
