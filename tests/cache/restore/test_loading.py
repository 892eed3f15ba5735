"""Records are read by several threads into caches, while others have the disk bring the next.

A restore that cannot begin leaves nobody behind, and one that has ended no memory.
"""

import threading
import time
import weakref
from contextlib import closing

import mlx.core as mx
import pytest

from keepwarm.cache.restore import loading
from keepwarm.cache.restore.loading import Loading, Reader
from keepwarm.cache.restore.plan import Point, Read
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.errors import CorruptBlock
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout, TensorSpec
from keepwarm.records.record import Part
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.kit.waiting import no_collection, wait_until
from tests.store.kit import refs_of, tokens_of, wanting_q8

MIB = 1 << 20

needs_reading_through = pytest.mark.linux


def test_records_are_read_in_parallel_and_a_miss_is_told(disk, records):
    for record in records:
        disk.put(record)
    reader = Reader(Tiers([("disk", disk)]), n_threads=3)
    reads = [Read(r.header.key, Part.DELTA, i) for i, r in enumerate(records)]
    seen = []
    started = reader.start(reads, lambda: lambda read, record: seen.append(record.header.number))
    calls = []
    outcome = started.outcome(meanwhile=lambda: calls.append(started.is_done))
    assert outcome[:2] == (["disk"] * len(records), set())
    assert len(calls) == len(records), "whoever waits works after each"
    assert started.is_done
    assert sorted(seen) == list(range(len(records)))
    missing = Read(type(reads[0].key)(bytes(20)), Part.DELTA, 9)
    # Only what is really missing is told: the others may serve the next plan.
    started = reader.start([missing, *reads], lambda: lambda read, record: None)
    outcome = started.outcome()
    assert (outcome.missed, outcome.fault) == ({missing.key}, "missing")
    reader.close()


class Watched:
    """A tier that notes what it was told to fetch."""

    def __init__(self, tier):
        self.tier = tier
        self.fetched = []

    def __getattr__(self, name):
        return getattr(self.tier, name)

    def prefetch(self, key, part):
        if self.tier.prefetch(key, part):
            self.fetched.append(key)
            return True
        return False


def all_fetched(reader):
    """Wait for what closing would cancel."""
    reader._prefetch_pool.shutdown(wait=True)


@needs_reading_through
def test_what_waits_to_be_read_is_fetched_from_where_it_lies(disk, records, reads):
    """And not what a faster tier has."""
    memory = MemoryTier(64 * MIB)
    memory.put(records[-1])
    near, far = Watched(memory), Watched(disk)
    reader = Reader(Tiers([("memory", near), ("disk", far)]), n_threads=1)
    gate = threading.Event()
    started = reader.start(reads, lambda: lambda read, record: gate.wait(300))
    _until(lambda: near.fetched and len(far.fetched) == len(reads) - 1)
    assert set(far.fetched) == {read.key for read in reads[:-1]}
    assert near.fetched == [reads[-1].key]
    gate.set()
    started.outcome()
    reader.close()


@needs_reading_through
def test_the_disk_works_while_a_place_is_prepared(disk, reads):
    far = Watched(disk)
    reader = Reader(Tiers([("disk", far)]), n_threads=1)

    def prepare():
        _until(lambda: len(far.fetched) == len(reads))
        return lambda read, record: None

    assert reader.start(reads, prepare).outcome().missed == set()
    reader.close()


def test_files_are_opened_while_a_place_is_prepared(disk, reads):
    opened = []

    class Seen(Watched):
        def visit(self, key, part, use, buffer):
            return self.tier.visit(key, part, lambda one: (opened.append(key), use(one)), buffer)

    reader = Reader(Tiers([("disk", Seen(disk))]), n_threads=2)
    taken = []

    def prepare():
        _until(lambda: len(opened) == 2)
        assert taken == []
        return lambda read, record: taken.append(read.key)

    assert reader.start(reads, prepare).outcome().missed == set()
    assert sorted(taken) == sorted(read.key for read in reads)
    reader.close()


@needs_reading_through
def test_what_was_read_meanwhile_is_not_fetched(disk, reads):
    gate = threading.Event()

    class Slow(Watched):
        def prefetch(self, key, part):
            assert gate.wait(300)
            return super().prefetch(key, part)

    far = Slow(disk)
    reader = Reader(Tiers([("disk", far)]), n_threads=1)
    reader.start(reads, lambda: lambda read, record: None).outcome()
    gate.set()
    all_fetched(reader)
    reader.close()
    assert set(far.fetched) <= {read.key for read in reads[: loading.PREFETCH_THREADS]}


@needs_reading_through
def test_what_is_read_aside_is_fetched_for_nobody(disk, reads):
    """Whoever waits has the disk to himself."""
    far = Watched(disk)
    reader = Reader(Tiers([("disk", far)]), n_threads=1)
    started = reader.start(reads, lambda: lambda read, record: None, in_background=True)
    started.outcome()
    all_fetched(reader)
    reader.close()
    assert far.fetched == []


@pytest.mark.parametrize("stops", ["failing", "stopping", "closing"])
def test_whoever_fetches_waits_for_nobody_who_is_gone(stops, disk, reads, monkeypatch):
    """There are more records than may be fetched ahead, and none of them is ever read."""
    monkeypatch.setattr(loading, "MAX_PREFETCHED", 1)
    reader = Reader(Tiers([("disk", disk)]), n_threads=1)
    entered, gate = threading.Event(), threading.Event()

    def wait(read, record):
        entered.set()
        gate.wait(300)

    def fail():
        raise MemoryError

    if stops == "failing":
        with pytest.raises(MemoryError):
            reader.start(reads, fail)
    else:
        started = reader.start(reads, lambda: wait)
        assert entered.wait(300)
        if stops == "stopping":
            started.stop()
    gate.set()
    ended = threading.Thread(target=reader.close, daemon=True)
    ended.start()
    ended.join(300)
    assert not ended.is_alive()


@needs_reading_through
def test_nobody_runs_too_far_ahead(disk, reads, monkeypatch):
    monkeypatch.setattr(loading, "MAX_PREFETCHED", 2)
    far = Watched(disk)
    reader = Reader(Tiers([("disk", far)]), n_threads=1)
    gates = [threading.Event() for _ in reads]
    started = reader.start(reads, lambda: lambda read, record: gates[read.number].wait(300))
    _until(lambda: len(far.fetched) == 2)
    time.sleep(0.05)
    assert len(far.fetched) == 2
    gates[0].set()
    _until(lambda: len(far.fetched) == 3)
    for gate in gates:
        gate.set()
    started.outcome()
    reader.close()


def _until(holds):
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_record_that_is_refused_counts_as_missed(disk, records):
    disk.put(records[0])
    reader = Reader(Tiers([("disk", disk)]))

    def refuse(read, record):
        raise CorruptBlock("0", 0, "it is not wanted")

    key = records[0].header.key
    outcome = reader.start([Read(key, Part.DELTA, 0)], lambda: refuse).outcome()
    assert (outcome.missed, outcome.fault) == ({key}, "layout")
    reader.close()


@pytest.mark.parametrize(("at_rest", "fault"), [("q8", None), ("q4", "layout"), (None, "layout")])
def test_a_record_that_is_rounded_otherwise_than_its_namespace_is_refused(at_rest, fault, disk):
    (ref,) = refs_of(1)
    disk.put(wanting_q8(ref))
    point = Point(256, (Read(ref.key, Part.DELTA, 0),), 0)
    with closing(Reader(Tiers([("disk", disk)]))) as reader:
        saver = MemorySaver(None)
        begun = Loading(tokens_of(256), point, LAYOUT, reader, saver, at_rest=at_rest)
        assert begun.finish().fault == fault
    assert (ref.key in disk.have([ref.key])) == (fault is None)


SPEC = TensorSpec((None, 8), mx.uint8)  # what the kit's records hold
LAYOUT = Layout((LayerSpec("0", Kind.DELTA, "KVCache", {"keys": SPEC, "values": SPEC}, {}),))


@pytest.mark.parametrize("n_begun", [0, 1, 4])
def test_a_start_that_fails_half_way_leaves_nobody_waiting(n_begun, disk, reads, monkeypatch):
    """Who has opened a file waits for its place, who fetches waits until others were read."""
    monkeypatch.setattr(loading, "MAX_PREFETCHED", 1)
    reader = Reader(Tiers([("disk", disk)]))
    submit, begun = reader._pool.submit, []

    def few(*given):
        if len(begun) == n_begun:
            raise RuntimeError("can't start new thread")
        begun.append(submit(*given))
        return begun[-1]

    monkeypatch.setattr(reader._pool, "submit", few)
    point = Point(256 * len(reads), tuple(reads), 0)
    with pytest.raises(RuntimeError, match="new thread"):
        Loading(tokens_of(point.n_tokens), point, LAYOUT, reader, MemorySaver(MemoryTier(0)))
    ended = threading.Thread(target=reader.close, daemon=True)
    ended.start()
    ended.join(300)
    assert not ended.is_alive()
    assert all(future.done() for future in begun)


def test_what_was_restored_is_freed_without_the_garbage_collector(disk, reads):
    """It would free gigabytes of a device at once, in the middle of another request."""
    reader = Reader(Tiers([("disk", disk)]))
    point = Point(256 * len(reads), tuple(reads), 0)
    with closing(reader), no_collection():
        begun = Loading(
            tokens_of(point.n_tokens), point, LAYOUT, reader, MemorySaver(MemoryTier(0))
        )
        assert begun.finish().restored is not None
        kept = weakref.ref(begun)
        del begun
        wait_until(lambda: kept() is None)
