"""The time that preparing one request may take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from keepwarm.errors import Cancelled, TimedOut


class PrepareStep(StrEnum):
    """What may take long, and what to do then."""

    REQUEST = "for reading it; send a shorter one"
    PROMPT = "for the prompt; send a shorter one"
    HISTORY = "for the turn before to be on disk; send it again"
    FORMAT = "for the answer's format; simplify it"


class PrepareDeadline:
    """Passes after `timeout_s`, or when the client goes. Thread-safe."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._cancelled = False
        self._stop: Callable[[], None] | None = None
        self._step, self._since = PrepareStep.REQUEST, time.monotonic()
        self._spent_s: defaultdict[PrepareStep, float] = defaultdict(float)

    def begin(self, step: PrepareStep) -> None:
        """What is done from now on, for the sentence of whoever waits in vain."""
        now = time.monotonic()
        self._spent_s[self._step] += now - self._since
        self._step, self._since = step, now

    def begin_again(self) -> None:
        """Give it the whole time from now on."""
        self._spent_s.clear()
        self._since = time.monotonic()
        if self._timeout_s is not None:
            self._end = self._since + self._timeout_s

    def cancel(self) -> None:
        """The client is gone: stop what runs now, and let nothing more begin."""
        # NOTE: `stopping` writes and reads the other way round, so one of the two sees the other.
        self._cancelled = True
        if (stop := self._stop) is not None:
            stop()

    def check_client(self) -> None:
        """Raise if the client is gone."""
        if self._cancelled:
            raise Cancelled("The request was cancelled.")

    def check(self) -> None:
        """Raise if nothing more may begin."""
        self.check_client()
        if self.left_s == 0:
            self.begin(self._step)
            longest = max(self._spent_s, key=self._spent_s.__getitem__)
            raise TimedOut(
                f"Preparing the request took longer than {self._timeout_s:g} s, most of it "
                f"{longest}."
            )

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """`stop` ends, from another thread, the work that is done inside."""
        self._stop = stop
        try:
            self.check()
            yield
        finally:
            self._stop = None
