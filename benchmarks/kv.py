"""One sequence: slicing, saving, restoring and merging, against a plain copy and mlx-lm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from benchmarks.caches import GEMMA_12B, LLAMA_8B, SMALL, Shape
from benchmarks.measure import (
    MEMORY_BUDGET,
    Peak,
    Record,
    Skipped,
    Speed,
    Task,
    peak_growth,
    reason_to_skip,
    seconds_of,
)
from benchmarks.requests.measure import in_child, release_memory
from keepwarm import kv
from keepwarm.errors import KeepwarmError
from keepwarm.prefix.blocks import BLOCK_TOKENS

Work: TypeAlias = Callable[[], object]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Measure: TypeAlias = Callable[[Shape, int, Path], list[Record]]

SIZES = (512, 2_048, 8_192, 32_768)
MERGED = 2  # sequences in one batch

# mlx-lm's save and load of the same cache, in a child process: this package does not import
# mlx_lm. Prints the seconds of each save and load.
MLX_LM = """
import json, sys
from pathlib import Path
import mlx.core as mx
from benchmarks.caches import SHAPES
from benchmarks.kv import clear, sync
from benchmarks.measure import seconds_of
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

name, n_tokens, repeats, file = sys.argv[1:]
caches = SHAPES[name].filled(int(n_tokens))

def save():
    save_prompt_cache(file, caches)
    sync(file)

def load():
    loaded = load_prompt_cache(file)
    mx.eval([cache.state for cache in loaded])
    return loaded

repeats = int(repeats)
saves = seconds_of(save, repeats, lambda: clear(Path(file).parent))
del caches
print(json.dumps({"mlx-lm save": saves, "mlx-lm load": seconds_of(load, repeats)}))
"""


def tasks(folder: Path, max_tokens: int, quick: bool) -> Iterator[Task]:
    """Every shape at every length, smallest first; files go to `folder`, which is emptied."""
    shapes = (SMALL,) if quick else (LLAMA_8B, GEMMA_12B)
    for n_tokens in (n for n in SIZES if n <= max_tokens):
        for shape in shapes:
            label = f"{shape.name}, {n_tokens:,} tokens"
            args = (shape, n_tokens, folder)
            yield Task(f"{label}: ours", partial(_if_space, speeds, *args))
            yield Task(f"{label}: mlx-lm", partial(_if_space, mlx_lm_speeds, *args))
            yield Task(f"{label}: memory", partial(_if_space, peaks, *args))


def _if_space(measure: Measure, shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    """Skip a step if memory or disk cannot hold the cache and one copy of it."""
    live = shape.live_bytes(n_tokens)
    why = reason_to_skip(2 * (live + shape.block_bytes), live, folder)
    if why:
        return [Skipped(f"{shape.name}, {n_tokens:,} tokens", why)]
    try:
        return measure(shape, n_tokens, folder)
    finally:
        clear(folder)
        release_memory()


def clear(folder: Path) -> None:
    """Delete the last sample's files: overwriting them would cost time."""
    for file in folder.iterdir():
        file.unlink()


def repeats_for(n_bytes: int) -> int:
    return 5 if n_bytes < 10**9 else 3


def speeds(shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    caches, layout = shape.filled(n_tokens), shape.layout()
    live = kv.live_bytes(caches)

    def speed(what: str, work: Work, n_bytes: int = live, before: Work = release_memory) -> Speed:
        seconds = seconds_of(work, repeats_for(live), before)
        return Speed(shape.name, n_tokens, what, n_bytes, seconds)

    def emptied() -> None:
        clear(folder)

    return [
        speed("copy, touched", touched_copy(caches, live)),
        speed("copy, fresh", lambda: copy_into(np.empty(live, np.uint8), arrays_of(caches))),
        speed("write", lambda: write(caches, folder / "plain"), before=emptied),
        speed("slice", lambda: slice_all(caches)),
        speed("save", lambda: save(caches, folder), before=emptied),
        speed("restore", lambda: restore(layout, n_tokens, folder)),
        speed("merge", lambda: merge(caches, live), MERGED * live),
    ]


def mlx_lm_speeds(shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    live = shape.live_bytes(n_tokens)
    arguments = (shape.name, n_tokens, repeats_for(live), folder / "cache.safetensors")
    command = [sys.executable, "-c", MLX_LM, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip() or "no message").splitlines()[-1]
        raise KeepwarmError(f"mlx-lm could not save and load {shape.name}: {last}.")
    found = json.loads(run.stdout)
    return [Speed(shape.name, n_tokens, what, live, tuple(found[what])) for what in found]


def peaks(shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    """Peak memory of saving and restoring, each in its own process."""
    live, block = shape.live_bytes(n_tokens), shape.block_bytes
    return [
        Peak(shape.name, n_tokens, what, live, block, in_child(work, shape, n_tokens, folder))
        for what, work in (("save", save_growth), ("restore", restore_growth))
    ]


def save_growth(shape: Shape, n_tokens: int, folder: Path) -> int:
    caches = shape.filled(n_tokens)
    release_memory()
    return peak_growth(lambda: save(caches, folder))


def restore_growth(shape: Shape, n_tokens: int, folder: Path) -> int:
    layout = shape.layout()
    release_memory()
    return peak_growth(lambda: restore(layout, n_tokens, folder))


# The operations.


def arrays_of(caches: kv.Caches) -> list[mx.array]:
    return [array for cache in caches for array in kv.encode(cache).arrays()]


def raw_bytes(array: mx.array) -> Bytes:
    """A view of the bytes of an array; numpy has no bf16."""
    return np.asarray(array.view(mx.uint8)).reshape(-1)


def copy_into(buffer: Bytes, arrays: list[mx.array]) -> Bytes:
    """Copy all arrays with numpy."""
    at = 0
    for raw in map(raw_bytes, arrays):
        buffer[at : at + raw.size] = raw
        at += raw.size
    return buffer


def touched_copy(caches: kv.Caches, n_bytes: int) -> Work:
    """A copy into memory that was touched before, so without page faults."""
    buffer = np.ones(n_bytes, np.uint8)
    return lambda: copy_into(buffer, arrays_of(caches))


def write(caches: kv.Caches, file: Path) -> None:
    """Write all arrays to one file with one fsync."""
    with file.open("wb") as out:
        for raw in map(raw_bytes, arrays_of(caches)):
            out.write(raw.data)
    sync(file)


def sync(file: Path | str) -> None:
    """fsync a file."""
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def slice_all(caches: kv.Caches) -> None:
    """Cut all blocks, keeping none."""
    for _ in kv.cut_blocks(caches):
        pass


def save(caches: kv.Caches, folder: Path) -> None:
    """One file per block, each synced; the folder is not."""
    for block in kv.cut_blocks(caches):
        save_block(block, folder / f"{block.index}.safetensors")


def save_block(block: kv.Block, file: Path) -> None:
    header = {"n_tokens": block.n_tokens, "first_rows": dict(block.first_rows)}
    tensors: dict[str, Any] = {**block.delta, **block.window}
    mx.save_safetensors(str(file), tensors, {"block": json.dumps(header)})
    sync(file)


def restore(layout: kv.Layout, n_tokens: int, folder: Path) -> kv.Caches:
    """Caches from those files, read from the page cache."""
    assembly = kv.Assembly(layout, n_tokens)
    for index in range(-(-n_tokens // BLOCK_TOKENS)):
        assembly.add(load_block(index, folder / f"{index}.safetensors"))
    return assembly.finish()


def load_block(index: int, file: Path) -> kv.Block:
    loaded: Any = mx.load(str(file), return_metadata=True)
    tensors, metadata = loaded
    header = json.loads(metadata["block"])
    parts: tuple[dict[str, mx.array], ...] = ({}, {})
    for name, array in tensors.items():
        path = name.partition("_")[0].removeprefix("L")
        parts[path in header["first_rows"]][name] = array
    return kv.Block(index, header["n_tokens"], parts[False], parts[True], header["first_rows"])


def merge(caches: kv.Caches, live: int) -> None:
    """The sequence twice in one batch, as many layers at once as memory allows."""
    room = max(1, (MEMORY_BUDGET - live) * len(caches) // (MERGED * live))
    for start in range(0, len(caches), room):
        rows = [caches[start : start + room]] * MERGED
        mx.eval([layer.state for layer in kv.merge(rows)])
