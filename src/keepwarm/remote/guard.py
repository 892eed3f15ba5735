"""Calls to a shared place: none after some failures, until a trial in the background succeeds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from keepwarm.concurrency import BusyError, CallError
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.remote.breaker import Breaker
from keepwarm.store.tier import TierCounts

LOG = logging.getLogger(__name__)
T = TypeVar("T")
CLOSE_S = 1.0  # a trial may be under way


class Guard:
    """One for each tier and all its threads."""

    def __init__(
        self,
        attempt: Callable[[], None],
        breaker: Breaker,
        counts: TierCounts,
        refresh: Callable[[], None],
        refresh_s: float,
    ) -> None:
        """`attempt` is the trial; `refresh` is called now and then while all is well."""
        self._attempt = attempt
        self._refresh = refresh
        self._refresh_s = refresh_s
        self.breaker = breaker
        self._counts = counts
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._tried = threading.Event()
        self.refused = ""  # why it is not used at all
        self._thread = threading.Thread(target=self._watch, name="keepwarm-remote", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_tried(self, timeout_s: float) -> bool:
        """Wait for the first trial; whether it may be used."""
        self._tried.wait(timeout_s)
        return not self.breaker.is_open

    def call(self, what: str, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if the place does not do it, which is counted."""
        if self.breaker.is_open:
            return None
        try:
            result = work()
        except (BadRecord, NewerFormat):  # the place has answered
            self.breaker.succeeded()
            raise
        except BusyError:  # this machine's fault
            self._counts.add(errors=1)
            return None
        except Exception as error:  # whatever it is, it is not worth a request
            is_own = not isinstance(error, CallError)
            LOG.log(
                logging.ERROR if is_own else logging.INFO,
                "a shared tier could not be %s: %s",
                what,
                error,
                exc_info=is_own,
            )
            self._counts.add(errors=1)
            self.breaker.failed()
            if self.breaker.is_open:
                self._failed.set()
            return None
        self.breaker.succeeded()
        return result

    def _watch(self) -> None:
        """Try it at the start, and again whenever it was left alone for a while."""
        while not self._closing.is_set() and not self.refused:
            if self.breaker.is_open:
                if not self._closing.wait(self.breaker.retry_in_s):
                    self._try()
                    self._tried.set()
            elif self._failed.wait(self._refresh_s):
                self._failed.clear()
            else:
                self.call("asked", self._refresh)

    def _try(self) -> None:
        try:
            self._attempt()
        except CallError as error:
            LOG.info("a shared tier does not answer: %s", error)
            self.breaker.tried(False)
        except BadInput as error:
            LOG.warning("a shared tier is not used: %s", error)
            self.refused = str(error)
        except Exception:  # whatever it is, it must not end the thread
            LOG.exception("a shared tier could not be tried")
            self.breaker.tried(False)
        else:
            self.breaker.tried(True)

    def close(self) -> None:
        """Call nobody any more."""
        self.breaker.end()
        self._closing.set()
        self._failed.set()
        self._thread.join(CLOSE_S)
