"""The process that prepares: it holds a tokenizer, and forks a child for every task.

A fork takes milliseconds and can be killed at any time without losing the tokenizer. This process
has no threads and never imports MLX. It ends when the server does.

On the control socket come messages of `MESSAGE.size` bytes: first the recipe, as an open file; then
tasks, each with a socket to its child, or the order to kill one, or to load what only some tasks
need, with a socket that is closed when that is done. One byte goes back: ready for tasks.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import resource
import select
import signal
import socket
from contextlib import suppress
from importlib import import_module
from struct import Struct
from typing import Any, NamedTuple, Protocol

LOG = logging.getLogger(__name__)
MESSAGE = Struct("<cQ")  # what to do, and the task's number, or whether a recipe is loaded too
RECIPE, START, KILL, LOAD, READY = b"r", b"s", b"k", b"l", b"y"
LENGTH = Struct("<Q")
NICE = 5  # what answers is more urgent than what prepares
MAX_MEMORY = 4 << 30


class Channel:
    """Python values over a socket. An end of it that is closed reads as EOFError."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def send(self, value: Any) -> None:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._link.sendall(LENGTH.pack(len(data)))
        self._link.sendall(data)

    def ask(self, *question: Any) -> Any:
        """For a task: the answer of the one who asked for it."""
        self.send(TaskQuestion(question))
        return self.receive()

    def receive(self) -> Any:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return pickle.loads(self._read(length))  # noqa: S301 (a process of our own wrote it)

    def _read(self, n_bytes: int) -> bytearray:
        data = bytearray(n_bytes)
        view, at = memoryview(data), 0
        while at < n_bytes:
            got = self._link.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return data


class TaskQuestion(NamedTuple):
    """What a task must know to go on."""

    question: tuple[Any, ...]


class TaskFailure(NamedTuple):
    """The error that ended a task."""

    error: Exception


class Recipe(Protocol):
    """What the parent sends first."""

    def build(self) -> Any:
        """What every task gets; its `load` takes long, and only some tasks need it."""


def main(control_file: int, *modules: str) -> None:
    """Build what the tasks need, then fork for every task until the parent is gone.

    `modules` are imported before the recipe comes, which needs them.
    """
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent decides
    for name in modules:
        import_module(name)
    with socket.socket(fileno=control_file) as control:
        recipe, wants_all = _receive_recipe(control)
        if recipe is None:
            return
        tools = recipe.build()
        if wants_all:
            _load(tools)
        _serve(control, tools)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its files; nothing if the parent is gone, or was killed."""
    try:
        data, files, _, _ = socket.recv_fds(control, MESSAGE.size, 1)
    except ConnectionResetError:
        return b"", []
    return data, files


def _receive_recipe(control: socket.socket) -> tuple[Recipe | None, bool]:
    """And whether to load what only some tasks need; None if the parent is gone."""
    data, files = _receive(control)
    if not files:
        return None, False
    with os.fdopen(files[0], "rb") as file:
        recipe: Recipe = pickle.load(file)  # noqa: S301 (the parent wrote it)
    return recipe, bool(MESSAGE.unpack(data)[1])


def _serve(control: socket.socket, tools: Any) -> None:
    children: dict[int, int] = {}  # process by task
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: _end(children))
    with suppress(BrokenPipeError):  # the parent is gone: there will be nothing to read
        control.send(READY)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _reap(children)
        if control in ready and not _obey(control, children, tools):
            _end(children)


def _end(children: dict[int, int]) -> None:
    for process in children.values():
        os.kill(process, signal.SIGKILL)
    os._exit(0)


def _reap(children: dict[int, int]) -> None:
    for task, process in list(children.items()):
        if os.waitpid(process, os.WNOHANG)[0]:
            del children[task]


def _obey(control: socket.socket, children: dict[int, int], tools: Any) -> bool:
    """Do what one message says; False if the parent is gone."""
    data, links = _receive(control)
    if len(data) < MESSAGE.size:
        return False
    kind, task = MESSAGE.unpack(data)
    if kind == START:
        with socket.socket(fileno=links[0]) as link:
            children[task] = os.fork() or _work(control, link, tools)
    elif kind == LOAD:
        with socket.socket(fileno=links[0]):
            _load(tools)
    elif task in children:
        os.kill(children[task], signal.SIGKILL)  # not yet reaped, so the number is still its own
    return True


def _load(tools: Any) -> None:
    """A task that needs what cannot be loaded says so; the others do without."""
    try:
        tools.load()
    except BaseException:  # native code that panics raises no Exception
        LOG.exception("the preparing process could not load what some tasks need")


def _work(control: socket.socket, link: socket.socket, tools: Any) -> int:
    """In the child: do one task, and never return."""
    try:
        control.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        channel = Channel(link)
        channel.send("started")
        run, arguments, cpu_s = channel.receive()
        _limit(cpu_s)
        try:
            result = run(tools, channel, *arguments)
        except Exception as error:
            result = TaskFailure(_portable(error))
        channel.send(result)
    finally:
        os._exit(0)


def _limit(cpu_s: float) -> None:
    """The system ends this process after so much work, also if nobody is left to do it."""
    seconds = math.ceil(cpu_s)  # a fork begins at 0
    limits = (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MAX_MEMORY),
        (resource.RLIMIT_CORE, 0),
    )
    for limit, most in limits:
        with suppress(OSError, ValueError):  # macOS knows no limit of memory
            resource.setrlimit(limit, (most, most))


def _portable(error: Exception) -> Exception:
    """The error itself if it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
