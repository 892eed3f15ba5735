"""When a shared tier is left alone, and when it is tried again."""

import pytest

from keepwarm.remote.breaker import MAX_FAILURES, MAX_RETRY_S, Breaker


@pytest.fixture
def breaker(clock):
    made = Breaker(clock)
    made.tried(True)
    return made


def test_it_is_open_until_it_was_tried(clock):
    made = Breaker(clock)
    assert made.is_open
    assert made.retry_in_s == 0.0
    made.tried(True)
    assert not made.is_open
    assert made.is_trusted


def test_failures_in_a_row_open_it(breaker):
    for _ in range(MAX_FAILURES - 1):
        breaker.failed()
    assert not breaker.is_open
    breaker.succeeded()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open


def test_one_failure_ends_the_trust_until_a_success(breaker):
    breaker.failed()
    assert not breaker.is_trusted
    assert not breaker.is_open
    breaker.succeeded()
    assert breaker.is_trusted


def test_only_a_trial_closes_it(breaker):
    for _ in range(MAX_FAILURES):
        breaker.failed()
    breaker.succeeded()  # of a call that began before
    assert breaker.is_open
    breaker.tried(True)
    assert not breaker.is_open


def test_trials_are_at_growing_distances_up_to_a_limit(breaker, clock):
    for _ in range(MAX_FAILURES):
        breaker.failed()
    waits = []
    for _ in range(7):
        waits.append(breaker.retry_in_s)
        clock.now += breaker.retry_in_s
        assert breaker.retry_in_s == 0.0
        breaker.tried(False)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, MAX_RETRY_S]


def test_failures_while_it_is_open_do_not_delay_the_trial(breaker, clock):
    for _ in range(MAX_FAILURES):
        breaker.failed()
    clock.now += 0.4
    breaker.failed()
    assert breaker.retry_in_s == pytest.approx(0.1)


def test_a_trial_that_is_under_way_at_the_end_changes_nothing(breaker):
    breaker.end()
    for success in (True, False):
        breaker.tried(success)
        assert breaker.is_open
        assert not breaker.is_trusted
