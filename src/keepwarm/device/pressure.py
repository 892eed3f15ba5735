"""Low memory: release what is kept only for speed, and return freed pages to the system."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

from keepwarm.device.memory import Memories, Memory, trim_heap
from keepwarm.units import format_bytes

LOG = logging.getLogger(__name__)

INTERVAL_S = 1.0  # between two checks of a watcher

Release: TypeAlias = Callable[[int], int]  # frees about so many bytes, returns how many


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
