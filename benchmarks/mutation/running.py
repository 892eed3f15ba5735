"""Tests in forks of a process that has imported what they need and computed nothing.

A process in which MLX has computed cannot be forked. A first run of every test notes which
functions it calls, and a mutant meets only the tests that call its function.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

import psutil
import pytest

from benchmarks.mutation.sites import Mutant, install

QUIET = [
    *("-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no"),
    *("-p", "_hypothesis_pytestplugin"),  # the only one these rooms need; others take a second
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # the process has imported much already
]
NO_END = -1000
IDLE_S = 60  # hardly computing: it waits for something that never comes
WAITING_S = 1.0  # what waiting so long may compute


class Recorder:
    """A pytest plugin: each test's CPU seconds, and the functions of the package it called."""

    def __init__(self, root: Path) -> None:
        self._root = str(root / "src") + os.sep
        self._called: set[CodeType] = set()
        self._failed: set[str] = set()
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._called, start = set(), _computed()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        yield
        sys.settrace(None)
        called = sorted(f"{self._module(code)}:{code.co_qualname}" for code in self._called)
        seconds = round(_computed() - start, 3)
        if item.nodeid not in self._failed:
            self.tests[item.nodeid] = {"seconds": seconds, "calls": called}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002
        if frame.f_code.co_filename.startswith(self._root):
            self._called.add(frame.f_code)

    def _module(self, code: CodeType) -> str:
        path = code.co_filename.removeprefix(self._root).removesuffix(".py")
        return path.replace(os.sep, ".").removesuffix(".__init__")


def _computed() -> float:
    """CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


class Failures:
    """A pytest plugin: the tests that fail, or files that cannot be read, written down at once."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._target.open("a") as file:
                file.write(f"{report.nodeid}\n")


class Judgement(NamedTuple):
    verdict: str
    by: str = ""  # the test that failed


def record(root: Path, test_file: str, target: Path) -> None:
    """Run a test file and note what its tests call; failing tests are left out."""

    def work() -> int:
        recorder = Recorder(root)
        arguments = [flag for flag in QUIET if flag != "-x"]
        status = int(pytest.main([*arguments, test_file], plugins=[recorder]))
        target.write_text(json.dumps({"status": status, "tests": recorder.tests}))
        return status

    in_fork(work, cpu_s=3600)


def judge(mutant: Mutant, tests: Sequence[str], cpu_s: float) -> Judgement:
    """Whether these tests, run in their order, notice the change."""
    with TemporaryDirectory() as folder:
        failures = Path(folder) / "failures"

        def work() -> int:
            try:
                install(mutant)
            except (AttributeError, ValueError):
                return 99  # its code cannot be exchanged
            return int(pytest.main([*QUIET, *tests], plugins=[Failures(failures)]))

        status = in_fork(work, cpu_s)
        by = failures.read_text().split("\n")[0] if failures.exists() else ""
    if by:
        return Judgement("killed", by)
    # A signal is a crash, or somebody ended the program.
    outcomes = {0: "survived", NO_END: "does not end", 99: "not possible"}
    return Judgement(outcomes.get(status, "crashed" if status < 0 else "not run"))


def failing(tests: Sequence[str]) -> list[str]:
    """Those that fail without any change, run in their order."""
    if not tests:
        return []  # without names pytest runs all there are
    with TemporaryDirectory() as folder:
        failures = Path(folder) / "failures"

        def work() -> int:
            arguments = [flag for flag in QUIET if flag != "-x"]
            return int(pytest.main([*arguments, *tests], plugins=[Failures(failures)]))

        in_fork(work, cpu_s=3600)
        return failures.read_text().splitlines() if failures.exists() else []


def in_fork(work: Callable[[], int], cpu_s: float, idle_s: float = IDLE_S) -> int:
    """The exit status of some work in a child process.

    It is ended when it has computed for too long, or nothing for a while. Other people's work on
    this machine does not count.
    """
    child = os.fork()
    if not child:
        _work(work, cpu_s)
    process, computed, since = psutil.Process(child), 0.0, time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.02)
        if (now := sum(process.cpu_times()[:2])) > computed + WAITING_S:
            computed, since = now, time.monotonic()
        elif time.monotonic() - since > idle_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return NO_END
    status = os.waitstatus_to_exitcode(ended[1])
    return NO_END if status == -signal.SIGXCPU else status


def _work(work: Callable[[], int], cpu_s: float) -> NoReturn:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s), resource.RLIM_INFINITY))
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    status = 98
    try:
        status = work()
    finally:
        os._exit(status)
