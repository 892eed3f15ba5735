"""Equal work of several threads, done once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from keepwarm.store.blobs.backend import BlobError
from keepwarm.store.blobs.deadline import CallDeadline

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """The first thread works; others that ask for the same meanwhile get its result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, list[Future[T]]] = {}  # and who else waits for it

    def do(
        self, what: Hashable, work: Callable[[], T], deadline: CallDeadline | None = None
    ) -> T | None:
        """What `work` returns; None if another thread is at it until the deadline, which may be
        sooner than its own.
        """
        waiting: Future[T] | None = None
        with self._lock:
            if (others := self._under_way.get(what)) is None:
                self._under_way[what] = []
            else:
                waiting = Future()
                others.append(waiting)
        if waiting is None:
            return self._do(what, work)
        try:
            return waiting.result(None if deadline is None else deadline.left_s())
        except (TimeoutError, BlobError):
            return None

    def _do(self, what: Hashable, work: Callable[[], T]) -> T:
        try:
            result = work()
        except BaseException as error:
            for other in self._end(what):
                other.set_exception(error)
            raise
        for other in self._end(what):
            other.set_result(result)
        return result

    def _end(self, what: Hashable) -> list[Future[T]]:
        with self._lock:
            return self._under_way.pop(what)
