"""Budgets for everything that takes memory, and who keeps them.

MemoryConfig   how much each place may take, scaled to the machine
MemoryScopes   MLX's buffer limits: high while something runs, low while nothing does
Memories       where arrays and blocks lie, and what is left there
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import mlx.core as mx
import psutil

LOG = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 1 << 62  # more than any machine has
CONTAINER = Path("/sys/fs/cgroup")


class Host(NamedTuple):
    """The memory of the machine, or of the container this process is shut in."""

    total_bytes: int
    available_bytes: int


def host_memory(container: Path = CONTAINER) -> Host:
    memory = psutil.virtual_memory()
    try:
        limit = int((container / "memory.max").read_text())
        used = _used(container)
    except (OSError, ValueError):  # no container, or one without a limit: it says `max`
        return Host(memory.total, memory.available)
    return Host(min(memory.total, limit), max(0, min(memory.available, limit - used)))


def _used(container: Path) -> int:
    """What cannot be had back: the page cache counts as used there, but goes when asked for."""
    words = (container / "memory.stat").read_text().split()
    parts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    pages = parts.get("active_file", 0) + parts.get("inactive_file", 0)
    return int((container / "memory.current").read_text()) - pages


def gpu_memory() -> int | None:
    """Bytes of a GPU that has memory of its own; None where it is the machine's."""
    total = mx.device_info().get("total_memory")
    return int(total) if total and mx.default_device() != mx.Device(mx.cpu) else None


def wired_limit() -> int | None:
    """Bytes that a GPU can keep from being paged out; None where there is no such thing."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    return int(limit) if limit else None


def free_buffers() -> int:
    """Give buffers that MLX keeps for reuse back to the system; how many bytes that were."""
    before = mx.get_cache_memory()
    mx.clear_cache()
    give_back()
    return before - mx.get_cache_memory()


def give_back() -> None:
    """Return what was freed to the system.

    glibc keeps pages that lie between blocks in use, so that a process that has dropped a cache of
    many small tensors is as large as before. Others return them by themselves.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(frozen=True)
class Memory:
    """One memory: how much it is, what of it may still be used, and what is free for the asking."""

    total_bytes: int
    left: Callable[[], int]
    tidy: Callable[[], int]  # free what nobody uses; how many bytes are known to be free by it

    @property
    def floor_bytes(self) -> int:
        """Less than this left is little."""
        return max(256 * MIB, self.total_bytes // 20)


class Memories(NamedTuple):
    """Where arrays lie, and where blocks do: the same, unless a GPU has memory of its own."""

    arrays: Memory
    blocks: Memory


def memories(gpu_bytes: int | None = None) -> Memories:
    """Those of this machine; `gpu_bytes` of a GPU's own, where it has them, unless given."""
    total, gpu_bytes = host_memory().total_bytes, gpu_bytes or gpu_memory()
    if gpu_bytes is None:
        shared = Memory(total, _left_of_shared, free_buffers)
        return Memories(shared, shared)
    gpu = Memory(gpu_bytes, lambda: gpu_bytes - mx.get_active_memory(), free_buffers)
    return Memories(gpu, Memory(total, lambda: host_memory().available_bytes, _trimmed))


def _left_of_shared() -> int:
    available, limit = host_memory().available_bytes, wired_limit()
    return available if limit is None else min(available, limit - mx.get_active_memory())


def _trimmed() -> int:
    give_back()
    return 0  # nobody says how much it was


@dataclass(frozen=True)
class MemoryConfig:
    """Bytes that each place may take."""

    buffer_active_bytes: int  # freed buffers that MLX keeps while something runs
    buffer_idle_bytes: int  # and while nothing does
    live_bytes: int  # finished caches, ready to go on
    tier_bytes: int  # blocks in memory
    batch_bytes: int  # keys and values of running requests

    @classmethod
    def automatic(
        cls, total_bytes: int | None = None, model_bytes: int = 0, host_bytes: int | None = None
    ) -> MemoryConfig:
        """Scaled to `total_bytes` of memory, this machine's unless given, beside a loaded model.

        `host_bytes` are the machine's where a GPU has memory of its own, of `total_bytes`: blocks
        lie in the one, all else in the other.
        """
        if total_bytes is None:
            gpu, host = gpu_memory(), host_memory().total_bytes
            total_bytes, host_bytes = (host, None) if gpu is None else (gpu, host)
        shared = host_bytes is None
        active = _active_buffers(total_bytes)
        for_others = _for_others(total_bytes) if shared else total_bytes // 10
        room = max(total_bytes // 16, total_bytes - for_others - model_bytes - active)
        return cls(  # a tenth of the room is left for what a step computes with
            buffer_active_bytes=active,
            buffer_idle_bytes=max(50 * MIB, total_bytes // 256),
            live_bytes=room // 5,
            tier_bytes=room // 5 if host_bytes is None else host_bytes // 4,
            batch_bytes=room // 2 if shared else room * 7 // 10,
        )

    @classmethod
    def unconstrained(cls) -> MemoryConfig:
        """No limits: whoever sets this watches the memory himself."""
        return cls(*[UNLIMITED] * 5)


def _active_buffers(total_bytes: int) -> int:
    """Small machines need the memory more than the speed."""
    for below, n_bytes in ((4 * GIB, 128 * MIB), (6 * GIB, 256 * MIB), (8 * GIB, 512 * MIB)):
        if total_bytes < below:
            return n_bytes
    return max(768 * MIB, total_bytes // 16)


def _for_others(total_bytes: int) -> int:
    """For the system and other programs, where they share the memory."""
    return max(total_bytes // 4, min(2 * GIB, total_bytes // 2))


class Device(Protocol):
    """What MLX lets one set, for the whole process. Setting answers with the value before."""

    def set_cache_limit(self, n_bytes: int) -> int: ...

    def set_wired_limit(self, n_bytes: int) -> int: ...

    def clear_cache(self) -> None: ...

    def wired_limit(self) -> int | None: ...


class MLX:
    """The device of this process."""

    def set_cache_limit(self, n_bytes: int) -> int:
        return mx.set_cache_limit(n_bytes)

    def set_wired_limit(self, n_bytes: int) -> int:
        mx.synchronize()  # it must not change under a running evaluation
        return mx.set_wired_limit(n_bytes)

    def clear_cache(self) -> None:
        free_buffers()

    def wired_limit(self) -> int | None:
        return wired_limit()


class Scope:
    """Counts from its making until `close`, which may be called twice; `with` calls it."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Known(NamedTuple):
    config: MemoryConfig
    active: bool


class MemoryScopes:
    """MLX's limits are the process's, so all engines of a process share one of these.

    While anything is active the buffer limit is the largest that an active scope asks for; while
    nothing is, the largest idle limit of those that joined. When the last scope closes, the limits
    are what they were before the first. What the device can keep resident it keeps in between.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or MLX()
        self._lock = threading.Lock()
        self._tokens = count()
        self._scopes: dict[int, _Known] = {}
        self._ran = False  # since `rested` last said so
        self._limit: int | None = None  # as set here; None: not ours
        self._before = 0
        self._wired_before: int | None = None

    def join(self, config: MemoryConfig) -> Scope:
        """An engine with these settings is there, until its scope is closed."""
        return self._open(_Known(config, active=False))

    def active(self, config: MemoryConfig) -> Scope:
        """Something runs, until its scope is closed."""
        return self._open(_Known(config, active=True))

    @property
    def is_active(self) -> bool:
        with self._lock:
            return self._is_active()

    def rested(self) -> bool:
        """Whether nothing runs and something did; said once."""
        with self._lock:
            if self._is_active():
                return False
            ran, self._ran = self._ran, False
            return ran

    def evict_if_idle(self) -> bool:
        """Free MLX's unused buffers unless something runs, which would want them again."""
        with self._lock:
            idle = not self._is_active()
            if idle:
                self._device.clear_cache()
            return idle

    def _is_active(self) -> bool:
        return any(known.active for known in self._scopes.values())

    def _open(self, known: _Known) -> Scope:
        with self._lock:
            token = next(self._tokens)
            self._warn_of_others(known)
            self._scopes[token] = known
            self._ran = self._ran or known.active
            self._apply()
        return Scope(lambda: self._close(token))

    def _close(self, token: int) -> None:
        with self._lock:
            if self._scopes.pop(token, None) is not None:
                self._apply()

    def _apply(self) -> None:
        limit = self._wanted()
        if limit == self._limit:
            return
        if limit is None:
            self._restore()
        elif self._limit is None:
            self._before = self._device.set_cache_limit(limit)
            self._wire()
        else:
            self._device.set_cache_limit(limit)
        self._limit = limit

    def _wanted(self) -> int | None:
        active = [k.config.buffer_active_bytes for k in self._scopes.values() if k.active]
        idle = [k.config.buffer_idle_bytes for k in self._scopes.values()]
        return max(active or idle, default=None)

    def _wire(self) -> None:
        wired = self._device.wired_limit()
        if wired is not None:
            self._wired_before = self._device.set_wired_limit(wired)

    def _restore(self) -> None:
        self._device.set_cache_limit(self._before)
        if self._wired_before is not None:
            self._device.set_wired_limit(self._wired_before)
            self._wired_before = None

    def _warn_of_others(self, known: _Known) -> None:
        """Not an error, but somebody does not get what he asked for."""
        others = [k.config for k in self._scopes.values()]
        if not known.active and others and known.config not in others:
            LOG.warning(
                "Two engines of this process have different memory settings; "
                "MLX has one buffer limit, so the larger one holds for both."
            )


@cache  # MLX's limits are the process's: two of these would restore them under each other
def scopes_of_process() -> MemoryScopes:
    return MemoryScopes()
