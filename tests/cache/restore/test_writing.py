"""Records reach the disk beside the work, in order, and are findable from the first moment."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest

from keepwarm.cache.restore import writing
from keepwarm.cache.restore.forgetting import Deletions, RequestClaim, Share
from keepwarm.cache.restore.writing import WRITE_BACKOFF_S, MemorySaver, Writer
from keepwarm.prefix.policy import Policy
from keepwarm.records.at_rest import at_rest
from keepwarm.records.record import Part, ReadBuffer
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import Outdated
from keepwarm.store.tiers import Tiers
from tests.kit.waiting import wait_until
from tests.store import kit

MIB = 1 << 20


class Gated:
    """A disk whose writes wait until they are let through."""

    def __init__(self, disk):
        self.disk = disk
        self.gate = threading.Event()

    def __getattr__(self, name):
        return getattr(self.disk, name)

    def put(self, record):
        assert self.gate.wait(300)
        return self.disk.put(record)


def test_a_record_is_findable_before_it_is_on_disk(disk, records):
    gated = Gated(disk)
    writer = Writer(None, gated, 64 * MIB)
    tiers = Tiers([("queue", writer.queued), ("disk", disk)])
    writer.put(records[0], Policy.READ_WRITE)
    key = records[0].header.key
    assert key not in disk.have([key])
    seen = []
    tiers.visit(
        key, Part.DELTA, lambda visit: seen.append(bytes(visit.tensors[0].data)), ReadBuffer()
    )
    assert seen == [bytes(records[0].tensors[0].data)]
    gated.gate.set()
    writer.flush()
    assert key in disk.have([key])
    assert not writer.queued.have([key])
    writer.close()


def test_flush_of_what_was_put_by_then_does_not_wait_for_what_was_put_later(disk, records):
    class FirstPasses(Gated):
        def put(self, record):
            is_first = record.header.key == records[0].header.key
            return disk.put(record) if is_first else super().put(record)

    gated = FirstPasses(disk)
    writer = Writer(None, gated, 64 * MIB)
    writer.put(records[0], Policy.READ_WRITE)
    by_then = writer.n_put
    writer.put(records[1], Policy.READ_WRITE)
    flushing = threading.Thread(target=writer.flush, args=(by_then,))
    flushing.start()
    flushing.join(60)
    was_flushed = not flushing.is_alive()
    gated.gate.set()
    writer.close()
    assert was_flushed
    assert disk.have([records[0].header.key])


def test_what_lasts_is_known_from_the_moment_it_is_put(disk, records):
    """What is in memory alone does not last."""
    gated, memory = Gated(disk), MemoryTier(64 * MIB)
    writer = Writer(memory, gated, 64 * MIB)
    keys = [record.header.key for record in records[:2]]
    writer.put(records[0], Policy.READ_WRITE)
    writer.put(records[1], Policy.EPHEMERAL)
    assert memory.have(keys).keys() == set(keys)
    assert writer.kept(keys).keys() == {keys[0]}
    gated.gate.set()
    writer.flush()
    assert writer.kept(keys).keys() == {keys[0]}
    assert MemorySaver(memory).kept(keys).keys() == set(keys)
    writer.close()
    memory.close()


class Unasked(Gated):
    """A disk that the thread which puts a record must not ask."""

    def have(self, keys):
        assert threading.current_thread().name == "keepwarm-writer"
        return self.disk.have(keys)


def test_writer_put_of_any_block_does_not_ask_the_disk(disk, records):
    writer = Writer(None, Unasked(disk), 64 * MIB)
    writer._disk.gate.set()
    for record in records:
        writer.put(record, Policy.READ_WRITE)
    writer.close()
    assert len(disk.have([r.header.key for r in records])) == len(records)


def test_writer_saves_no_block_whose_parent_was_not_saved(disk, records):
    writer = Writer(None, disk, 64 * MIB)
    writer.put(records[1], Policy.READ_WRITE)
    writer.close()
    assert not disk.have([records[1].header.key])
    assert lost(writer) == {"orphan": 1}


def lost(writer):
    return {why: n for why, n in writer.stats().lost.items() if n}


def test_what_a_full_disk_refuses_is_no_full_queue(disk, records):
    disk.limits = DiskLimits(max_bytes=1, min_free_bytes=0)
    writer = Writer(None, disk, 64 * MIB)
    for record in records:
        writer.put(record, Policy.READ_WRITE)
    writer.close()
    assert lost(writer) == {"disk_full": 1, "orphan": len(records) - 1}


def test_what_was_forgotten_was_not_dropped(disk, records):
    """One is being written, the others wait."""
    gated = Gated(disk)
    writer = Writer(None, gated, 64 * MIB)
    claim = RequestClaim(None, "", kit.NAMESPACE, [1] * 2000, since=0, to_disk=True)
    for record in records:
        writer.put(record, Policy.READ_WRITE, share=Share(claim, 256))
    writer.forget(Deletions(None, str))
    assert not writer.kept([record.header.key for record in records[1:]]), "the control"
    gated.gate.set()
    writer.close()
    assert lost(writer) == {}


def test_what_was_forgotten_while_it_was_written_was_not_dropped(disk, records):
    """Another process has deleted it: it is tried again, and forgotten then."""

    class Changed(Gated):
        def put(self, record):
            raise Outdated

    def catch_up():
        for each in writers:
            each.forget(Deletions(None, str))

    writers = []
    claim = RequestClaim(None, "", kit.NAMESPACE, [1] * 2000, since=0, to_disk=True)
    writer = Writer(None, Changed(disk), 64 * MIB, catch_up=catch_up)
    writers.append(writer)
    writer.put(records[0], Policy.READ_WRITE, share=Share(claim, 256))
    writer.close()
    assert lost(writer) == {}
    assert not writer.written


def test_writer_counts_of_two_threads_are_not_lost(disk, monkeypatch):
    """Those for which the queue has no room, and those that the disk refuses."""

    class Broken(Gated):
        def put(self, record):
            raise RuntimeError("no such luck")

    def replace(stats, **sums):
        time.sleep(0.0005)  # between reading a count and writing it
        return dataclasses.replace(stats, **sums)

    monkeypatch.setattr(writing, "replace", replace)
    made = [kit.record(kit.first_block([n]), n_bytes=64 << 5 * (n % 2)) for n in range(200)]
    writer = Writer(None, Broken(disk), 1024)
    for one in made:
        writer.put(one, Policy.READ_WRITE)
    writer.close()
    assert writer.stats().failed > 0
    assert lost(writer).keys() == {"disk_error", "queue_full"}
    assert sum(lost(writer).values()) == len(made)


def test_the_same_record_is_written_once(disk, records):
    gated = Gated(disk)
    writer = Writer(None, gated, 64 * MIB)
    for _ in range(5):
        writer.put(records[0], Policy.READ_WRITE)
    gated.gate.set()
    writer.flush()
    assert writer.stats().written_records == disk.stats().puts == 1
    writer.close()


@pytest.mark.parametrize("policy", list(Policy))
def test_policies_decide_what_reaches_the_disk(policy, disk, records):
    memory = MemoryTier(64 * MIB)
    writer = Writer(memory, disk, 64 * MIB)
    writer.put(records[0], policy)
    writer.close()
    on_disk = bool(disk.have([records[0].header.key]))
    assert on_disk == (policy in (Policy.READ_WRITE, Policy.DURABLE))


def test_a_full_queue_drops_the_deepest_and_counts_it(disk, records):
    gated = Gated(disk)
    room = sum(record.n_bytes for record in records[:3])
    writer = Writer(None, gated, room)
    for record in records:
        writer.put(record, Policy.READ_WRITE)
    gated.gate.set()
    writer.flush()
    there = [bool(disk.have([record.header.key])) for record in records]
    assert there[0]
    assert there == sorted(there, reverse=True), "a block without its parent is of no use"
    assert sum(lost(writer).values()) == there.count(False)
    assert lost(writer)["queue_full"] > 0
    writer.close()


def test_saves_wait_for_restores(disk, records):
    writer = Writer(None, disk, 64 * MIB)
    with writer.restoring():
        writer.put(records[0], Policy.READ_WRITE)
        time.sleep(0.2)
        assert not disk.have([records[0].header.key])
    writer.flush()
    assert disk.have([records[0].header.key])
    writer.close()


class OneByOne(Gated):
    """Takes a record for each time it is told to."""

    def __init__(self, disk):
        super().__init__(disk)
        self.turns = threading.Semaphore(0)

    def put(self, record):
        assert self.turns.acquire(timeout=300)
        return self.disk.put(record)


def test_flushing_waits_for_no_more_than_was_there(disk, records):
    """Under steady traffic the queue is never empty; whoever flushes gets through all the same."""
    slow = OneByOne(disk)
    writer = Writer(None, slow, 64 * MIB)
    writer.put(records[0], Policy.READ_WRITE)
    flushing = threading.Thread(target=writer.flush)
    flushing.start()
    while not writer._n_flushing:
        time.sleep(0.01)
    writer.put(records[1], Policy.READ_WRITE)
    slow.turns.release()
    flushing.join(300)
    assert not flushing.is_alive()
    assert disk.have([r.header.key for r in records[:2]]).keys() == {records[0].header.key}
    slow.turns.release()
    writer.close()


def test_a_disk_that_refuses_costs_a_counter_and_no_more(disk, records):
    class Broken(Gated):
        def put(self, record):
            raise RuntimeError("no such luck")

    writer = Writer(None, Broken(disk), 64 * MIB)
    for record in records:
        writer.put(record, Policy.READ_WRITE)
    writer.flush()
    stats = writer.stats()
    assert stats.failed >= 1
    assert lost(writer) == {"disk_error": 1, "orphan": len(records) - 1}
    assert not writer.kept([record.header.key for record in records]), "they can be put again"
    writer.close()


def test_deletions_that_cannot_be_followed_do_not_end_the_writer(disk, records, monkeypatch):
    monkeypatch.setattr(writing, "CATCH_UP_S", 0.01)
    tried = threading.Semaphore(0)

    def fail():
        tried.release()
        raise RuntimeError("no such luck")

    writer = Writer(None, disk, 64 * MIB, catch_up=fail)
    assert tried.acquire(timeout=60)
    assert tried.acquire(timeout=60)
    writer.put(records[0], Policy.READ_WRITE)
    writer.flush()
    assert disk.have([records[0].header.key])
    writer.close()


def test_the_daily_budget_holds_over_processes_and_days(disk, records):
    day = ["2026-11-15"]
    size = records[0].n_bytes
    for start in (0, 1):  # a second process of the same day
        wear = WriteBudget(disk.root, 3 * size, lambda: day[0])
        writer = Writer(None, disk, 64 * MIB, wear)
        for record in records[2 * start : 2 * start + 2]:
            writer.put(record, Policy.READ_WRITE)
        writer.close()
    assert writer.stats().over_budget == 1
    assert wear.by_day() == {"2026-11-15": 3 * size}
    day[0] = "2026-11-16"
    assert wear.take(size)


def test_a_disk_that_refused_is_left_alone_for_a_while(disk, records, monkeypatch):
    """Whoever wants to be sure tries all the same; without a disk there is nothing to try."""
    now = [1000.0]
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    writer = Writer(None, disk, 64 * MIB, WriteBudget(disk.root, records[0].n_bytes))
    for record, takes in zip(records[:2], (True, False), strict=True):
        writer.put(record, Policy.READ_WRITE)
        writer.flush()
        assert writer.accepts_resaves(Policy.READ_WRITE) is takes
    assert writer.accepts_resaves(Policy.DURABLE)
    assert not writer.accepts_resaves(Policy.EPHEMERAL)
    now[0] += WRITE_BACKOFF_S
    assert writer.accepts_resaves(Policy.READ_WRITE)
    writer.close()
    assert not MemorySaver(MemoryTier(MIB)).accepts_resaves(Policy.DURABLE)


def test_bytes_that_were_there_already_wear_nothing(disk, records):
    wear = WriteBudget(disk.root)
    for _ in range(2):
        writer = Writer(None, disk, 64 * MIB, wear)
        writer.put(records[0], Policy.READ_WRITE)
        writer.close()
    assert list(wear.by_day().values()) == [records[0].n_bytes]


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_block_that_cools_in_the_queue_is_written_rounded(is_begun, disk):
    """Whether it waits, or is being written exactly."""
    before, ref = kit.refs_of(2)
    wanting = kit.wanting_q8(ref)
    exact = dataclasses.replace(wanting, header=dataclasses.replace(wanting.header, extra={}))
    memory, gated = MemoryTier(64 * MIB), Gated(disk)
    disk.put(kit.record(before))
    writer = Writer(memory, gated, 64 * MIB)
    if not is_begun:
        writer.put(kit.record(kit.refs_of(1, seed=1)[0]), Policy.READ_WRITE)
    wait_until(lambda: is_begun or writer._writing)
    writer.put(exact, Policy.READ_WRITE)
    wait_until(lambda: not is_begun or writer._writing)
    writer.put(wanting, Policy.READ_WRITE)
    gated.gate.set()
    writer.flush()
    for tier in (disk, memory):
        assert tier.read(ref.key, Part.DELTA).header.extra["codec"] == "q8"
    assert writer.stats().queued_blocks == 0
    assert writer.stats().written_records == 2
    assert lost(writer) == {}
    writer.close()


def test_rounded_rows_wear_by_what_is_written(disk):
    """A day's budget that has no room for the exact rows has room for these."""
    (ref,) = kit.refs_of(1)
    exact = kit.wanting_q8(ref)
    n_bytes = at_rest(exact).n_bytes
    wear = WriteBudget(disk.root, n_bytes)
    writer = Writer(None, disk, 64 * MIB, wear)
    writer.put(exact, Policy.READ_WRITE)
    writer.close()
    assert list(wear.by_day().values()) == [n_bytes]
    assert writer.stats().written_bytes == n_bytes < 0.6 * exact.n_bytes
