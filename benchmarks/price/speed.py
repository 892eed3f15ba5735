"""How fast blocks are rounded and restored, as the writer's and reader threads and the device do
it, and what rounding takes beside an answer.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from keepwarm import kv
from keepwarm.cache.restore.loading import READER_THREADS
from keepwarm.cache.restore.records import block_of, records_of
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.store import Budgets, Store
from keepwarm.config import load as load_settings
from keepwarm.engine.engine import Engine
from keepwarm.kv.buffers import HostArray
from keepwarm.kv.kinds import Caches
from keepwarm.kv.slabs import SlabPool
from keepwarm.kv.slices import cut_blocks
from keepwarm.models.load import Model
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, chain
from keepwarm.prefix.policy import Policy
from keepwarm.records.at_rest import AT_REST, EXACT, Q4, at_rest
from keepwarm.records.record import Part, ReadBuffer, Record, RecordView
from keepwarm.store.disk.disk import DiskTier
from keepwarm.text.request import KVOptions, Request, Sampling

HEADS, WIDTH = 8, 128
RESTORED = 7936  # tokens, in whole blocks, and room for one more in a context of 8,192
NAMESPACE = Namespace(bytes(32))
TYPES = {"bf16": mx.bfloat16, "fp32": mx.float32}

Rates: TypeAlias = dict[str, dict[str, float]]


def stored_rates(n_layers: int = 8, n_tokens: int = 2048) -> dict[str, Rates]:
    """MB a second of processor time, the best of five: rounding, and reading a file that the page
    cache has, verifying it and filling rows; by type and codec."""
    return {name: _stored(_caches(n_layers, n_tokens, dtype)) for name, dtype in TYPES.items()}


def _stored(caches: Caches) -> Rates:
    found: Rates = {}
    for codec in AT_REST:
        records = list(_records(caches, codec))
        n_mb = sum(record.n_bytes for record in records) / 1e6
        found[codec] = {"restore": n_mb / _restore_s(records)}
        if codec != EXACT:
            found[codec]["round"] = n_mb / _best(partial(_round, records))
    return found


def _round(records: Sequence[Record]) -> list[Record]:
    return [at_rest(record) for record in records]


def _restore_s(records: Sequence[Record]) -> float:
    buffer, memory = ReadBuffer(), dict[Any, Any]()

    def use(view: RecordView) -> None:
        for rows in block_of(view).delta.values():
            assert isinstance(rows, HostArray)
            item = np.uint16 if rows.dtype == mx.bfloat16 else np.float32
            rows.write_to(memory.setdefault(rows.shape, np.empty(rows.shape, item)))

    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(Path(folder))
        keys = [record.header.key for record in records]
        for record in records:
            disk.put(record)
        seconds = _best(lambda: [disk.visit(key, Part.DELTA, use, buffer) for key in keys])
        disk.close()
    return seconds


def device_rates(n_layers: int = 32, n_tokens: int = 8192) -> Rates:
    """MB of bf16 a second by the clock, the best of three: blocks in memory that become caches on
    the default device, with rows that reader threads or the device make whole; and how far the two
    are apart."""
    caches = _caches(n_layers, n_tokens, mx.bfloat16)
    layout, pool, found = kv.layout_of(caches), SlabPool.if_cuda(), Rates()
    n_mb = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) / 1e6
    for codec in AT_REST:
        records = _round(list(_records(caches, codec)))
        by_threads = partial(_assembled, records, layout, n_tokens, pool, _whole_block)
        found[codec] = {"threads": n_mb / _best(by_threads, 3, time.perf_counter)}
        if codec != EXACT:
            by_device = partial(_assembled, records, layout, n_tokens, pool, block_of)
            found[codec]["device"] = n_mb / _best(by_device, 3, time.perf_counter)
            found[codec]["apart"] = _apart(by_threads(), by_device())
    if pool is not None:
        pool.close()
    return found


def _assembled(
    records: Sequence[Record],
    layout: kv.Layout,
    n_tokens: int,
    pool: SlabPool | None,
    to_block: Callable[[Record], kv.Block],
) -> Caches:
    assembly = kv.Assembly(layout, n_tokens, pool)
    with ThreadPoolExecutor(READER_THREADS) as threads:
        for _ in threads.map(lambda record: assembly.add(to_block(record)), records):
            assembly.advance(is_complete=False)
    return assembly.finish()


def _whole_block(record: Record) -> kv.Block:
    """With rows that this thread makes whole."""
    block = block_of(record)
    rows = {name: rows for name, rows in block.delta.items() if isinstance(rows, HostArray)}
    return replace(block, delta={name: HostArray(r.words, r.dtype) for name, r in rows.items()})


def _apart(one: Caches, other: Caches) -> float:
    pairs = zip(one, other, strict=True)
    sides = [(x.keys - y.keys, x.values - y.values) for x, y in pairs]
    return max(float(mx.abs(off).max()) for both in sides for off in both)


def decode_rates(model: Model, n_tokens: int = 512, n_rounds: int = 24) -> dict[str, float]:
    """Tokens a second of processor time while an answer is decoded and its blocks are written, by
    codec, as a share of exact blocks in the same round; the median of some rounds, whose order
    turns."""
    shares: dict[str, list[float]] = {codec: [] for codec in AT_REST}
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings({"KEEPWARM_HOME": folder})
        with Store(settings=settings) as store, Engine(model, store, settings=settings) as engine:
            for number in range(n_rounds):
                first = number % len(AT_REST)
                order = [*AT_REST[first:], *AT_REST[:first]]
                rates = {codec: _decode(engine, codec, number, n_tokens) for codec in order}
                for codec, rate in rates.items():
                    shares[codec].append(rate / rates[EXACT])
    return {codec: median(found) for codec, found in shares.items()}


def _decode(engine: Engine, codec: str, seed: int, n_tokens: int) -> float:
    prompt = np.random.default_rng(seed).integers(100, 4000, 300).tolist()
    greedy = Sampling(max_tokens=n_tokens, temperature=0.0)
    began = time.process_time()
    request = Request(prompt=prompt, sampling=greedy, kv=KVOptions(at_rest=codec))
    result = engine.submit(request).result()
    engine.wait_until_saved()
    return result.usage.completion_tokens / (time.process_time() - began)


def first_tokens(model: Model, n_tokens: int, n_rounds: int) -> Rates:
    """Seconds by the clock until a conversation that is restored from disk has its next token, by
    codec, with its files in the page cache (warm) and not (cold); the median of some rounds, in
    turn. What is restored are random numbers in the model's shapes."""
    took = {codec: {"cold": list[float](), "warm": list[float]()} for codec in AT_REST}
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings({"KEEPWARM_HOME": folder})
        with (
            Store(settings=settings, budgets=Budgets(memory_bytes=0)) as store,
            Engine(model, store, settings=settings) as engine,
        ):
            for codec in AT_REST:
                restorer = engine.lane_of(kv=KVOptions(at_rest=codec)).restorer
                engine.call(partial(_keep, restorer, n_tokens)).result()
            engine.wait_until_saved()
            for _ in range(n_rounds):
                for codec in AT_REST:
                    _forget_pages(Path(folder))
                    for way in ("cold", "warm"):
                        took[codec][way].append(_first_token(engine, codec, n_tokens))
    return {c: {way: median(found) for way, found in ways.items()} for c, ways in took.items()}


def _keep(restorer: Restorer, n_tokens: int) -> None:
    keys = [leaf.tensors["keys"] for leaf in restorer.layout.leaves()]
    _, n_heads, _, width = keys[0].with_rows(n_tokens)
    caches = _caches(len(keys), n_tokens, keys[0].dtype, n_heads, width)
    restorer.open(range(n_tokens)).finish(range(n_tokens), caches)


def _first_token(engine: Engine, codec: str, n_tokens: int) -> float:
    request = Request(
        prompt=[*range(n_tokens), 0],
        sampling=Sampling(max_tokens=1, temperature=0.0),
        kv=KVOptions(at_rest=codec),
        policy=Policy.READ_ONLY,
    )
    began = time.perf_counter()
    result = engine.submit(request).result()
    seconds = time.perf_counter() - began
    assert result.receipt.reused == {"disk": n_tokens}, result.receipt
    return seconds


def _forget_pages(folder: Path) -> None:
    """Have the operating system drop what it has read of these files."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _caches(
    n_layers: int, n_tokens: int, dtype: mx.Dtype, n_heads: int = HEADS, width: int = WIDTH
) -> Caches:
    caches = [KVCache() for _ in range(n_layers)]
    for seed, cache in enumerate(caches):
        rows = mx.random.normal((1, n_heads, n_tokens, width), key=mx.random.key(seed))
        rows = rows.astype(dtype)
        cache.update_and_fetch(rows, -rows)
    mx.eval([cache.state for cache in caches])
    return caches


def _records(caches: Caches, codec: str) -> Iterator[Record]:
    n_tokens = caches[0].offset
    last = n_tokens // BLOCK_TOKENS - 1
    refs = chain(NAMESPACE, range(n_tokens))
    for ref, block in zip(refs, cut_blocks(caches, n_tokens), strict=True):
        is_exact = codec == EXACT or (codec == Q4 and ref.number in (0, last))
        yield from records_of(NAMESPACE, ref, block, codec=None if is_exact else codec)


def _best(
    work: Callable[[], object], n_rounds: int = 5, clock: Callable[[], float] = time.thread_time
) -> float:
    seconds = []
    for _ in range(n_rounds):
        began = clock()
        work()
        seconds.append(clock() - began)
    return min(seconds)
