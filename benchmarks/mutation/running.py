"""Tests in forks of a process that has imported what they need and computed nothing.

A process in which MLX has computed cannot be forked. A first run of every test notes which
functions it calls, and a mutant meets only the tests that call its function.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from benchmarks.mutation.sites import Mutant, install

QUIET = [
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # the process has imported much already
]
TIMED_OUT = -1


class Recorder:
    """A pytest plugin: for each test its seconds, and the functions of the package it called."""

    def __init__(self, root: Path) -> None:
        self._root = str(root / "src") + os.sep
        self._called: set[CodeType] = set()
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._called, start = set(), time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        yield
        sys.settrace(None)
        called = sorted(f"{self._module(code)}:{code.co_qualname}" for code in self._called)
        seconds = round(time.monotonic() - start, 3)
        self.tests[item.nodeid] = {"seconds": seconds, "calls": called}

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002
        if frame.f_code.co_filename.startswith(self._root):
            self._called.add(frame.f_code)

    def _module(self, code: CodeType) -> str:
        path = code.co_filename.removeprefix(self._root).removesuffix(".py")
        return path.replace(os.sep, ".").removesuffix(".__init__")


def record(root: Path, test_file: str, target: Path) -> None:
    """Run a test file and note what its tests call; failing tests are left out."""

    def work() -> int:
        recorder = Recorder(root)
        arguments = [flag for flag in QUIET if flag != "-x"]
        status = int(pytest.main([*arguments, test_file], plugins=[recorder]))
        target.write_text(json.dumps({"status": status, "tests": recorder.tests}))
        return status

    in_fork(work, timeout_s=3600)


def judge(mutant: Mutant, tests: Sequence[str], timeout_s: float) -> str:
    """Whether these tests, run in their order, notice the change."""

    def work() -> int:
        try:
            install(mutant)
        except (AttributeError, ValueError):
            return 99  # its code cannot be exchanged
        return int(pytest.main([*QUIET, *tests]))

    outcomes = {0: "survived", TIMED_OUT: "timed out", 99: "not possible"}
    status = in_fork(work, timeout_s)
    # Other exit codes are failures; a signal is a crash, or somebody ended the program.
    return outcomes.get(status, "killed" if status > 0 else "crashed")


def in_fork(work: Callable[[], int], timeout_s: float) -> int:
    """The exit status of some work in a child process, which is ended at its time limit."""
    child = os.fork()
    if not child:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        status = 98
        try:
            status = work()
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT
