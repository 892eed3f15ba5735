"""What is measured: servers that the bench starts, running servers, and the engine itself.

All started servers get the same model directory and the same BLAS.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from benchmarks.requests.bare import BareEngine
from benchmarks.requests.client import BenchRequest, HttpClient, TimedReply
from benchmarks.requests.measure import drop_files
from keepwarm.device import kernels
from keepwarm.errors import BadInput, KeepwarmError, Unreachable

START_S = 900.0  # on a busy machine
POLL_S = 0.05  # between two looks at a server that starts
QUIET_S = 1.0  # a store is taken as written when it has not grown for so long
NO_REMOTE = ","  # no address: an empty variable would leave what config.toml says
DROPS_PAGES = hasattr(os, "posix_fadvise")  # whether the system can drop files from its page cache

# The first import of mlx fixes the BLAS, and both servers must have the same, so it is started
# before. This folder does not import mlx_lm: the server is a program of its own.
MLX_LM_SERVER = """
from keepwarm import blas
blas.start()
from mlx_lm.server import main
main()
"""


class Target(Protocol):
    """A server or engine under test. `is_ours`: it is Keepwarm and obeys a cache policy."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def is_ours(self) -> bool: ...

    @property
    def restart_method(self) -> str:
        """How the bench restarts it; empty if it cannot."""

    @property
    def store(self) -> Path | None:
        """Its directory on disk, if it has one."""

    def ask(self, ask: BenchRequest) -> TimedReply: ...

    def launch(self) -> None:
        """Start it, until it says that it is ready; a server may say so before its model is."""

    def start(self) -> float:
        """Start it; seconds until it was ready."""

    def kill(self) -> None:
        """End it without warning; `start` starts it again."""

    def settle(self) -> None:
        """Wait until all writes to disk are done."""

    def cpu_s(self) -> float | None:
        """CPU seconds used so far, if known."""

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes by tier, and of live caches; empty if it does not report them."""

    def close(self) -> None: ...


class ServerProcess:
    """A server process that the bench starts."""

    restart_method = "kill -9"

    def __init__(
        self,
        name: str,
        about: str,
        command: Sequence[str],
        *,
        health: str,
        log: Path,
        store: Path | None = None,
        environ: Mapping[str, str] | None = None,
        model: str = "default_model",
    ) -> None:
        self.name, self.about, self.store = name, about, store
        self.is_ours = store is not None
        self._model = model  # as requests name it
        self._command, self._health, self._log = command, health, log
        self.environ = {**os.environ, "HF_HUB_OFFLINE": "1", **(environ or {})}  # of the next start
        for ours in ("PYTHONDONTWRITEBYTECODE", kernels.VARIABLE, kernels.CHECK):
            self.environ.pop(ours, None)  # bytecode and kernels, as an installed one has
        self.environ["KEEPWARM_REMOTE"] = NO_REMOTE
        self._process: subprocess.Popen[bytes] | None = None
        self._client: HttpClient | None = None
        self._address = ""

    def launch(self) -> None:
        port = free_port()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(port)],
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the bench alone, which ends its servers
            )
        self._address = f"http://127.0.0.1:{port}"
        self._wait_for(f"{self._address}{self._health}")
        self._client = HttpClient(f"{self._address}/v1", model=self._model)

    def start(self) -> float:
        began = time.perf_counter()
        self.launch()
        self.ask(
            BenchRequest([{"role": "user", "content": "Hi"}], 1, "no-store")
        )  # weights may load at the first request
        return time.perf_counter() - began

    def _wait_for(self, url: str) -> None:
        end = time.monotonic() + START_S
        with httpx.Client(timeout=5, trust_env=False) as client:
            while time.monotonic() < end and self._running.poll() is None:
                with suppress(httpx.HTTPError):
                    if client.get(url).is_success:
                        return
                time.sleep(POLL_S)
        raise Unreachable(f"{self.name} did not start; its log ends with: {self._log_tail()}")

    def _log_tail(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").splitlines()[-3:]) or "nothing"

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise Unreachable(f"{self.name} is not running.")
        return self._process

    def ask(self, ask: BenchRequest) -> TimedReply:
        if self._client is None:
            raise Unreachable(f"{self.name} is not running.")
        return self._client.ask(ask)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._running.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def settle(self) -> None:
        if self.store is not None:
            wait_for_writes(self.store)

    def cpu_s(self) -> float | None:
        times = psutil.Process(self._running.pid).cpu_times()
        return times.user + times.system

    def cache_stats(self) -> Mapping[str, Any]:
        """What Keepwarm says of its cache; empty for other servers."""
        if not self.is_ours or self._client is None:
            return {}
        shown: Mapping[str, Any] = self._client.get("/cache")
        return shown

    def buffer_bytes(self) -> int:
        """Freed buffers that MLX keeps in Keepwarm's process; 0 for other servers."""
        if not self.is_ours or self._client is None:
            return 0
        uses = self._client.get("/dashboard/now")["memory"] or []
        return sum(use["n_bytes"] for use in uses if use["budget"] == "buffers")

    def is_compiling(self) -> bool:
        """Whether Keepwarm says that kernels are left to compile."""
        if not self.is_ours:
            return False
        try:
            return "kernels" in httpx.get(f"{self._address}/health", trust_env=False).json()
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.name} does not answer ({error!r}).") from error

    def held_bytes(self) -> Mapping[str, int]:
        shown = self.cache_stats()
        if not shown:
            return {}
        tiers = {name: tier["n_bytes"] for name, tier in shown["tiers"].items()}
        return _by_tier(shown["live"]["n_bytes"], tiers)

    def close(self) -> None:
        self.kill()


class Remote:
    """A running server, given by its URL. It cannot be restarted."""

    is_ours, restart_method, store = False, "", None

    def __init__(self, name: str, base: str, key: str) -> None:
        self.name, self.about = name, "a running server"
        self._client = HttpClient(base, key)

    def launch(self) -> None:
        return

    def start(self) -> float:
        return 0.0

    def ask(self, ask: BenchRequest) -> TimedReply:
        return self._client.ask(ask)

    def kill(self) -> None:
        raise BadInput(f"{self.name} was not started by the bench and cannot be stopped.")

    def settle(self) -> None:
        return

    def cpu_s(self) -> float | None:
        return None

    def held_bytes(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._client.close()


class InProcess:
    """The engine in this process, without HTTP; a restart closes and reopens it."""

    is_ours, restart_method = True, "closed and reopened"

    def __init__(self, name: str, model: Path, store: Path) -> None:
        self.name, self.store = name, store
        self.about = "keepwarm.Engine in the bench's process, closed and reopened to restart"
        self._model = model
        self._engine: BareEngine | None = None

    @property
    def engine(self) -> BareEngine:
        if self._engine is None:
            raise Unreachable(f"{self.name} is not running.")
        return self._engine

    def launch(self) -> None:
        if self._engine is None:
            self._engine = BareEngine(self._model, self.store)
        else:
            self._engine.restart()

    def start(self) -> float:
        began = time.perf_counter()
        self.launch()
        return time.perf_counter() - began

    def ask(self, ask: BenchRequest) -> TimedReply:
        return self.engine.ask(ask)

    def kill(self) -> None:
        """Does nothing; `start` closes and reopens the engine."""

    def settle(self) -> None:
        self.engine.flush()

    def cpu_s(self) -> float | None:
        return time.process_time()

    def held_bytes(self) -> Mapping[str, int]:
        stats = self.engine.stats()
        tiers = {name: tier.n_bytes for name, tier in stats.tiers.items()}
        return _by_tier(stats.live.n_bytes, tiers)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _by_tier(live: int, tiers: Mapping[str, int]) -> Mapping[str, int]:
    return {"live caches": live, **{f"{name} tier": n_bytes for name, n_bytes in tiers.items()}}


def keepwarm_server(model: Path, folder: Path, name: str = "keepwarm") -> ServerProcess:
    store = folder / f"store-{name}"
    command = [sys.executable, "-m", "keepwarm", "serve", "--model", str(model)]
    return ServerProcess(
        name,
        "keepwarm serve with default settings but greedy, restarted with kill -9",
        command,
        health="/health/ready",
        log=folder / f"{name}.log",
        store=store,
        environ={"KEEPWARM_STORE": str(store), "KEEPWARM_SAMPLING": "greedy"},
    )


def mlx_lm_server(model: Path, folder: Path, name: str = "mlx-lm") -> ServerProcess:
    command = [sys.executable, "-W", "ignore", "-c", MLX_LM_SERVER, "--model", str(model)]
    quiet = ["--log-level", "WARNING"]
    about = "mlx_lm.server with default settings and the same BLAS, restarted with kill -9"
    log = folder / f"{name}.log"
    return ServerProcess(name, about, [*command, *quiet], health="/health", log=log)


def make(wanted: str, model: Path, folder: Path) -> Target:
    """`keepwarm`, `mlx-lm`, `engine`, or the base URL of a server, also as NAME=URL."""
    if wanted == "keepwarm":
        return keepwarm_server(model, folder)
    if wanted == "mlx-lm":
        return mlx_lm_server(model, folder)
    if wanted == "engine":
        return InProcess("engine", model, folder / "store-engine")
    name, _, url = wanted.rpartition("=")
    if url.startswith(("http://", "https://")):
        return Remote(
            name or httpx.URL(url).netloc.decode(), url, os.environ.get("OPENAI_API_KEY", "")
        )
    raise BadInput(
        f"{wanted!r} is not a target; give keepwarm, mlx-lm, engine or a URL such as "
        "http://127.0.0.1:8080/v1."
    )


def wait_for_kernels(target: Target) -> None:
    """Keepwarm compiles kernels for batches while it is idle."""
    began = time.monotonic()
    while isinstance(target, ServerProcess) and target.is_compiling():
        time.sleep(1.0)
    seconds = time.monotonic() - began
    print(f"{target.name} compiled kernels for {seconds:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind a bench as Ctrl-C does, so that it ends its servers."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    unset = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]  # `nohup` ignores
    for number in unset:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in unset:
            signal.signal(number, signal.SIG_DFL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files deleted meanwhile count as 0."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue
    return sum(sizes)


def wait_for_writes(folder: Path, timeout_s: float = 60.0) -> None:
    """Wait until no file below the folder has grown for a second."""
    end = time.monotonic() + timeout_s
    size, since = disk_bytes(folder), time.monotonic()
    while time.monotonic() - since < QUIET_S and time.monotonic() < end:
        time.sleep(0.1)
        if (now := disk_bytes(folder)) != size:
            size, since = now, time.monotonic()


def drop_pages(folder: Path) -> None:
    """Drop all files below a folder from the page cache."""
    drop_files([path for path in folder.rglob("*") if path.is_file()])


def error_line(error: Exception) -> str:
    """An error as one line, without the home directory."""
    text = str(error).partition("\n")[0] if isinstance(error, KeepwarmError) else repr(error)
    return text.replace(str(Path.home()), "~")
