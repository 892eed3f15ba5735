"""How single operations are measured: seconds, peak memory, and the records that hold them."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.requests.measure import release_memory
from keepwarm.units import format_bytes

if sys.platform != "win32":
    import resource

GIB = 1 << 30
MEMORY_BUDGET = 12 * 10**9  # leaves memory to other processes
MAX_TOUCHED = 2 << 30  # bytes
BOUND = 1.1  # times the live bytes, plus two blocks: allowed for saving and restoring


@dataclass(frozen=True)
class Speed:
    """Every sample of one operation, in seconds; `n_bytes` are the live bytes it moves."""

    case: str
    n_tokens: int
    what: str
    n_bytes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_second(self) -> float:
        return self.n_bytes / self.median / 1e9

    @property
    def spread(self) -> float:
        """(highest - lowest) ÷ median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True)
class Figure:
    """A row of a table; `against` is what it is divided by."""

    what: str
    value: float  # ms
    against: float | None = None
    goal: float | None = None  # of the ratio; without `against` of the value
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.value / self.against if self.against else None

    @property
    def holds(self) -> bool | None:
        measured = self.ratio if self.against else self.value
        return None if self.goal is None or measured is None else measured <= self.goal

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:8.3f}"
        goal = "" if self.goal is None else f"{self.goal:8.2f} {'yes' if self.holds else 'NO'}"
        return f"{self.what:<58} {self.value:>10,.1f} ms {ratio:>8} {goal}"


@dataclass(frozen=True)
class Peak:
    """Peak memory of saving or restoring, above what the process held before."""

    case: str
    n_tokens: int
    what: str
    live_bytes: int
    block_bytes: int
    growth_bytes: int

    @property
    def ratio(self) -> float:
        """Growth over live bytes, after subtracting two blocks."""
        return (self.growth_bytes - 2 * self.block_bytes) / self.live_bytes

    @property
    def holds(self) -> bool:
        return self.ratio <= BOUND


@dataclass(frozen=True)
class Density:
    """Memory of a batch compared with that of its live tokens."""

    case: str
    lengths: tuple[int, ...]
    when: str
    live_bytes: int
    held_bytes: int

    @property
    def ratio(self) -> float:
        return self.held_bytes / self.live_bytes


@dataclass(frozen=True)
class Cost:
    """All samples of an operation on a store of `n_blocks`, in seconds unless `what` says bytes."""

    what: str
    n_blocks: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Skipped:
    case: str
    why: str


Record = Speed | Peak | Density | Cost | Skipped


@dataclass(frozen=True)
class Task:
    """One step of a benchmark: its label in the progress bar, and its work."""

    label: str
    run: Callable[[], list[Record]]


def touch_memory(n_bytes: int) -> None:
    """Touch and release memory, so that the next sample does not pay for getting it.

    A host takes back memory that a virtual machine freed a second or two ago and returns it page
    by page, which cost about a millisecond per MB.
    """
    np.ones(min(n_bytes, MAX_TOUCHED), np.uint8)


def seconds_of(
    work: Callable[[], object], repeats: int, before: Callable[[], object] = release_memory
) -> tuple[float, ...]:
    """Time each call of `work`; `before` and releasing the result are not timed."""
    return tuple(_once(work, before) for _ in range(repeats))


def _once(work: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    release_memory()
    return seconds


def peak_growth(work: Callable[[], object]) -> int:
    """Peak growth of this process's memory during `work`, in bytes."""
    _reset_peak()
    before = psutil.Process().memory_info().rss
    work()
    return _peak() - before


def _reset_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Peak resident bytes; since the start of the process where this is not Linux.

    On Linux `ru_maxrss` does not work: a child process inherits its parent's peak.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def reason_to_skip(n_memory: int, n_disk: int, folder: Path) -> str:
    """Why a step of this size does not fit this machine; empty if it does."""
    memory = min(MEMORY_BUDGET, int(psutil.virtual_memory().available * 0.9))
    disk = int(shutil.disk_usage(folder).free * 0.9)
    if n_memory > memory:
        return f"needs {format_bytes(n_memory)} of memory, {format_bytes(memory)} may be used"
    if n_disk > disk:
        return f"needs {format_bytes(n_disk)} of disk, {format_bytes(disk)} may be used"
    return ""


def pinned_gb_per_s(n_bytes: int = GIB) -> float | None:
    """From pinned host memory to the device; None without CUDA."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    host, there, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(n_bytes)
    calls: list[Callable[[], int]] = [
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxSetCurrent(context),
        lambda: cuda.cuMemHostAlloc(ctypes.byref(host), size, 0),
        lambda: cuda.cuMemAlloc_v2(ctypes.byref(there), size),
    ]
    if any(call() for call in calls):  # in order, up to the first that fails
        return None
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        cuda.cuMemcpyHtoD_v2(there, host, size)
        seconds.append(time.perf_counter() - started)
    cuda.cuMemFree_v2(there)
    cuda.cuMemFreeHost(host)
    return n_bytes / statistics.median(seconds) / 1e9
