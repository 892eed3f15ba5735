"""Budgets that fit the machine, limits that nobody races for, and memory that is given back."""

import logging
import re
import threading
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from keepwarm.device.memory import (
    GIB,
    MIB,
    UNLIMITED,
    MemoryConfig,
    MemoryScopes,
    gpu_memory,
    host_memory,
    memories,
    wired_limit,
)

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
SIZES = (4, 8, 16, 24, 32, 64, 128, 192)
SMALL = MemoryConfig.automatic(4 * GIB)
LARGE = MemoryConfig.automatic(64 * GIB)


# What automatic picks.


@pytest.mark.parametrize(
    ("gib", "active"), [(3, 128), (4, 256), (5, 256), (6, 512), (7, 512), (8, 768), (12, 768)]
)
def test_buffers_of_small_machines(gib, active):
    """S4-09."""
    config = MemoryConfig.automatic(gib * GIB)
    assert config.buffer_active_bytes == active * MIB
    assert config.buffer_idle_bytes == 50 * MIB


def test_buffers_of_large_machines_grow_with_them():
    """S4-09: a workstation is no telephone."""
    config = MemoryConfig.automatic(64 * GIB)
    assert config.buffer_active_bytes == 4 * GIB
    assert config.buffer_idle_bytes == GIB // 4


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("share", [0, 0.1, 0.3])
def test_all_budgets_together_leave_room(gib, share):
    """S4-08: a quarter for the system, and a tenth of the rest for what a step computes with."""
    total, model = gib * GIB, int(share * gib * GIB)
    config = MemoryConfig.automatic(total, model)
    caches = config.live_bytes + config.tier_bytes + config.batch_bytes
    assert model + config.buffer_active_bytes + caches / 0.9 <= 0.75 * total
    assert config.buffer_idle_bytes < config.buffer_active_bytes
    assert min(config.live_bytes, config.tier_bytes, config.batch_bytes) >= total // 80


def test_more_memory_is_more_of_everything():
    configs = [astuple(MemoryConfig.automatic(gib * GIB)) for gib in SIZES]
    for smaller, larger in pairwise(configs):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))


def test_a_model_that_fills_the_machine_leaves_little_but_something():
    config = MemoryConfig.automatic(8 * GIB, model_bytes=20 * GIB)
    assert config.batch_bytes == 8 * GIB // 32


def test_a_gpu_with_memory_of_its_own_leaves_the_machines_to_blocks():
    """Everything but the tier is on the GPU, where there is no system to spare."""
    config = MemoryConfig.automatic(80 * GIB, 16 * GIB, host_bytes=128 * GIB)
    assert config.tier_bytes == 32 * GIB
    on_gpu = config.buffer_active_bytes + (config.live_bytes + config.batch_bytes) / 0.9
    assert 16 * GIB + on_gpu <= 0.9 * 80 * GIB
    shared = MemoryConfig.automatic(80 * GIB, 16 * GIB)
    assert config.batch_bytes > shared.batch_bytes


def test_automatic_is_about_this_machine():
    """S4-08."""
    total = gpu_memory() or host_memory().total_bytes
    host = host_memory().total_bytes if gpu_memory() else None
    assert MemoryConfig.automatic() == MemoryConfig.automatic(total, host_bytes=host)


def test_unconstrained_is_more_than_there_is():
    """S4-08: and MLX takes it for a limit."""
    config = MemoryConfig.unconstrained()
    assert set(astuple(config)) == {UNLIMITED}
    with MemoryScopes().active(config):
        assert set_limit(UNLIMITED) == UNLIMITED


def table() -> list[str]:
    """The table of the page, as the code has it now."""
    rows = [(f"{n} GiB", MemoryConfig.automatic(n * GIB)) for n in SIZES]
    with_model = MemoryConfig.automatic(16 * GIB, 5 * GIB)
    gpu = MemoryConfig.automatic(80 * GIB, 16 * GIB, host_bytes=128 * GIB)
    rows += [("16 GiB, model of 5 GiB", with_model)]
    rows += [("CUDA 80 GiB, machine 128 GiB, model of 16 GiB", gpu)]
    return [f"| {name} | {' | '.join(map(_cell, astuple(config)))} |" for name, config in rows]


def _cell(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def test_the_page_says_what_automatic_picks():
    """S4-09."""
    text = PAGE.read_text()
    documented = re.findall(r"^\| (?:\d|CUDA).*\|$", text, re.MULTILINE)
    assert documented == table()


# What the machine has.


def test_the_machine_is_asked():
    host = host_memory(Path("/nowhere"))
    assert host.total_bytes == psutil.virtual_memory().total
    assert 0 < host.available_bytes < host.total_bytes


def container(path, limit, current=0, **parts):
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in parts.items()))
    return path


def test_a_container_has_what_it_may_take(tmp_path):
    """Its page cache is not in the way of anybody."""
    parts = {"anon": 300 * MIB, "active_file": 100 * MIB, "inactive_file": 400 * MIB}
    inside = container(tmp_path, GIB, current=800 * MIB, **parts)
    assert host_memory(inside) == (GIB, GIB - 300 * MIB)


def test_a_container_without_a_limit_is_the_machine(tmp_path):
    assert host_memory(container(tmp_path, "max")).total_bytes == psutil.virtual_memory().total


def test_what_is_left_of_this_machine():
    memory = memories().arrays
    assert 0 < memory.left() < memory.total_bytes
    assert memory.total_bytes == (gpu_memory() or host_memory().total_bytes)
    if (limit := wired_limit()) is not None:
        assert memory.left() <= limit


def test_without_a_gpu_of_its_own_memory_there_is_one():
    """Arrays and blocks are beside each other, so dropping either leaves more for both."""
    arrays, blocks = memories()
    assert (arrays is blocks) == (gpu_memory() is None)


def test_a_gpu_with_memory_of_its_own_makes_two():
    """Each with a floor by its own size, and with what is left there."""
    arrays, blocks = memories(gpu_bytes=80 * GIB)
    assert arrays.floor_bytes == 4 * GIB
    assert blocks.floor_bytes == max(256 * MIB, host_memory().total_bytes // 20)
    held = mx.zeros((MIB,))
    mx.eval(held)
    assert arrays.left() == 80 * GIB - mx.get_active_memory()
    assert 0 < blocks.left() < host_memory().total_bytes
    assert blocks.tidy() == 0


# Scopes.


def set_limit(n_bytes):
    """MLX tells its limit only when it is set."""
    return mx.set_cache_limit(n_bytes)


def limit():
    now = set_limit(0)
    set_limit(now)
    return now


@pytest.fixture
def before():
    """The limit as it was, which every test must leave behind."""
    before = limit()
    yield before
    assert limit() == before


def test_limits_are_high_while_something_runs(before):
    """S4-09, S4-10: and low while nothing does, and as before when all is closed."""
    scopes = MemoryScopes()
    with scopes.join(LARGE):
        assert limit() == LARGE.buffer_idle_bytes
        with scopes.active(LARGE):
            assert limit() == LARGE.buffer_active_bytes
            assert scopes.is_active
        assert limit() == LARGE.buffer_idle_bytes
        assert not scopes.is_active
    assert limit() == before


def test_the_limit_stays_until_the_last_ends(before):
    """S4-10: whichever that is."""
    scopes = MemoryScopes()
    with scopes.join(LARGE):
        first, second = scopes.active(LARGE), scopes.active(LARGE)
        first.close()
        assert limit() == LARGE.buffer_active_bytes
        second.close()
        assert limit() == LARGE.buffer_idle_bytes


def test_a_scope_is_released_once_however_often_it_is_closed(before):
    """S4-11: a token a scope, not a counter that a second close would lower again."""
    scopes = MemoryScopes()
    with scopes.active(LARGE):
        other = scopes.active(LARGE)
        for _ in range(3):
            other.close()
        assert scopes.is_active
        assert limit() == LARGE.buffer_active_bytes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_errors_and_cancellation_release(before, error):
    """S4-11."""
    scopes = MemoryScopes()
    with pytest.raises(error), scopes.active(LARGE):
        raise error
    assert not scopes.is_active


def test_an_abandoned_answer_releases(before):
    """S4-11: a generator that nobody reads to its end."""
    scopes = MemoryScopes()

    def answer():
        with scopes.active(LARGE):
            yield 1
            yield 2

    running = answer()
    next(running)
    assert scopes.is_active
    running.close()
    assert not scopes.is_active


@pytest.mark.parametrize("order", [(SMALL, LARGE), (LARGE, SMALL)])
def test_two_engines_with_different_settings_do_not_race(before, order, caplog):
    """S4-24, D6: whoever comes first, the larger holds while it is active, and somebody is told."""
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
    """S4-10, S4-24."""
    scopes = MemoryScopes()

    def work(config):
        for _ in range(200):
            with scopes.active(config):
                assert scopes.is_active

    threads = [threading.Thread(target=work, args=(c,)) for c in (SMALL, LARGE) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not scopes.is_active


def test_buffers_are_freed_only_when_nothing_runs(before):
    """S4-12: MLX's cache is empty afterwards, and full before."""
    scopes = MemoryScopes()
    with scopes.join(LARGE):
        with scopes.active(LARGE):
            mx.eval(mx.zeros((MIB,)))
            assert mx.get_cache_memory() >= 4 * MIB
            assert not scopes.evict_if_idle()
            assert mx.get_cache_memory() >= 4 * MIB
        assert scopes.evict_if_idle()
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
    """S4-15: from the first engine to the last, not under a running evaluation."""
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
    """S4-15."""
    device = Recorder()
    with MemoryScopes(device).active(SMALL):
        assert device.wired == 7
    assert device.wired == 7
