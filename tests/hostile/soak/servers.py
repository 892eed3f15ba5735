"""Real `keepwarm serve` processes on a shared store, killed and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.fairness import Models

from tests.server.processes import ROOT

MIB = 1 << 20
DISK_BYTES = 48 * MIB
MAX_BODY = 4 * MIB
KEYS = ("one", "two", "three", "stranger")
ADMIN = "admin"
TRACEBACK = re.compile(r"Traceback \(most recent call last\)|raised at \(innermost last\)")
PROGRAM = ("-m", "keepwarm", "serve", "--port", "0")
START_S = 300.0  # guards against hanging
YEAR_S = 365 * 24 * 3600.0
# The same program with another clock; nothing else can be given to a process without privileges.
AHEAD = (
    "import sys, time; real = time.time; ahead = float(sys.argv.pop(1)); "
    "time.time = lambda: real() + ahead; from keepwarm.cli.main import main; main()"
)


@dataclass
class Measures:
    """The largest values seen while the soak ran."""

    rss: int = 0
    store_bytes: int = 0
    home_bytes: int = 0
    files: int = 0
    threads: int = 0
    log_bytes: int = 0

    def add(self, other: Measures) -> None:
        for name, value in vars(other).items():
            setattr(self, name, max(getattr(self, name), value))


@dataclass
class Place:
    """One home: a store that one or more servers share."""

    name: str
    home: Path
    encryption_key: str = ""
    shared: Path | None = None  # a directory that is a tier of several places

    def environ(self) -> dict[str, str]:
        sealed = {"KEEPWARM_ENCRYPTION_KEY": self.encryption_key} if self.encryption_key else {}
        return {
            **os.environ,
            **sealed,
            "KEEPWARM_REMOTE": f"file://{self.shared}" if self.shared else ",",
            "KEEPWARM_REMOTE_BYTES": str(DISK_BYTES),
            "KEEPWARM_HOME": str(self.home),
            "KEEPWARM_API_KEYS": ",".join(KEYS),
            "KEEPWARM_ADMIN_KEY": ADMIN,
            "KEEPWARM_DISK_BYTES": str(DISK_BYTES),
            "KEEPWARM_MEMORY_BYTES": str(8 * MIB),
            "KEEPWARM_MAX_BODY_BYTES": str(MAX_BODY),
            "KEEPWARM_DRAIN_S": "20",
            "KEEPWARM_LOG_LEVEL": "warning",
            "MLX_DISABLE_COMPILE": "1",
        }

    @property
    def store(self) -> Path:
        return self.home / "store"

    def n_bytes(self, folder: Path | None = None) -> int:
        return sum(size for _, size in sizes(folder or self.store))

    def damageable(self) -> list[Path]:
        """Files of blocks that no agent has."""
        agents = ""
        for path in (self.store / "agents").glob("*.json"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                agents += path.read_text()
        files = (self.store / "blocks").glob("*/*.safetensors")
        return sorted(path for path in files if path.name.partition(".")[0] not in agents)

    def leftovers(self) -> list[str]:
        """What is under `tmp` when no server runs; lock files are empty, and stay."""
        found = [path for path, n_bytes in sizes(self.store / "tmp") if n_bytes]
        return [str(path.relative_to(self.store)) for path in found]


def sizes(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files and their bytes, while others create and delete them."""
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory) / name
            with suppress(OSError):
                yield path, path.lstat().st_size


@dataclass
class Server:
    """A process at a place; the next one begins where it was killed.

    It serves two models, of which one fits into memory.
    """

    models: Models
    place: Place
    number: int
    ends: int = 0
    url: str = ""
    process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> Path:
        return self.place.home.parent / f"{self.place.name}-{self.number}.log"

    def start(self, ahead_s: float = 0.0) -> None:
        program = ("-c", AHEAD, str(ahead_s), *PROGRAM[2:]) if ahead_s else PROGRAM
        weights = str(self.models.weights_bytes)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, *self.models.options(has_both=True)],
                cwd=ROOT,
                env={**self.place.environ(), "KEEPWARM_WEIGHTS_BYTES": weights},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", greeting)
        if found is None:
            raise RuntimeError(f"a server did not start: {self.log.read_text()[-2000:]}")
        self.url = found[0]

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def pause(self, seconds: float) -> None:
        """Stop the process for a moment, wherever it is."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        self.ends += 1
        process.send_signal(how)
        code = process.wait(START_S)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def measure(self) -> Measures:
        with suppress(psutil.Error):
            if self.process is not None:
                process = psutil.Process(self.process.pid)
                files, threads = process.num_fds(), process.num_threads()
                log = self.log.stat().st_size
                return Measures(rss_of(process), files=files, threads=threads, log_bytes=log)
        return Measures()

    @property
    def died(self) -> bool:
        """Ended by itself."""
        return self.process is not None and self.process.poll() is not None


def rss_of(process: psutil.Process) -> int:
    """Of the process and of those it has started."""
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def logged(servers: list[Server]) -> Mapping[str, int]:
    """Bytes and tracebacks of all logs."""
    texts = [server.log.read_text(errors="replace") for server in servers]
    return {
        "log bytes": sum(len(text.encode()) for text in texts),
        "log lines": sum(text.count("\n") for text in texts),
        "logged tracebacks": sum(len(TRACEBACK.findall(text)) for text in texts),
    }
