"""The store: restore and put against plain files, and costs by number of blocks."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain as joined
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import mlx.core as mx
import psutil

from benchmarks.caches import LLAMA_8B, Shape
from benchmarks.measure import (
    Cost,
    Peak,
    Record,
    Skipped,
    Speed,
    Task,
    peak_growth,
    reason_to_skip,
    seconds_of,
    touch_memory,
)
from benchmarks.requests.measure import drop_files, in_child, release_memory
from keepwarm import kv
from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.records import records_of
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.errors import KeepwarmError
from keepwarm.kv.slices import tensor_name
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockRef, Namespace, chain
from keepwarm.records import record as store_record
from keepwarm.records.record import Header, Part, Tensor, encode_record
from keepwarm.store.disk.disk import DiskLimits, DiskTier, Pages
from keepwarm.store.memory import MemoryTier
from keepwarm.store.names import INDEX, path_of
from keepwarm.store.tiers import Tiers

SIZES = (2_048, 8_192, 32_768)
COUNTS = (100, 1_000, 10_000, 100_000)
PROMPT_TOKENS = 100_000
NAMESPACE = Namespace(bytes(32))
SAMPLES = 5
READ_SAMPLES = 15  # reads vary the most with other load, and do not wear the disk
READ_BYTES = 1 << 20  # at a time; fits the CPU's cache
MEMORY = "memory per record, bytes"
PLAIN = Shape("plain", n_layers=8, n_heads=8, width=128)
FLAT = Shape("flat", n_layers=1, n_heads=1, width=8)
SMALL_RECORD = (Tensor("L0_B0_K", "U8", (8,), memoryview(bytes(8))),)

LOAD_ANYWAY = Rates(load_bytes_per_s=1e15, prefill_tokens_per_s=1e-3)


class Work(NamedTuple):
    what: str
    run: Callable[[], object]
    before: Callable[[], object] = release_memory


def tasks(folder: Path, max_tokens: int, quick: bool) -> Iterator[Task]:
    shape, sizes = (PLAIN, (512,)) if quick else (LLAMA_8B, SIZES)
    for n_tokens in (n for n in sizes if n <= max_tokens):
        label = f"store, {shape.name}, {n_tokens:,} tokens"
        yield Task(label, partial(_if_space, shape, n_tokens, folder))
    root = folder / "many"
    for n_blocks in COUNTS[:2] if quick else COUNTS:
        yield Task(f"store of {n_blocks:,} blocks", partial(costs, root, n_blocks))
    yield Task("cleaning up", partial(_cleared, root))


def _cleared(root: Path) -> list[Record]:
    rmtree(root)
    return []


def _if_space(shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    """Skip if memory cannot hold the cache twice, or disk three times."""
    live = shape.live_bytes(n_tokens)
    why = reason_to_skip(2 * (live + shape.block_bytes), 3 * live, folder)
    if why:
        return [Skipped(f"store, {shape.name}, {n_tokens:,} tokens", why)]
    root = folder / "store"
    try:
        return [*puts(shape, n_tokens, folder), *restores(shape, n_tokens, root)]
    finally:
        for directory in (root, folder / "plain"):
            rmtree(directory, ignore_errors=True)
        release_memory()


def measure(
    shape: Shape, n_tokens: int, works: Sequence[Work], n_samples: int = SAMPLES
) -> list[Record]:
    """Take samples of all works in random order, so that other load affects all alike."""
    seconds: dict[str, list[float]] = {work.what: [] for work in works}
    order = random.Random(0)  # noqa: S311
    for _ in range(n_samples):
        for work in order.sample(works, len(works)):
            seconds[work.what] += seconds_of(work.run, 1, work.before)
    live, case = shape.live_bytes(n_tokens), f"store, {shape.name}"
    return [Speed(case, n_tokens, what, live, tuple(found)) for what, found in seconds.items()]


# Putting


def puts(shape: Shape, n_tokens: int, folder: Path) -> list[Record]:
    """Fills the store. Both sides sync every file; ours also hashes and indexes."""
    records = list(records_for(shape, n_tokens))
    sizes = [sum(memoryview(piece).nbytes for piece in encode_record(record)) for record in records]
    root, plain = folder / "store", folder / "plain"

    opened: list[DiskTier] = []

    def fresh() -> None:
        while opened:
            opened.pop().close()
        for directory in (root, plain):
            rmtree(directory, ignore_errors=True)
        plain.mkdir()
        opened.append(DiskTier(root, DiskLimits(min_free_bytes=0)))
        touch_memory(shape.live_bytes(n_tokens))  # for the pages of the files

    def put() -> None:
        for record in records:
            opened[0].put(record).durable.result()

    def write() -> None:
        for number, (record, n_bytes) in enumerate(zip(records, sizes, strict=True)):
            write_file(plain / str(number), record, n_bytes)

    found = measure(shape, n_tokens, [Work("write", write, fresh), Work("put", put, fresh)])
    fresh()
    put()
    opened.pop().close()
    return found


def records_for(shape: Shape, n_tokens: int) -> Iterator[store_record.Record]:
    refs = chain(NAMESPACE, tokens_of(n_tokens))
    for ref, block in zip(refs, kv.cut_blocks(shape.filled(n_tokens)), strict=True):
        yield from records_of(NAMESPACE, ref, block)


def write_file(path: Path, record: store_record.Record, n_bytes: int) -> None:
    """Write and sync a plain file of the same size."""
    with path.open("wb", buffering=0) as file:
        file.write(bytes(n_bytes - record.n_bytes))
        for tensor in record.tensors:
            file.write(tensor.data)
        os.fsync(file.fileno())


# Restoring


def restores(shape: Shape, n_tokens: int, root: Path) -> list[Record]:
    """Cold is as after a start: pages are dropped before each sample, if this system can, and the
    store has not read the files."""
    files = sorted((root / "blocks").rglob("*.safetensors"))
    disk = DiskTier(root, DiskLimits(min_free_bytes=0))
    reader = Reader(Tiers([("disk", disk)]))
    restore = partial(restore_all, restorer_of(shape, disk, reader), tokens_of(n_tokens))
    read, read_by_many = (partial(read_all, files, n) for n in (1, reader.n_threads))
    warm, cold = (partial(_prepare, shape.live_bytes(n_tokens), disk, drop) for drop in ([], files))
    restore()  # warm up
    works = [
        Work("restore, warm", restore, warm),
        Work("mx.load, warm", partial(load_and_assemble, shape, n_tokens, files), warm),
        Work("read, warm", read, warm),
    ]
    found = measure(shape, n_tokens, works, READ_SAMPLES)
    if hasattr(os, "posix_fadvise"):
        works = [
            Work("restore, cold", restore, cold),
            Work("read, cold", read, cold),
            Work("read in as many threads, cold", read_by_many, cold),
        ]
        found += measure(shape, n_tokens, works, READ_SAMPLES)
    reader.close()
    disk.close()
    growth = in_child(restore_growth, shape, n_tokens, root)
    live, block = shape.live_bytes(n_tokens), shape.block_bytes
    return [*found, Peak(f"store, {shape.name}", n_tokens, "restore", live, block, growth)]


def _prepare(live: int, disk: DiskTier, drop: Sequence[Path]) -> None:
    """Prepare memory for the rows and the page cache of the next sample."""
    drop_files(drop)
    disk.records.pages = Pages(disk.files)
    touch_memory(2 * live)


def restorer_of(shape: Shape, disk: DiskTier, reader: Reader) -> Restorer:
    tiers, saver = Tiers([("disk", disk)]), MemorySaver(MemoryTier(0))
    return Restorer(NAMESPACE, shape.layout(), tiers, reader, saver, LOAD_ANYWAY)


def restore_all(restorer: Restorer, prompt: Sequence[int]) -> kv.Caches:
    """Restore every token from the store."""
    found = restorer.restore([*prompt, 0])
    if found.caches is None or found.n_tokens != len(prompt):
        raise KeepwarmError(f"Only {found.n_tokens} of {len(prompt)} tokens could be restored.")
    return found.caches


def restore_growth(shape: Shape, n_tokens: int, root: Path) -> int:
    disk = DiskTier(root, DiskLimits(min_free_bytes=0))
    restorer = restorer_of(shape, disk, Reader(Tiers([("disk", disk)])))
    release_memory()
    prompt = tokens_of(n_tokens)
    return peak_growth(lambda: restore_all(restorer, prompt))


def load_and_assemble(shape: Shape, n_tokens: int, files: Sequence[Path]) -> list[list[mx.array]]:
    """The same bytes with MLX only, unverified: load each file and copy its rows."""
    rows = (1, shape.n_heads, n_tokens, shape.width)
    layers = [[mx.zeros(rows, mx.bfloat16) for _ in "KV"] for _ in range(shape.n_layers)]
    for file in files:
        tensors: Any = mx.load(str(file))
        mx.eval(tensors)
        number = int(next(iter(tensors)).split("_")[1].removeprefix("B"))
        start = number * BLOCK_TOKENS
        for layer, pair in enumerate(layers):
            for i, name in enumerate(("keys", "values")):
                part = tensors[tensor_name(str(layer), number, name)]
                pair[i][..., start : start + part.shape[2], :] = part
        mx.eval(layers)
    return layers


def read_all(files: Sequence[Path], n_threads: int) -> int:
    """Read every byte of the files and discard it: the limit of disk and system."""
    with ThreadPoolExecutor(n_threads) as pool:
        return sum(pool.map(read_file, files))


def read_file(path: Path) -> int:
    memory, n_read = bytearray(READ_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while n_more := file.readinto(memory):
            n_read += n_more
    return n_read


# Many blocks


def costs(root: Path, n_blocks: int) -> list[Record]:
    """Costs measured in a child process; `root` grows from call to call."""
    fill(root, n_blocks)
    found = in_child(sample_costs, root, n_blocks)
    return [Cost(what, n_blocks, samples) for what, samples in found.items()]


def sample_costs(root: Path, n_blocks: int) -> dict[str, tuple[float, ...]]:
    before = psutil.Process().memory_info().rss
    limits = DiskLimits(min_free_bytes=0)
    disk = DiskTier(root, limits)
    prompt = tokens_of(PROMPT_TOKENS)
    plan = restorer_of(FLAT, disk, Reader(Tiers([("disk", disk)]))).plan(prompt)
    grown = psutil.Process().memory_info().rss - before
    restorer = server_restorer(disk, prompt)
    keys = [read.key for read in plan.point.reads]
    works = {
        "open": lambda: DiskTier(root, limits).close(),
        f"look up {PROMPT_TOKENS:,} tokens": lambda: restorer.plan(prompt),
        "mark found blocks as used": lambda: disk.touch(keys),
        "put one and delete it": lambda: _put_and_delete(disk),
    }
    seconds = {what: seconds_of(work, 2 * SAMPLES) for what, work in works.items()}
    return seconds | {MEMORY: (grown / n_blocks,)}


def server_restorer(disk: DiskTier, prompt: Sequence[int]) -> Restorer:
    """A restorer with a server's tiers; the prompt is also in memory, the queue is empty."""
    memory = MemoryTier(1 << 30)
    for ref in chain(NAMESPACE, prompt):
        memory.put(_small_record(ref))
    tiers = Tiers([("memory", memory), ("queue", MemoryTier(1 << 30)), ("disk", disk)])
    saver = MemorySaver(memory)
    return Restorer(NAMESPACE, FLAT.layout(), tiers, Reader(tiers), saver, LOAD_ANYWAY)


def _put_and_delete(disk: DiskTier) -> None:
    (ref,) = chain(NAMESPACE, [1, 2, 3])
    disk.put(_small_record(ref)).durable.result()
    disk.delete_all([ref.key])


def fill(root: Path, n_blocks: int) -> None:
    """Write files and rows as put does, without syncing, which would take minutes."""
    disk = DiskTier(root, DiskLimits(min_free_bytes=0))
    done = disk.index.lookups.n_blocks()
    disk.close()
    for number in range(256):
        (root / "blocks" / f"{number:02x}").mkdir(exist_ok=True)
    database = sqlite3.connect(root / INDEX, isolation_level=None)
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA cache_size = -262144")
    database.execute("BEGIN")
    for ref in islice(_endless_blocks(), done, n_blocks):
        _add(root, database, ref)
    database.execute("COMMIT")
    database.close()


def _endless_blocks() -> Iterator[BlockRef]:
    """Blocks of random prompts of 100,000 tokens, without end."""
    seeds = iter(range(1 << 30))
    return joined.from_iterable(chain(NAMESPACE, tokens_of(PROMPT_TOKENS, s)) for s in seeds)


def _add(root: Path, database: sqlite3.Connection, ref: BlockRef) -> None:
    data = b"".join(encode_record(_small_record(ref)))
    path_of(root, ref.key, Part.DELTA).write_bytes(data)
    columns = "key, parent, namespace, number, n_tokens, d, used"
    row = (ref.key, ref.parent, NAMESPACE, ref.number, ref.n_tokens, len(data), time.time())
    query = f"INSERT INTO blocks({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
    database.execute(query, row)
    database.execute("INSERT INTO tokens VALUES (?, ?, ?)", (ref.parent, ref.tokens, ref.key))


def _small_record(ref: BlockRef) -> store_record.Record:
    header = Header(NAMESPACE, ref.key, ref.parent, Part.DELTA, ref.number, ref.tokens)
    return store_record.Record(header, SMALL_RECORD)


def tokens_of(n_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=n_tokens)  # noqa: S311


def plot(found: Sequence[Cost], file: Path) -> None:
    """Plot every cost by number of blocks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    timed = [cost for cost in found if cost.what != MEMORY]
    for what in dict.fromkeys(cost.what for cost in timed):
        line = sorted((cost.n_blocks, cost.median * 1e3) for cost in timed if cost.what == what)
        axes.plot(*zip(*line, strict=True), "o-", label=what)
    axes.set(xlabel="blocks", ylabel="ms, median", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
