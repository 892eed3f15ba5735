"""A real Redis or Valkey, started for a test, which can be stopped, paused and ended."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROGRAMS = ("valkey-server", "redis-server")
START_S = 300.0
PORTS = (12_000, 32_000)


class RedisServer:
    """A process that keeps everything in memory."""

    def __init__(self, directory: Path, *options: str, port: int = 0, tls: bool = False) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            pytest.skip("needs `redis-server` or `valkey-server`")
        self.port = port or free_port()
        self._tls = tls
        port_option = ("--port", "0", "--tls-port") if tls else ("--port",)
        quiet = ("--save", "", "--appendonly", "no", "--loglevel", "warning")
        self._command = [program, *port_option, str(self.port), *quiet, *options]
        self._directory = directory
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'s' * self._tls}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, cwd=self._directory, stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "the server did not start"
            assert time.monotonic() < until
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def n_connections(self) -> int:
        """That are open, besides the one that asks."""
        return int(self._info("clients").split("connected_clients:")[1].split()[0]) - 1

    def _info(self, section: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), START_S) as one:
            one.sendall(f"INFO {section}\r\n".encode())
            return one.recv(1 << 16).decode()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    """Below those that the system gives to connections, of which one might take it meanwhile.

    Chosen by the system's chance: other processes that test may have the same seed.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


@contextmanager
def redis_server(directory: Path, *options: str, tls: bool = False) -> Iterator[RedisServer]:
    server = RedisServer(directory, *options, tls=tls)
    try:
        yield server
    finally:
        server.kill()
