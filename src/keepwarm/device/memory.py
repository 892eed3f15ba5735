"""How much memory this machine and its GPU have, and how it is divided.

Memories       the memory that holds arrays and the one that holds blocks, with what is free
MemoryConfig   budgets for caches, blocks and buffers, scaled to the machine
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import psutil

from keepwarm.errors import BadInput

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 1 << 62  # more than any machine has
CONTAINER = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """The memory of the machine, or of the container that this process runs in."""

    total_bytes: int
    available_bytes: int


def host_memory(container: Path = CONTAINER) -> HostMemory:
    memory = psutil.virtual_memory()
    try:
        limit = int((container / "memory.max").read_text())
        used = _used_bytes(container)
    except (OSError, ValueError):  # no container, or no limit: the file says `max`
        return HostMemory(memory.total, memory.available)
    return HostMemory(min(memory.total, limit), max(0, min(memory.available, limit - used)))


def _used_bytes(container: Path) -> int:
    """Without the page cache, which counts as used there but can be reclaimed."""
    words = (container / "memory.stat").read_text().split()
    parts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    pages = parts.get("active_file", 0) + parts.get("inactive_file", 0)
    return int((container / "memory.current").read_text()) - pages


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def gpu_memory() -> int | None:
    """Bytes of the GPU's own memory; None where it shares the machine's."""
    total = mx.device_info().get("total_memory")
    return int(total) if total and not on_cpu() else None


def wired_limit() -> int | None:
    """Bytes that the GPU can keep resident; None where there is no such limit."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    return int(limit) if limit else None


def free_buffers() -> int:
    """Return the buffers that MLX keeps for reuse to the system; the bytes freed."""
    before = mx.get_cache_memory()
    mx.clear_cache()
    trim_heap()
    return before - mx.get_cache_memory()


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps free pages that lie between allocations in use, so a process that has dropped a
    cache of many small tensors stays as large as before. Other allocators need no such call.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(frozen=True)
class Memory:
    """One physical memory: the machine's, or a GPU's own."""

    total_bytes: int
    free_bytes: Callable[[], int]
    release_unused: Callable[[], int]  # returns the bytes known to be freed by it

    @property
    def floor_bytes(self) -> int:
        """Less than this free is low memory."""
        return max(256 * MIB, self.total_bytes // 20)


class Memories(NamedTuple):
    """One memory in both roles, unless the GPU has its own."""

    arrays: Memory
    blocks: Memory


def memories(gpu_bytes: int | None = None, on_host: Callable[[], int] = int) -> Memories:
    """Those of this machine; `gpu_bytes` overrides the size of the GPU's own memory, and `on_host`
    says how many bytes of MLX's arrays are not there."""
    total, gpu_bytes = host_memory().total_bytes, gpu_bytes or gpu_memory()
    if gpu_bytes is None:
        shared = Memory(total, _free_shared_bytes, free_buffers)
        return Memories(shared, shared)

    def free_bytes() -> int:
        return gpu_bytes - mx.get_active_memory() + on_host()

    gpu = Memory(gpu_bytes, free_bytes, free_buffers)
    return Memories(gpu, Memory(total, lambda: host_memory().available_bytes, _trim_host))


def _free_shared_bytes() -> int:
    available, limit = host_memory().available_bytes, wired_limit()
    return available if limit is None else min(available, limit - mx.get_active_memory())


def _trim_host() -> int:
    trim_heap()
    return 0  # malloc_trim does not report how much


@dataclass(frozen=True)
class MemoryConfig:
    """Budgets in bytes."""

    buffer_active_bytes: int  # freed buffers that MLX keeps while requests run
    buffer_idle_bytes: int  # and while none do
    live_bytes: int  # live caches of finished requests
    tier_bytes: int  # the memory tier
    batch_bytes: int  # keys and values of running requests

    def __post_init__(self) -> None:
        for name, n_bytes in vars(self).items():
            if n_bytes < 0:
                raise BadInput(f"{name} is {n_bytes}; it must be 0 or more.")

    @property
    def buffers(self) -> tuple[int, int]:
        """The limits that MLX has for the whole process."""
        return self.buffer_active_bytes, self.buffer_idle_bytes

    @classmethod
    def automatic(
        cls, total_bytes: int | None = None, model_bytes: int = 0, host_bytes: int | None = None
    ) -> MemoryConfig:
        """Scaled to `total_bytes`, by default this machine's memory, less a loaded model.

        Where the GPU has its own memory, `total_bytes` is the GPU's and `host_bytes` the machine's:
        blocks go to the machine's, everything else to the GPU's.
        """
        if total_bytes is None:
            gpu, host = gpu_memory(), host_memory().total_bytes
            total_bytes, host_bytes = (host, None) if gpu is None else (gpu, host)
        shared = host_bytes is None
        active = _active_buffer_bytes(total_bytes)
        reserved = _reserved_bytes(total_bytes) if shared else total_bytes // 10
        room = max(total_bytes // 16, total_bytes - reserved - model_bytes - active)
        return cls(  # the last tenth of the room is for temporaries of a step
            buffer_active_bytes=active,
            buffer_idle_bytes=max(50 * MIB, total_bytes // 256),
            live_bytes=room // 5,
            tier_bytes=room // 5 if host_bytes is None else host_bytes // 4,
            batch_bytes=room // 2 if shared else room * 7 // 10,
        )

    def divided(self, n_models: int) -> MemoryConfig:
        """One model's share of `n_models`; the memory tier and MLX's buffers are common."""
        live, batch = self.live_bytes // n_models, self.batch_bytes // n_models
        return replace(self, live_bytes=live, batch_bytes=batch)

    @classmethod
    def unconstrained(cls) -> MemoryConfig:
        """No limits; the caller watches the memory."""
        return cls(*[UNLIMITED] * 5)


def most_weights() -> int:
    """What weights of several models may take together, so that there is room for their caches."""
    gpu, host = gpu_memory(), host_memory().total_bytes
    total = gpu or host
    reserved = _reserved_bytes(total) if gpu is None else total // 10
    return (total - reserved - _active_buffer_bytes(total)) * 3 // 4


def _active_buffer_bytes(total_bytes: int) -> int:
    """Small machines need the memory more than the speed."""
    for below, n_bytes in ((4 * GIB, 128 * MIB), (6 * GIB, 256 * MIB), (8 * GIB, 512 * MIB)):
        if total_bytes < below:
            return n_bytes
    return max(768 * MIB, total_bytes // 16)


def _reserved_bytes(total_bytes: int) -> int:
    """For the system and other programs, where they share the memory."""
    return max(total_bytes // 4, min(2 * GIB, total_bytes // 2))
