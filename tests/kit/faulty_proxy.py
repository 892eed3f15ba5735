"""A proxy between a client and a server that loses, delays, changes or refuses what passes."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from tests.kit.redis_server import free_port

LARGE = 4096  # bytes received at once that are taken for a part of a value
CHUNK = 1 << 16
SOON = 30.0
BURST_S = 0.002

Send: TypeAlias = Callable[[bytes], None]
Answer: TypeAlias = Callable[[bytes], bytes | None]
"""What is answered to a request in the server's place; None passes it on."""


class FaultyProxy:
    """Passes everything on, unless one of its faults is switched on."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._gate = threading.Event()
        self.mend()
        self.port = free_port()  # which `listen` takes again
        self.listen()

    def mend(self) -> None:
        self.on_value: Callable[[bytes, Send], None] | None = None  # large parts of replies
        self.answer: Answer | None = None
        self.delay_s = 0.0  # of every reply
        self.bytes_per_s = math.inf  # of all that passes
        self.go_on()

    def move_to(self, port: int) -> None:
        """New connections lead there; those that are open stay where they are."""
        self._server = port

    def strand(self) -> None:
        """Nothing passes any more on connections that are open, and nobody is told."""
        self._gate.clear()
        self._gate = threading.Event()
        self._gate.set()

    def pause(self) -> None:
        """Nothing passes, in either direction, until it goes on."""
        self._gate.clear()

    def go_on(self) -> None:
        self._gate.set()

    def refuse(self) -> None:
        """Nobody listens any more, and what was connected is not."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.disconnect()

    def listen(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self._accept()

    def disconnect(self) -> None:
        with self._lock:
            left, self._open = self._open, set()
        for one in left:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._gate.set()
        self.refuse()

    def _accept(self) -> None:
        threading.Thread(target=self._serve, args=(self._listening,), daemon=True).start()

    def _serve(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listening.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server), SOON)
                server.settimeout(None)
                for one in (client, server):  # or a line of any rate stops for 40 ms now and then
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                asked, gate = threading.Event(), self._gate
                for work in (self._requests, self._replies):
                    args = client, server, asked, gate
                    threading.Thread(target=work, args=args, daemon=True).start()

    def _requests(
        self,
        client: socket.socket,
        server: socket.socket,
        asked: threading.Event,
        gate: threading.Event,
    ) -> None:
        with suppress(OSError), client, server:
            while data := client.recv(CHUNK):
                gate.wait()
                asked.set()
                answer = self.answer(data) if self.answer else None
                if answer is not None:
                    client.sendall(answer)
                    client.shutdown(socket.SHUT_RDWR)
                    return
                self._wait_for_room(len(data))
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _replies(
        self,
        client: socket.socket,
        server: socket.socket,
        asked: threading.Event,
        gate: threading.Event,
    ) -> None:
        with suppress(OSError):
            try:
                while data := server.recv(CHUNK):
                    gate.wait()
                    if asked.is_set():
                        asked.clear()
                        time.sleep(self.delay_s)
                    self._wait_for_room(len(data))
                    if self.on_value is not None and len(data) >= LARGE:
                        self.on_value(data, client.sendall)
                    else:
                        client.sendall(data)
            finally:
                client.shutdown(socket.SHUT_RDWR)

    def _wait_for_room(self, n_bytes: int) -> None:
        """Until the line has carried what came before, and this."""
        with self._lock:
            earliest = time.monotonic() - BURST_S  # sleeping takes longer than it should
            self._free_at = max(self._free_at, earliest) + n_bytes / self.bytes_per_s
            wait_s = self._free_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
