"""A tier over a real place: what another machine put is found, asked for once, and verified."""

import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.prefix.blocks import BLOCK_TOKENS, chain, pack
from keepwarm.prefix.fingerprint import FORMAT_VERSION
from keepwarm.records.at_rest import WANTED
from keepwarm.records.cipher import Cipher, derive_key
from keepwarm.records.record import Part, ReadBuffer, Tensor, encode_record
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.health import MAX_FAILURES
from keepwarm.remote.lookup import ABSENT_S, PRESENT_S
from keepwarm.remote.records import RemoteRecord
from keepwarm.remote.tier import ASK_S, MIN_FAR, RemoteTier, lookup_s
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import RemoteLookup
from tests.kit.waiting import wait_until
from tests.store.kit import NAMESPACE, content, record, refs_of, tokens_of

SOON = 30.0
CLASS = "cpu-mlx-0.1"


class Watched:
    """A place whose calls are counted, and fail or wait on demand."""

    def __init__(self, backend):
        self._backend = backend
        self.in_batches, self.is_distant = backend.in_batches, backend.is_distant
        self.calls = []
        self.failing = False
        self.gate = None

    def __getattr__(self, name):
        call = getattr(self._backend, name)

        def watched(*args, **options):
            self.calls.append(name)
            if self.gate is not None:
                self.gate.wait(SOON)
            if self.failing:
                raise CallError("gone")
            return call(*args, **options)

        return call if name == "close" else watched


@pytest.fixture
def open_tier(address, clock):
    """Opens a tier as another machine would; its place is `tier.place`."""
    opened = []

    def opener(compute_class=CLASS, **options):
        place = Watched(open_backend(address))
        tier = RemoteTier(place, compute_class, clock=clock, **options)
        opened.append(tier)
        tier.place = place
        assert tier.health.wait_until_tried(SOON) or tier.health.refused
        place.calls.clear()
        return tier

    yield opener
    for tier in opened:
        tier.close()


def question(tokens, n_here=0, has_rows=True, n_window=0, has_states=False):
    refs = list(chain(NAMESPACE, tokens))
    n_whole = len(tokens) // BLOCK_TOKENS
    return RemoteLookup(NAMESPACE, refs, n_whole, n_here, has_rows, n_window, has_states)


def ask(tier, tokens, **options):
    tier.look_up(question(tokens, **options), CallDeadline(SOON))


def put_chain(tier, n_blocks, seed=0, n_last=BLOCK_TOKENS):
    made = [record(ref) for ref in refs_of(n_blocks, seed, n_last)]
    assert all(tier.put(one).stored for one in made)
    return made


def test_what_one_machine_puts_another_finds_once_it_has_asked(open_tier):
    made, there = put_chain(open_tier(), 5, n_last=100), open_tier()
    keys = [one.header.key for one in made]
    tokens = tokens_of(4 * BLOCK_TOKENS + 100)
    assert there.have(keys) == {}
    assert there.read(keys[0], Part.DELTA) is None
    ask(there, [*tokens, 1, 2, 3])
    assert there.have(keys).keys() == set(keys)
    assert there.have(keys)[keys[-1]].n_tokens == 100
    assert there.children(keys[3], pack([*tokens[-100:], 1])) == [(keys[4], 100)]
    for one in made:
        found = there.read(one.header.key, Part.DELTA)
        assert found.header == one.header
        assert content(found) == content(one)


def test_machines_that_compute_other_numbers_share_nothing(open_tier):
    put_chain(open_tier(), 2)
    other = open_tier("cpu-mlx-0.2")
    ask(other, tokens_of(2 * BLOCK_TOKENS))
    assert other.have([ref.key for ref in refs_of(2)]) == {}


def test_windows_and_states_are_known_with_their_rows(open_tier):
    first, there = open_tier(), open_tier()
    refs, tokens = refs_of(3, n_last=50), tokens_of(2 * BLOCK_TOKENS + 50)
    for ref in refs:
        first.put(record(ref))
    first.put(record(refs[1], Part.WINDOW, w_rows=200))
    first.put(record(refs[2], Part.WINDOW, w_rows=40))
    first.put(record(refs[2], Part.STATE))
    ask(there, [*tokens, 1, 2], n_window=2, has_states=True)
    known = there.have([ref.key for ref in refs])
    assert known[refs[0].key].parts == {Part.DELTA}
    assert (known[refs[1].key].parts, known[refs[1].key].w_rows) == ({Part.DELTA, Part.WINDOW}, 200)
    assert (known[refs[2].key].parts, known[refs[2].key].w_rows) == (set(Part), 40)
    assert there.states([refs[1].key]) == [(refs[2].key, refs[1].key, 50)]


def test_answers_are_remembered(open_tier, clock):
    put_chain(open_tier(), 3)
    there, tokens = open_tier(), tokens_of(4 * BLOCK_TOKENS)
    ask(there, tokens)
    assert there.place.calls
    there.place.calls.clear()
    ask(there, tokens)
    assert there.place.calls == []
    clock.now += ABSENT_S  # the fourth block may be there now
    ask(there, tokens)
    assert 0 < len(there.place.calls) <= 4
    clock.now += PRESENT_S
    assert there.have([ref.key for ref in refs_of(3)]) == {}


def damaged(tier, one, change):
    """Put other bytes in the place of a record."""
    name = tier._names.of(RemoteRecord.of(one.header))
    backend = tier.place
    data = bytearray(backend.read(name, lambda n: memoryview(bytearray(n)), SOON))
    backend.put(name, [bytes(change(data))], SOON, replace=True)
    return name


def flipped(data):
    data[-3] ^= 4
    return data


@pytest.mark.parametrize(
    "change",
    [flipped, lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:4],
     lambda data: bytes(len(data))],
    ids=["flipped", "cut", "longer", "short", "zeros"],
)  # fmt: skip
def test_bad_bytes_are_a_miss_and_deleted_when_they_are_bad_twice(open_tier, clock, change):
    first, there = open_tier(), open_tier()
    (one,) = put_chain(first, 1)
    name = damaged(first, one, change)
    for n_left in (1, 0):
        ask(there, tokens_of(BLOCK_TOKENS))
        assert there.read(one.header.key, Part.DELTA) is None
        assert there.take_fault(one.header.key, Part.DELTA) == "damaged"
        assert there.have([one.header.key]) == {}
        assert len([n for n in there.place.sizes([name], SOON) if n]) == n_left
        clock.now += ABSENT_S
    assert first.place.sizes([name], SOON) == [None]
    assert there.stats().quarantined == 2
    assert not there.is_open


def test_a_record_under_the_name_of_another_is_a_miss(open_tier):
    first, there = open_tier(), open_tier()
    one, other = put_chain(first, 1)[0], put_chain(first, 1, seed=1)[0]
    data = b"".join(encode_record(other))
    damaged(first, one, lambda _: data)
    ask(there, tokens_of(BLOCK_TOKENS))
    assert there.read(one.header.key, Part.DELTA) is None
    assert there.take_fault(one.header.key, Part.DELTA) == "damaged"


def test_what_was_evicted_after_the_question_is_a_miss_with_all_that_follows(open_tier):
    first, there = open_tier(), open_tier()
    made = put_chain(first, 3)
    ask(there, tokens_of(3 * BLOCK_TOKENS))
    keys = [one.header.key for one in made]
    first.place.delete([first._names.of(RemoteRecord.of(made[1].header))], SOON)
    used = []
    assert not there.visit(keys[1], Part.DELTA, used.append, ReadBuffer())
    assert used == []
    assert there.take_fault(keys[1], Part.DELTA) is None
    assert there.have(keys).keys() == {keys[0]}


def test_failures_end_the_calls_and_a_trial_brings_it_back(open_tier, clock):
    first = open_tier()
    put_chain(first, 2)
    (other,) = put_chain(first, 1, seed=9)
    there, keys = open_tier(), [ref.key for ref in refs_of(2)]
    ask(there, tokens_of(2 * BLOCK_TOKENS))
    ask(there, tokens_of(BLOCK_TOKENS, 9))
    there.place.failing = True
    assert there.read(keys[0], Part.DELTA) is None
    n_calls = len(there.place.calls)
    assert there.have(keys) == {}, "after a failure nothing is loaded"
    assert there.read(other.header.key, Part.DELTA) is None
    assert len(there.place.calls) == n_calls, "and nothing is called but a question"
    for seed in (1, 2):
        ask(there, tokens_of(BLOCK_TOKENS, seed))
    assert there.is_open
    n_calls = len(there.place.calls)
    ask(there, tokens_of(BLOCK_TOKENS, 3))
    assert there.put(record(refs_of(1, seed=4)[0])).durable.exception() is not None
    assert len(there.place.calls) == n_calls
    there.place.failing = False
    clock.now += 10.0
    until = time.monotonic() + SOON
    while there.is_open:
        assert time.monotonic() < until
        time.sleep(0.01)
    ask(there, tokens_of(2 * BLOCK_TOKENS))
    assert there.read(keys[1], Part.DELTA) is not None


def all_at_once(tier, flights, work):
    """What ten threads get that call while the first call of the place has not returned yet."""
    tier.place.calls.clear()
    tier.place.gate = threading.Event()

    def n_waiting():
        return len(tier.place.calls) + sum(map(len, list(flights._under_way.values())))

    with ThreadPoolExecutor(10) as threads:
        results = [threads.submit(work) for _ in range(10)]
        until = time.monotonic() + SOON
        while n_waiting() < 10 and time.monotonic() < until:
            time.sleep(0.001)
        n_waited = n_waiting()
        tier.place.gate.set()
        found = [result.result() for result in results]
    tier.place.gate = None
    assert n_waited >= 10, "or nothing is at once"
    return found


def test_equal_reads_at_the_same_time_are_made_once(open_tier):
    (one,) = put_chain(open_tier(), 1)
    memory = MemoryTier(1 << 20)
    there = open_tier(memory=memory)
    ask(there, tokens_of(BLOCK_TOKENS))
    found = all_at_once(there, there._fetches, lambda: there.read(one.header.key, Part.DELTA))
    assert all(content(each) == content(one) for each in found)
    assert there.place.calls == ["fetch"]
    assert there.stats().hits == 10
    assert content(memory.read(one.header.key, Part.DELTA)) == content(one)
    there.read(one.header.key, Part.DELTA)  # by a thread that looked into memory before
    assert there.place.calls == ["fetch"]
    memory.close()


def test_nobody_waits_for_the_deadline_of_another_read(open_tier):
    (one,) = put_chain(open_tier(), 1)
    there = open_tier()
    ask(there, tokens_of(BLOCK_TOKENS))
    there.place.calls.clear()
    there.place.gate = threading.Event()
    with ThreadPoolExecutor() as threads:
        patient = threads.submit(there.read, one.header.key, Part.DELTA)
        wait_until(lambda: there.place.calls == ["fetch"])
        assert there.read(one.header.key, Part.DELTA, deadline=CallDeadline(0.01)) is None
        assert not patient.done()
        there.place.gate.set()
        assert content(patient.result()) == content(one)
    assert there.is_trusted, "it was no failure of the place"


def test_equal_questions_at_the_same_time_are_asked_once(open_tier):
    made, tokens = put_chain(open_tier(), 3), tokens_of(3 * BLOCK_TOKENS)
    alone, there = open_tier(), open_tier()
    ask(alone, tokens)
    all_at_once(there, there._questions, lambda: ask(there, tokens))
    assert sorted(there.place.calls) == sorted(alone.place.calls)
    assert len(there.have([one.header.key for one in made])) == 3


def test_a_record_has_the_time_of_the_whole_load(open_tier):
    (one,) = put_chain(open_tier(), 1)
    there, times = open_tier(), []
    ask(there, tokens_of(BLOCK_TOKENS))
    fetch = there.place.fetch

    def timed(name, take, use, timeout_s):
        times.append(timeout_s)
        return fetch(name, take, use, timeout_s)

    there.place.fetch = timed
    assert there.read(one.header.key, Part.DELTA, deadline=CallDeadline(4 * SOON)) is not None
    assert there.read(one.header.key, Part.DELTA) is not None
    assert times[0] > 2 * SOON
    assert times[1] <= SOON


def cipher_of(secret):
    return Cipher(derive_key(b64encode(secret * 32).decode(), b"", {}))


def test_a_sealed_record_in_a_plain_place_is_a_miss_that_stays(open_tier):
    first, there, cipher = open_tier(), open_tier(), cipher_of(b"s")
    (one,) = put_chain(first, 1)
    name = damaged(first, one, lambda _: b"".join(encode_record(one, cipher)))
    ask(there, tokens_of(BLOCK_TOKENS))
    for n in range(1, MAX_FAILURES + 2):
        assert there.read(one.header.key, Part.DELTA) is None
        assert there.take_fault(one.header.key, Part.DELTA) == "newer"
        assert there.stats().newer == n
        there._known.add([RemoteRecord.of(one.header)._replace(n_bytes=1)])
    assert there.is_trusted, "it was no failure of the place"
    assert there.stats().errors == 0
    assert first.place.sizes([name], SOON) != [None]


def test_a_plain_place_takes_no_sealed_records(open_tier):
    open_tier()
    refused = open_tier(cipher=cipher_of(b"a"))
    assert "not encrypted" in refused.health.refused
    assert not refused.put(record(refs_of(1)[0])).stored


@pytest.mark.parametrize(
    ("planned_s", "computing_s", "seconds"),
    [(0.64, 20.0, 0.64), (0.64, 6.5, 0.64), (0.64, 6.3, None), (0.01, 20.0, ASK_S),
     (0.01, 0.2, 0.02), (0.01, 0.09, None)],
    ids=["as planned", "just", "too long", "at least", "at most a tenth", "not even that"],
)  # fmt: skip
def test_lookup_s_of_a_distant_store_is_that_of_its_calls_if_it_is_little(
    planned_s, computing_s, seconds
):
    assert lookup_s(planned_s, computing_s) == pytest.approx(seconds)


def test_state_tells_why_a_tier_is_not_used(open_tier, monkeypatch):
    open_tier()
    there = open_tier()
    assert there.stats().state == "ok"
    there.health.failed()
    assert there.state == "half-open"
    there.place.failing = True
    for seed in (1, 2):
        ask(there, tokens_of(BLOCK_TOKENS, seed))
    assert (there.stats().state, there.stats().last_error) == ("open", "gone")
    there.place.failing = False
    there.health.tried(True)
    there.is_writable = False
    assert there.state == "read-only"
    monkeypatch.setattr(there, "_ask_s", lambda *_: None)
    for _ in range(MIN_FAR):
        there.ask(question(tokens_of(BLOCK_TOKENS)), 1.0)
    assert there.state == "too far"
    refused = open_tier(cipher=cipher_of(b"a"))
    assert refused.stats().state == "refused"
    assert "not encrypted" in refused.stats().last_error


def test_two_versions_of_keepwarm_share_a_tier(open_tier, clock):
    """While a fleet is upgraded: what the newer one wrote is a miss for the older and stays, and
    nobody is out of order.
    """
    older, newer = open_tier(), open_tier()
    mine, theirs = put_chain(older, 1), put_chain(newer, 1, seed=1)
    header = replace(theirs[0].header, version=FORMAT_VERSION + 1)
    next_format = b"".join(encode_record(replace(theirs[0], header=header), None))
    name = damaged(newer, theirs[0], lambda _: next_format)
    for _ in range(MAX_FAILURES + 1):
        ask(older, tokens_of(BLOCK_TOKENS, 1))
        assert older.read(theirs[0].header.key, Part.DELTA) is None
        assert older.take_fault(theirs[0].header.key, Part.DELTA) == "newer"
        clock.now += ABSENT_S
    assert older.place.sizes([name], SOON) == [len(next_format)]
    for tier in (older, newer):
        ask(tier, tokens_of(BLOCK_TOKENS))
        assert content(tier.read(mine[0].header.key, Part.DELTA)) == content(mine[0])
        assert tier.state == "ok"


def test_rows_travel_in_the_bits_that_they_have_at_rest(open_tier):
    made = record(refs_of(1)[0])
    rows = Tensor("L0_B0_K", "BF16", (1, 2, 256, 64), memoryview(bytes(2 * 256 * 64 * 2)))
    wanted = replace(made, header=replace(made.header, extra={WANTED: "q8"}), tensors=[rows])
    assert open_tier().put(wanted).stored
    there = open_tier()
    ask(there, [*tokens_of(BLOCK_TOKENS), 1])
    found = there.read(made.header.key, Part.DELTA)
    assert found.header.extra["codec"] == "q8"
    assert found.n_bytes < 0.54 * rows.n_bytes
