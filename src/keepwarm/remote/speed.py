"""How fast a shared tier answers and sends, measured while it is used."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from keepwarm.errors import BadRecord, NewerFormat

NEW = 0.3  # the weight of the latest measurement; the first replaces the guess
MIN_BYTES = 1 << 18  # less says nothing of the rate
LATEST = 100  # calls that are remembered
SLOW = 0.95  # of them are no slower than what a question plans with


class TierSpeed:
    """Rather too fast until something is measured: what is never loaded is never measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: deque[float] = deque(maxlen=LATEST)  # seconds
        self.latency_s = 0.0005
        self.bytes_per_s = 1e9
        self.put_bytes_per_s = math.inf  # one put after the other
        self._weight = 1.0  # of the next rate
        self._n_reading = 0
        self._began = 0.0
        self._n_bytes = self._n_lost = 0

    def load_s(self, n_bytes: int) -> float:
        """Seconds that so many bytes take, in several reads at once."""
        return self.latency_s + n_bytes / self.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float:
        """The faster of both directions. A trial reads little, and seems slow where the way is
        long or the machine busy; so nothing is known of it before something was put.
        """
        return max(self.bytes_per_s, self.put_bytes_per_s)

    @property
    def call_s(self) -> float:
        """The 95th percentile of the latest calls."""
        with self._lock:
            calls = sorted(self._calls)
        return calls[int(SLOW * (len(calls) - 1) + 0.5)] if calls else self.latency_s

    def begin_anew(self) -> None:
        """After an outage much may have changed: the next measurements replace all before."""
        with self._lock:
            self._calls.clear()
            self._weight = 1.0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around a call that moves few bytes; one that fails is not counted."""
        began = self._clock()
        yield
        with self._lock:
            self._calls.append(self._clock() - began)
            self.latency_s = median(self._calls)

    @contextmanager
    def reading(self, n_bytes: int) -> Iterator[Callable[[int], None]]:
        """Around a read of so many bytes, which tells those that it got, and whatever must be done
        before they can be used. The rate is that of all reads that overlap.
        """
        with self._lock:
            self._n_reading += 1
            if self._n_reading == 1:
                self._began, self._n_bytes, self._n_lost = self._clock(), 0, 0
        try:
            yield self._add
        except (BadRecord, NewerFormat):  # it was read
            raise
        except BaseException:
            with self._lock:
                self._n_lost += n_bytes
            raise
        finally:
            with self._lock:
                self._n_reading -= 1
                if not self._n_reading:
                    self._measure(max(self._clock() - self._began, 1e-6))

    def _measure(self, seconds: float) -> None:
        """In seconds per byte, so that one very fast read does not outweigh all others.

        What was not read in time shows at least that the rate was no higher; but an outage shows
        the same, so that each time it is at most halved.
        """
        if self._n_lost:
            highest = (self._n_bytes + self._n_lost) / seconds
            self.bytes_per_s = min(self.bytes_per_s, max(highest, self.bytes_per_s / 2))
        elif self._n_bytes >= MIN_BYTES:
            rate, new, self._weight = self._n_bytes / seconds, self._weight, NEW
            self.bytes_per_s = 1 / ((1 - new) / self.bytes_per_s + new / rate)

    @contextmanager
    def putting(self, n_bytes: int) -> Iterator[None]:
        """Around a put of so many bytes; one that fails is not counted."""
        began = self._clock()
        yield
        rate, last = n_bytes / max(self._clock() - began, 1e-6), self.put_bytes_per_s
        if n_bytes >= MIN_BYTES:
            self.put_bytes_per_s = rate if last == math.inf else 1 / ((1 - NEW) / last + NEW / rate)

    def declined(self) -> None:
        """Loading seemed too slow; sooner or later it is tried again."""
        self.bytes_per_s *= 1.02

    def _add(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes += n_bytes
