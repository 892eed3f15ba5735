"""Answers on their way to a client: whole, or as server-sent events while they are made.

Headers go out when the plan is known, so that they carry the receipt. Who waits longer for it gets
them without, and signs of life: some clients give up on a silent server. A client that goes away
cancels its answer; what fails after the headers is said inside the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from keepwarm.errors import Cancelled, EngineFailed
from keepwarm.server.http.problems import Problem, problem_of
from keepwarm.server.http.wire import receipt_headers
from keepwarm.text.request import Event, Progress, Receipt, Result, Started

KEEP_ALIVE_S = 1.0
PLAN_S = 3.0  # less than the five seconds after which the most impatient clients give up
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

log = logging.getLogger(__name__)


class Reply(Protocol):
    """What is sent: an engine's answer, or several as one."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def cancel(self) -> None: ...
    async def wait(self) -> Result: ...


class Encoder(Protocol):
    """Events of an answer as the bytes of one API's stream. One encoder serves one stream."""

    def event(self, event: Event) -> bytes:
        """Frames for this event; empty where the API has none for it."""

    def waiting(self, progress: Progress | None) -> bytes:
        """A sign of life, sent every second in which nothing else was."""

    def problem(self, problem: Problem) -> bytes:
        """The last words of a stream that fails."""


def frame(data: str, event: str | None = None) -> bytes:
    """One server-sent event; `data` is a line of JSON."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data}\n\n".encode()


def comment(progress: Progress | None) -> bytes:
    """A line that clients skip, with how far the prompt has been read."""
    return f": {progress_json(progress)}\n\n".encode()


def progress_json(progress: Progress | None) -> str:
    if progress is None:
        return "{}"
    return json.dumps({"prompt_tokens_done": progress.done, "prompt_tokens": progress.total})


class WholeAnswer(Response):
    """Waits for all of an answer and sends it as one JSON object."""

    def __init__(self, reply: Reply, build: Callable[[Result], Mapping[str, Any]]) -> None:
        super().__init__()
        self._reply = reply
        self._build = build

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_if_gone(self._reply, receive):
            result = await self._reply.wait()
        response = JSONResponse(self._build(result), headers=receipt_headers(result.receipt))
        await response(scope, receive, send)


class EventStream(Response):
    """Sends an answer as it is made."""

    media_type = "text/event-stream"

    def __init__(
        self,
        reply: Reply,
        encoder: Encoder,
        keep_alive_s: float = KEEP_ALIVE_S,
        plan_s: float = PLAN_S,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._reply = reply
        self._encoder = encoder
        self._keep_alive_s = keep_alive_s
        self._plan_s = plan_s
        self._progress: Progress | None = None
        self._quiet = True  # nothing was sent since the last sign of life
        self._opened = False  # headers are out
        self._planned = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_if_gone(self._reply, receive):
            beat = asyncio.create_task(self._keep_alive(send))
            try:
                await self._send_all(send)
            finally:
                beat.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._reply:
                if isinstance(event, Progress):
                    self._progress = event
                    continue
                if isinstance(event, Started):
                    await self._plan(event.receipt, send)
                if frames := self._encoder.event(event):
                    await self._send(send, frames)
        except Cancelled:
            if not self._opened:
                raise  # otherwise nobody is there to be told
        except Exception as error:
            if not self._opened:
                raise
            problem = problem_of(error)
            if problem.status == 500:
                log.exception("A stream failed.")
            await self._send(send, self._encoder.problem(problem))

    async def _plan(self, receipt: Receipt, send: Send) -> None:
        self._planned = True
        if not self._opened:
            self.headers.update(receipt_headers(receipt))
            await self._open(send)

    async def _open(self, send: Send) -> None:
        self._opened = True
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

    async def _send(self, send: Send, frames: bytes) -> None:
        self._quiet = False
        await send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        patient_until = time.monotonic() + self._plan_s
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive_s)
            if self._quiet and self._planned:
                await self._send(send, self._encoder.waiting(self._progress))
            elif self._quiet and time.monotonic() >= patient_until:
                await self._say_that_it_waits(send)

    async def _say_that_it_waits(self, send: Send) -> None:
        """Before the plan no API knows an event, so it is a comment, for all of them."""
        if not self._opened:
            await self._open(send)
        await self._send(send, comment(self._progress))


async def started(events: AsyncIterator[Event]) -> Started:
    """Wait for the plan of an answer. What fails before it is an ordinary error answer."""
    async for event in events:
        if isinstance(event, Started):
            return event
    raise EngineFailed("The answer ended before it began; ask again.")


@asynccontextmanager
async def cancelled_if_gone(reply: Reply, receive: Receive) -> AsyncIterator[None]:
    """Inside, a client that disconnects cancels the reply; so does leaving before its end."""
    watcher = asyncio.create_task(_watch(reply, receive))
    try:
        yield
    finally:
        watcher.cancel()
        reply.cancel()


async def _watch(reply: Reply, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.cancel()
