"""The time that preparing one request may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keepwarm.errors import Cancelled, TimedOut


class PrepareDeadline:
    """Passes after `timeout_s`, or when the client goes. Thread-safe."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._stop: Callable[[], None] | None = None

    def begin_again(self) -> None:
        """Give it the whole time from now on."""
        if self._timeout_s is not None:
            self._end = time.monotonic() + self._timeout_s

    def cancel(self) -> None:
        """The client is gone: stop what runs now, and let nothing more begin."""
        with self._lock:
            self._cancelled = True
            stop = self._stop
        if stop is not None:
            stop()

    def check_client(self) -> None:
        """Raise if the client is gone."""
        if self._cancelled:
            raise Cancelled("The request was cancelled.")

    def check(self) -> None:
        """Raise if nothing more may begin."""
        self.check_client()
        if self.left_s == 0:
            raise TimedOut(
                f"Preparing the request took longer than {self._timeout_s:g} s; send a shorter one."
            )

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """`stop` ends, from another thread, the work that is done inside."""
        with self._lock:
            self._stop = stop
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._stop = None
