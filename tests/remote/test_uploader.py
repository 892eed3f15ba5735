"""What is written to a shared tier: root first, within a day's budget, nothing that was deleted."""

import threading
from contextlib import closing

import pytest

from keepwarm.concurrency import CallError
from keepwarm.prefix.blocks import BLOCK_TOKENS, chain
from keepwarm.records.at_rest import at_rest
from keepwarm.records.record import Part
from keepwarm.remote import directory
from keepwarm.remote.compression import count_bytes
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.records import parse_last
from keepwarm.remote.tier import RemoteTier
from keepwarm.remote.uploader import MAX_TELLING, Uploader
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import NamedBlock
from keepwarm.store.tiers import Tiers
from tests.contract.shared import names_in
from tests.kit.waiting import wait_until
from tests.remote.test_codes import numbers
from tests.store.kit import NAMESPACE, encode, record, refs_of, tokens_of, wanting_q8

SOON = 30.0
REFS = refs_of(4)


class Place(DirectoryBackend):
    """Remembers what was put, in order."""

    def __init__(self, root):
        super().__init__(root)
        self.keys = []
        self.n_bytes = 0
        self.on_put = lambda: None

    def put(self, name, pieces, *args, **options):
        stored = super().put(name, pieces, *args, **options)
        if (parsed := parse_last(name)) is not None:
            self.keys.append(parsed[0])
            self.n_bytes += count_bytes(pieces)
            self.on_put()
        return stored


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return Place(tmp_path / "place")


@pytest.fixture
def tier(place):
    tier = RemoteTier(place, "cpu-mlx-0.1")
    assert tier.health.wait_until_tried(SOON)
    yield tier
    tier.close()


@pytest.fixture
def memory():
    memory = MemoryTier(1 << 20)
    for ref in REFS:
        memory.put(record(ref))
    yield memory
    memory.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("keepwarm.remote.uploader.CLOSE_S", SOON)


def share(tier, memory, budget=None, uses=1, delete_later=lambda *_: None):
    uploader = Uploader([tier], Tiers([("memory", memory)]), memory.have, budget, delete_later)
    for _ in range(uses):
        uploader.offer(NAMESPACE, REFS)
    uploader.close()


def test_the_root_comes_first_and_nothing_twice(tier, place, memory):
    share(tier, memory, uses=3)
    assert place.keys == [ref.key for ref in REFS]


def test_a_day_has_a_budget(tier, place, memory, tmp_path):
    """What does not fit is offered again with its next use, perhaps tomorrow."""
    n_bytes, day = record(REFS[0]).n_bytes, ["2026-01-01"]
    (tmp_path / "tmp").mkdir()
    budget = WriteBudget(tmp_path, 3 * n_bytes, lambda: day[0], name="uploaded")
    share(tier, memory, budget)
    assert place.keys == [ref.key for ref in REFS[:3]]
    assert budget.by_day() == {"2026-01-01": 3 * n_bytes}
    share(tier, memory, budget)
    assert len(place.keys) == 3
    day[0] = "2026-01-02"
    share(tier, memory, budget)
    assert len(place.keys) == 4


def test_a_budget_counts_the_bytes_that_are_sent(tier, place, memory, tmp_path):
    (tmp_path / "tmp").mkdir()
    budget = WriteBudget(tmp_path, name="uploaded")
    tier.speed.bytes_per_s = tier.speed.put_bytes_per_s = 1e4  # so slow that they are coded
    made = [numbers(ref) for ref in REFS]
    for one in made:
        memory.delete_all([one.header.key])
        memory.put(one)
    share(tier, memory, budget)
    n_headers = sum(len(encode(one)) - one.n_bytes for one in made)
    (n_sent,) = budget.by_day().values()
    assert n_sent == place.n_bytes - n_headers < 0.75 * sum(one.n_bytes for one in made)


def test_a_budget_counts_rounded_rows_as_they_are_sent(tier, place, tmp_path):
    (tmp_path / "tmp").mkdir()
    made = [wanting_q8(ref) for ref in REFS]
    n_bytes = sum(at_rest(one).n_bytes for one in made)
    budget = WriteBudget(tmp_path, n_bytes, name="uploaded")
    with closing(MemoryTier(1 << 24)) as memory:
        for one in made:
            memory.put(one)
        share(tier, memory, budget)
    assert place.keys == [ref.key for ref in REFS]
    assert list(budget.by_day().values()) == [n_bytes]
    known = tier.have(place.keys)
    assert sum(info.n_bytes for info in known.values()) == n_bytes


def test_what_is_deleted_while_it_is_put_is_withdrawn(tier, place, memory):
    place.on_put = lambda: memory.delete_all([place.keys[-1]]) if len(place.keys) == 4 else None
    share(tier, memory)
    sizes = [tier.has(record(ref).header) for ref in REFS]
    assert sizes == [True, True, True, False]


def test_what_is_deleted_while_a_put_is_late_is_withdrawn_too(tier, place, memory):
    """It may be there all the same."""

    def come_late():
        if len(place.keys) == 4:
            memory.delete_all([place.keys[-1]])
            raise CallError("no answer in time")

    place.on_put = come_late
    share(tier, memory)
    assert [tier.has(record(ref).header) for ref in REFS] == [True, True, True, False]


def test_a_late_put_counts_as_written_and_nothing_that_follows_is_sent(
    tier, place, memory, tmp_path
):
    """It could not be reached; and a slow line would be full without end."""

    def come_late():
        if len(place.keys) == 2:
            raise CallError("no answer in time")

    (tmp_path / "tmp").mkdir()
    budget = WriteBudget(tmp_path, name="uploaded")
    place.on_put = come_late
    share(tier, memory, budget)
    assert place.keys == [ref.key for ref in REFS[:2]]
    assert list(budget.by_day().values()) == [2 * record(REFS[0]).n_bytes]
    share(tier, memory, budget)
    assert place.keys == [ref.key for ref in REFS]


def lose(monkeypatch, memory, lost, part):
    """A record that is listed and cannot be read, as one that is deleted at that moment."""
    read = memory.read
    monkeypatch.setattr(
        memory,
        "read",
        lambda key, *what: None if (key, what[0]) == (lost, part) else read(key, *what),
    )


@pytest.mark.parametrize("part", [Part.DELTA, Part.WINDOW])
def test_nothing_follows_a_block_that_cannot_be_read(tier, place, memory, monkeypatch, part):
    memory.put(record(REFS[1], Part.WINDOW))
    lose(monkeypatch, memory, REFS[1].key, part)
    share(tier, memory)
    assert REFS[0].key in place.keys
    assert REFS[2].key not in place.keys


@pytest.mark.parametrize("n_inside", [100, BLOCK_TOKENS])
def test_a_state_that_cannot_be_read_holds_nothing_up(tier, place, memory, monkeypatch, n_inside):
    """Inside of a block or at its end: it is nobody's ancestor."""
    end = refs_of(2, n_last=n_inside)[-1]
    memory.put(record(end, Part.STATE))
    lose(monkeypatch, memory, end.key, Part.STATE)
    share(tier, memory)
    assert place.keys == [ref.key for ref in REFS]


@pytest.mark.parametrize("n_lost", [3, 4, 5])
def test_blocks_at_the_end_do_not_hold_each_other_up(tier, place, memory, monkeypatch, n_lost):
    """The last tokens, the block that they lie in, and what else was read for the prompt."""
    refs = refs_of(4, n_last=100)
    others = [refs_of(1, seed)[0] for seed in (1, 2)]
    for ref in (refs[-1], *others):
        memory.put(record(ref))
    keys = [ref.key for ref in (*refs, REFS[3], *others)]
    lost = keys.pop(n_lost)
    lose(monkeypatch, memory, lost, Part.DELTA)
    uploader = Uploader([tier], Tiers([("memory", memory)]), memory.have)
    uploader.offer(NAMESPACE, refs, [other.key for other in others])
    uploader.close()
    assert place.keys == keys


def test_what_another_machine_puts_first_holds_nothing_up(tier, memory, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    budget, put = WriteBudget(tmp_path, name="uploaded"), tier.put
    with closing(RemoteTier(DirectoryBackend(tmp_path / "place"), "cpu-mlx-0.1")) as other:
        assert other.health.wait_until_tried(SOON)
        monkeypatch.setattr(tier, "put", lambda one: other.put(one) and put(one))
        share(tier, memory, budget)
    assert all(tier.has(record(ref).header) for ref in REFS)
    assert list(budget.by_day().values()) == [0]


def test_what_cannot_be_withdrawn_is_deleted_later(tier, place, memory, monkeypatch):
    def fail(names, timeout_s):
        raise CallError("gone")

    later = []
    place.on_put = lambda: memory.delete_all([place.keys[-1]]) if len(place.keys) == 4 else None
    monkeypatch.setattr(place, "delete", fail)
    share(tier, memory, delete_later=lambda *block: later.append(block))
    assert later == [(NAMESPACE, NamedBlock(REFS[3].key, REFS[3].parent, REFS[3].n_tokens))]


@pytest.mark.parametrize("can_delete", [True, False])
def test_what_is_told_and_not_wanted_by_then_is_taken_back(
    can_delete, tier, place, memory, monkeypatch
):
    def fail(names, timeout_s):
        raise CallError("gone")

    if not can_delete:
        monkeypatch.setattr(place, "delete", fail)
    later = []
    here = Tiers([("memory", memory)])
    uploader = Uploader([tier], here, memory.have, None, lambda *block: later.append(block))
    tokens, is_wanted = tokens_of(300), iter([True, False])
    *_, end = chain(NAMESPACE, tokens)
    for text in ("wanted", "deleted"):
        told = uploader.tell(NAMESPACE, text, text.encode, tokens, lambda: next(is_wanted))
        told.result(SOON)
    uploader.close()
    assert len(names_in(place)) == (2 if can_delete else 4)
    named = NAMESPACE, NamedBlock(end.key, end.parent, end.n_tokens)
    assert later == ([] if can_delete else [named])


def test_an_answer_waits_until_it_is_told_within_a_bound(tier, place, memory, monkeypatch):
    """To a distant place too; but not for a place that hangs, nor behind many others."""
    place.is_distant = True
    gate, put = threading.Event(), directory._put
    monkeypatch.setattr(directory, "_put", lambda *args: gate.wait(SOON) and put(*args))
    monkeypatch.setattr("keepwarm.remote.tier.ANSWERS_S", SOON)
    uploader = Uploader([tier], Tiers([("memory", memory)]), memory.have)

    def tell(text):
        return uploader.tell(NAMESPACE, text, text.encode, tokens_of(300), lambda: True)

    told = [tell(f"text {n}") for n in range(MAX_TELLING + 1)]
    assert told.pop() is None
    assert not any(one.done() for one in told)
    gate.set()
    for one in told:
        one.result(SOON)
    wait_until(lambda: len(names_in(place)) == 2 * (MAX_TELLING + 1))
    gate.clear()
    monkeypatch.setattr("keepwarm.remote.tier.ANSWERS_S", 0.05)
    tell("while it hangs").result(SOON / 2)
    assert len(names_in(place)) == 2 * (MAX_TELLING + 1)
    gate.set()
    uploader.close()


def test_nobody_who_stops_waiting_ends_the_uploader(tier, place, memory):
    uploader = Uploader([tier], Tiers([("memory", memory)]), memory.have)
    gate = threading.Event()
    place.on_put = lambda: gate.wait(SOON)
    waiting = [uploader.offer(NAMESPACE, REFS) for _ in range(2)]
    assert not any(tried.cancel() for tried in waiting)
    gate.set()
    assert uploader.offer(NAMESPACE, REFS).result(SOON) is None
    uploader.close()
    assert all(tried.done() for tried in waiting)


def test_the_queue_is_bounded_by_bytes(tier, place, memory, monkeypatch):
    monkeypatch.setattr(
        "keepwarm.remote.uploader.MAX_QUEUED", sum(len(ref.tokens) for ref in REFS) - 1
    )
    share(tier, memory)
    assert place.keys == []
