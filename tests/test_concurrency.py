"""Work that other threads do: one that hangs is a failure, one that only waited is not."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from keepwarm.concurrency import AbandonableExecutor, BusyError, CallError, in_background
from tests.kit.waiting import no_collection, wait_until

SOON = 30.0


@pytest.fixture
def gates():
    made = [threading.Event() for _ in range(2)]
    yield made
    for gate in made:
        gate.set()


def test_a_pool_that_hangs_has_failed(gates):
    with closing(AbandonableExecutor(1)) as hands:
        for _ in range(2):  # the first hangs, the second waits behind it
            with pytest.raises(CallError) as caught:
                hands.run(lambda: gates[0].wait(SOON), 0.01)
            assert not isinstance(caught.value, BusyError)


def test_a_pool_that_does_other_work_meanwhile_is_busy(gates):
    """The first work ends and the second begins while the third waits."""
    began = threading.Event()

    def second():
        began.set()
        gates[1].wait(SOON)

    with closing(AbandonableExecutor(1)) as hands, ThreadPoolExecutor(3) as threads:
        works = [threads.submit(hands.run, lambda: gates[0].wait(SOON), SOON)]
        while hands._n_open < 1:
            pass
        works.append(threads.submit(hands.run, second, SOON))
        while hands._n_open < 2:
            pass
        third = threads.submit(hands.run, lambda: None, 0.5)
        while hands._n_open < 3:
            pass
        gates[0].set()
        assert began.wait(SOON)
        with pytest.raises(BusyError):
            third.result(SOON)
        gates[1].set()
        for work in works:
            work.result(SOON)


def test_who_stops_waiting_does_not_end_what_is_done_in_the_background(gates):
    done = in_background(lambda: gates[0].wait(SOON), "keepwarm-test")
    assert not done.cancel()
    assert not done.done()
    gates[0].set()
    assert done.result(SOON)


class Blob:
    """Stands for what was read: a record of many megabytes."""


def wait_until_idle(hands):
    while hands._n_open:
        pass


def test_a_hand_keeps_nothing_of_what_was_read():
    with closing(AbandonableExecutor(1)) as hands:
        blob = weakref.ref(hands.run(Blob, SOON))
        wait_until(lambda: blob() is None, SOON)


def test_an_error_keeps_nothing_of_what_was_read():
    blobs = []

    def fail():
        blob = Blob()
        blobs.append(weakref.ref(blob))
        raise OSError("gone")

    with (
        no_collection(),
        closing(AbandonableExecutor(1)) as hands,
    ):  # or it would find what only holds itself
        with pytest.raises(CallError, match="gone"):
            hands.run(fail, SOON)
        wait_until(lambda: blobs[0]() is None, SOON)


def test_the_first_failure_of_several_is_told_and_the_rest_is_not_begun(gates):
    began = []

    def fail():
        raise TimeoutError

    with closing(AbandonableExecutor(1)) as hands:
        with pytest.raises(CallError, match="timed out") as caught:
            hands.run_all([fail, lambda: gates[0].wait(SOON), lambda: began.append(1)], SOON)
        assert not isinstance(caught.value, BusyError)
        gates[0].set()
        wait_until_idle(hands)
        assert began == []
