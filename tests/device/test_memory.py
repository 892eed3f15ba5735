"""Budgets that fit the machine, and what the machine has."""

import re
from dataclasses import astuple
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from keepwarm.device.memory import (
    GIB,
    MIB,
    MemoryConfig,
    gpu_memory,
    host_memory,
    memories,
    wired_limit,
)

PAGE = Path(__file__).parents[2] / "docs" / "results" / "memory.md"
SIZES = (4, 8, 16, 24, 32, 64, 128, 192)
SMALL = MemoryConfig.automatic(4 * GIB)
LARGE = MemoryConfig.automatic(64 * GIB)


# What automatic picks.


@pytest.mark.parametrize(
    ("gib", "active"), [(3, 128), (4, 256), (5, 256), (6, 512), (7, 512), (8, 768), (12, 768)]
)
def test_buffers_of_small_machines(gib, active):
    config = MemoryConfig.automatic(gib * GIB)
    assert config.buffer_active_bytes == active * MIB
    assert config.buffer_idle_bytes == 50 * MIB


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("share", [0, 0.1, 0.3])
def test_all_budgets_together_leave_room(gib, share):
    """A quarter for the system, and a tenth of the rest for temporaries of a step."""
    total, model = gib * GIB, int(share * gib * GIB)
    config = MemoryConfig.automatic(total, model)
    caches = config.live_bytes + config.tier_bytes + config.batch_bytes
    assert model + config.buffer_active_bytes + caches / 0.9 <= 0.75 * total
    assert config.buffer_idle_bytes < config.buffer_active_bytes
    assert min(config.live_bytes, config.tier_bytes, config.batch_bytes) >= total // 80


def test_a_model_that_fills_the_machine_leaves_little_but_something():
    config = MemoryConfig.automatic(8 * GIB, model_bytes=20 * GIB)
    assert config.batch_bytes == 8 * GIB // 32


def test_automatic_is_about_this_machine():
    total = gpu_memory() or host_memory().total_bytes
    host = host_memory().total_bytes if gpu_memory() else None
    assert MemoryConfig.automatic() == MemoryConfig.automatic(total, host_bytes=host)


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
    """Its page cache counts as available."""
    parts = {"anon": 300 * MIB, "active_file": 100 * MIB, "inactive_file": 400 * MIB}
    inside = container(tmp_path, GIB, current=800 * MIB, **parts)
    assert host_memory(inside) == (GIB, GIB - 300 * MIB)


def test_a_container_without_a_limit_is_the_machine(tmp_path):
    assert host_memory(container(tmp_path, "max")).total_bytes == psutil.virtual_memory().total


def test_what_is_left_of_this_machine():
    memory = memories().arrays
    assert 0 < memory.free_bytes() < memory.total_bytes
    assert memory.total_bytes == (gpu_memory() or host_memory().total_bytes)
    if (limit := wired_limit()) is not None:
        assert memory.free_bytes() <= limit


def test_without_a_gpu_of_its_own_memory_there_is_one():
    """Arrays and blocks share one memory, so releasing either frees memory for both."""
    arrays, blocks = memories()
    assert (arrays is blocks) == (gpu_memory() is None)


def test_a_gpu_with_memory_of_its_own_makes_two():
    """Each has a floor by its own size and its own free bytes."""
    arrays, blocks = memories(gpu_bytes=80 * GIB)
    assert arrays.floor_bytes == 4 * GIB
    assert blocks.floor_bytes == max(256 * MIB, host_memory().total_bytes // 20)
    held = mx.zeros((MIB,))
    mx.eval(held)
    assert arrays.free_bytes() == 80 * GIB - mx.get_active_memory()
    some_on_host = memories(gpu_bytes=80 * GIB, on_host=lambda: 3 * MIB).arrays
    assert some_on_host.free_bytes() == arrays.free_bytes() + 3 * MIB
    assert 0 < blocks.free_bytes() < host_memory().total_bytes
    assert blocks.release_unused() == 0
