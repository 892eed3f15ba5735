"""How fast one core rounds blocks of bf16 numbers, and how fast it restores them from disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.price.codecs import Rounding, coded, decoded
from keepwarm.cache.restore.records import block_of
from keepwarm.kv.buffers import HostArray
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, block_key, pack, root
from keepwarm.records.at_rest import WANTED, at_rest
from keepwarm.records.record import Header, Part, ReadBuffer, Record, RecordView, Tensor
from keepwarm.store.disk.disk import DiskTier

HEADS, WIDTH, N_BLOCKS, N_TENSORS = 8, 128, 32, 16
NAMESPACE = Namespace(bytes(32))


def rates(rounding: Rounding) -> dict[str, float]:
    """MB of bf16 a second of processor time, the best of five; as in `codecs`, in plain numpy."""
    blocks = list(_numbers(N_BLOCKS))
    kept = [coded(_widened(block), rounding) for block in blocks]
    n_bytes = sum(block.nbytes for block in blocks)
    times = {
        "code": _best(lambda: [coded(_widened(block), rounding) for block in blocks]),
        "decode": _best(lambda: [_narrowed(decoded(block, rounding)) for block in kept]),
    }
    return {name: n_bytes / 1e6 / seconds for name, seconds in times.items()}


def stored_rates() -> dict[str, dict[str, float]]:
    """The same of records, as the writer's and reader threads do it: rounding, and reading a file
    that the page cache has, verifying it and filling rows."""
    exact = _records({})
    wanted = _records({WANTED: "q8"})
    n_mb = sum(record.n_bytes for record in exact) / 1e6
    round_s = _best(lambda: [at_rest(record) for record in wanted])
    restores = {"exact": _restore_s(exact), "q8": _restore_s(wanted)}
    found = {name: {"restore": n_mb / seconds} for name, seconds in restores.items()}
    found["q8"]["round"] = n_mb / round_s
    return found


def _records(extra: dict[str, str]) -> list[Record]:
    records, parent = [], root(NAMESPACE)
    shape = (1, HEADS, BLOCK_TOKENS, WIDTH)
    tensors = [
        Tensor(f"L{number}_B0_K", "BF16", shape, block.reshape(-1).data.cast("B"))
        for number, block in enumerate(_numbers(N_TENSORS))
    ]
    for number in range(N_BLOCKS // 4):
        tokens = pack([number] * BLOCK_TOKENS)
        key = block_key(NAMESPACE, parent, tokens)
        header = Header(NAMESPACE, key, parent, Part.DELTA, number, tokens, extra)
        records.append(Record(header, tensors))
        parent = key
    return records


def _restore_s(records: Sequence[Record]) -> float:
    memory = np.empty((1, HEADS, BLOCK_TOKENS, WIDTH), np.uint16)
    buffer = ReadBuffer()

    def use(view: RecordView) -> None:
        for rows in block_of(view).delta.values():
            assert isinstance(rows, HostArray)
            rows.write_to(memory)

    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(Path(folder))
        keys = [record.header.key for record in records]
        for record in records:
            disk.put(record)
        seconds = _best(lambda: [disk.visit(key, Part.DELTA, use, buffer) for key in keys])
        disk.close()
    return seconds


def _numbers(n_blocks: int) -> Any:
    shape = (n_blocks, HEADS, BLOCK_TOKENS, WIDTH)
    numbers = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _widened(block: Any) -> Any:
    return (block.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrowed(rows: Any) -> Any:
    bits = np.ascontiguousarray(rows).view(np.uint32)
    bits += np.uint32(0x8000)
    return (bits >> np.uint32(16)).astype(np.uint16)


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)
