"""Tests in forks of a process that has imported what they need and computed nothing.

A process in which MLX has computed cannot be forked.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn

import psutil
import pytest

from benchmarks.mutation.sites import Mutant, install

QUIET = [
    *("-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no"),
    *("-p", "_hypothesis_pytestplugin"),  # the only one that is needed; others take a second
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # the process has imported much already
]
NO_END, NOT_POSSIBLE = -1000, 99
PATIENCE = 3  # times the CPU time of a mutant may pass by the clock
IDLE_S = 60  # hardly computing: it waits for something that never comes
WAITING_S = 1.0  # what waiting so long may compute


class Limit:
    """A pytest plugin: no test begins when the time for a mutant is spent."""

    def __init__(self, seconds: float) -> None:
        self.tests = 0
        self._cpu_s, self._end = seconds, time.monotonic() + PATIENCE * seconds

    @property
    def spent(self) -> bool:
        return sum(os.times()[:4]) > self._cpu_s or time.monotonic() > self._end

    def pytest_runtest_logfinish(self) -> None:
        self.tests += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if self.spent:
            item.session.shouldstop = "the time for this mutant is spent"
            raise item.session.Interrupted(item.session.shouldstop)


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
    by: str  # the test that failed
    tests: int
    calls: int
    spent: bool  # so further tests were not tried


def judge(mutant: Mutant, files: Sequence[str], seconds: float) -> Judgement:
    """Whether the tests of these files notice the change before the time is spent."""
    with TemporaryDirectory() as folder:
        failures, report = Path(folder) / "failures", Path(folder) / "report"

        def work() -> int:
            try:
                calls = install(mutant)
            except (AttributeError, ValueError):
                return NOT_POSSIBLE
            limit = Limit(seconds)
            for file in files:
                pytest.main([*QUIET, file], plugins=[limit, Failures(failures)])
                if failures.exists() or limit.spent:
                    break
            report.write_text(json.dumps([limit.tests, len(calls), limit.spent]))
            return 0

        status = in_fork(work, cpu_s=2 * seconds + 20)
        by = failures.read_text().split("\n")[0] if failures.exists() else ""
        tests, calls, spent = json.loads(report.read_text()) if report.exists() else (0, 0, False)
    if by:
        return Judgement("killed", by, tests, calls, spent)
    # A signal is a crash, or somebody ended the program.
    outcomes = {0: "survived" if calls else "not called", NO_END: "does not end"}
    outcomes |= {NOT_POSSIBLE: "not possible"}
    verdict = outcomes.get(status, "crashed" if status < 0 else "not run")
    return Judgement(verdict, "", tests, calls, spent)


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
            with suppress(ProcessLookupError):  # it has not become a group of its own yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
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
