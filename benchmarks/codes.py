"""`python -m benchmarks.codes`: what the lossless code of shared tiers saves, and at which rate.

The rows that a model computes for a text, in bf16: how much smaller they become and in how much
processor time; then the same blocks loaded from a Redis behind slow lines, as they are and coded,
in turn. Needs `redis-server` or `valkey-server`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from tests.kit.redis_server import redis_server

from benchmarks.remote.lines import slow_lines
from keepwarm import load  # before mlx, for a fast BLAS
from keepwarm.kv import make_caches
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockRef, Namespace, chain
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.blobs.opening import open_backend
from keepwarm.store.buffers import code_record, count_bytes, undo_code
from keepwarm.store.record import Header, Part, Record, Tensor, encode_record
from keepwarm.store.remote.question import Question
from keepwarm.store.remote.tier import READERS, RemoteTier

TEXT = Path(__file__).parents[1] / "docs" / "serving.md"
NAMESPACE = Namespace(bytes(32))
ROUNDS = 5
RATES = (5, 20, 50, 100, 500)  # MB/s
MB = 1e6
NEVER, ALWAYS = 1e15, 1e3  # bytes a second at which a record is not coded, and is
PATIENT = 1e5  # so slow that nothing is late
SOON = 60.0


def main(
    model: Annotated[str, typer.Option(help="Whose keys and values.")] = "smollm2",
    n_blocks: Annotated[int, typer.Option(help="Blocks of a text.")] = 4,
    rounds: Annotated[int, typer.Option(help="Loads of each kind.")] = ROUNDS,
) -> None:
    """Measure the code on the keys and values of a text, and loads over slow lines."""
    refs, records = blocks_of(model, n_blocks)
    print(_processor_time(records))
    with (
        tempfile.TemporaryDirectory(prefix="keepwarm-codes-") as folder,
        redis_server(Path(folder)) as server,
    ):
        for name, rate in (("plain", NEVER), ("coded", ALWAYS)):
            with tier_at(server.url, name) as tier:
                print(f"{name}: {_put(tier, records, rate) / MB:.1f} MB in the place")
        with slow_lines(server.port, [MB * rate for rate in RATES]) as ports:
            for rate, port in zip(RATES, ports, strict=True):
                print(compare(f"redis://127.0.0.1:{port}", rate, refs, records, rounds))


def compare(
    url: str, mb_per_s: int, refs: Sequence[BlockRef], records: Sequence[Record], rounds: int
) -> str:
    """Medians of loads in turn; and which of both a machine behind this line writes."""
    times: dict[str, list[float]] = {"plain": [], "coded": []}
    with tier_at(url, f"chosen-{mb_per_s}") as tier:
        n_sent = sum(record.n_bytes - tier.put(record).n_saved for record in records)
        measured = tier.speed.line_bytes_per_s
    for _ in range(rounds):
        for name, taken in times.items():
            taken.append(_load_s(url, name, refs))
    plain, coded = (statistics.median(taken) for taken in times.values())
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    return (
        f"{mb_per_s:>3} MB/s (measured {measured / MB:.0f}): plain {plain:.2f} s, coded "
        f"{coded:.2f} s, ratio {ratio:.2f}; chosen: {n_sent / MB:.1f} MB"
    )


def blocks_of(name: str, n_blocks: int) -> tuple[list[BlockRef], list[Record]]:
    """Keys and values of every layer, which must be plain attention, in bf16."""
    import mlx.core as mx
    import numpy as np

    model = load(name)
    tokens = model.tokenizer.encode(TEXT.read_text())[: n_blocks * BLOCK_TOKENS]
    caches = make_caches(model.module)
    model.module(mx.array([tokens]), cache=caches)
    refs, records = list(chain(NAMESPACE, tokens)), []
    for ref in refs:
        tensors, rows = [], slice(ref.number * BLOCK_TOKENS, (ref.number + 1) * BLOCK_TOKENS)
        for n, cache in enumerate(caches):
            for what, whole in (("K", cache.keys), ("V", cache.values)):
                own = whole[:, :, rows].astype(mx.bfloat16)
                data = memoryview(np.array(own.view(mx.uint16)).tobytes())
                tensors.append(Tensor(f"L{n}_B{ref.number}_{what}", "BF16", own.shape, data))
        header = Header(NAMESPACE, ref.key, ref.parent, Part.DELTA, ref.number, ref.tokens)
        records.append(Record(header, tuple(tensors)))
    return refs, records


@contextmanager
def tier_at(url: str, numerics: str) -> Iterator[RemoteTier]:
    tier = RemoteTier(open_backend(url), numerics)
    try:
        if not tier.wait_until_tried(SOON):
            raise RuntimeError("It does not answer.")
        yield tier
    finally:
        tier.close()


def _put(tier: RemoteTier, records: Sequence[Record], bytes_per_s: float) -> int:
    """Bytes that were sent."""
    tier.speed.bytes_per_s = tier.speed.put_bytes_per_s = bytes_per_s
    puts = [tier.put(record) for record in records]
    if not all(put.stored for put in puts):
        raise RuntimeError("It does not keep what is put.")
    return sum(record.n_bytes for record in records) - sum(put.n_saved for put in puts)


def _load_s(url: str, numerics: str, refs: Sequence[BlockRef]) -> float:
    """Until all records are read and verified, by as many threads as read a prompt."""
    with tier_at(url, numerics) as tier, ThreadPoolExecutor(READERS) as readers:
        tier.ask(Question(NAMESPACE, refs, len(refs), 0, True, 0, False), CallDeadline(SOON))
        tier.speed.bytes_per_s = PATIENT
        began = time.perf_counter()
        found = list(readers.map(lambda ref: tier.read(ref.key, Part.DELTA), refs))
        if None in found:
            raise RuntimeError("A record was not read in time.")
        return time.perf_counter() - began


def _processor_time(records: Sequence[Record]) -> str:
    """Of coding and decoding; the fastest of some rounds."""
    plain = [encode_record(record) for record in records]
    n_bytes, coding, decoding = sum(map(count_bytes, plain)), [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        pairs = zip(records, plain, strict=True)
        coded = [b"".join(code_record(*pair, ALWAYS)) for pair in pairs]
        between = time.process_time()
        back = [undo_code(memoryview(one)) for one in coded]
        coding.append(between - began)
        decoding.append(time.process_time() - between)
        if [bytes(one) for one in back] != [b"".join(one) for one in plain]:
            raise ValueError("The code has changed a record.")
    gain = n_bytes / sum(map(len, coded))
    rates = [n_bytes / min(taken) / MB for taken in (coding, decoding)]
    return (
        f"gain {gain:.2f}; one core codes {rates[0]:.0f} and decodes {rates[1]:.0f} MB/s; "
        f"written below {rates[1] * (1 - 1 / gain):.0f} MB/s"
    )


if __name__ == "__main__":
    typer.run(main)
