"""Turns at the device, which the engines of a process share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceTurns:
    """One engine at a time computes; who waits longest is next.

    So engines with work alternate, a step each, and a step measures its own model alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Inside, no other engine computes."""
        turn = threading.Event()
        with self._lock:
            if self._is_taken:
                self._waiting.append(turn)
            else:
                self._is_taken = True
                turn.set()
        turn.wait()
        try:
            yield
        finally:
            self._pass_on()

    def others_wait(self) -> bool:
        """Whether another engine waits for this turn to end."""
        return bool(self._waiting)

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
