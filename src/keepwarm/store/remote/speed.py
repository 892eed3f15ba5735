"""How fast a shared tier answers and sends, measured while it is used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NEW = 0.3  # the weight of the latest measurement; the first replaces the guess
MIN_BYTES = 1 << 18  # less says nothing of the rate


class TierSpeed:
    """Rather too fast until something is measured: what is never loaded is never measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.latency_s = 0.0005
        self.bytes_per_s = 1e9
        self._weights = {"latency": 1.0, "rate": 1.0}
        self._n_reading = 0
        self._began = 0.0
        self._n_bytes = 0

    def load_s(self, n_bytes: int) -> float:
        """Seconds that so many bytes take, in several reads at once."""
        return self.latency_s + n_bytes / self.bytes_per_s

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a question; one that fails is not counted."""
        began = self._clock()
        yield
        with self._lock:
            self.latency_s += self._weight("latency") * (self._clock() - began - self.latency_s)

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Around a read, which tells its bytes. The rate is that of all reads that overlap."""
        with self._lock:
            self._n_reading += 1
            if self._n_reading == 1:
                self._began, self._n_bytes = self._clock(), 0
        try:
            yield self._add
        finally:
            with self._lock:
                self._n_reading -= 1
                if not self._n_reading and self._n_bytes >= MIN_BYTES:
                    self._measure(self._clock() - self._began)

    def _measure(self, seconds: float) -> None:
        """In seconds per byte, so that one very fast read does not outweigh all others."""
        rate, new = self._n_bytes / max(seconds, 1e-6), self._weight("rate")
        self.bytes_per_s = 1 / ((1 - new) / self.bytes_per_s + new / rate)

    def _weight(self, of: str) -> float:
        weight, self._weights[of] = self._weights[of], NEW
        return weight

    def declined(self) -> None:
        """Loading seemed too slow; sooner or later it is tried again."""
        self.bytes_per_s *= 1.02

    def _add(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes += n_bytes
