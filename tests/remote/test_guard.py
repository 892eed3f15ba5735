"""What counts as a failure of a place."""

import time

import pytest

from keepwarm.concurrency import BusyError, CallError
from keepwarm.errors import BadRecord
from keepwarm.remote.breaker import MAX_FAILURES, Breaker
from keepwarm.remote.guard import Guard
from keepwarm.store.tier import TierCounts
from tests.remote.conftest import SOON


@pytest.fixture
def guard(clock):
    made = Guard(lambda: None, Breaker(clock), TierCounts(), lambda: None, 60.0)
    made.breaker.tried(True)
    return made


def failing(error):
    def work():
        raise error

    return work


def test_a_busy_pool_is_no_failure(guard):
    for _ in range(MAX_FAILURES + 1):
        assert guard.call("asked", failing(BusyError("busy"))) is None
    assert guard.breaker.is_trusted
    assert guard._counts.stats(0, 0, None).errors == MAX_FAILURES + 1


@pytest.mark.parametrize("error", [CallError("gone"), OSError("odd"), KeyError("own bug")])
def test_anything_else_is_one(guard, error):
    for _ in range(MAX_FAILURES):
        assert guard.call("asked", failing(error)) is None
    assert guard.breaker.is_open
    calls = []
    assert guard.call("asked", lambda: calls.append(1)) is None
    assert calls == []


def test_a_bad_record_is_an_answer(guard):
    guard.breaker.failed()
    with pytest.raises(BadRecord):
        guard.call("read", failing(BadRecord("bad")))
    assert guard.breaker.is_trusted


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), KeyError("own bug")])
def test_a_trial_that_fails_in_any_way_is_made_again(clock, error):
    """What a place sends must not end the thread that tries it."""
    errors = [error]

    def attempt():
        clock.now += 60.0
        if errors:
            raise errors.pop()

    guard = Guard(attempt, Breaker(clock), TierCounts(), lambda: None, 60.0)
    guard.start()
    guard.wait_until_tried(SOON)
    until = time.monotonic() + SOON
    while guard.breaker.is_open and time.monotonic() < until:
        time.sleep(0.01)
    assert not guard.breaker.is_open
    guard.close()


def test_after_the_end_nobody_is_called(clock):
    guard = Guard(lambda: None, Breaker(clock), TierCounts(), lambda: None, 60.0)
    calls = []
    guard.start()
    assert guard.wait_until_tried(SOON)
    assert guard.call("asked", lambda: calls.append(1) or True)
    guard.close()
    assert guard.call("asked", lambda: calls.append(2) or True) is None
    assert calls == [1]
    assert not guard.breaker.is_trusted
