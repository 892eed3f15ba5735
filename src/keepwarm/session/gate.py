"""A lock that threads and coroutines share, first come, first served."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Literal, TypeAlias

from keepwarm.errors import Busy

Rule: TypeAlias = Literal["queue", "refuse"]

_ACTING_FOR: ContextVar[object] = ContextVar("acting_for", default=None)


class Gate:
    """`rule`: whether a caller waits while another one holds the gate, or gets Busy."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._holder: object = None  # the thread or task that holds it
        self._waiting: deque[tuple[object, Future[None]]] = deque()

    @contextmanager
    def hold(self, rule: Rule | None = None) -> Iterator[None]:
        """Hold the gate for the block."""
        turn = self._enqueue(rule)
        try:
            turn.result()
        except BaseException:  # Ctrl-C
            self._leave_queue(turn)
            raise
        try:
            yield
        finally:
            self._release()

    @asynccontextmanager
    async def ahold(self) -> AsyncIterator[None]:
        turn = self._enqueue()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            self._leave_queue(turn)
            raise
        try:
            yield
        finally:
            self._release()

    def _enqueue(self, rule: Rule | None = None) -> Future[None]:
        """A future that is done when the caller holds the gate."""
        caller, turn = _caller(), Future[None]()
        with self._lock:
            if self._holder is None:
                self._holder = caller
                turn.set_result(None)
            elif self._holder == caller or (rule or self.rule) == "refuse":
                raise Busy(
                    "The session is already answering; wait until it is done, or close the stream."
                )
            else:
                self._waiting.append((caller, turn))
        return turn

    def _leave_queue(self, turn: Future[None]) -> None:
        if not turn.cancel():  # the gate was handed over at the same moment
            self._release()

    def _release(self) -> None:
        """Hand the gate to the next caller that still waits."""
        with self._lock:
            self._holder = None
            while self._waiting and self._holder is None:
                caller, turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._holder = caller
                    turn.set_result(None)


@contextmanager
def acting_for_task() -> Iterator[None]:
    """Threads started inside with `asyncio.to_thread` count as the current task."""
    token = _ACTING_FOR.set(asyncio.current_task())
    try:
        yield
    finally:
        _ACTING_FOR.reset(token)


def _caller() -> object:
    """The current task or thread: if it waited for itself, it would wait forever."""
    try:
        return _ACTING_FOR.get() or asyncio.current_task() or threading.get_ident()
    except RuntimeError:  # no event loop in this thread
        return threading.get_ident()
