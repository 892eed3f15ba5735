"""Connections: how many there may be, and how long each may keep the server waiting.

A connection waits (for a request, or for the rest of its header) or works (on an answer). When
there are too many, the one that has waited longest is closed; one that works never is. A client
has `client_timeout_s` to send a header, and as long to read what is buffered for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepwarm.errors import BadInput
from keepwarm.server.http.problems import Problem, openai_body, problem_of, respond

LINGER_S = 2.0  # for a client that still sends a body nobody reads, before it reads the answer
BOTH_LENGTHS = {b"content-length", b"transfer-encoding"}


class ConnectionPool:
    """All connections of a server."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._working: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # the longest first

    def admit(self, connection: Connection) -> bool:
        """Make room for a new connection, if one waits that can be closed."""
        if len(self._working) + len(self._waiting) >= self._limit:
            if not self._waiting:
                return False
            oldest, _ = self._waiting.popitem(last=False)
            oldest.transport.abort()
        self._waiting[connection] = None
        return True

    def waits(self, connection: Connection) -> None:
        self._working.discard(connection)
        self._waiting.setdefault(connection)

    def works(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._working.add(connection)

    def leaves(self, connection: Connection) -> None:
        self._working.discard(connection)
        self._waiting.pop(connection, None)

    def refusal(self) -> bytes:
        """The answer to a connection for which there is no room."""
        says = f"{self._limit} connections are in use, which is the limit; retry shortly."
        body = json.dumps(openai_body(Problem(503, says)))
        return (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Retry-After: 1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()


class Deadline:
    """Calls a function unless it is stopped in time; starting it again does not extend it."""

    def __init__(self, seconds: float, expired: Callable[[], None]) -> None:
        self._seconds = seconds
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expired)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connection(H11Protocol):
    """uvicorn's connection, with deadlines."""

    def __init__(self, *, pool: ConnectionPool, timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._pool = pool
        self._header_deadline = Deadline(timeout_s, self._abort)
        self._reading_deadline = Deadline(timeout_s, self._abort)
        self._app, self.app = self.app, self._answer

    def _abort(self) -> None:
        """Close without sending what is buffered: `close` waits for a client that does not read."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_deadline.start()
        if not self._pool.admit(self):
            transport.write(self._pool.refusal())
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._header_deadline.start()
        else:
            self._header_deadline.stop()
            self._pool.works(self)

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._reading_deadline.start()
        elif self._is_waiting():  # and has not sent its next request already
            self._pool.waits(self)

    def timeout_keep_alive_handler(self) -> None:
        self._abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_deadline.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._reading_deadline.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_deadline.stop()
        self._reading_deadline.stop()
        self._pool.leaves(self)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, and two things that only a connection can do.

        A client that still sends can read the answer, because its body is read and dropped for
        a while. An answer that is given up ends the connection, so that it is not taken for whole.
        """
        unread = False

        async def hold_end(message: Message) -> None:
            nonlocal unread
            unread = self.cycle.more_body and _is_last(message)
            await send({**message, "more_body": True} if unread else message)

        try:
            if {name for name, _ in scope["headers"]} >= BOTH_LENGTHS:
                await _refuse_framing(scope, receive, hold_end)
            else:
                await self._app(scope, receive, hold_end)
            if unread:
                await self._drop_body(receive)
                await send({"type": "http.response.body"})
        finally:
            if self.cycle.response_started and not self.cycle.response_complete:
                self._abort()
                await asyncio.sleep(0)  # so that uvicorn sees that the client is gone

    async def _drop_body(self, receive: Receive) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.cycle.more_body and not self.cycle.disconnected:
                    await receive()


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


async def _refuse_framing(scope: Scope, receive: Receive, send: Send) -> None:
    """Where two servers in a row disagree on a body's end, one request can hide in another."""
    error = BadInput("The request has Content-Length and Transfer-Encoding; send only one of them.")
    answer = respond(scope["path"], problem_of(error))
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)
