"""A server process: bind the port, serve, drain on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from typing_extensions import override

from keepwarm.config import Settings
from keepwarm.errors import BadInput
from keepwarm.server.http.connections import Connection, ConnectionPool
from keepwarm.server.http.logs import log_to_stderr
from keepwarm.server.models.models import Models
from keepwarm.server.request_log import log_drain, log_start, log_stop

KEEP_ALIVE_S = 75
DRAIN_LINES_S = 5.0  # between two lines about a drain
AFTER_DRAIN_S = 2  # for the last frames of streams that the drain cut short
BACKLOG = 256  # connections that the system, and one turn of the loop, accept ahead
SEND_BUFFER_BYTES = 256 << 10
SPARE_CONNECTIONS = 768  # besides those of running requests
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """Listen before the model is loaded, so that a port in use is reported at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadInput(
                f"Port {port} on {host} is in use; stop that server or choose another --port."
            ) from error
        why = error.strerror or str(error)
        raise BadInput(f"Cannot listen on {host}, port {port}: {why}.") from error
    # Connections inherit both. Otherwise each token waits for the previous one's TCP ACK, and the
    # system buffers megabytes for a client that does not read.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listening


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
) -> None:
    """Serve until SIGTERM or SIGINT; running answers then have `drain_s` seconds to finish.

    Meanwhile `start` loads the model; what it raises ends the server and is raised here. A second
    signal kills the process; only what is not yet on disk is lost.
    """
    log_to_stderr(settings)
    for number in STOP_SIGNALS:  # until the server runs and has handlers of its own
        signal.signal(number, _end_at_once)
    started = _in_background(start)  # first: `make_app` imports the APIs, which takes as long
    app = make_app()
    server = DrainingServer(app, settings)
    started.add_done_callback(server.stop_if_failed)
    log_start(app.state.models.first.name, address_of(listening), settings)
    server.run(sockets=[listening])
    log_stop(settings)
    if not started.done():
        _end_at_once(server.stopped_by)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    started.result()


def _end_at_once(number: int, _: FrameType | None = None) -> None:
    """A model that is half loaded has nothing to save.

    By the signal itself: at the interpreter's own end the loading thread would be unwound inside
    MLX, and C++ would abort the process.
    """
    os.write(2, b"Stopped before the model was loaded.\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _in_background(start: Callable[[], None]) -> Future[None]:
    started: Future[None] = Future()

    def run() -> None:
        try:
            start()
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)

    Thread(target=run, name="keepwarm-start", daemon=True).start()
    return started


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

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.stopped_by = sig
        self.should_exit = True  # uvicorn's own would raise the signal again after its shutdown

    def stop_if_failed(self, started: Future[None]) -> None:
        if started.exception() is not None:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keep the port open during the drain: new requests get a 503, not a refused connection."""
        end = time.monotonic() + self._drain_s
        self._log_drain(end)
        drained = asyncio.ensure_future(run_in_threadpool(self._models.drain, self._drain_s))
        while not (await asyncio.wait({drained}, timeout=DRAIN_LINES_S))[0]:
            self._log_drain(end)
        drained.result()
        await super().shutdown(sockets)

    def _log_drain(self, end: float) -> None:
        models = self._models
        log_drain(models.n_unfinished, max(0.0, end - time.monotonic()), models.write_stats())
