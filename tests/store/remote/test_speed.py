"""What is measured of a shared tier."""

import pytest

from keepwarm.store.remote.speed import TierSpeed

MIB = 1 << 20


def settled(measure, n=40):
    for _ in range(n):
        measure()


@pytest.fixture
def speed(clock):
    return TierSpeed(clock)


def test_overlapping_reads_share_one_rate(speed, clock):
    def measure():
        with speed.reading() as one, speed.reading() as two:
            clock.now += 0.1
            one(5 * MIB)
            two(5 * MIB)

    speed.latency_s = 0.0
    settled(measure)
    assert speed.bytes_per_s == pytest.approx(100 * MIB, rel=0.01)
    assert speed.load_s(50 * MIB) == pytest.approx(0.5, rel=0.02)


def test_latency_is_that_of_questions_which_were_answered(speed, clock):
    def measure():
        with speed.asking():
            clock.now += 0.02

    settled(measure)
    failing = speed.asking()
    failing.__enter__()
    clock.now += 50.0
    failing.__exit__(OSError, OSError("gone"), None)
    assert speed.latency_s == pytest.approx(0.02, rel=0.01)


def test_what_was_declined_is_tried_again_some_day(speed, clock):
    speed.latency_s = 0.0
    with speed.reading() as add:
        clock.now += 100.0
        add(MIB)
    slow = speed.load_s(MIB)
    settled(speed.declined, 200)
    assert speed.load_s(MIB) < slow / 10


def test_the_first_measurement_replaces_the_guess(speed, clock):
    with speed.reading() as add:
        clock.now += 1.0
        add(7 * MIB)
    assert speed.bytes_per_s == pytest.approx(7 * MIB)


def test_a_few_bytes_say_nothing_of_the_rate(speed, clock):
    before = speed.bytes_per_s
    with speed.reading() as add:
        clock.now += 1.0
        add(10)
    assert speed.bytes_per_s == before
