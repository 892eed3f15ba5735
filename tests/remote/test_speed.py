"""What is measured of a shared tier."""

import math

import pytest

from keepwarm.concurrency import CallError
from keepwarm.remote.health import RemoteSpeed

MIB = 1 << 20


def settled(measure, n=40):
    for _ in range(n):
        measure()


@pytest.fixture
def speed(clock):
    return RemoteSpeed(clock)


def test_overlapping_reads_share_one_rate(speed, clock):
    def measure():
        with speed.reading(5 * MIB) as one, speed.reading(5 * MIB) as two:
            clock.now += 0.1
            one(5 * MIB)
            two(5 * MIB)

    speed.latency_s = 0.0
    settled(measure)
    assert speed.bytes_per_s == pytest.approx(100 * MIB, rel=0.01)
    assert speed.load_s(50 * MIB) == pytest.approx(0.5, rel=0.02)


def call(speed, clock, seconds):
    with speed.calling():
        clock.now += seconds


def test_latency_is_that_of_calls_which_were_answered(speed, clock):
    settled(lambda: call(speed, clock, 0.02))
    with pytest.raises(CallError), speed.calling():
        clock.fail_after(50.0)
    assert speed.latency_s == speed.call_s == pytest.approx(0.02)


def test_a_question_plans_with_the_95th_percentile_of_the_latest_calls(speed, clock):
    for n in range(1, 101):
        call(speed, clock, n / 1000)
    assert speed.call_s == pytest.approx(0.095)
    assert speed.latency_s == pytest.approx(0.0505)
    settled(lambda: call(speed, clock, 0.01), 100)
    call(speed, clock, 5.0)
    assert speed.call_s == pytest.approx(0.01), "a few slow ones are no matter"


def test_the_first_calls_say_what_to_plan_with(speed, clock):
    for seconds in (0.08, 0.09, 0.07, 0.08):
        call(speed, clock, seconds)
    assert speed.call_s == pytest.approx(0.09)


def test_after_an_outage_all_is_measured_anew(speed, clock):
    settled(lambda: call(speed, clock, 0.01))
    speed.begin_anew()
    call(speed, clock, 0.2)
    with speed.reading(MIB) as add:
        clock.now += 1.0
        add(MIB)
    assert speed.call_s == speed.latency_s == pytest.approx(0.2)
    assert speed.bytes_per_s == pytest.approx(MIB)


def fail_to_read(speed, clock, seconds):
    with pytest.raises(CallError), speed.reading(MIB):
        clock.fail_after(seconds)


def test_what_was_not_read_in_time_shows_that_the_rate_is_lower(speed, clock):
    with speed.reading(MIB) as add:
        clock.now += 0.01
        add(MIB)
    fail_to_read(speed, clock, 0.001)
    assert speed.bytes_per_s == pytest.approx(100 * MIB), "it was refused"
    fail_to_read(speed, clock, 0.0125)
    assert speed.bytes_per_s == pytest.approx(80 * MIB)
    fail_to_read(speed, clock, 50.0)
    assert speed.bytes_per_s == pytest.approx(40 * MIB), "an outage says little"


def test_what_was_declined_is_tried_again_some_day(speed, clock):
    speed.latency_s = 0.0
    with speed.reading(MIB) as add:
        clock.now += 100.0
        add(MIB)
    slow = speed.load_s(MIB)
    settled(speed.declined, 200)
    assert speed.load_s(MIB) < slow / 10


def test_the_first_measurement_replaces_the_guess(speed, clock):
    with speed.reading(7 * MIB) as add:
        clock.now += 1.0
        add(7 * MIB)
    assert speed.bytes_per_s == pytest.approx(7 * MIB)


def test_a_line_is_as_fast_as_its_faster_direction(speed, clock):
    with speed.reading(MIB) as add:
        clock.now += 1.0
        add(MIB)
    assert speed.line_bytes_per_s == math.inf, "nothing was put yet"
    put(speed, clock, 8 * MIB)
    assert speed.line_bytes_per_s == pytest.approx(8 * MIB)
    settled(lambda: put(speed, clock, MIB // 2))
    assert speed.line_bytes_per_s == pytest.approx(MIB)
    with pytest.raises(CallError):
        speed.put(MIB, lambda: clock.fail_after(50.0))
    assert not speed.put(MIB, lambda: False), "what is refused takes no time"
    put(speed, clock, 100)
    assert speed.put_bytes_per_s == pytest.approx(MIB // 2, rel=0.01)


def put(speed, clock, n_bytes):
    def take_a_second():
        clock.now += 1.0
        return True

    assert speed.put(n_bytes, take_a_second)


def test_a_few_bytes_say_nothing_of_the_rate(speed, clock):
    before = speed.bytes_per_s
    with speed.reading(10) as add:
        clock.now += 1.0
        add(10)
    assert speed.bytes_per_s == before
