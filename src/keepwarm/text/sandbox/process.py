"""Tasks in a process of their own: they hold no lock of this one, and end at their deadline."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from tempfile import TemporaryFile
from typing import Any, Self, TypeAlias

from keepwarm.errors import EngineFailed, KeepwarmError
from keepwarm.text.sandbox.deadline import PrepareDeadline
from keepwarm.text.sandbox.worker import (
    KILL,
    LOAD,
    MESSAGE,
    RECIPE,
    START,
    Channel,
    Recipe,
    TaskFailure,
    TaskQuestion,
)

LOG = logging.getLogger(__name__)
READY_S = 60.0  # for it to import what it needs, on a machine with much else to do
TICK_S = 0.1
FORK_S = 5.0  # for a fork, which takes milliseconds: then the process hangs
END_S = 2.0  # for it to end by itself, and its tasks with it
CODE = "from keepwarm.text.sandbox import worker; worker.main({}, *{})"

Reply: TypeAlias = Callable[..., Any]  # to what a task asks while it runs


class ProcessGone(Exception):
    """The process ended, hangs, or could not start; the task was not done."""


class SandboxProcess:
    """Starts with its first task or before, and again if it has ended. Thread-safe. Close it."""

    def __init__(self, *modules: str) -> None:
        """It imports `modules` at once; tasks wait for a recipe."""
        self._modules = modules
        self._lock = threading.Lock()
        self._tasks = count(1)
        self._pickled: bytes | None = None
        self._closed = False
        self._has_worked = False
        self._is_loaded = False  # or is told to load, before any later task
        self._loading: socket.socket | None = None  # closed at its end once that is done
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self._lock, suppress(ProcessGone):  # the first task tries again
            self._connect()
        return self

    def give(self, recipe: Recipe) -> Self:
        """`recipe` builds what every task gets first."""
        try:
            self._pickled = pickle.dumps(recipe, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # it may hold a tokenizer that cannot be sent
            LOG.debug("prompts are prepared in the server: %s", error)
            self.close()
        else:
            with self._lock:
                try:
                    self._send_recipe()
                except OSError:  # the first task starts another, with the recipe
                    self._end()
        return self

    def load(self) -> None:
        """Have it load what only some tasks need; once is enough."""
        with self._lock:
            if not self._is_loaded:
                self._is_loaded = True
                self._send_load()

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
        control = self.wait_until_ready(deadline)
        here, there = socket.socketpair()
        with here, there, deadline.stopping(lambda: self._kill(number)):
            self._start_task(number, there, control)
            there.close()
            try:
                deadline.check()  # from here on a cancellation kills the task
                self._wait_for_start(here, deadline, control)
                begun = time.monotonic()
                result = _result(here, (task, arguments, cpu_s), deadline, reply)
                self._has_worked = True
                return result
            except (OSError, EOFError) as error:
                deadline.check()
                crashed = time.monotonic() - begun < cpu_s  # it cannot have worked for so long
                raise self._crash(control) if crashed else too_long from error
            finally:
                self._kill(number)  # in case that it still runs

    def wait_until_ready(self, deadline: PrepareDeadline) -> socket.socket:
        """Its control socket, once it takes tasks; the time until then is not the request's."""
        end = time.monotonic() + READY_S
        with self._lock:
            control = self._connect()
        if not self._is_ready(control, 0.0):
            while not self._is_ready(control, TICK_S):
                deadline.check_client()
                if time.monotonic() > end:
                    self._replace(control)
                    raise ProcessGone
            deadline.begin_again()
        return control

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _is_ready(self, control: socket.socket, timeout_s: float) -> bool:
        return is_ready(control, timeout_s) and not self._is_loading(timeout_s)

    def _is_loading(self, timeout_s: float = 0.0) -> bool:
        loading = self._loading  # another thread may forget it
        return loading is not None and not is_ready(loading, timeout_s)

    def _crash(self, control: socket.socket) -> Exception:
        """A process that has never worked is of no use here; one that has met its end.

        One that was replaced, because it was slow to fork for another task, took this one along.
        """
        was_replaced = control is not self._control and not self._closed
        if was_replaced or not self._has_worked:
            return ProcessGone()
        return EngineFailed("The prompt is more than this machine can prepare; send a shorter one.")

    def _start_task(self, number: int, link: socket.socket, control: socket.socket) -> None:
        with self._lock:
            try:
                socket.send_fds(control, [MESSAGE.pack(START, number)], [link.fileno()])
            except OSError as error:
                raise ProcessGone from error

    def _wait_for_start(
        self, link: socket.socket, deadline: PrepareDeadline, control: socket.socket
    ) -> None:
        """A task that begins says so; one that ends before has no process to run in."""
        left_s = deadline.left_s
        most_s = READY_S if self._is_loading() else FORK_S
        try:
            link.settimeout(most_s if left_s is None else min(most_s, left_s))
            Channel(link).receive()
        except (OSError, EOFError) as error:
            deadline.check()
            if isinstance(error, TimeoutError):
                self._replace(control)
            raise ProcessGone from error

    def _replace(self, control: socket.socket) -> None:
        """By a new one, for later tasks; several tasks may see that it hangs.

        It is ended without the lock, for which a client that leaves would wait on the event loop.
        """
        with self._lock:
            if control is not self._control or self._closed:
                return
            LOG.warning("the preparing process hangs; another is started")
            process, self._control, self._process = self._process, None, None
            self._forget_loading()
            with suppress(ProcessGone):
                self._connect()
        _end(control, process)

    def _kill(self, number: int) -> None:
        with self._lock:
            self._tell(KILL, number)

    def _tell(self, what: bytes, number: int = 0) -> None:
        if self._control is not None:
            try:
                self._control.send(MESSAGE.pack(what, number))
            except OSError:
                LOG.debug("the preparing process has ended already")

    def _connect(self) -> socket.socket:
        if self._closed:
            raise ProcessGone
        if self._process is not None and self._process.poll() is not None:
            LOG.warning("the preparing process ended; another is started")
            self._end()
        if self._control is None:
            try:
                self._control = self._spawn()
                self._send_recipe()
            except OSError as error:  # no files, no memory, no such program
                self._end()
                raise ProcessGone from error
        return self._control

    def _spawn(self) -> socket.socket:
        here, there = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        # Without threads of its own the tokenizer can be forked.
        environ = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", "-c", CODE.format(there.fileno(), self._modules)]
        with there:
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[there.fileno()], env=environ, stdin=subprocess.DEVNULL
                )
            except OSError:
                here.close()
                raise
        return here

    def _send_recipe(self) -> None:
        """As a file: nobody reads the socket before the imports are done."""
        if self._pickled is None or self._control is None:
            return
        with TemporaryFile() as file:
            file.write(self._pickled)
            file.seek(0)
            try:
                message = MESSAGE.pack(RECIPE, self._is_loaded)
                socket.send_fds(self._control, [message], [file.fileno()])
            except OSError:
                LOG.debug("the preparing process has ended already")

    def _send_load(self) -> None:
        """To a process that has its recipe; a later one is told with it."""
        if self._pickled is None or self._control is None:
            return
        self._loading, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(self._control, [MESSAGE.pack(LOAD, 0)], [there.fileno()])
            except OSError:
                LOG.debug("the preparing process has ended already")

    def _forget_loading(self) -> None:
        if self._loading is not None:
            self._loading.close()
            self._loading = None

    def _end(self) -> None:
        self._forget_loading()
        _end(self._control, self._process)
        self._control = self._process = None


def _end(control: socket.socket | None, process: subprocess.Popen[bytes] | None) -> None:
    if control is not None:
        control.close()
    if process is not None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(link: socket.socket, timeout_s: float) -> bool:
    """Also of a process that has ended: the task finds out. The byte is never read."""
    poll = select.poll()
    try:
        poll.register(link, select.POLLIN)
    except ValueError:  # closed by another thread
        return True
    return bool(poll.poll(1000 * timeout_s))


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
