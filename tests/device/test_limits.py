"""Buffer limits: high while something runs, restored afterwards, shared by all engines."""

import logging
import threading
from dataclasses import astuple, replace

import mlx.core as mx
import pytest

from keepwarm.device.memory import GIB, MIB, UNLIMITED, MemoryConfig, MemoryScopes

SMALL = MemoryConfig.automatic(4 * GIB)
LARGE = MemoryConfig.automatic(64 * GIB)


def set_limit(n_bytes):
    """MLX reports its limit only when a new one is set."""
    return mx.set_cache_limit(n_bytes)


def limit():
    now = set_limit(0)
    set_limit(now)
    return now


@pytest.fixture
def before():
    """The limit before the test, which every test must restore."""
    before = limit()
    yield before
    assert limit() == before


def test_limits_are_high_while_something_runs(before):
    """And low while nothing does, and as before when all is closed."""
    scopes = MemoryScopes()
    with scopes.join(LARGE):
        assert limit() == LARGE.buffer_idle_bytes
        with scopes.active(LARGE):
            assert limit() == LARGE.buffer_active_bytes
        assert limit() == LARGE.buffer_idle_bytes
    assert limit() == before


def test_a_scope_is_released_once_however_often_it_is_closed(before):
    """One token per scope, not a counter that a second close would lower again."""
    scopes = MemoryScopes()
    with scopes.active(LARGE):
        other = scopes.active(LARGE)
        for _ in range(3):
            other.close()
        assert limit() == LARGE.buffer_active_bytes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_errors_and_cancellation_release(before, error):
    scopes = MemoryScopes()
    with pytest.raises(error), scopes.active(LARGE):
        raise error
    assert limit() == before


@pytest.mark.parametrize("order", [(SMALL, LARGE), (LARGE, SMALL)])
def test_two_engines_with_different_settings_do_not_race(before, order, caplog):
    """In either order the larger limit holds while active, and a warning is logged."""
    scopes = MemoryScopes()
    with caplog.at_level(logging.WARNING), scopes.join(order[0]), scopes.join(order[1]):
        assert "different memory settings" in caplog.text
        assert limit() == LARGE.buffer_idle_bytes
        with scopes.active(order[0]), scopes.active(order[1]):
            assert limit() == LARGE.buffer_active_bytes
        with scopes.active(SMALL):
            assert limit() == SMALL.buffer_active_bytes
    assert limit() == before


def test_equal_engines_are_no_reason_to_warn(before, caplog):
    scopes = MemoryScopes()
    with scopes.join(LARGE), scopes.join(replace(LARGE)), scopes.active(SMALL):
        assert caplog.text == ""


def test_many_threads_leave_the_limit_as_it_was(before):
    scopes = MemoryScopes()

    def work(config):
        for _ in range(200):
            with scopes.active(config):
                assert not scopes.release_if_idle()

    threads = [threading.Thread(target=work, args=(c,)) for c in (SMALL, LARGE) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scopes.release_if_idle()


def test_buffers_are_freed_only_when_nothing_runs(before):
    """MLX's cache is empty afterwards, and full before."""
    scopes = MemoryScopes()
    with scopes.join(LARGE):
        with scopes.active(LARGE):
            mx.eval(mx.zeros((MIB,)))
            assert mx.get_cache_memory() >= 4 * MIB
            assert not scopes.release_if_idle()
            assert mx.get_cache_memory() >= 4 * MIB
        assert scopes.release_if_idle()
        assert mx.get_cache_memory() == 0


class Recorder:
    """A device with wired memory, which this machine may not have."""

    def __init__(self, wired=None):
        self.cache, self.wired, self.recommended = 32 * MIB, 7, wired

    def set_cache_limit(self, n_bytes):
        before, self.cache = self.cache, n_bytes
        return before

    def set_wired_limit(self, n_bytes):
        before, self.wired = self.wired, n_bytes
        return before

    def clear_cache(self):
        raise AssertionError

    def wired_limit(self):
        return self.recommended


def test_memory_is_wired_and_let_go():
    """From the first engine to the last, never during an evaluation."""
    device = Recorder(wired=10 * GIB)
    scopes = MemoryScopes(device)
    first, second = scopes.join(SMALL), scopes.join(SMALL)
    assert device.wired == 10 * GIB
    with scopes.active(SMALL):
        first.close()
    assert device.wired == 10 * GIB
    second.close()
    assert device.wired == 7
    with scopes.active(SMALL):
        assert device.wired == 10 * GIB
    assert (device.wired, device.cache) == (7, 32 * MIB)


def test_a_device_without_wired_memory_is_left_alone():
    device = Recorder()
    with MemoryScopes(device).active(SMALL):
        assert device.wired == 7
    assert device.wired == 7


def test_unconstrained_is_more_than_there_is():
    """And MLX accepts it as a limit."""
    config = MemoryConfig.unconstrained()
    assert set(astuple(config)) == {UNLIMITED}
    with MemoryScopes().active(config):
        assert set_limit(UNLIMITED) == UNLIMITED
