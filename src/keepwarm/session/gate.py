"""Who may use a session now: threads and coroutines, one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Literal, TypeAlias

from keepwarm.errors import Busy

Rule: TypeAlias = Literal["queue", "refuse"]

_ACTING_FOR: ContextVar[object] = ContextVar("acting_for", default=None)


class Gate:
    """A lock that threads and coroutines share, first come, first served.

    `rule`: whether a caller waits while another one holds the gate, or gets Busy.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._holder: object = None  # the thread or task that holds it
        self._waiting: deque[tuple[object, Future[None]]] = deque()

    @contextmanager
    def hold(self, rule: Rule | None = None) -> Iterator[None]:
        """Hold the gate for the block."""
        turn = self._enqueue(rule, blocks=True)
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

    def _enqueue(self, rule: Rule | None = None, *, blocks: bool = False) -> Future[None]:
        """A future that is done when the caller holds the gate; `blocks`: its thread waits."""
        caller, turn = _caller(), Future[None]()
        with self._lock:
            if self._holder is None:
                self._holder = caller
                turn.set_result(None)
            elif (rule or self.rule) == "refuse" or self._never_comes(caller, blocks):
                raise Busy(
                    "The session is already answering; wait until it is done, or close the stream."
                )
            else:
                self._waiting.append((caller, turn))
        return turn

    def _never_comes(self, caller: object, blocks: bool) -> bool:
        """Whether the caller would wait for itself, or for a task of the loop that it stops."""
        before = [self._holder, *(each for each, turn in self._waiting if not turn.cancelled())]
        loops = [each.get_loop() for each in before if isinstance(each, asyncio.Task)]
        return self._holder in (caller, threading.get_ident()) or (blocks and _loop() in loops)

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
    task = asyncio.current_task() if _loop() else None
    return _ACTING_FOR.get() or task or threading.get_ident()


def _loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None
