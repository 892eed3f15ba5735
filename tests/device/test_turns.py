"""Engines that share the device alternate."""

import threading

import pytest

from keepwarm.device.turns import DeviceTurns
from tests.kit.waiting import wait_until

N = 20


def test_who_has_work_alternates():
    """Nobody takes two turns while another waits: each waits for one turn of every other."""
    turns, log = DeviceTurns(), []

    def work(name):
        for n_before in range(N):
            with turns.take():
                log.append(name)
                if n_before < N - 1:
                    wait_until(lambda: len(turns._waiting) == 2)

    workers = [threading.Thread(target=work, args=name) for name in "abc"]
    with turns.take():
        for n_before, worker in enumerate(workers):
            worker.start()
            wait_until(lambda n=n_before: len(turns._waiting) == n + 1)
        assert turns.others_wait()
    for worker in workers:
        worker.join(60)
    assert log == list("abc" * N)


def test_a_turn_that_fails_ends():
    turns = DeviceTurns()

    def fail():
        with turns.take():
            raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        fail()
    with turns.take():
        assert not turns.others_wait()
