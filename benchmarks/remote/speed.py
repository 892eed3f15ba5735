"""Restoring and sharing records, verified, against plain reads and writes of the same bytes.

All in one run, in turn and with the same number of threads; only ratios are compared. Reading and
hashing the same bytes is measured beside: nobody who verifies can be faster.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from xxhash import xxh3_128

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockRef, Namespace, chain
from keepwarm.records.record import Header, Part, Record, Tensor, encode_record
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import Backend
from keepwarm.remote.compression import memory_for
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.tier import RemoteLookup

THREADS = 3  # as many as read a prompt
PATIENT = 1e6  # bytes a second that are expected: deadlines are not measured here
CLASS = "benchmark"
SOON = 60.0
FUSE = "FUSE"  # a directory on a share; one in memory is read faster than it can be hashed
GOALS = {"redis": 0.7, "s3": 0.7, "directory": 0.8, FUSE: 0.8}
PUT_GOAL, CPU_GOAL = 0.6, 1.6
PUT_ROUNDS = 7  # all of them stay in memory


class RecordSize(NamedTuple):
    n_records: int
    n_bytes: int  # of each
    n_layers: int  # with keys and values


SMALL = RecordSize(12, 4 << 20, 8)
LARGE = RecordSize(4, 28 << 20, 28)  # 256 tokens of a model of 3 billion parameters, in bf16


class Times(NamedTuple):
    """Against plain reads or writes."""

    rate: float
    cpu: float


@dataclass(frozen=True)
class Ratio:
    """A verified operation against the plain one."""

    place: str
    n_bytes: int  # of a record
    what: str
    rate: float  # of the plain rate
    cpu: float  # times the plain processor time
    goal: float
    hashed: Times | None = None  # the same for reading and hashing, and nothing else

    @property
    def holds(self) -> bool:
        return self.rate >= self.goal and (self.what == "put" or self.cpu <= CPU_GOAL)

    def __str__(self) -> str:
        verdict = "yes" if self.holds else "NO"
        hashed = ""
        if self.hashed is not None:
            hashed = f"; read and hashed {self.hashed.rate:.2f}, cpu {self.hashed.cpu:.2f}"
        return (
            f"{self.place:<10} {self.n_bytes >> 20:>3} MiB {self.what:<8} "
            f"rate {self.rate:5.2f} (goal {self.goal}) cpu {self.cpu:5.2f} {verdict}{hashed}"
        )


def measure(place: str, url: str, size: RecordSize, rounds: int) -> list[Ratio]:
    namespace, n_records = Namespace(os.urandom(32)), size.n_records
    refs = list(chain(namespace, list(range(BLOCK_TOKENS * n_records))))
    records = [_record(namespace, ref, size) for ref in refs]
    with closing(open_backend(url)) as backend, _tier(open_backend(url)) as tier:
        for record in records:
            if not tier.put(record).stored:
                raise CallError("it does not keep what is put")
        names = [_name(record.header) for record in records]
        raw_get, raw_put = _raw(place, url, backend)

        def ask() -> None:
            tier.speed.bytes_per_s = PATIENT
            tier.look_up(
                RemoteLookup(namespace, refs, len(refs), 0, True, 0, False), CallDeadline(SOON)
            )

        def restore(number: int) -> None:
            if tier.read(refs[number].key, Part.DELTA) is None:
                raise CallError("a record was not read in time")

        own = Namespace(os.urandom(32))
        n_puts = min(rounds, PUT_ROUNDS)
        new = iter(list(chain(own, range((n_puts + 1) * n_records * BLOCK_TOKENS))))

        def share(number: int) -> None:
            ref = next(new)
            header = Header(own, ref.key, ref.parent, Part.DELTA, 0, ref.tokens, {})
            if not tier.put(Record(header, records[number].tensors)).stored:
                raise CallError("a record was not put")

        def get(number: int) -> object:
            return raw_get(names[number])

        def get_and_hash(number: int) -> bytes:
            return xxh3_128(raw_get(names[number])).digest()

        bodies = [b"".join(encode_record(record)) for record in records]
        gets, hashed = _compare([get, restore, get_and_hash], n_records, rounds, ask)
        (puts,) = _compare([lambda n: raw_put(bodies[n]), share], n_records, n_puts)
    return [
        Ratio(place, size.n_bytes, "restore", *gets, GOALS[place], hashed),
        Ratio(place, size.n_bytes, "put", *puts, PUT_GOAL),
    ]


def _compare(
    works: Sequence[Callable[[int], object]],
    n: int,
    rounds: int,
    before: Callable[[], None] = lambda: None,
) -> list[Times]:
    """Each of the others against the first; medians."""
    found: list[list[Times]] = [[] for _ in works]
    with ThreadPoolExecutor(THREADS) as threads:
        for number in range(rounds + 1):
            before()
            order = works if number % 2 else works[::-1]  # none is always the first
            taken = {work: _timed(threads, work, n) for work in order}
            raw_s, raw_cpu = taken[works[0]]
            if number:  # the first warms up
                for times, work in zip(found, works, strict=True):
                    seconds, cpu = taken[work]
                    times.append(Times(raw_s / seconds, cpu / raw_cpu))
    return [Times(*map(statistics.median, zip(*times, strict=True))) for times in found[1:]]


def _timed(
    threads: ThreadPoolExecutor, work: Callable[[int], object], n: int
) -> tuple[float, float]:
    """What is read is dropped at once, by both: kept results would cost fresh pages."""

    def drop(number: int) -> None:
        work(number)

    began, cpu = time.perf_counter(), time.process_time()
    list(threads.map(drop, range(n)))
    return time.perf_counter() - began, time.process_time() - cpu


def _raw(
    place: str, url: str, backend: Backend
) -> tuple[Callable[[str], Any], Callable[[bytes], object]]:
    """Plain reads and writes by the fastest client of each place."""
    folder = f"raw/{uuid.uuid4().hex}"

    def new_name() -> str:
        return f"{folder}/{uuid.uuid4().hex}"

    if place in ("directory", FUSE):
        root = Path(urlsplit(url).path)
        (root / folder).mkdir(parents=True)

        def write(data: bytes) -> int:
            return (root / new_name()).write_bytes(data)

        return lambda name: (root / name).read_bytes(), write
    if place == "redis":  # our own client is the fastest there is
        return (
            lambda name: backend.read(name, memory_for, SOON),
            lambda data: backend.put(new_name(), [data], SOON),
        )
    import obstore

    from keepwarm.remote.s3 import S3Address, open_store

    store = open_store(S3Address.parse(urlsplit(url)), "")
    return (
        lambda name: obstore.get(store, name).bytes(),
        lambda data: obstore.put(store, new_name(), data, use_multipart=False),
    )


@contextmanager
def _tier(backend: Backend) -> Iterator[RemoteTier]:
    tier = RemoteTier(backend, CLASS)
    try:
        until = time.monotonic() + SOON
        while not tier.health.wait_until_tried(SOON):
            if tier.health.refused or time.monotonic() > until:
                raise CallError(tier.health.refused or "it does not answer")
            time.sleep(0.1)
        yield tier
    finally:
        tier.close()


def _name(header: Header) -> str:
    return RemoteNames(CLASS).of(RemoteRecord.of(header))


def _record(namespace: Namespace, ref: BlockRef, record: RecordSize) -> Record:
    """Keys and values of some layers, as a block of a model has them."""
    header = Header(namespace, ref.key, ref.parent, Part.DELTA, ref.number, ref.tokens, {})
    size = record.n_bytes // (2 * record.n_layers)
    tensors = tuple(
        Tensor(f"L{layer}_B{ref.number}_{kind}", "U8", (size,), memoryview(os.urandom(size)))
        for layer in range(record.n_layers)
        for kind in "KV"
    )
    return Record(header, tensors)
