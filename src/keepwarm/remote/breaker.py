"""Whether a shared tier is used, for all threads: after some failures it is left alone, and tried
again in the background."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

MAX_FAILURES = 3  # in a row
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 8.0


class Breaker:
    """Open, which is unusable, until the first trial has succeeded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._n_failures: float = MAX_FAILURES
        self._retry_s = 0.0
        self._retry_at = clock()

    @property
    def is_open(self) -> bool:
        return self._n_failures >= MAX_FAILURES

    @property
    def is_trusted(self) -> bool:
        """Whether the last call succeeded. After a failure nothing is loaded until a question is
        answered: so no request waits for two deadlines.
        """
        return self._n_failures == 0

    @property
    def retry_in_s(self) -> float:
        """Seconds until an open one is due for a trial."""
        return max(0.0, self._retry_at - self._clock())

    def succeeded(self) -> None:
        """A success of a call that began before it opened does not close it: a trial does."""
        with self._lock:
            if not self.is_open:
                self._n_failures = 0

    def failed(self) -> None:
        with self._lock:
            self._n_failures += 1
            if self._n_failures == MAX_FAILURES:
                self._retry_s = FIRST_RETRY_S
                self._retry_at = self._clock() + self._retry_s

    def tried(self, success: bool) -> None:
        """Note the outcome of a trial."""
        with self._lock:
            if self._n_failures == math.inf:
                return
            if success:
                self._n_failures, self._retry_s = 0, 0.0
                return
            self._n_failures = max(self._n_failures, MAX_FAILURES)
            self._retry_s = min(max(2 * self._retry_s, FIRST_RETRY_S), MAX_RETRY_S)
            self._retry_at = self._clock() + self._retry_s

    def end(self) -> None:
        """Leave it open for good, also if a trial is under way."""
        with self._lock:
            self._n_failures = math.inf
