"""How single operations are measured: seconds, peak memory, and the records that hold them."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from keepwarm.bench.measure import release_memory
from keepwarm.units import format_bytes

if sys.platform != "win32":
    import resource

MEMORY_BUDGET = 12 * 10**9  # others use this machine too
MAX_TOUCHED = 2 << 30  # bytes before each sample
BOUND = 1.1  # of the live bytes, plus two blocks: what saving or restoring may need


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
        """How far apart the samples are, as a part of their median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True)
class Peak:
    """Memory that a process needed while it saved or restored, above what it held before."""

    case: str
    n_tokens: int
    what: str
    live_bytes: int
    block_bytes: int
    growth_bytes: int

    @property
    def ratio(self) -> float:
        """Of the live cache, the two blocks that are allowed on top left aside."""
        return (self.growth_bytes - 2 * self.block_bytes) / self.live_bytes

    @property
    def holds(self) -> bool:
        return self.ratio <= BOUND


@dataclass(frozen=True)
class Density:
    """Memory that a batch holds against what its live tokens need."""

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
    """Every sample of what something takes in a store of so many blocks: seconds, or as it says."""

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
    """One step of a bench: what the progress bar says, and what gives the records."""

    label: str
    run: Callable[[], list[Record]]


def touch_memory(n_bytes: int) -> None:
    """Touch so much memory and let it go again, so that the next sample finds it there.

    A host takes from its virtual machines what they do not use, a second or two after they freed
    it, and gives it back page by page: a millisecond a MB was found, for whoever came next.
    """
    np.ones(min(n_bytes, MAX_TOUCHED), np.uint8)


def seconds_of(
    work: Callable[[], object], repeats: int, before: Callable[[], object] = release_memory
) -> tuple[float, ...]:
    """Time each call; `before`, and dropping what it returns, are outside the measured time."""
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
    """Bytes by which the memory of this process rose above where it stood, at its highest."""
    _forget_peak()
    before = psutil.Process().memory_info().rss
    work()
    return _peak() - before


def _forget_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Highest resident bytes; elsewhere than on Linux since the start of the process.

    `ru_maxrss` is no use on Linux: a child begins with the peak of the process that started it.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def reason_to_skip(n_memory: int, n_disk: int, folder: Path) -> str:
    """Why a step of this size must be left out here; nothing where there is room."""
    memory = min(MEMORY_BUDGET, int(psutil.virtual_memory().available * 0.9))
    disk = int(shutil.disk_usage(folder).free * 0.9)
    if n_memory > memory:
        return f"needs {format_bytes(n_memory)} of memory, {format_bytes(memory)} may be used"
    if n_disk > disk:
        return f"needs {format_bytes(n_disk)} of disk, {format_bytes(disk)} may be used"
    return ""
