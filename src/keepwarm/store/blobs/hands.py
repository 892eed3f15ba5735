"""Calls that may hang, as to a file system on the network, made so that their callers need not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from keepwarm.store.blobs.backend import BlobError, BusyError

T = TypeVar("T")
MAX_HANDS = 8


class Hands:
    """Some threads that do the work of others. One that hangs is left behind, and ends with the
    process.
    """

    def __init__(self, n_hands: int = MAX_HANDS) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._n_hands = n_hands
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._n_open = 0  # handed over and not done
        self._n_done = 0

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """What `work` returns; raises BlobError for an error of the system, or if it takes longer.

        Work that has not begun by then is not begun; what has begun goes on in vain. It is a
        BusyError if the hands were busy and did some other work meanwhile: then nothing hangs.
        """
        return self.run_all([work], timeout_s)[0]

    def run_all(self, works: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
        """The same for several, at the same time."""
        deadline, n_done = time.monotonic() + timeout_s, self._n_done
        futures = [self._start(work) for work in works]
        try:
            return [one.result(max(0.0, deadline - time.monotonic())) for one in futures]
        except TimeoutError as error:
            if any(one.done() and one.exception() is error for one in futures):
                raise BlobError(str(error) or "timed out") from error  # the system's
            waiting = [one for one in futures if not one.done()]
            is_busy = all(one.cancel() for one in waiting) and self._n_done > n_done
            kind = BusyError if is_busy else BlobError
            raise kind(f"no answer within {timeout_s * 1000:.0f} ms") from error
        except OSError as error:
            raise BlobError(error.strerror or str(error)) from error
        finally:
            for one in futures:
                one.cancel()

    def _start(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        self._hand_over(do)
        return future

    def _hand_over(self, do: Callable[[], None]) -> None:
        with self._lock:
            self._work.put(do)
            self._n_open += 1
            if len(self._threads) < min(self._n_open, self._n_hands):
                name = f"keepwarm-hand-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()

    def _serve(self) -> None:
        while (do := self._work.get()) is not None:
            do()
            with self._lock:
                self._n_open -= 1
                self._n_done += 1

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
