"""Memory that runs low: what is kept only to be faster is dropped, what was freed goes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

from keepwarm.device.memory import Memories, Memory, give_back
from keepwarm.device.space import in_words

LOG = logging.getLogger(__name__)

INTERVAL_S = 1.0  # between two looks of a watcher

Shed: TypeAlias = Callable[[int], int]  # free about so many bytes; how many it was


class Watch:
    """Sheds what lies in one memory when less than its floor is left, until a good deal more is.

    `shed` is asked in order: what costs least to have again stands first. What nobody uses goes
    before all of it.
    """

    def __init__(self, memory: Memory, shed: Sequence[Shed]) -> None:
        self.enough_bytes = memory.floor_bytes * 3 // 2
        self.shed_bytes = 0  # since it was made
        self._memory = memory
        self._shed = shed
        self._low = False

    def check(self) -> int:
        """Look once, shed if need be; the bytes that were freed."""
        left = self._memory.left()
        self._low = left < (self.enough_bytes if self._low else self._memory.floor_bytes)
        if not self._low:
            return 0
        freed = self._free(self.enough_bytes - left)
        self.shed_bytes += freed
        LOG.info("Memory is low: %s left, %s freed.", in_words(left), in_words(freed))
        return freed

    def _free(self, missing: int) -> int:
        freed = self._memory.tidy()
        for shed in self._shed:
            if freed < missing:
                freed += self._ask(shed, missing - freed)
        self._memory.tidy()  # where the arrays that were just dropped went
        return freed

    def _ask(self, shed: Shed, n_bytes: int) -> int:
        """One that fails frees nothing, and the others are asked all the same."""
        try:
            return shed(n_bytes)
        except Exception:
            LOG.exception("Cached state could not be dropped.")
            return 0


def watches(memories: Memories, live: Shed, blocks: Shed) -> list[Watch]:
    """Live caches are arrays. What lies in another memory would free nothing where it is low."""
    if memories.arrays is memories.blocks:
        return [Watch(memories.arrays, [live, blocks])]
    return [Watch(memories.arrays, [live]), Watch(memories.blocks, [blocks])]


class Watcher:
    """Looks at every memory from time to time; when something has `rested`, gives freed ones back.

    Nothing runs until `start`, or call `check` yourself.
    """

    def __init__(
        self,
        watches: Sequence[Watch],
        *,
        rested: Callable[[], bool] = bool,  # never
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._watches = watches
        self._rested = rested
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> int:
        """Look once at each; the bytes that were freed."""
        return sum(watch.check() for watch in self._watches)

    def start(self) -> Self:
        """Look every `interval_s` on a thread of its own, until `close`."""
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
                if self._rested():
                    give_back()
            except Exception:
                LOG.exception("The memory could not be looked at.")
