"""Sends an answer to the client: as one JSON object, as server-sent events, or as lines of JSON.

Headers go out when the restore plan is known, so that they carry the receipt. If that takes longer
than `PLAN_S`, they go out without it and keep-alive comments follow: some clients give up on a
silent server. A client that disconnects cancels its answer. An error after the headers becomes an
event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, NotRequired, Protocol, TypeVar

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from keepwarm.engine.answer import collect
from keepwarm.errors import EngineFailed
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.problems import Problem, problem_of
from keepwarm.text.request import (
    Event,
    Inexact,
    Progress,
    Receipt,
    Result,
    Scored,
    Started,
    TokenInfo,
)

T = TypeVar("T")
R = TypeVar("R")

RECEIPT_HEADER = "x-keepwarm-receipt"
ABSENT = (None, ())  # values of fields that a receipt leaves out


class ReceiptMissOut(TypedDict):
    position: int
    message: int | None
    reason: str
    nearest: int


class ReceiptOut(TypedDict):
    """How much of the prompt was reused and how much was computed."""

    prompt_tokens: int
    reused: dict[str, int]
    recomputed: int
    saved_ms: float | None  # None: what they took to compute is not known
    exact: bool
    inexact: NotRequired[list[Inexact]]  # why not
    lossy_tokens: NotRequired[int]  # of those reused, rounded at rest
    spliced: int
    scrubbed: list[str]
    reordered: NotRequired[list[str]]  # parts of the prompt that come elsewhere
    unread: NotRequired[list[str]]  # kinds of parts replaced by a note
    ignored_fields: NotRequired[list[str]]  # fields of the request without effect here
    miss: NotRequired[ReceiptMissOut]
    repeated_calls: NotRequired[list[str]]  # ids of calls as the model made them just before
    durable: NotRequired[bool]  # only when a durable request is done
    shared: NotRequired[int]  # prompt tokens that another machine would restore, when it is done
    scored: NotRequired[int]  # prompt tokens with logprobs, for which nothing is reused
    continued: NotRequired[int]  # known tokens of the agent, if only new messages were sent
    model: NotRequired[str]  # whose vectors they are
    phases_ms: NotRequired[dict[str, float]]  # parts of the time to the first token
    speculation: NotRequired[dict[str, int]]  # steps, drafted and accepted tokens


def receipt_dict(receipt: Receipt, **more: object) -> ReceiptOut:
    """`more` is what one API adds, where there is any of it."""
    fields = asdict(receipt)
    fields |= {"exact": receipt.exact}
    given = {name: value for name, value in fields.items() if value not in ABSENT}
    added = {name: value for name, value in more.items() if value}
    return {"saved_ms": None, "scrubbed": [], **given, **added}  # type: ignore[typeddict-item]


def receipt_headers(receipt: Receipt, **more: object) -> dict[str, str]:
    return {RECEIPT_HEADER: json.dumps(receipt_dict(receipt, **more), separators=(",", ":"))}


KEEP_ALIVE_S = 1.0
LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}
MANY_LOGPROBS = 4096  # written in some 10 ms
PLAN_S = 3.0  # some clients give up after five seconds
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

EVENT_SCHEMA = {  # one event of a stream, for the OpenAPI document
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Its name, if the API has named events."},
        "data": {"type": "string", "description": "JSON; OpenAI's completions end with `[DONE]`."},
    },
    "required": ["data"],
}

log = logging.getLogger(__name__)


def answer_docs(model: type) -> dict[int | str, dict[str, Any]]:
    """The 200 response of a generating endpoint, for the OpenAPI document."""
    stream = {"text/event-stream": {"schema": EVENT_SCHEMA}}
    about = "The answer, as one object or as events."
    return {200: {"model": model, "description": about, "content": stream}}


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class AnswerLike(Cancellable, Protocol):
    """What is sent: an engine's answer, or several combined."""

    def __aiter__(self) -> AsyncIterator[Event]: ...


class Encoder(Protocol):
    """Turns the events of one answer into the bytes of one API's stream."""

    def event(self, event: Event) -> bytes:
        """Frames for this event; empty if the API has none."""

    def keep_alive(self, progress: Progress | None) -> bytes:
        """Sent after every second without another frame."""

    def problem(self, problem: Problem) -> bytes:
        """The last frames of a stream that fails."""


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def frame(fields: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return b"%sdata: %s\n\n" % (name, _one_line(fields))


def line(fields: Mapping[str, Any]) -> bytes:
    """One line of a stream of JSON objects."""
    return _one_line(fields) + b"\n"


def _one_line(fields: Mapping[str, Any]) -> bytes:
    """JSON without what clients that read texts, as httpx does, take for the end of a line."""
    written = to_json(fields)
    for end, escaped in LINE_ENDS.items():
        written = written.replace(end, escaped)
    return written


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    """For what may be megabytes, as log-probabilities are: six times as fast as `json`, which has
    the interpreter to itself until it is done.
    """
    return Response(to_json(value), headers=headers, media_type="application/json")


def comment(progress: Progress | None) -> bytes:
    """A line that clients skip, with the progress of prefill."""
    return b": %s\n\n" % to_json(progress_fields(progress))


def progress_fields(progress: Progress | None) -> dict[str, int]:
    if progress is None:
        return {}
    return {"prompt_tokens_done": progress.done, "prompt_tokens": progress.total}


class WholeAnswer(Response):
    """Waits for the complete answer and sends it as one JSON object."""

    def __init__(
        self,
        answer: AnswerLike,
        build: Callable[[Result], Mapping[str, Any]],
        observe: Callable[[Event], None] = lambda _: None,
    ) -> None:
        """`observe` is called with each event as it comes."""
        super().__init__()
        self._answer = answer
        self._build = build
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = []
        async with cancel_on_disconnect(self._answer, receive):
            async for event in self._answer:
                self._observe(event)
                events.append(event)
        result = collect(events)
        parts = [choice.tokens for choice in result.choices]
        if _has_many_logprobs([*parts, *result.scored.values()]):
            response = await resumed(scope, self._response, result)
        else:
            response = self._response(result)
        await response(scope, receive, send)

    def _response(self, result: Result) -> Response:
        return json_response(self._build(result), receipt_headers(result.receipt))


def _has_many_logprobs(parts: Sequence[Sequence[TokenInfo]]) -> bool:
    """Whether writing them, which may take seconds, would keep the event loop."""
    infos = (info for part in parts for info in part if info.logprob is not None)
    return sum(1 + len(info.top) for info in infos) > MANY_LOGPROBS


async def resumed(scope: Scope, work: Callable[[T], R], given: T) -> R:
    """`work(given)`, not on the event loop."""
    slot: PrepareSlot = scope["state"]["slot"]
    return await slot.resume(work, given)


class EventStream(Response):
    """Sends an answer while it is generated."""

    media_type = "text/event-stream"
    keep_alive_s, plan_s = KEEP_ALIVE_S, PLAN_S

    def __init__(self, answer: AnswerLike, encoder: Encoder) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._answer = answer
        self._encoder = encoder
        self._progress: Progress | None = None
        self._quiet = True  # nothing was sent in the current second
        self._opened = False  # headers are sent
        self._planned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(self._answer, receive):
            beat = asyncio.create_task(self._keep_alive(send))
            try:
                await self._send_all(scope, send)
            finally:
                beat.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, scope: Scope, send: Send) -> None:
        try:
            async for event in self._answer:
                if isinstance(event, Progress):
                    self._progress = event
                    continue
                if isinstance(event, Started):
                    await self._plan(event.receipt, send)
                if isinstance(event, Scored) and _has_many_logprobs([event.tokens]):
                    frames = await resumed(scope, self._encoder.event, event)
                else:
                    frames = self._encoder.event(event)
                if frames:
                    await self._send(send, frames)
        except Exception as error:
            if not self._opened:
                raise
            problem = problem_of(error)
            if problem.status == 500:
                log.exception("A stream failed")
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
        comment_after = time.monotonic() + self.plan_s
        while True:
            self._quiet = True
            await asyncio.sleep(self.keep_alive_s)
            if self._quiet and self._planned:
                await self._send(send, self._encoder.keep_alive(self._progress))
            elif self._quiet and time.monotonic() >= comment_after:
                await self._send_comment(send)

    async def _send_comment(self, send: Send) -> None:
        if not self._opened:
            await self._open(send)
        await self._send(send, self._early())

    def _early(self) -> bytes:
        """No API has an event that may come before the plan, so this is a comment."""
        return comment(self._progress)


class LineStream(EventStream):
    """The same as lines of JSON, which have no comments: what keeps alive is a line, too."""

    media_type = "application/x-ndjson"

    def _early(self) -> bytes:
        return self._encoder.keep_alive(self._progress)


async def wait_for_start(events: AsyncIterator[Event]) -> Started:
    """Wait for the restore plan. An error before it becomes an ordinary error response."""
    async for event in events:
        if isinstance(event, Started):
            return event
    raise EngineFailed("The answer ended before it started; retry.")


@asynccontextmanager
async def cancel_on_disconnect(answer: Cancellable, receive: Receive) -> AsyncIterator[None]:
    """Cancels the answer when the client disconnects or the block is left early."""
    watcher = asyncio.create_task(_cancel_when_gone(answer, receive))
    try:
        yield
    finally:
        watcher.cancel()
        answer.cancel()


async def _cancel_when_gone(answer: Cancellable, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()
