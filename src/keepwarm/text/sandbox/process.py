"""Tasks in a process of their own: they hold no lock of this one, and end at their deadline."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from tempfile import TemporaryFile
from typing import Any, TypeAlias

from keepwarm.errors import EngineFailed, KeepwarmError
from keepwarm.text.sandbox.deadline import PrepareDeadline
from keepwarm.text.sandbox.worker import (
    KILL,
    MESSAGE,
    START,
    Channel,
    Recipe,
    TaskFailure,
    TaskQuestion,
)

LOG = logging.getLogger(__name__)
END_S = 2.0  # for it to end by itself, and its tasks with it
CODE = "from keepwarm.text.sandbox import worker; worker.main({}, {})"

Reply: TypeAlias = Callable[..., Any]  # to what a task asks while it runs


class ProcessGone(Exception):
    """The process ended, or could not start; the task was not done."""


class SandboxProcess:
    """Starts with its first task, and again if it has ended. Thread-safe. Close it."""

    def __init__(self, recipe: Recipe) -> None:
        """`recipe` builds what every task gets first."""
        self._recipe = recipe
        self._lock = threading.Lock()
        self._tasks = count(1)
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._has_worked = False
        self._later: threading.Timer | None = None

    def run(
        self,
        task: Callable[..., Any],
        *arguments: Any,
        deadline: PrepareDeadline,
        cpu_s: float,
        too_long: KeepwarmError,
        reply: Reply | None = None,
    ) -> Any:
        """The result of `task(tools, channel, *arguments)`, which runs in a fork.

        Raises what it raises, `too_long` if it works for longer than `cpu_s`, and what `deadline`
        says when that ends.
        """
        number = next(self._tasks)
        here, there = socket.socketpair()
        with here, there, deadline.stopping(lambda: self._kill(number)):
            self._start_task(number, there)
            there.close()
            try:
                deadline.check()  # from here on a cancellation kills the task
                _wait_for_start(here, deadline)
                begun = time.monotonic()
                result = _result(here, (task, arguments, cpu_s), deadline, reply)
                self._has_worked = True
                return result
            except (OSError, EOFError) as error:
                deadline.check()
                crashed = time.monotonic() - begun < cpu_s  # it cannot have worked for so long
                raise self._crash() if crashed else too_long from error
            finally:
                self._kill(number)  # in case that it still runs

    def start(self, after_s: float) -> None:
        """Start it then, so that the first task need not wait, unless that comes earlier."""
        self._later = threading.Timer(after_s, self._start)
        self._later.daemon = True
        self._later.start()

    def _start(self) -> None:
        with self._lock, suppress(ProcessGone):
            self._connect()

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        with self._lock:
            self._closed = True
            self._end()

    def _crash(self) -> Exception:
        """A process that has never worked is of no use here; one that has met its end."""
        if not self._has_worked:
            return ProcessGone()
        return EngineFailed("The prompt is more than this machine can prepare; send a shorter one.")

    def _start_task(self, number: int, link: socket.socket) -> None:
        with self._lock:
            try:
                socket.send_fds(self._connect(), [MESSAGE.pack(START, number)], [link.fileno()])
            except OSError as error:
                raise ProcessGone from error

    def _kill(self, number: int) -> None:
        with self._lock:
            if self._control is not None:
                try:
                    self._control.send(MESSAGE.pack(KILL, number))
                except OSError:
                    LOG.debug("the preparing process has ended already")

    def _connect(self) -> socket.socket:
        if self._closed:
            raise ProcessGone
        if self._process is not None and self._process.poll() is not None:
            LOG.warning("the preparing process ended; it is started again")
            self._end()
        if self._control is None:
            self._control = self._spawn()
        return self._control

    def _spawn(self) -> socket.socket:
        pickled = self._pickled()
        here, there = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        # Without threads of its own the tokenizer can be forked.
        environ = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        with there, TemporaryFile() as recipe:
            recipe.write(pickled)
            recipe.seek(0)
            passed = [there.fileno(), recipe.fileno()]
            command = [sys.executable, "-P", "-c", CODE.format(*passed)]
            self._process = subprocess.Popen(
                command, pass_fds=passed, env=environ, stdin=subprocess.DEVNULL
            )
        return here

    def _pickled(self) -> bytes:
        """The recipe, which may hold a tokenizer that cannot be sent."""
        try:
            return pickle.dumps(self._recipe, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise ProcessGone from error

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None


def _wait_for_start(link: socket.socket, deadline: PrepareDeadline) -> None:
    """A task that begins says so; one that ends before has no process to run in."""
    try:
        link.settimeout(deadline.left_s)
        Channel(link).receive()
    except (OSError, EOFError) as error:
        deadline.check()
        raise ProcessGone from error


def _result(link: socket.socket, task: Any, deadline: PrepareDeadline, reply: Reply | None) -> Any:
    channel = Channel(link)
    link.settimeout(deadline.left_s)
    channel.send(task)
    while True:
        found = channel.receive()
        if isinstance(found, TaskFailure):
            raise found.error
        if not isinstance(found, TaskQuestion):
            return found
        assert reply is not None
        channel.send(reply(*found.question))
        link.settimeout(deadline.left_s)
