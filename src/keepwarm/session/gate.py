"""One at a time, in the order of arrival; threads and coroutines wait side by side."""

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

_ACTS_FOR: ContextVar[object] = ContextVar("acts_for", default=None)


class Gate:
    """`rule` says what happens to those who come while somebody is inside."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._inside: object = None  # the thread or task that came in
        self._waiting: deque[tuple[object, Future[None]]] = deque()

    @contextmanager
    def hold(self, rule: Rule | None = None) -> Iterator[None]:
        """Inside alone."""
        turn = self._knock(rule)
        try:
            turn.result()
        except BaseException:  # Ctrl-C
            self._give_up(turn)
            raise
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def ahold(self) -> AsyncIterator[None]:
        turn = self._knock()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        try:
            yield
        finally:
            self._leave()

    def _knock(self, rule: Rule | None = None) -> Future[None]:
        """Done when one may come in."""
        who, turn = _who(), Future[None]()
        with self._lock:
            if self._inside is None:
                self._inside = who
                turn.set_result(None)
            elif self._inside == who or (rule or self.rule) == "refuse":
                raise Busy("The session is giving an answer; wait for its end, or close it.")
            else:
                self._waiting.append((who, turn))
        return turn

    def _give_up(self, turn: Future[None]) -> None:
        if not turn.cancel():  # it came at the same moment
            self._leave()

    def _leave(self) -> None:
        """Let the next one in who has not gone away."""
        with self._lock:
            self._inside = None
            while self._waiting and self._inside is None:
                who, turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._inside = who
                    turn.set_result(None)


@contextmanager
def acting_for_task() -> Iterator[None]:
    """What threads do that are started in here, with `asyncio.to_thread`, this task does."""
    token = _ACTS_FOR.set(asyncio.current_task())
    try:
        yield
    finally:
        _ACTS_FOR.reset(token)


def _who() -> object:
    """The task or thread that runs this: whoever waits for itself would wait for ever."""
    try:
        return _ACTS_FOR.get() or asyncio.current_task() or threading.get_ident()
    except RuntimeError:  # no loop runs here
        return threading.get_ident()
