"""A server process: bind the port, serve, drain on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepwarm.concurrency import in_background
from keepwarm.config import Settings
from keepwarm.errors import BadInput, KeepwarmError, Stopping
from keepwarm.server.http.logs import log_drain, log_start, log_stop, log_to_stderr
from keepwarm.server.http.problems import Problem, ProblemResponse, openai_body, problem_of
from keepwarm.server.models.models import Models

KEEP_ALIVE_S = 75
DRAIN_LINES_S = 5.0  # between two lines about a drain
LOST_S = 30  # to end in, without a device
AFTER_DRAIN_S = 2  # for the last frames of streams that the drain cut short
BACKLOG = 256  # connections that the system, and one turn of the loop, accept ahead
SEND_BUFFER_BYTES = 256 << 10
SPARE_CONNECTIONS = 768  # besides those of running requests
SWITCH_S = 0.0005  # that a thread may run Python while the engine or the loop wants to
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that one in use is reported at once.

    It is not open yet: who connects before the server can answer would wait for its imports.
    """
    listening = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address[:2])
    except OSError as error:
        if listening is not None:
            listening.close()
        raise _not_to_be_had(host, port, error) from error
    # Connections inherit both. Otherwise each token waits for the previous one's TCP ACK, and the
    # system buffers megabytes for a client that does not read.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listening


def _not_to_be_had(host: str, port: int, error: OSError) -> BadInput:
    if error.errno == errno.EADDRINUSE:
        return BadInput(
            f"Port {port} on {host} is in use; stop that server or choose another port."
        )
    return BadInput(f"Cannot listen on {host}, port {port}: {error.strerror or error}.")


def _listen(listening: socket.socket) -> None:
    """Open the port. Another server may have done so since it was bound: then this one ends, as at
    a signal, while its model is loaded.
    """
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        host, port = listening.getsockname()[:2]
        os.write(2, f"{_not_to_be_had(host, port, error)}\n".encode())
        os._exit(2)


def address_of(listening: socket.socket) -> str:
    """The URL by which this machine reaches the server."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    make_app: Callable[[], FastAPI],
    settings: Settings,
    listening: socket.socket,
    start: Callable[[], None] = lambda: None,
    greet: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; running answers then have `drain_s` seconds to finish.

    Raises if the device computes nothing more, so that a supervisor starts the server again.

    Meanwhile `start` loads the model; what it raises ends the server and is raised here. `greet` is
    called once it is loaded and the port is open. A second signal kills the process; only what is
    not yet on disk is lost.
    """

    def greet_if_loaded(started: Future[None]) -> None:
        if started.exception() is None:
            greet()

    sys.setswitchinterval(SWITCH_S)
    log_to_stderr(settings)
    for number in STOP_SIGNALS:  # until the server runs and has handlers of its own
        signal.signal(number, _end_at_once)
    started = in_background(
        start, "keepwarm-start"
    )  # first: `make_app` imports the APIs, which takes as long
    try:
        app = make_app()
    except KeepwarmError as error:  # the thread that loads must not be unwound, as above
        os.write(2, f"{error}\n".encode())
        os._exit(2)
    server = DrainingServer(app, settings)
    started.add_done_callback(server.stop_if_failed)
    _listen(listening)
    started.add_done_callback(greet_if_loaded)
    log_start(app.state.models.first.name, address_of(listening), settings)
    server.run(sockets=[listening])
    log_stop(settings)
    if not started.done():
        _end_at_once(server.stopped_by)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    started.result()
    if server.lost:
        raise Stopping(server.lost)


def _end_at_once(number: int, _: FrameType | None = None) -> None:
    """A model that is half loaded has nothing to save.

    By the signal itself: at the interpreter's own end the loading thread would be unwound inside
    MLX, and C++ would abort the process.
    """
    os.write(2, b"Stopped before the model was loaded.\n")
    _end_by(number)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the first process of a container, which ignores its own signals


def most_connections(settings: Settings) -> int:
    """What requests may use and some more, within half of the files that may be open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_queue + SPARE_CONNECTIONS
    return wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed // 2)


class DrainingServer(uvicorn.Server):
    """On shutdown, finishes running answers and refuses new ones before it closes."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(  # type: ignore[arg-type]
                    Connection,
                    pool=ConnectionPool(most_connections(settings)),
                    timeout_s=settings.client_timeout_s,
                ),
                ws="none",
                backlog=BACKLOG,
                lifespan="on",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=AFTER_DRAIN_S,
            )
        )
        self._models: Models = app.state.models
        self._drain_s = settings.drain_s
        self.stopped_by: int = signal.SIGTERM
        self.lost = ""  # why the device computes nothing more

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            _end_by(sig)
        self.stopped_by = sig
        self.should_exit = True  # uvicorn's own would raise the signal again after its shutdown

    @override
    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to stop."""
        self.lost = self._models.lost
        if self.lost:
            signal.alarm(LOST_S)  # what frees memory of the device may hang
        return await super().on_tick(counter) or bool(self.lost)

    def stop_if_failed(self, started: Future[None]) -> None:
        if started.exception() is not None:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keep the port open during the drain: new requests get a 503, not a refused connection."""
        end = time.monotonic() + self._drain_s
        self._log_drain(end)
        drained = asyncio.create_task(asyncio.to_thread(self._models.drain, self._drain_s))
        while not (await asyncio.wait({drained}, timeout=DRAIN_LINES_S))[0]:
            self._log_drain(end)
        drained.result()
        await super().shutdown(sockets)

    def _log_drain(self, end: float) -> None:
        models = self._models
        log_drain(models.n_unfinished, max(0.0, end - time.monotonic()), models.write_stats())


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
    answer = ProblemResponse(scope, problem_of(error))
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)
