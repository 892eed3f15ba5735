"""What was freed is freed for the system too; a program, because other engines free pages too."""

from __future__ import annotations

import time

import mlx.core as mx
import psutil

from keepwarm.device.memory import MIB, MemoryConfig, MemoryScopes, Watcher, trim_heap


def rss() -> int:
    return psutil.Process().memory_info().rss


def full_of_holes(n_arrays: int = 3000) -> list[mx.array]:
    """Every hundredth of many small arrays; the others are freed, and their pages kept."""
    arrays = [mx.full((5000,), number) for number in range(n_arrays)]
    mx.eval(arrays)
    kept = arrays[::100]
    del arrays
    mx.clear_cache()
    return kept


def trim() -> None:
    kept = full_of_holes()
    before = rss()
    trim_heap()
    assert before - rss() > 20 * MIB
    assert [int(array[0]) for array in kept] == list(range(0, 3000, 100))


def work_and_rest() -> None:
    """An engine that rests gives pages back; one that runs does not, for it would want them."""
    scopes, memory = MemoryScopes(), MemoryConfig(*[64 * MIB] * 5)
    with scopes.join(memory), Watcher([], became_idle=scopes.became_idle, interval_s=0.01):
        with scopes.active(memory):
            kept = full_of_holes()
            start = rss()
            time.sleep(0.1)
            assert start - rss() < 10 * MIB
        deadline = time.monotonic() + 300
        while start - rss() < 20 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        assert start - rss() > 20 * MIB
    assert kept


if __name__ == "__main__":
    trim()
    work_and_rest()
