"""The memory of this machine and its GPU: how much, how it is divided, what is done if it is low.

Memories       the memory that holds arrays and the one that holds blocks, with what is free
MemoryConfig   budgets for caches, blocks and buffers, scaled to the machine
MemoryScopes   MLX's buffer limits, which hold for the process: high while something runs, else low
Watcher        releases what is kept only for speed, and returns freed pages to the system
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import mlx.core as mx
import psutil

from keepwarm.errors import BadInput
from keepwarm.units import format_bytes

LOG = logging.getLogger(__name__)
MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 1 << 62  # more than any machine has
CONTAINER = Path("/sys/fs/cgroup")
INTERVAL_S = 1.0  # between two checks of a watcher

Release: TypeAlias = Callable[[int], int]  # frees about so many bytes, returns how many


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


class MLXDevice:
    """MLX's process-wide memory settings. Setters return the previous value."""

    def set_cache_limit(self, n_bytes: int) -> int:
        return mx.set_cache_limit(n_bytes)

    def set_wired_limit(self, n_bytes: int) -> int:
        mx.synchronize()  # not while an evaluation is running
        return mx.set_wired_limit(n_bytes)

    def clear_cache(self) -> None:
        free_buffers()

    def wired_limit(self) -> int | None:
        return wired_limit()


class Scope:
    """Open until `close`, which may be called twice; `with` calls it."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _ScopeEntry(NamedTuple):
    config: MemoryConfig
    active: bool


class MemoryScopes:
    """MLX's limits hold for the process, so all engines of a process share one of these.

    While any scope is active, the buffer limit is the largest that an active scope asks for;
    otherwise it is the largest idle limit of the open scopes. Closing the last scope restores the
    limits from before the first. In between, the wired limit is the largest the device allows.
    """

    def __init__(self, device: MLXDevice | None = None) -> None:
        self._device = device or MLXDevice()
        self._lock = threading.Lock()
        self._tokens = count()
        self._scopes: dict[int, _ScopeEntry] = {}
        self._ran = False  # since the last call of `became_idle`
        self._limit: int | None = None  # None: no scope is open, the limit is MLX's own
        self._before = 0
        self._wired_before: int | None = None

    def join(self, config: MemoryConfig) -> Scope:
        """Register an engine with these settings until the scope is closed."""
        return self._open(_ScopeEntry(config, active=False))

    def active(self, config: MemoryConfig) -> Scope:
        """Mark the process as running something until the scope is closed."""
        return self._open(_ScopeEntry(config, active=True))

    def became_idle(self) -> bool:
        """Whether the process ran something and is idle now; True once for each such change."""
        with self._lock:
            if self._is_active():
                return False
            ran, self._ran = self._ran, False
            return ran

    def release_if_idle(self) -> bool:
        """Free MLX's unused buffers unless something runs that would allocate them again."""
        with self._lock:
            idle = not self._is_active()
            if idle:
                self._device.clear_cache()
            return idle

    def _is_active(self) -> bool:
        return any(entry.active for entry in self._scopes.values())

    def _open(self, entry: _ScopeEntry) -> Scope:
        with self._lock:
            token = next(self._tokens)
            self._warn_if_different(entry)
            self._scopes[token] = entry
            self._ran = self._ran or entry.active
            self._apply()
        return Scope(lambda: self._close(token))

    def _close(self, token: int) -> None:
        with self._lock:
            if self._scopes.pop(token, None) is not None:
                self._apply()

    def _apply(self) -> None:
        limit = self._wanted_limit()
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

    def _wanted_limit(self) -> int | None:
        entries = self._scopes.values()
        active = [entry.config.buffer_active_bytes for entry in entries if entry.active]
        idle = [entry.config.buffer_idle_bytes for entry in entries]
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

    def _warn_if_different(self, entry: _ScopeEntry) -> None:
        others = [other.config.buffers for other in self._scopes.values()]
        if not entry.active and others and entry.config.buffers not in others:
            LOG.warning(
                "Two engines of this process have different memory settings; "
                "MLX has one buffer limit, so the larger one holds for both."
            )


@cache  # one a process: two would restore MLX's limits over each other
def scopes_of_process() -> MemoryScopes:
    return MemoryScopes()


class MemoryGuard:
    """Releases caches in one memory when less than its floor is free, until 1.5 floors are.

    Unused buffers go first, then each of `releases` in order: cheapest to restore first.
    """

    def __init__(self, memory: Memory, releases: Sequence[Release]) -> None:
        self.enough_bytes = memory.floor_bytes * 3 // 2
        self._memory = memory
        self._releases = releases
        self._is_low = False

    def check(self) -> int:
        """Check once, release if needed; the bytes freed."""
        free = self._memory.free_bytes()
        self._is_low = free < (self.enough_bytes if self._is_low else self._memory.floor_bytes)
        if not self._is_low:
            return 0
        freed = self._release(self.enough_bytes - free)
        LOG.info("Memory is low: %s free, %s released.", format_bytes(free), format_bytes(freed))
        return freed

    def _release(self, n_bytes: int) -> int:
        freed = self._memory.release_unused()
        for release in self._releases:
            if freed < n_bytes:
                freed += self._try(release, n_bytes - freed)
        self._memory.release_unused()  # the arrays just released have become unused buffers
        return freed

    def _try(self, release: Release, n_bytes: int) -> int:
        """If one fails, the others are still called."""
        try:
            return release(n_bytes)
        except Exception:
            LOG.exception("Cached state could not be released.")
            return 0


def make_guards(memories: Memories, live: Release, blocks: Release) -> list[MemoryGuard]:
    """Live caches are arrays; releasing what lies in another memory would not help."""
    if memories.arrays is memories.blocks:
        return [MemoryGuard(memories.arrays, [live, blocks])]
    return [MemoryGuard(memories.arrays, [live]), MemoryGuard(memories.blocks, [blocks])]


class Watcher:
    """Checks every memory at an interval, and trims the heap whenever `became_idle` says so.

    Its thread runs from `start` to `close`; `check` works without it.
    """

    def __init__(
        self,
        guards: Sequence[MemoryGuard],
        *,
        became_idle: Callable[[], bool] = bool,  # never
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._guards = guards
        self._became_idle = became_idle
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> int:
        """Check each memory once; the bytes freed."""
        return sum(guard.check() for guard in self._guards)

    def start(self) -> Self:
        """Check every `interval_s` on its own thread, until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keepwarm-memory", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.check()
                if self._became_idle():
                    trim_heap()
            except Exception:
                LOG.exception("The memory check failed.")
