"""Threads that make calls which may hang, work that several threads want done once, deadlines."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MAX_WORKERS = 8


class CallError(Exception):
    """A call to another machine or to a file system failed, or did not end in time."""


class BusyError(CallError):
    """A call did not begin in time, because this machine makes too many others."""


class CallDeadline:
    """The end of a call, by the monotonic clock."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._at = clock() + timeout_s

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._at

    def left_s(self) -> float:
        """The seconds that are left; raises if there are none."""
        left_s = self._at - self._clock()
        if left_s <= 0:
            raise CallError(f"no answer within {self.timeout_s * 1000:.0f} ms")
        return left_s


class _Call(Generic[T]):
    """Work that is handed over; two locks cost less than a Future, and every record has one."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._begun = threading.Lock()  # held by whoever does the work, or has called it off
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def call_off(self) -> bool:
        """Whether it had not begun; then it never does."""
        return self._begun.acquire(blocking=False)

    def do(self) -> None:
        """Unless it was called off."""
        if self._begun.acquire(blocking=False):
            try:
                self._result.append(self._work())
            except BaseException as error:
                self._error = error

    def end(self) -> None:
        """Wake whoever waits for it."""
        self._under_way.release()

    @property
    def is_done(self) -> bool:
        return not self._under_way.locked()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done in time."""
        is_done = self._under_way.acquire(timeout=max(0.0, timeout_s))
        if is_done:
            self._under_way.release()
        return is_done

    def take_result(self) -> T:
        """Once; raises what the work has raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this call, and what was read
        return self._result.pop()


class AbandonableExecutor:
    """A few threads that make calls for others. One that hangs is abandoned, and ends with the
    process: Python cannot end a thread, and ThreadPoolExecutor waits for its own at exit.
    """

    def __init__(self, n_workers: int = MAX_WORKERS) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._n_workers = n_workers
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._n_open = 0  # handed over and not done
        self._n_done = 0

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """What `work` returns; raises CallError for an error of the system, or if it takes longer.

        Work that has not begun by then is not begun; what has begun goes on in vain. It is a
        BusyError if the workers were busy and did some other work meanwhile: then nothing hangs.
        """
        return self.run_all([work], timeout_s)[0]

    def run_all(self, works: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
        """The same for several, at the same time."""
        deadline, n_done = time.monotonic() + timeout_s, self._n_done
        calls = [_Call(work) for work in works]
        for call in calls:
            self._hand_over(call)
        try:
            results = []
            for call in calls:
                if not call.wait(deadline - time.monotonic()):
                    raise self._late(calls, n_done, timeout_s)
                results.append(call.take_result())
            return results
        except OSError as error:
            raise CallError(error.strerror or str(error) or "timed out") from error
        finally:
            for call in calls:
                call.call_off()

    def _late(self, calls: Sequence[_Call[T]], n_done: int, timeout_s: float) -> CallError:
        waiting = [call for call in calls if not call.is_done]
        is_busy = all(call.call_off() for call in waiting) and self._n_done > n_done
        kind = BusyError if is_busy else CallError
        return kind(f"no answer within {timeout_s * 1000:.0f} ms")

    def _hand_over(self, call: _Call[T]) -> None:
        with self._lock:
            self._calls.put(call)
            self._n_open += 1
            if len(self._threads) < min(self._n_open, self._n_workers):
                name = f"io-worker-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.do()
            with self._lock:  # first: whoever is woken may hand over the next one
                self._n_open -= 1
                self._n_done += 1
            call.end()
            del call  # who waits for the next one must not keep what was read

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Do it on a thread that does not keep the process from ending."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


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
        except (TimeoutError, CallError):
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


class DeviceLock:
    """One engine at a time computes; who waits longest is next.

    So engines with work alternate, a step each, and a step measures its own model alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()
        self._latest: int | None = None  # the thread that has it, or had it last
        self._is_handed_over = False  # another one had it before

    @contextmanager
    def take(self) -> Iterator[None]:
        """Inside, no other engine computes."""
        granted = threading.Event()
        with self._lock:
            if self._is_taken:
                self._waiting.append(granted)
            else:
                self._is_taken = True
                granted.set()
        granted.wait()
        before, self._latest = self._latest, threading.get_ident()
        self._is_handed_over = before != self._latest
        try:
            yield
        finally:
            self._pass_on()

    def others_ran(self) -> bool:
        """Whether another engine computed between this turn and the one before; inside one."""
        return self._is_handed_over

    def others_wait(self) -> bool:
        """Whether another engine waits for this one to end."""
        return bool(self._waiting)

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
