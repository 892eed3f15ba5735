"""Threads that make calls which may hang, work that several threads want done once, deadlines."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

LOG = logging.getLogger(__name__)
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


class AbandonableExecutor:
    """A few threads that make calls for others. One that hangs is abandoned, and ends with the
    process: Python cannot end a thread, and ThreadPoolExecutor waits for its own at exit.
    """

    def __init__(self, n_workers: int = MAX_WORKERS) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
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
        calls = [self._hand_over(work) for work in works]
        results: list[T] = []
        try:
            while len(results) < len(calls):
                left_s = max(0.0, deadline - time.monotonic())
                results.append(calls[len(results)].result(left_s))
        except OSError as error:
            if not calls[len(results)].done():
                raise self._late(calls, n_done, timeout_s) from None
            raise CallError(error.strerror or str(error) or "timed out") from error
        finally:
            while calls:  # which an error that is raised here would hold, and what was read
                calls.pop().cancel()
        return results

    def _late(self, calls: Sequence[Future[T]], n_done: int, timeout_s: float) -> CallError:
        waiting = [call for call in calls if not call.done()]
        is_busy = all(call.cancel() for call in waiting) and self._n_done > n_done
        kind = BusyError if is_busy else CallError
        return kind(f"no answer within {timeout_s * 1000:.0f} ms")

    def _hand_over(self, work: Callable[[], T]) -> Future[T]:
        call: Future[T] = Future()
        with self._lock:
            self._calls.put((call, work))
            self._n_open += 1
            if len(self._threads) < min(self._n_open, self._n_workers):
                name = f"io-worker-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        return call

    def _serve(self) -> None:
        while (handed_over := self._calls.get()) is not None:
            call, work = handed_over
            result = error = None
            is_wanted = call.set_running_or_notify_cancel()
            try:
                result = work() if is_wanted else None
            except BaseException as raised:
                error = raised
            with self._lock:  # first: whoever is woken may hand over the next one
                self._n_open -= 1
                self._n_done += 1
            if error is not None:
                call.set_exception(error)
            elif is_wanted:
                call.set_result(result)
            del handed_over, call, work, result, error  # the next call may be long in coming

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Do it on a thread that does not keep the process from ending."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it

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


def _compute() -> None:
    """Something trivial, on the device."""
    import mlx.core as mx  # what waits for a device has loaded it

    mx.eval(mx.zeros(1) + 1)


class DeviceLock:
    """One engine at a time computes; who waits longest is next.

    So engines with work alternate, a step each, and a step measures its own model alone.
    """

    def __init__(self, compute: Callable[[], object] = _compute) -> None:
        self._compute = compute
        self.lost = ""  # why nothing can be computed any more, in a sentence
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()
        self._turns: Counter[int] = Counter()  # in which it computed, by thread
        self._seen: Counter[int] = Counter()  # turns of others, when a thread last had it
        self._others_ran = False  # since then

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
        self._look()
        self._turns[threading.get_ident()] += 1
        try:
            yield
        finally:
            self._pass_on()

    @contextmanager
    def take_if_idle(self) -> Iterator[bool]:
        """Whether no other engine computes, or has computed since this one last looked.

        It waits for nobody: work that can wait must not end that of another engine. Only if it is
        idle does it count as a turn: else engines that look would keep each other from it.
        """
        with self._lock:
            is_free = not self._is_taken
            self._is_taken = True
        if not is_free:
            yield False
            return
        self._look()
        is_idle = not (self.others_ran() or self.lost)
        self._turns[threading.get_ident()] += is_idle
        try:
            yield is_idle
        finally:
            self._pass_on()

    def examine(self) -> str:
        """After an error: why nothing can be computed any more, if so.

        Some GPU errors stay until the process ends, such as an illegal memory access.
        """
        try:
            self._compute()
        except Exception as error:
            if not self.lost and "out of memory" not in str(error):  # that one passes
                self.lost = (
                    f"The device computes nothing more in this process ({error}); retry when it "
                    "has been started again, with its blocks on disk."
                )
                LOG.critical("%s", self.lost)
        return self.lost

    def _look(self) -> None:
        own = threading.get_ident()
        n_others = self._turns.total() - self._turns[own]
        self._others_ran = n_others != self._seen[own]
        self._seen[own] = n_others

    def others_ran(self) -> bool:
        """Whether another engine computed between this turn and the one before; inside one."""
        return self._others_ran

    def others_wait(self) -> bool:
        """Whether another engine waits for this one to end."""
        return bool(self._waiting)

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
