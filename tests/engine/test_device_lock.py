"""Engines that share the device alternate."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepwarm.concurrency import DeviceLock
from tests.kit.waiting import wait_until

N = 20


def test_who_has_work_alternates():
    """Nobody takes two device while another waits: each waits for one turn of every other."""
    device, log = DeviceLock(), []

    def work(name):
        for n_before in range(N):
            with device.take():
                log.append(name)
                if n_before < N - 1:
                    wait_until(lambda: len(device._waiting) == 2)

    workers = [threading.Thread(target=work, args=name) for name in "abc"]
    with device.take():
        for n_before, worker in enumerate(workers):
            worker.start()
            wait_until(lambda n=n_before: len(device._waiting) == n + 1)
        assert device.others_wait()
    for worker in workers:
        worker.join(60)
    assert log == list("abc" * N)


def test_who_had_it_before_knows_whether_others_had_it_since():
    device = DeviceLock()

    def others_ran():
        with device.take():
            return device.others_ran()

    others_ran()
    assert not others_ran()
    other = threading.Thread(target=others_ran)
    other.start()
    other.join(60)
    assert others_ran()
    assert not others_ran()


def test_who_only_looks_does_not_keep_others_from_idle_work():
    device = DeviceLock()

    def looks():
        with device.take_if_idle() as is_idle:
            return is_idle

    with ThreadPoolExecutor(1) as thread, device.take():
        assert not thread.submit(looks).result(60), "it does not wait"
        assert not device.others_wait()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert not one.submit(looks).result(60), "this thread computed"
        assert not other.submit(looks).result(60)
        assert one.submit(looks).result(60), "the other one has only looked"
        assert not other.submit(looks).result(60), "the first had a turn"
        assert other.submit(looks).result(60)


def test_a_turn_that_fails_ends():
    device = DeviceLock()

    def fail():
        with device.take():
            raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        fail()
    with device.take():
        assert not device.others_wait()


def test_a_device_is_lost_when_nothing_can_be_computed_not_while_memory_is_short():
    def fail(why):
        raise RuntimeError(why)

    assert not DeviceLock().examine()
    assert not DeviceLock(lambda: fail("cudaMallocAsync failed: out of memory")).examine()
    device = DeviceLock(lambda: fail("unspecified launch failure"))
    assert "unspecified launch failure" in device.examine() == device.lost
    with device.take_if_idle() as is_idle:
        assert not is_idle
