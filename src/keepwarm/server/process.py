"""A server process: bind first, serve, and leave in order when told to."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from keepwarm.config import Settings
from keepwarm.errors import BadInput
from keepwarm.server.host import EngineHost
from keepwarm.server.http.logs import log_to_stderr

KEEP_ALIVE_S = 75
MAX_PORT = 65535
AFTER_DRAIN_S = 2  # for the last words of streams that the drain has cut short
STOPS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """Listen at once, so that a second server is told before it loads a model."""
    if not 0 <= port <= MAX_PORT:
        raise BadInput(f"There is no port {port}; choose one from 1 to {MAX_PORT}, or 0.")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadInput(
                f"Port {port} on {host} is in use; stop the server there or choose another --port."
            ) from error
        why = error.strerror or str(error)
        raise BadInput(f"Cannot listen on {host}, port {port}: {why}.") from error
    # Connections inherit it: else a token waits for the client to acknowledge the one before.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket) -> str:
    """The URL by which this machine reaches it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, settings: Settings, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; running answers then get `drain_s` to end.

    A second signal ends the process at once; what is not yet on disk is lost, and nothing else.
    """
    log_to_stderr()
    make_ready(app)
    # uvicorn raises the signal again once it has shut down; by then there is nothing left to do.
    for number in STOPS:
        signal.signal(number, lambda *_: None)
    gc.freeze()  # what is loaded stays: looking through all of it takes a tenth of a second
    DrainingServer(app, settings).run(sockets=[listening])
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


def make_ready(app: FastAPI) -> None:
    """Do what would else be done while clients wait: routes are built when first one is asked for.

    That takes half a second, in which nobody else would be answered either.
    """
    app.openapi()


class DrainingServer(uvicorn.Server):
    """Lets running answers end while it refuses new ones, and only then closes."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=AFTER_DRAIN_S,
            )
        )
        self._host: EngineHost = app.state.host
        self._drain_s = settings.drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Who asks while running answers end is told so, and not left before a closed door."""
        await asyncio.to_thread(self._host.drain, self._drain_s)
        await super().shutdown(sockets)
