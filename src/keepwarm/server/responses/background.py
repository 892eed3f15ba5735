"""Responses that go on without their client: it looks at them, follows or cancels them by id."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from keepwarm.errors import Busy, Cancelled
from keepwarm.server.http.problems import problem_of
from keepwarm.server.http.sse import AnswerLike, comment
from keepwarm.server.responses.events import Frames, ResponseBuilder, ResponseStream
from keepwarm.server.responses.store import ResponseStore

MAX_RUNNING, MAX_OWN = 64, 16  # of all keys, and of one
MAX_ENDED = 16  # whose events can still be followed by their numbers
KEEP_ALIVE_S = 1.0
LOG = logging.getLogger(__name__)


class RunningResponse:
    """One response, with all events so far."""

    def __init__(
        self, answer: AnswerLike, builder: ResponseBuilder, save: Callable[[dict[str, Any]], None]
    ) -> None:
        """`save` stores a response that was cancelled or failed; the builder does all others."""
        self._answer = answer
        self._builder = builder
        self._save = save
        self._stream = ResponseStream(builder)
        self._sent: list[bytes] = []
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    @property
    def response(self) -> dict[str, Any]:
        """As it is now."""
        return self._builder.response

    async def cancel(self) -> None:
        self._answer.cancel()
        await asyncio.wait({self.task})

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events behind this number, also those that are still to come."""
        following = after + 1
        while True:
            news, has_ended = self._news, self.task.done()
            for sent in self._sent[following:]:
                yield sent
                following += 1
            if has_ended:
                return
            if following >= len(self._sent):
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                    continue
                yield comment(None)

    async def _run(self) -> None:
        try:
            async for event in self._answer:
                self._add(self._builder.add(event))
        except Cancelled:
            self._end(self._builder.cancel())
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                LOG.exception("A response in the background failed")
            self._end(self._builder.fail(problem))
        finally:
            self._news.set()

    def _end(self, events: Frames) -> None:
        self._add(events)
        self._save(self.response)

    def _add(self, events: Frames) -> None:
        self._sent += self._stream.frames(events)
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundResponses:
    """Those of all tenants, for the event loop. Close it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._slots: Counter[str] = Counter()  # by tenant
        self._running: dict[tuple[str, str], RunningResponse] = {}
        self._ended: OrderedDict[tuple[str, str], RunningResponse] = OrderedDict()
        self._checks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        store.on_forget(self._forget_all)

    @contextmanager
    def slot(self, tenant: str) -> Iterator[None]:
        """A place among the responses that may run, from before the first `await` of a request
        until its response has ended; raises if there is none.
        """
        n_own, n_all = self._slots[tenant], self._slots.total()
        if n_own >= MAX_OWN or n_all >= MAX_RUNNING:
            raise Busy(
                f"{n_own} of your responses run in the background, and {n_all} in "
                f"all; the limits are {MAX_OWN} and {MAX_RUNNING}. Retry when one has ended."
            )
        self._slots[tenant] += 1
        try:
            yield
        finally:
            self._slots[tenant] -= 1

    def add(self, tenant: str, running: RunningResponse) -> None:
        self._loop = asyncio.get_running_loop()
        key = tenant, running.response["id"]
        self._running[key] = running
        running.task.add_done_callback(lambda _: self._end(key))

    def running(self, tenant: str, response_id: str) -> RunningResponse | None:
        return self._running.get((tenant, response_id))

    def ended(self, tenant: str, response_id: str) -> RunningResponse | None:
        """One that has ended a short while ago."""
        return self._ended.get((tenant, response_id))

    async def cancel(self, tenant: str, response_id: str) -> None:
        """If it runs, end it."""
        if running := self._running.get((tenant, response_id)):
            await running.cancel()

    def forget(self, tenant: str, response_id: str) -> None:
        self._ended.pop((tenant, response_id), None)

    async def close(self) -> None:
        await asyncio.gather(*(running.cancel() for running in list(self._running.values())))
        await asyncio.gather(*self._checks, return_exceptions=True)

    def _end(self, key: tuple[str, str]) -> None:
        self._ended[key] = self._running.pop(key)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        check = asyncio.create_task(self._check(*key))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    async def _check(self, tenant: str, response_id: str) -> None:
        """Forget a response that was not stored, because its agent was deleted meanwhile."""
        if not await self._store.has(tenant, response_id):
            self.forget(tenant, response_id)

    def _forget_all(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.clear)
