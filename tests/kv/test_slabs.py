"""Slabs: host memory that a CUDA device shares. Here the device is the CPU."""

import gc
import sys
import time

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.kv import slabs
from keepwarm.kv.slabs import Slab, SlabArray
from tests.kit.waiting import wait_until

N_BYTES = 100_000


def fill(slab: Slab, value: int) -> None:
    slab.array[:N_BYTES] = mx.full((N_BYTES,), value, mx.uint8)
    mx.async_eval(slab.array)


def test_a_write_changes_the_slab_itself(pool):
    """Memory of another array would not be mapped for the device."""
    slab = pool.take(N_BYTES)
    address = np.asarray(slab.array).ctypes.data
    fill(slab, 7)
    assert slab.memory.ctypes.data == address
    assert (slab.memory[:N_BYTES] == 7).all()


def test_a_slab_returns_with_the_last_reference_to_its_bytes(pool):
    slab = pool.take(N_BYTES)
    fill(slab, 1)
    bytes_held = SlabArray(slab, 0, (N_BYTES,), mx.uint8).words.data
    del slab
    gc.collect()
    assert pool.free_bytes == 0
    again = pool.take(N_BYTES)
    fill(again, 2)
    assert bytes_held[0] == bytes_held[-1] == 1
    del bytes_held
    gc.collect()
    assert pool.free_bytes == slabs._rounded(N_BYTES)
    del again  # which nobody has read
    gc.collect()
    assert pool.free_bytes == 2 * slabs._rounded(N_BYTES)
    reused = pool.take(N_BYTES)
    assert pool.free_bytes == slabs._rounded(N_BYTES)
    fill(reused, 3)
    assert (reused.memory[:N_BYTES] == 3).all()


def test_slabs_are_prepared_ahead_and_again(pool):
    pool.expect([N_BYTES, 2 * N_BYTES])
    wanted = slabs.MAX_READY * (slabs._rounded(N_BYTES) + slabs._rounded(2 * N_BYTES))
    wait_until(lambda: pool.free_bytes >= wanted)
    taken = [pool.take(N_BYTES) for _ in range(5)]
    wait_until(lambda: pool.free_bytes >= wanted)
    assert len(taken) == 5


def test_more_are_prepared_while_none_are_taken(pool, monkeypatch):
    """As many as the blocks may take, and no more after memory was short."""
    monkeypatch.setattr(slabs, "QUIET_S", 0.05)
    size = slabs._rounded(N_BYTES)
    pool.allow((slabs.MAX_READY + 10) * size)
    pool.expect([N_BYTES])
    wait_until(lambda: pool.free_bytes == (slabs.MAX_READY + 10) * size)
    taken = [pool.take(N_BYTES) for _ in range(20)]
    wait_until(lambda: pool.free_bytes == slabs.MAX_READY * size)  # 52 of the 42 allowed
    assert pool.n_bytes == (slabs.MAX_READY + 20) * size
    taken.clear()
    gc.collect()
    assert pool.free_bytes == (slabs.MAX_READY + 20) * size
    pool.trim(sys.maxsize)
    wait_until(lambda: pool.free_bytes == pool.n_bytes == slabs.MAX_READY * size)
    time.sleep(3 * slabs.QUIET_S)
    assert pool.free_bytes == slabs.MAX_READY * size


def test_many_are_prepared_at_once(pool, monkeypatch):
    """Each time waits for work on the device, which may be long."""
    batches, make = [], slabs._make
    monkeypatch.setattr(
        slabs, "_make", lambda size, n_slabs: batches.append(n_slabs) or make(size, n_slabs)
    )
    size = slabs._rounded(N_BYTES)
    monkeypatch.setattr(slabs, "AT_ONCE_BYTES", 12 * size)
    pool.expect([N_BYTES])
    wait_until(lambda: pool.free_bytes == slabs.MAX_READY * size)
    assert sorted(batches) == [slabs.MAX_READY - 24, 12, 12]


def test_none_are_prepared_ahead_once_a_kept_prompt_has_begun(pool, monkeypatch):
    """Its first slabs are taken when its first slice is computed; beside that few are made."""
    monkeypatch.setattr(slabs, "QUIET_S", 1000.0)
    size = slabs._rounded(N_BYTES)
    pool._last_taken -= 2000
    pool.allow(1 << 40)
    pool.will_take()
    pool.expect([N_BYTES])
    wait_until(lambda: pool.free_bytes >= slabs.MAX_READY * size)
    taken = [pool.take(N_BYTES) for _ in range(5)]
    wait_until(lambda: pool.n_bytes == (slabs.MAX_READY + len(taken)) * size)
    time.sleep(0.2)
    assert pool.free_bytes == slabs.MAX_READY * size
    assert pool.n_bytes == (slabs.MAX_READY + len(taken)) * size


def test_unused_slabs_are_freed(pool):
    for slab in [pool.take(N_BYTES) for _ in range(4)]:
        del slab
    gc.collect()
    size = slabs._rounded(N_BYTES)
    assert pool.free_bytes == 4 * size
    pool.trim(size + 1)
    assert pool.free_bytes == 2 * size
    pool.trim(-5)
    assert pool.free_bytes == 2 * size


def test_a_closed_pool_has_freed_its_slabs(pool):
    pool.expect([N_BYTES])
    wait_until(lambda: pool.free_bytes)
    held = pool.take(N_BYTES)
    pool.close()
    assert pool.free_bytes == 0
    assert pool.n_bytes == held.array.nbytes


@given(st.integers(0, 1 << 34))
def test_a_slab_is_larger_than_asked_but_not_much(n_bytes):
    size = slabs._rounded(n_bytes)
    assert n_bytes < size <= max(n_bytes * 9 / 8, n_bytes + slabs.MIN_STEP)
    assert size % slabs.MIN_STEP == 0


def test_a_slab_that_cannot_be_prepared_stops_no_later_one(pool, monkeypatch, caplog):
    """Requests make their own meanwhile."""
    make = slabs._make

    def fail(n_bytes, n_slabs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(slabs, "_make", fail)
    pool.expect([N_BYTES])
    wait_until(lambda: not pool._expected and not pool._coming.total())
    assert pool.n_bytes == 0
    assert "could not be prepared" in caplog.text
    monkeypatch.setattr(slabs, "_make", make)
    assert pool.take(N_BYTES).array.nbytes >= N_BYTES
    pool.expect([N_BYTES])
    wait_until(lambda: pool.free_bytes > 0)
