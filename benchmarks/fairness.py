"""`python -m benchmarks.fairness`: what one key's attacks cost the requests of another.

A server with two keys. One sends the requests of `benchmarks/attacks.py` over several connections;
the other asks for 16 tokens, again and again, and its time to first token is compared with that
of an undisturbed server.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.attacks import ATTACKS, CHAT, Attack
from benchmarks.requests.measure import describe_machine

CONNECTIONS = 8  # of the attacking key
PROMPT = "Name a fruit and a colour, please: number {}."
LONG = 512  # tokens: the longest slice of a prompt on a CPU
START_S = 180.0
WARM_UP_S = 3.0  # of an attack, before it is measured
VICTIM, ATTACKER = "fairness-victim", "fairness-attacker"


@dataclass(frozen=True)
class Times:
    """Times to first token of one key, in milliseconds, and the answers to the other's attack."""

    attack: str
    tries: int
    median_ms: float
    p95_ms: float
    worst_ms: float
    statuses: dict[str, int]

    @classmethod
    def of(cls, attack: str, seconds: Sequence[float], statuses: Counter[str]) -> Times:
        ms = sorted(1000 * each for each in seconds)
        p95 = ms[min(len(ms) - 1, -(-95 * len(ms) // 100) - 1)]
        median, p95, worst = (round(each, 1) for each in (statistics.median(ms), p95, ms[-1]))
        return cls(attack, len(ms), median, p95, worst, dict(statuses))


class Victim:
    """Asks for 16 tokens and times the first."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {VICTIM}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=600)
        self._numbers = count(1)

    def ask(self, text: str = PROMPT) -> float:
        message = {"role": "user", "content": text.format(next(self._numbers))}
        body = {"messages": [message], "max_tokens": 16, "temperature": 0, "stream": True}
        begun = time.perf_counter()
        with self._client.stream(
            "POST", CHAT, json=body, headers={"X-Keepwarm-Cache": "no-store"}
        ) as answer:
            if answer.status_code != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer.iter_lines():
                if '"content": "' in line and '"content": ""' not in line:
                    return time.perf_counter() - begun  # leaving ends the answer
        raise RuntimeError("An answer without text.")

    def times(self, n: int, text: str = PROMPT) -> list[float]:
        return [self.ask(text) for _ in range(n)]


class Attacker:
    """Sends one attack over several connections until it is stopped; counts the answers."""

    def __init__(self, port: int, attack: Attack) -> None:
        self._port = port
        self._attack = attack
        self._stop = threading.Event()
        self.statuses: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run) for _ in range(CONNECTIONS)]

    def __enter__(self) -> Attacker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.statuses[self._send()] += 1
            except (OSError, http.client.HTTPException) as error:
                self.statuses[type(error).__name__] += 1
                time.sleep(0.01)

    def _send(self) -> str:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {"Authorization": f"Bearer {ATTACKER}", "Content-Type": "application/json"}
        try:
            link.request("POST", self._attack.path, self._attack.make(), headers)
            if self._attack.hangs_up:
                time.sleep(0.05)
                return "hung up"
            answer = link.getresponse()
            answer.read()
            return str(answer.status)
        finally:
            link.close()


def attack_until_eof(port: int, name: str) -> None:
    """The attacking process; the measuring one closes its standard input to stop it."""
    with suppress(OSError):
        os.nice(19)  # an attacker has a machine of its own
    with Attacker(port, ATTACKS[name]) as attacker:
        sys.stdin.read()
        shown = dict(attacker.statuses)
    print(json.dumps(shown), flush=True)
    os._exit(0)


@contextmanager
def attacking(port: int, name: str, found: Counter[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.fairness", "--attack", name, "--port", str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            time.sleep(WARM_UP_S)
            yield
        finally:
            out, _ = process.communicate()
            found.update(json.loads(out or "{}"))


@contextmanager
def serving() -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="keepwarm-fairness-") as store:
        port = free_port()
        environ = {
            **os.environ,
            "KEEPWARM_API_KEYS": f"{VICTIM},{ATTACKER}",
            "KEEPWARM_STORE": store,
        }
        command = [sys.executable, "-m", "keepwarm", "serve", "--port", str(port)]
        process = subprocess.Popen(command, env=environ)
        try:
            wait_until_ready(port, process)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("The server did not start; run keepwarm serve to see why.")


def measure(names: Sequence[str], tries: int) -> Iterator[Times]:
    for name in names:
        with serving() as port:  # a new one: what an attack leaves behind is not another's fault
            victim = Victim(f"http://127.0.0.1:{port}")
            victim.times(10)
            statuses: Counter[str] = Counter()
            if name == "none":
                yield Times.of(name, victim.times(tries), statuses)
                yield Times.of("slice", victim.times(10, " fox" * LONG + PROMPT), statuses)
            else:
                with attacking(port, name, statuses):
                    seconds = victim.times(tries)
                yield Times.of(name, seconds, statuses)


def main(
    attack: Annotated[str, typer.Option(help="Only attack, with no measurement.")] = "",
    port: Annotated[int, typer.Option(help="Where to attack.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Measure these attacks.")] = None,
    tries: Annotated[int, typer.Option(help="Requests per attack.")] = 100,
    output: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure the time to first token of one key while another attacks."""
    if attack:
        attack_until_eof(port, attack)
    found = []
    limit = 0.0
    for times in measure(["none", *(only or ATTACKS)], tries):
        found.append(times)
        if times.attack == "slice":
            limit = 3 * found[0].p95_ms + (times.median_ms - found[0].median_ms)
        held = "" if not limit or times.attack == "slice" else (times.p95_ms <= limit)
        typer.echo(f"{times} limit {limit:.0f} {held}")
    if output is not None:
        report = {
            "command": "python -m benchmarks.fairness",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": describe_machine(),
            "limit_ms": round(limit, 1),
            "times": [asdict(each) for each in found],
        }
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
