"""Responses that go on without their client: it looks at them, follows or cancels them by id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from keepwarm.errors import Cancelled
from keepwarm.server.http.body import Fields
from keepwarm.server.http.limits import SharedLimit
from keepwarm.server.http.problems import problem_of
from keepwarm.server.http.sse import AnswerLike, comment
from keepwarm.server.responses.events import (
    Frames,
    ResponseBuilder,
    numbered_frame,
    replay,
)
from keepwarm.server.responses.request import Item
from keepwarm.text.request import Done, Finished

MAX_RUNNING, MAX_OWN = 64, 16  # of all keys, and of one
MAX_BYTES, MAX_OWN_BYTES = 256 << 20, 64 << 20  # of events, which are held for those who follow
EVENT_BYTES, LOGPROB_BYTES = 512, 350  # one of them in memory, and one token's log-probability
KEEP_ALIVE_S = 1.0
LOG = logging.getLogger(__name__)


class RunningResponse:
    """One response, with all events so far; they are freed when it has ended and nobody follows.

    They become JSON for those who follow: with log-probabilities the last ones are megabytes each.
    """

    def __init__(
        self,
        answer: AnswerLike,
        builder: ResponseBuilder,
        save: Callable[[dict[str, Any]], None],
        budget: SharedLimit,
        caller: str,
    ) -> None:
        """`save` stores a response that was cancelled or failed; the builder does all others.
        `budget` is of the bytes of events, by caller.
        """
        self._answer = answer
        self._builder = builder
        self._save = save
        self._budget = budget
        self._caller = caller
        self.input: Sequence[Item] = ()  # of its request
        self._events = builder.create()  # before it waits: by its id a client comes back
        self._n_bytes = 0  # of these, that are in the budget
        self._n_following = 0
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(lambda _: self._free())

    @property
    def response(self) -> dict[str, Any]:
        """As it is now."""
        return self._builder.response

    async def cancel(self) -> None:
        self._answer.cancel()
        await asyncio.wait({self.task})

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events behind this number, also those that are still to come."""
        if self.task.done() and not self._events:
            yield replay(self.response, after)
            return
        self._n_following += 1
        try:
            async for sent in self._follow(after + 1):
                yield sent
        finally:
            self._n_following -= 1
            self._free()

    async def _follow(self, following: int) -> AsyncIterator[bytes]:
        while True:
            news, has_ended = self._news, self.task.done()
            for event in self._events[following:]:
                yield numbered_frame(event, following)
                following += 1
            if has_ended:
                return
            if following >= len(self._events):
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                    continue
                yield comment(None)

    async def _run(self) -> None:
        try:
            async for event in self._answer:
                n_bytes = self._add(self._builder.add(event))
                if not isinstance(event, Finished | Done):  # whose events are freed soon
                    self._budget.take(self._caller, n_bytes)
                    self._n_bytes += n_bytes
        except Cancelled:
            self._end(self._builder.cancel())
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                LOG.exception("A response in the background failed")
            self._answer.cancel()
            self._end(self._builder.fail(problem))
        finally:
            self._news.set()

    def _end(self, events: Frames) -> None:
        self._add(events)
        self._save(self.response)

    def _add(self, events: Frames) -> int:
        """About how many bytes they are."""
        self._events += events
        news, self._news = self._news, asyncio.Event()
        news.set()
        return sum(map(_size, events))

    def _free(self) -> None:
        if self.task.done() and not self._n_following:
            self._events = []
            self._budget.release(self._caller, self._n_bytes)
            self._n_bytes = 0


def _size(event: Fields) -> int:
    n_logprobs = sum(1 + len(each["top_logprobs"]) for each in event.get("logprobs", ()))
    return EVENT_BYTES + len(event.get("delta", "")) + LOGPROB_BYTES * n_logprobs


class BackgroundResponses:
    """Those of all tenants that run, for the event loop. Close it."""

    def __init__(self) -> None:
        self._slots = SharedLimit(
            MAX_RUNNING,
            MAX_OWN,
            f"{MAX_RUNNING} responses run in the background, which is the limit. Retry when one "
            "has ended.",
            f"{MAX_OWN} of your responses run in the background, which is the limit. Retry when "
            "one has ended.",
        )
        self.budget = SharedLimit(
            MAX_BYTES,
            MAX_OWN_BYTES,
            "The responses that run in the background are too long together; retry when one has "
            "ended.",
            "Your responses that run in the background are too long together; send fewer at a "
            "time, or ask for fewer top_logprobs.",
        )
        self._running: dict[tuple[str, str], RunningResponse] = {}

    def slot(self, caller: str) -> AbstractContextManager[None]:
        """A place among the responses that may run, from before the first `await` of a request
        until its response has ended; raises if there is none.
        """
        return self._slots.one_more(caller)

    def add(self, tenant: str, running: RunningResponse) -> None:
        key = tenant, running.response["id"]
        self._running[key] = running
        running.task.add_done_callback(lambda _: self._running.pop(key))

    def running(self, tenant: str, response_id: str) -> RunningResponse | None:
        return self._running.get((tenant, response_id))

    async def cancel(self, tenant: str, response_id: str) -> None:
        """If it runs, end it."""
        if running := self._running.get((tenant, response_id)):
            await running.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(running.cancel() for running in list(self._running.values())))
