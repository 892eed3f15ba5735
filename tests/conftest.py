"""What holds for every test: the machine's fast BLAS, no silent skips, one default model."""

import gc
import os
import platform
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from keepwarm import blas

# What collecting makes stays, and looking through it again and again takes a fifth of its time.
gc.disable()

# Both must be settled before the first import of mlx, so nothing here imports it at the top:
# without compilation the suite is much faster, and a BLAS that is loaded later is not used.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
blas.start()

# Child processes take the same, where each would measure for a second in its own home.
if (used := blas.in_use()) and used.name in blas.LIBRARIES:
    os.environ.setdefault("KEEPWARM_BLAS", used.name)
    os.environ.setdefault("KEEPWARM_BLAS_THREADS", str(used.threads))

# A busy machine fails no test for being slow.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Begun last, it would keep one processor busy while the others have nothing left to do.
FIRST = "tests/test_newcomer.py"

# The default model is slow on two cores: what the whole suite may ask of it in this process.
MAX_DECODED = 300
MAX_PREFILLED = 6000

MEMORY_FILES = Path("/dev/shm")
MIN_MEMORY_FILES = 4 << 30


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Any]:
    """Tiny models by architecture, each built once; tests must not change them."""
    from tests.kit.models import tiny

    return cache(tiny)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models with a tokenizer, for engines around them."""
    from tests.kit.engines import Models

    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Any]:
    """The default model, counting what it is fed; the last test that uses it fails over budget."""
    import keepwarm
    from tests.kit.runs import FedCounter

    model = keepwarm.load("smollm2")
    counter = FedCounter(model.module)
    yield replace(model, module=counter)
    used = f"{counter.decoded} tokens decoded, {counter.prefilled} prefilled"
    allowed = f"the suite may ask {MAX_DECODED} and {MAX_PREFILLED} of the default model"
    assert counter.decoded <= MAX_DECODED, f"{used}; {allowed}"
    assert counter.prefilled <= MAX_PREFILLED, f"{used}; {allowed}"


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The address of a bucket in a real server."""
    from tests.kit.s3_server import moto_server

    with moto_server() as address:
        yield address


@pytest.fixture(scope="session")
def weed_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same in SeaweedFS, which takes longer to start."""
    from tests.kit.s3_server import weed_server

    with weed_server(tmp_path_factory.mktemp("weed")) as address:
        yield address


@pytest.fixture(scope="session")
def places(request: pytest.FixtureRequest) -> Any:
    """How each kind of place that machines share is made, empty."""
    from tests.kit.places import places

    return places(request.getfixturevalue)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long tests too")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than processors: a third of the time a test waits for a process, disk or clock."""
    return len(blas.cpus()) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # A job in the background of a shell ignores Ctrl-C, and so would every command it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.basetemp is None and enough_memory_files():
        config.option.basetemp = MEMORY_FILES / f"keepwarm-tests-{os.getpid()}"
    config.addinivalue_line("markers", "soak: runs for minutes; only with --soak")
    config.addinivalue_line("markers", "real_model: only where REAL_MODEL_DIR names a model")
    config.addinivalue_line("markers", "linux_cpu: about a choice that only Linux CPU has")
    config.addinivalue_line("markers", "linux: about a call or a program that only Linux has")
    config.addinivalue_line("markers", "glibc: about pages that only glibc's allocator keeps")
    config.pluginmanager.register(SkipReport(under_ci=bool(os.environ.get("CI"))), "skip-report")


def pytest_unconfigure(config: pytest.Config) -> None:
    if str(config.option.basetemp).startswith(str(MEMORY_FILES)):
        shutil.rmtree(config.option.basetemp, ignore_errors=True)


def enough_memory_files() -> bool:
    """Whether test files can lie in memory: the store syncs every one, which disks are slow at."""
    can_write = MEMORY_FILES.is_dir() and os.access(MEMORY_FILES, os.W_OK)
    return can_write and shutil.disk_usage(MEMORY_FILES).free > MIN_MEMORY_FILES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, which is not a skip: long tests without --soak, and what is not there."""
    absent = {"soak"} if not config.getoption("--soak") else set()
    absent |= {"real_model"} if not os.environ.get("REAL_MODEL_DIR") else set()
    absent |= {"linux_cpu"} if not blas.wanted() else set()
    absent |= {"linux"} if sys.platform != "linux" else set()
    absent |= {"glibc"} if platform.libc_ver()[0] != "glibc" else set()
    left = {item for item in items if any(item.get_closest_marker(name) for name in absent)}
    items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    if left:
        config.hook.pytest_deselected(items=list(left))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


class SkipReport:
    """Says which tests were left out, and fails the run for them: under CI for all, elsewhere for
    those without a good reason.

    A good reason names the missing program in backquotes: "needs `git`".
    """

    def __init__(self, under_ci: bool) -> None:
        self.under_ci = under_ci
        self.wrong: list[str] = []
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that skips itself is never run, so it is seen here."""
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.reasons[reason.removeprefix("Skipped: ")] += 1
        if self.under_ci or reason.count("`") < 2:
            self.wrong.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.reasons:
            said = ", ".join(f"{n} ({reason})" for reason, n in self.reasons.most_common())
            terminalreporter.write_line(f"Tests left out on this machine: {said}.")
        if self.wrong:
            why = "under CI nothing may" if self.under_ci else "name the missing `program`"
            terminalreporter.write_line(f"skipped ({why}): {', '.join(self.wrong)}", red=True)
