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
        self._under_way: dict[Hashable, Future[T]] = {}

    def do(
        self, what: Hashable, work: Callable[[], T], deadline: CallDeadline | None = None
    ) -> T | None:
        """What `work` returns; None if another thread is at it until the deadline, which may be
        sooner than its own.
        """
        with self._lock:
            other = self._under_way.get(what)
            if other is None:
                own: Future[T] = Future()
                self._under_way[what] = own
        if other is not None:
            try:
                return other.result(None if deadline is None else deadline.left_s())
            except (TimeoutError, BlobError):
                return None
        try:
            own.set_result(work())
        except BaseException as error:
            own.set_exception(error)
        finally:
            with self._lock:
                del self._under_way[what]
        return own.result()
