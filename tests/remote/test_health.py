"""When a remote store is left alone and tried again, and what counts as a failure of it."""

import time
from contextlib import closing

import pytest

from keepwarm.concurrency import BusyError, CallDeadline, CallError
from keepwarm.errors import BadInput, BadRecord
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.health import (
    MAX_FAILURES,
    MAX_RETRY_S,
    TIDY_S,
    TRIAL_S,
    Health,
    RemoteSpeed,
    try_backend,
)
from keepwarm.remote.redis import ADDRESS_S
from keepwarm.remote.tier import REFRESH_S, RemoteTier
from keepwarm.store.tier import TierCounts
from tests.remote.conftest import CLASS, SOON


def new_health(clock, attempt=lambda _: None):
    return Health(attempt, TierCounts(), lambda _: None, lambda: 60.0, clock)


@pytest.fixture
def health(clock):
    made = new_health(clock)
    made.tried(True)
    return made


def test_it_is_open_until_it_was_tried(clock):
    made = new_health(clock)
    assert made.is_open
    assert made.retry_in_s == 0.0
    made.tried(True)
    assert not made.is_open
    assert made.is_trusted


def test_failures_in_a_row_open_it(health):
    for _ in range(MAX_FAILURES - 1):
        health.failed()
    assert not health.is_open
    health.succeeded()
    for _ in range(MAX_FAILURES - 1):
        health.failed()
    assert not health.is_open
    health.failed()
    assert health.is_open


def test_one_failure_ends_the_trust_until_a_success(health):
    health.failed()
    assert not health.is_trusted
    assert not health.is_open
    health.succeeded()
    assert health.is_trusted


def test_only_a_trial_closes_it(health):
    for _ in range(MAX_FAILURES):
        health.failed()
    health.succeeded()  # of a call that began before
    assert health.is_open
    health.tried(True)
    assert not health.is_open


def test_trials_are_at_growing_distances_up_to_a_limit(health, clock):
    for _ in range(MAX_FAILURES):
        health.failed()
    waits = []
    for _ in range(7):
        waits.append(health.retry_in_s)
        clock.now += health.retry_in_s
        assert health.retry_in_s == 0.0
        health.tried(False)
    assert waits == [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, MAX_RETRY_S]


class Hanging(DirectoryBackend):
    """Every call takes a quarter of its time, until one gets no answer."""

    def __init__(self, root, clock):
        super().__init__(root)
        self._clock, self.n_answered = clock, 0

    def _answer(self, timeout_s):
        self._clock.now += timeout_s if self.n_answered == 0 else timeout_s / 4
        self.n_answered -= 1
        if self.n_answered < 0:
            raise CallError("no answer in time")

    def sizes(self, names, timeout_s):
        self._answer(timeout_s)
        return super().sizes(names, SOON)

    def look(self, ranges, timeout_s):
        self._answer(timeout_s)
        return super().look(ranges, SOON)

    def fetch(self, name, take, use, timeout_s, n_bytes=None):
        self._answer(timeout_s)
        return super().fetch(name, take, use, SOON, n_bytes)

    def put(self, name, pieces, timeout_s, replace=False):
        self._answer(timeout_s)
        return super().put(name, pieces, SOON, replace)

    def delete(self, names, timeout_s):
        self._answer(timeout_s)
        return super().delete(names, SOON)

    def list_names(self, folder, timeout_s):
        self._answer(timeout_s)
        return super().list_names(folder, SOON)


def test_wherever_a_trial_hangs_the_next_is_within_ten_seconds(tmp_path, clock):
    """And connecting may take a second for each of two addresses."""
    with closing(Hanging(tmp_path, clock)) as place:
        place.n_answered = 1000
        with closing(RemoteTier(place, CLASS, clock=lambda: 0.0)) as tier:
            assert tier.health.wait_until_tried(SOON)
            place.n_answered = 1000
            tier._try(CallDeadline(TRIAL_S, clock))
            n_calls, took = 1000 - place.n_answered, []
            for place.n_answered in range(n_calls):
                began = clock.now
                with pytest.raises(CallError):
                    tier._try(CallDeadline(TRIAL_S, clock))
                took.append(clock.now - began)
    assert n_calls == 10, "all that a trial does"
    assert max(took) <= TRIAL_S + TIDY_S
    assert TRIAL_S + TIDY_S + 2 * ADDRESS_S + MAX_RETRY_S <= 10.0


def test_what_is_read_only_is_soon_tried_again_and_later_less_often(tmp_path, clock):
    with closing(RemoteTier(DirectoryBackend(tmp_path), CLASS, clock=clock)) as tier:
        assert tier.health.wait_until_tried(SOON)
        assert tier._refresh_s() == REFRESH_S
        tier.backend.put = lambda *_: False
        tier._measure(CallDeadline(SOON))
        waits = []
        for seconds in (0.0, 5.0, 20.0, 1000.0):
            clock.now += seconds
            waits.append(tier._refresh_s())
        assert waits == [MAX_RETRY_S, 5.0, 25.0, REFRESH_S]


def test_failures_while_it_is_open_do_not_delay_the_trial(health, clock):
    for _ in range(MAX_FAILURES):
        health.failed()
    clock.now += 0.4
    health.failed()
    assert health.retry_in_s == pytest.approx(0.1)


def test_a_trial_that_is_under_way_at_the_end_changes_nothing(health):
    health.close()
    for success in (True, False):
        health.tried(success)
        assert health.is_open
        assert not health.is_trusted


class Slow(DirectoryBackend):
    """A place where chosen calls are late, though they are done."""

    late: tuple[str, ...] = ()

    def put(self, name, *args, **options):
        stored = super().put(name, *args, **options)
        return self._unless_late("put") and stored

    def read(self, name, take, timeout_s, n_bytes=None):
        self._unless_late("read" if n_bytes is None else "read of a part")
        return super().read(name, take, timeout_s, n_bytes)

    def _unless_late(self, call):
        if call in self.late:
            raise CallError("no answer in time")
        return True


@pytest.fixture
def slow(tmp_path):
    with closing(Slow(tmp_path)) as backend:
        yield backend


@pytest.mark.parametrize("late", ["put", "read"])
def test_a_trial_that_is_late_leaves_nothing(slow, tmp_path, late):
    slow.late = (late,)
    with pytest.raises(CallError, match="in time"):
        try_backend(slow, RemoteSpeed(), CallDeadline(SOON))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_trial_has_all_its_time_to_tidy_up(slow):
    given = []
    slow.delete = lambda names, timeout_s: given.append(timeout_s)
    try_backend(slow, RemoteSpeed(), CallDeadline(300))
    assert given[0] > 250


def test_a_place_is_refused_for_its_parts_only_while_it_reads_the_whole(slow):
    """Else it was slow for a moment, and is tried again soon."""
    slow.late = ("read of a part",)
    with pytest.raises(BadInput, match="parts of blobs"):
        try_backend(slow, RemoteSpeed(), CallDeadline(SOON))

    def fail_from_now_on(call):
        if call == "read of a part":
            slow.late = (call, "read")
        if call in slow.late:
            raise CallError("no answer in time")
        return True

    slow.late, slow._unless_late = (), fail_from_now_on
    with pytest.raises(CallError, match="in time"):
        try_backend(slow, RemoteSpeed(), CallDeadline(SOON))


def test_an_outage_is_told_once_and_its_end_too(health, caplog):
    caplog.set_level("WARNING")
    for _ in range(MAX_FAILURES + 2):
        health.call("asked", failing(CallError("gone")))
    for success in (False, False, True, True):
        health.tried(success)
    told = [record.message for record in caplog.records if "a shared tier is" in record.message]
    assert told == [
        "a shared tier is not used until it answers: gone",
        "a shared tier is used again",
    ]


def failing(error):
    def work():
        raise error

    return work


def test_a_busy_pool_is_no_failure(health):
    for _ in range(MAX_FAILURES + 1):
        assert health.call("asked", failing(BusyError("busy"))) is None
    assert health.is_trusted
    assert health._counts.stats(0, 0, None).errors == MAX_FAILURES + 1


@pytest.mark.parametrize("error", [CallError("gone"), OSError("odd"), KeyError("own bug")])
def test_anything_else_is_one(health, error):
    for _ in range(MAX_FAILURES):
        assert health.call("asked", failing(error)) is None
    assert health.is_open
    calls = []
    assert health.call("asked", lambda: calls.append(1)) is None
    assert calls == []


def test_a_call_that_outlives_an_outage_does_not_begin_another(health):
    """As some uploads that hang for seconds, while a trial has succeeded meanwhile."""

    def outlive():
        for _ in range(MAX_FAILURES):
            health.failed()
        health.tried(True)
        raise CallError("no answer in time")

    assert health.call("written", outlive) is None
    assert health.is_trusted
    assert health.call("written", failing(CallError("gone"))) is None
    assert not health.is_trusted


def test_a_bad_record_is_an_answer(health):
    health.failed()
    with pytest.raises(BadRecord):
        health.call("read", failing(BadRecord("bad")))
    assert health.is_trusted


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), KeyError("own bug")])
def test_a_trial_that_fails_in_any_way_is_made_again(clock, error):
    """What a place sends must not end the thread that tries it."""
    errors = [error]

    def attempt(_):
        clock.now += 60.0
        if errors:
            raise errors.pop()

    health = new_health(clock, attempt)
    health.start()
    health.wait_until_tried(SOON)
    until = time.monotonic() + SOON
    while health.is_open and time.monotonic() < until:
        time.sleep(0.01)
    assert not health.is_open
    health.close()


def test_after_the_end_nobody_is_called(clock):
    health = new_health(clock)
    calls = []
    health.start()
    assert health.wait_until_tried(SOON)
    assert health.call("asked", lambda: calls.append(1) or True)
    health.close()
    assert health.call("asked", lambda: calls.append(2) or True) is None
    assert calls == [1]
    assert not health.is_trusted
