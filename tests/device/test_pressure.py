"""Low memory: the right caches are released, from the right memory, and no more than needed."""

import threading

import mlx.core as mx
import pytest

from keepwarm.device.memory import (
    GIB,
    MIB,
    Memories,
    Memory,
    MemoryGuard,
    Watcher,
    free_buffers,
    make_guards,
)
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of

FLOOR = 1000 * MIB
TOTAL = 20 * FLOOR


class Fake:
    """A memory with so many free bytes; its release functions add to them."""

    def __init__(self, left, total=TOTAL):
        self.left = left
        self.asked = []
        self.memory = Memory(total, lambda: self.left, lambda: 0)

    def shedder(self, name, holds):
        def shed(n_bytes):
            nonlocal holds
            freed = min(holds, n_bytes)
            holds -= freed
            self.left += freed
            self.asked.append((name, n_bytes))
            return freed

        return shed


@pytest.fixture
def fake():
    return Fake(left=2 * FLOOR)


# One memory.


def test_nothing_is_shed_while_there_is_enough(fake):
    guard = MemoryGuard(fake.memory, [fake.shedder("live", 5 * FLOOR)])
    fake.left = FLOOR
    assert guard.check() == 0
    assert fake.asked == []


def test_the_least_valuable_goes_first_and_no_more_than_needed(fake):
    shed = [fake.shedder("live", 300 * MIB), fake.shedder("tier", 9 * FLOOR)]
    guard = MemoryGuard(fake.memory, shed)
    fake.left = 900 * MIB
    assert guard.check() == 600 * MIB
    assert fake.asked == [("live", 600 * MIB), ("tier", 300 * MIB)]
    assert fake.left == guard.enough_bytes


def test_what_nobody_uses_goes_before_all_else():
    tidied = []
    memory = Memory(TOTAL, lambda: FLOOR - 1, lambda: tidied.append(1) or FLOOR)
    fake = Fake(0)
    assert MemoryGuard(memory, [fake.shedder("live", FLOOR)]).check() == FLOOR
    assert (len(tidied), fake.asked) == (2, [])


def test_it_sheds_until_there_is_a_good_deal_more_than_the_floor(fake):
    """Hysteresis: not one block per check, and nothing between floor and enough."""
    guard = MemoryGuard(fake.memory, [fake.shedder("live", 9 * FLOOR)])
    for left, sheds in [(1200, 0), (999, 1), (1200, 1), (1499, 1), (1500, 0), (1200, 0), (999, 1)]:
        fake.left, fake.asked = left * MIB, []
        guard.check()
        assert len(fake.asked) == sheds, left


def test_one_that_fails_does_not_spare_the_others(fake, caplog):
    def broken(n_bytes):
        raise OSError("no")

    guard = MemoryGuard(fake.memory, [broken, fake.shedder("tier", 9 * FLOOR)])
    fake.left = 500 * MIB
    assert guard.check() == 1000 * MIB
    assert "could not be released" in caplog.text


def test_shedding_frees_memory_of_the_process():
    """Released arrays leave MLX, even as buffers for reuse."""
    held = [mx.zeros((MIB,)) for _ in range(4)]
    mx.eval(held)
    start = mx.get_active_memory()

    def shed(n_bytes):
        held.clear()
        return 16 * MIB

    assert MemoryGuard(Memory(TOTAL, lambda: 0, free_buffers), [shed]).check() >= 16 * MIB
    assert start - mx.get_active_memory() >= 16 * MIB
    assert mx.get_cache_memory() == 0


# Two memories: a GPU that has its own, in a large machine.


def of_two(gpu_left, host_left):
    gpu, host = Fake(gpu_left, total=80 * GIB), Fake(host_left, total=2048 * GIB)
    looks = make_guards(
        Memories(gpu.memory, host.memory),
        gpu.shedder("live", 20 * GIB),
        host.shedder("tier", 500 * GIB),
    )
    return gpu, host, Watcher(looks)


@pytest.mark.parametrize(
    ("gpu_left", "host_left", "asked"),
    [(60 * GIB, 1000 * GIB, []), (3 * GIB, 1000 * GIB, ["live"]), (60 * GIB, 100 * GIB, ["tier"])],
)
def test_the_memory_that_is_low_by_its_own_floor_sheds_what_lies_there(gpu_left, host_left, asked):
    """A twentieth of the machine is more than the GPU has; what lies elsewhere would not help."""
    gpu, host, watcher = of_two(gpu_left, host_left)
    freed = watcher.check()
    assert freed == gpu.left - gpu_left + host.left - host_left
    assert [name for name, _ in (*gpu.asked, *host.asked)] == asked
    assert bool(freed) == bool(asked)


def test_one_memory_sheds_both():
    """Live caches first, because their blocks stay."""
    fake = Fake(FLOOR // 2)
    shared = Memories(fake.memory, fake.memory)
    shed = fake.shedder("live", 0), fake.shedder("tier", 9 * FLOOR)
    assert Watcher(make_guards(shared, *shed)).check() == FLOOR
    assert [name for name, _ in fake.asked] == ["live", "tier"]


@pytest.mark.parametrize("low", ["gpu", "host"])
def test_an_engine_sheds_where_it_is_low(models, tmp_path, low):
    """In the low memory only; the other keeps its content."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.warm(ask(prompt_of(600))).result()
        engine.wait_until_saved()
        left = {"gpu": 80 * GIB, "host": 80 * GIB, low: 0}
        both = Memories(
            Memory(80 * GIB, lambda: left["gpu"], lambda: 0),
            Memory(80 * GIB, lambda: left["host"], lambda: 0),
        )
        before = {use.name: use.n_bytes for use in engine.memory()}
        Watcher(make_guards(both, engine.live.release, engine.store.release)).check()
        now = {use.name: use.n_bytes for use in engine.memory()}
    kept, gone = ("memory", "live") if low == "gpu" else ("live", "memory")
    assert now[kept] == before[kept] > 0
    assert now[gone] == 0 < before[gone]


# Its thread.


def test_it_watches_on_a_thread_of_its_own(fake):
    """And ends with it."""
    shed = threading.Event()
    fake.left = 10
    before = set(threading.enumerate())  # engines of other tests have watchers too

    def drop(n_bytes):
        shed.set()
        return n_bytes

    with Watcher([MemoryGuard(fake.memory, [drop])], interval_s=0.001) as watcher:
        assert shed.wait(300)
        assert watcher.start() is watcher
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "keepwarm-memory"]


def test_a_machine_that_cannot_be_read_is_looked_at_again():
    """The thread survives an error in one check."""
    looks, again = [], threading.Event()

    def left():
        looks.append(1)
        if len(looks) == 1:
            raise OSError("busy")
        again.set()
        return 1 << 50

    with Watcher([MemoryGuard(Memory(TOTAL, left, lambda: 0), [])], interval_s=0.001):
        assert again.wait(300)
