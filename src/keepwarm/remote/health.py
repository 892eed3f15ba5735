"""Whether a remote store is used, and how fast it is: measured while it is used.

After some failures in a row nobody calls it, until a trial in the background succeeds: does it do
what a tier needs, and how fast? One that does something else than it is asked is refused.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple, TypeVar

from keepwarm.concurrency import BusyError, CallDeadline, CallError
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.remote.backend import Backend, FolderRange, at_most
from keepwarm.store.tier import TierCounts

LOG = logging.getLogger(__name__)
T = TypeVar("T")
MAX_FAILURES = 3  # in a row
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 2.0  # with a trial that hangs, it is used again within 10 s
REFUSED_RETRY_S = 60.0  # what is wrong there may be put right
CLOSE_S = 1.0  # a trial may be under way
NEW = 0.3  # the weight of the latest measurement; the first replaces the guess
MIN_BYTES = 1 << 18  # less says nothing of the rate
LATEST = 100  # calls that are remembered
SLOW = 0.95  # of them are no slower than what a question plans with
TRIAL_BYTES = 1 << 20
TRIAL_S = 4.0  # the longest it may take
TIDY_S = 1.0  # after that, to delete what it has put
FOLDER = "trial"
N_TIMED = 3  # blobs, read at the same time as those of a prompt are
TIMED_S = 0.2  # that each of them should take
TIMED_BYTES = 1 << 18, 1 << 22  # the least and the most
PATIENT_S = 30.0
NO_PARTS = "It cannot be used as a shared tier: it does not read parts of blobs"


class Health:
    """One for each remote store and all threads that call it: open, which is unusable, until the
    first trial has succeeded.
    """

    def __init__(
        self,
        attempt: Callable[[CallDeadline], None],
        counts: TierCounts,
        refresh: Callable[[CallDeadline], None],
        refresh_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str = "a shared tier",
    ) -> None:
        """`attempt` is the trial; `refresh` is called now and then while all is well; `name` is for
        the log.
        """
        self.name = name
        self._attempt, self._counts = attempt, counts
        self._refresh, self._refresh_s = refresh, refresh_s
        self._clock = clock
        self._changed = threading.Condition()
        self._n_failures: float = MAX_FAILURES
        self._n_recoveries = 0
        self._retry_s, self._retry_at = 0.0, clock()
        self._was_tried = self._is_closed = False
        self._is_outage = False  # and the log says so
        self.refused = ""  # why it is not used at all
        self.last_error = ""
        self._thread = threading.Thread(target=self._watch, name="keepwarm-remote", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_tried(self, timeout_s: float) -> bool:
        """Wait for the first trial; whether it may be used."""
        with self._changed:
            self._changed.wait_for(lambda: self._was_tried, timeout_s)
        return not self.is_open

    @property
    def is_open(self) -> bool:
        return self._n_failures >= MAX_FAILURES

    @property
    def is_trusted(self) -> bool:
        """Whether the last call succeeded. After a failure nothing is loaded until a question is
        answered: so no request waits for two deadlines.
        """
        return self._n_failures == 0

    @property
    def retry_in_s(self) -> float:
        """Seconds until an open one is due for a trial."""
        return max(0.0, self._retry_at - self._clock())

    def call(self, what: str, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if the store does not do it, which is counted."""
        if self.is_open:
            return None
        n_recoveries = self._n_recoveries
        try:
            result = work()
        except (BadRecord, NewerFormat):  # the store has answered
            self.succeeded()
            raise
        except BusyError as error:  # this machine's fault
            self._counts.add(errors=1)
            self.last_error = str(error)
            return None
        except BadInput as error:
            self._refuse(error)
            return None
        except Exception as error:  # whatever it is, it is not worth a request
            is_own = not isinstance(error, CallError)
            level = logging.ERROR if is_own else logging.INFO
            LOG.log(level, "%s could not be %s: %s", self.name, what, error, exc_info=is_own)
            self._counts.add(errors=1)
            self.last_error = str(error)
            if n_recoveries == self._n_recoveries:  # else that outage is over
                self.failed()
            return None
        self.succeeded()
        return result

    def succeeded(self) -> None:
        """A success of a call that began before it opened does not close it: a trial does."""
        with self._changed:
            if not self.is_open:
                self._n_failures = 0

    def failed(self) -> None:
        with self._changed:
            self._n_failures += 1
            if self._n_failures == MAX_FAILURES:
                self._retry_s = FIRST_RETRY_S
                self._retry_at = self._clock() + self._retry_s
                self._tell(is_outage=True)
                self._changed.notify_all()

    def tried(self, success: bool) -> None:
        """Note the outcome of a trial."""
        with self._changed:
            self._was_tried = True
            self._changed.notify_all()
            if self._n_failures == math.inf:
                return
            self._tell(is_outage=not success)
            if success:
                self._n_failures, self._retry_s, self.refused = 0, 0.0, ""
                self._n_recoveries += 1
                return
            self._n_failures = max(self._n_failures, MAX_FAILURES)
            self._retry_s = min(max(2 * self._retry_s, FIRST_RETRY_S), MAX_RETRY_S)
            wait_s = REFUSED_RETRY_S if self.refused else self._retry_s
            self._retry_at = self._clock() + wait_s

    def _tell(self, is_outage: bool) -> None:
        """Each outage once, and its end."""
        if is_outage and not self._is_outage:
            LOG.warning("%s is not used until it answers: %s", self.name, self.last_error)
        if self._is_outage and not is_outage:
            LOG.warning("%s is used again", self.name)
        self._is_outage = is_outage

    def _refuse(self, error: BadInput) -> None:
        if self.refused != str(error):
            LOG.warning("%s is not used: %s", self.name, error)
        self.refused = self.last_error = str(error)
        self._is_outage = True
        self.tried(False)

    def close(self) -> None:
        """Call nobody any more, also if a trial is under way."""
        with self._changed:
            self._n_failures, self._is_closed = math.inf, True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _watch(self) -> None:
        """Try it at the start, and again whenever it was left alone for a while."""
        while not self._is_closed:
            with self._changed:
                was_open = self.is_open
                if was_open:
                    self._changed.wait_for(lambda: self._is_closed, self.retry_in_s)
                else:
                    self._changed.wait_for(lambda: self.is_open, self._refresh_s())
            if was_open and not self._is_closed:
                self._try()
            elif not self.is_open:
                self.call("asked", lambda: self._refresh(self._deadline()))

    def _deadline(self) -> CallDeadline:
        """For whatever this thread does: so that the next trial is not late."""
        return CallDeadline(TRIAL_S, self._clock)

    def _try(self) -> None:
        try:
            self._attempt(self._deadline())
        except BadInput as error:
            return self._refuse(error)
        except CallError as error:
            self.last_error = str(error)
        except Exception as error:  # whatever it is, it must not end the thread
            LOG.exception("%s could not be tried", self.name)
            self.last_error = str(error)
        else:
            return self.tried(True)
        return self.tried(False)


class RemoteSpeed:
    """Rather too fast until something is measured: what is never loaded is never measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: deque[float] = deque(maxlen=LATEST)  # seconds
        self.latency_s = 0.0005
        self.bytes_per_s = 1e9
        self.put_bytes_per_s = math.inf  # one put after the other
        self._weight = 1.0  # of the next rate
        self._n_reading = 0
        self._began = 0.0
        self._n_bytes = self._n_lost = 0

    def load_s(self, n_bytes: int) -> float:
        """Seconds that so many bytes take, in several reads at once."""
        return self.latency_s + n_bytes / self.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float:
        """The faster of both directions. A trial reads little, and seems slow where the way is
        long or the machine busy; so nothing is known of it before something was put.
        """
        return max(self.bytes_per_s, self.put_bytes_per_s)

    @property
    def call_s(self) -> float:
        """The 95th percentile of the latest calls."""
        with self._lock:
            calls = sorted(self._calls)
        return calls[int(SLOW * (len(calls) - 1) + 0.5)] if calls else self.latency_s

    def begin_anew(self) -> None:
        """After an outage much may have changed: the next measurements replace all before."""
        with self._lock:
            self._calls.clear()
            self._weight = 1.0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around a call that moves few bytes; one that fails is not counted."""
        began = self._clock()
        yield
        with self._lock:
            self._calls.append(self._clock() - began)
            self.latency_s = median(self._calls)

    @contextmanager
    def reading(self, n_bytes: int) -> Iterator[Callable[[int], None]]:
        """Around a read of so many bytes, which tells those that it got, and whatever must be done
        before they can be used. The rate is that of all reads that overlap.
        """
        with self._lock:
            self._n_reading += 1
            if self._n_reading == 1:
                self._began, self._n_bytes, self._n_lost = self._clock(), 0, 0
        try:
            yield self._add
        except (BadRecord, NewerFormat):  # it was read
            raise
        except BaseException:
            with self._lock:
                self._n_lost += n_bytes
            raise
        finally:
            with self._lock:
                self._n_reading -= 1
                if not self._n_reading:
                    self._measure(max(self._clock() - self._began, 1e-6))

    def _measure(self, seconds: float) -> None:
        """In seconds per byte, so that one very fast read does not outweigh all others.

        What was not read in time shows at least that the rate was no higher; but an outage shows
        the same, so that each time it is at most halved.
        """
        if self._n_lost:
            highest = (self._n_bytes + self._n_lost) / seconds
            self.bytes_per_s = min(self.bytes_per_s, max(highest, self.bytes_per_s / 2))
        elif self._n_bytes >= MIN_BYTES:
            rate, new, self._weight = self._n_bytes / seconds, self._weight, NEW
            self.bytes_per_s = 1 / ((1 - new) / self.bytes_per_s + new / rate)

    def put(self, n_bytes: int, put: Callable[[], bool]) -> bool:
        """Put so many bytes; whether they are stored. What is refused or fails is not counted."""
        began = self._clock()
        is_stored = put()
        rate, last = n_bytes / max(self._clock() - began, 1e-6), self.put_bytes_per_s
        if is_stored and n_bytes >= MIN_BYTES:
            self.put_bytes_per_s = rate if last == math.inf else 1 / ((1 - NEW) / last + NEW / rate)
        return is_stored

    def declined(self) -> None:
        """Loading seemed too slow; sooner or later it is tried again."""
        self.bytes_per_s *= 1.02

    def _add(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes += n_bytes


def try_backend(backend: Backend, speed: RemoteSpeed, deadline: CallDeadline) -> bool:
    """Put, find, read and delete a blob, and measure it; whether it was put. Raises CallError where
    that fails, and BadInput if the place does something else than it is asked.

    A full place can still be read from, and one that may not be written to. One that replaces blobs
    is good enough, because equal names have equal content, or the same rows exact and rounded.
    """
    name, data = f"{FOLDER}/{uuid.uuid4().hex}", os.urandom(TRIAL_BYTES)
    time_calls(backend, speed, deadline)
    is_stored = True  # as far as is known: a put that is late may come after all
    try:
        is_stored = backend.put(name, [data], deadline.left_s())
        if is_stored:
            _check(backend, name, data, speed, deadline)
    finally:
        if is_stored:
            left_s = 0.0 if deadline.is_over else deadline.left_s()
            backend.delete([name], max(TIDY_S, left_s))
    return is_stored


class BlobRates(NamedTuple):
    """Bytes in a second."""

    put: float = 0.0  # 0 if it is full or read-only
    read: float = 0.0


def time_blobs(backend: Backend, bytes_per_s: float) -> BlobRates:
    """Put some blobs, one after the other, and read them at the same time; about `bytes_per_s` is
    expected. Raises CallError where that fails.
    """
    least, most = TIMED_BYTES
    data = os.urandom(max(least, min(most, int(bytes_per_s * TIMED_S))))
    names = [f"{FOLDER}/{uuid.uuid4().hex}" for _ in range(N_TIMED)]
    try:
        began = time.perf_counter()
        if not all(backend.put(name, [data], PATIENT_S) for name in names):
            return BlobRates()
        put = time.perf_counter()
        with ThreadPoolExecutor(N_TIMED) as readers:
            list(readers.map(lambda name: backend.read(name, at_most(most), PATIENT_S), names))
        n_bytes, end = N_TIMED * len(data), time.perf_counter()
        return BlobRates(n_bytes / (put - began), n_bytes / (end - put))
    finally:
        backend.delete(names, PATIENT_S)


def time_calls(backend: Backend, speed: RemoteSpeed, deadline: CallDeadline) -> None:
    """Measure how fast a place answers; the first call may have to connect."""
    backend.sizes([FOLDER], deadline.left_s())
    for _ in range(2):
        with speed.calling():
            backend.sizes([FOLDER], deadline.left_s())


def _check(
    backend: Backend, name: str, data: bytes, speed: RemoteSpeed, deadline: CallDeadline
) -> None:
    take = at_most(TRIAL_BYTES)
    with speed.reading(TRIAL_BYTES) as add:
        whole = backend.read(name, take, deadline.left_s())
        add(TRIAL_BYTES)
    if whole is None or bytes(whole) != data:
        raise CallError("it returned other bytes than were put")
    try:
        with speed.calling():
            part = backend.read(name, take, deadline.left_s(), n_bytes=100)
    except CallError as error:
        backend.read(name, take, deadline.left_s())  # raises if it answers nothing now
        raise BadInput(f"{NO_PARTS} ({error}).") from error
    if part is None or bytes(part) != data[:100]:
        raise BadInput(f"{NO_PARTS}.")
    with speed.calling():
        wanted = FolderRange(FOLDER, name.rpartition("/")[2])
        (listed,) = backend.look([wanted], deadline.left_s())
    if name not in [one.name for one in listed]:
        raise BadInput("It cannot be used as a shared tier: it does not list what was put.")
