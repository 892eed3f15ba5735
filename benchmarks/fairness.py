"""`python -m benchmarks.fairness`: what one key's attacks cost the requests of another.

A server with two keys. One sends the requests of `benchmarks/attacks.py` over several connections,
each attack alone and then all together; the other asks for 16 tokens over all APIs in turn, before
the attack and beside it. Both are measured on the same server, one after the other: on a machine
with other work only their ratio means something.

Without `--only` it writes docs/results/fairness.json and the tables of docs/results/fairness.md.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain, count, cycle
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from tests.kit.checkpoints import write_checkpoint

from benchmarks.attacks import (
    ATTACKS,
    CHAT,
    OTHER_MODEL,
    OWN_MODEL,
    PREPARED,
    RESPONSES,
    Attack,
)
from benchmarks.requests.measure import describe_machine

CONNECTIONS = 8  # of the attacking key, with one attack
TOGETHER = 2  # of each attack, with all
ALL = "all together"
PROMPT = "Name a fruit and a colour, please: number {}."
SLICE_MS = 500.0  # of another key's prompt, while a request waits
SLACK_MS = 100.0
N_TOKENS = 16
START_S = 300.0
PREPARE_S = 600.0
WARM_UP_S = 3.0  # of an attack, before it is measured
VICTIM, ATTACKER = "fairness-victim", "fairness-attacker"
RESULTS = Path(__file__).parents[1] / "docs" / "results"
JSON, PAGE = RESULTS / "fairness.json", RESULTS / "fairness.md"
MEASURED = re.compile(
    r"(?<=<!-- measured, from docs/results/fairness.json -->\n).*?(?=<!-- end -->)", re.DOTALL
)
HEAD = (
    *("attack", "costs", "before, ms: median, p95", "beside, ms: median, p95, longest"),
    *("limit, ms", "held", "slowest API", "answers to the attack, by status"),
)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
N_CONTEXT = 4096


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": N_TOKENS}


def _options() -> dict[str, Any]:
    return {"stream": False, "options": {"num_predict": N_TOKENS, "temperature": 0}}


APIS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    CHAT: _messages,
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": N_TOKENS},
    "/v1/messages": _messages,
    RESPONSES: lambda text: {"input": text, "max_output_tokens": N_TOKENS},
    "/api/chat": lambda text: {**_messages(text), **_options()},
    "/api/generate": lambda text: {"prompt": text, **_options()},
}


@dataclass(frozen=True)
class Times:
    """Milliseconds of some requests over one API."""

    tries: int
    median_ms: float
    p95_ms: float
    worst_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        ms = sorted(1000 * each for each in seconds)
        p95 = ms[min(len(ms) - 1, -(-95 * len(ms) // 100) - 1)]
        median, p95, worst = (round(each, 1) for each in (statistics.median(ms), p95, ms[-1]))
        return cls(len(ms), median, p95, worst)


@dataclass(frozen=True)
class Outcome:
    """What one attack did to the other key's requests, and what answers the attack got."""

    attack: str
    cost: str
    load_ms: float  # of the victim's own model, where another may be loaded in its place
    before: Times
    beside: Times
    slowest: str  # API, by its median beside the attack
    failures: Mapping[str, int]  # the victim's, by status
    statuses: Mapping[str, int]  # the attacker's

    @property
    def limit_ms(self) -> float:
        """The most that the 95th percentile may be."""
        if self.cost == "no prefill":
            return 2 * self.before.p95_ms + SLACK_MS
        return 3 * self.before.p95_ms + SLICE_MS + self.load_ms

    @property
    def held(self) -> bool:
        has_failed = self.failures or any(status.startswith("5") for status in self.statuses)
        return self.beside.p95_ms <= self.limit_ms and not has_failed

    def row(self) -> str:
        cells = (
            f"{self.attack:24}",
            f"{self.before.p95_ms:8.0f}",
            f"{self.beside.median_ms:8.0f}",
            f"{self.beside.p95_ms:8.0f}",
            f"{self.limit_ms:8.0f}",
            "  held  " if self.held else "  MISSED",
            f"  {self.slowest:22}{dict(self.statuses)} {self.failures or ''}",
        )
        return "".join(cells)


class Victim:
    """Asks for 16 tokens over every API, and times each answer."""

    def __init__(self, port: int, model: str) -> None:
        url = f"http://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {VICTIM}", "X-Keepwarm-Cache": "no-store"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=600)
        self._model = model
        self._numbers = count(1)
        self.failures: Counter[str] = Counter()

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def ask(self, path: str, model: str | None = None) -> float:
        body = APIS[path](PROMPT.format(next(self._numbers)))
        begun = time.perf_counter()
        answer = self._client.post(path, json={**body, "model": model or self._model})
        if answer.status_code != 200:
            self.failures[str(answer.status_code)] += 1
        return time.perf_counter() - begun

    def times(self, tries: int) -> tuple[Times, str]:
        """Of so many requests over all APIs in turn; and the API with the longest median."""
        seconds: dict[str, list[float]] = {path: [] for path in APIS}
        for _, path in zip(range(tries), cycle(APIS), strict=False):
            seconds[path].append(self.ask(path))
        asked = {path: found for path, found in seconds.items() if found}
        slowest = max(asked, key=lambda path: statistics.median(asked[path]))
        return Times.of(list(chain(*asked.values()))), slowest

    def load_ms(self) -> float:
        """How long a request takes for which another model must go and its own be loaded."""
        seconds = []
        for _ in range(2):
            self.ask(CHAT, OTHER_MODEL)
            seconds.append(self.ask(CHAT))
        return 1000 * max(seconds)


class Attacker:
    """Sends one attack over several connections until it is stopped; counts the answers."""

    def __init__(self, port: int, attack: Attack, n_connections: int) -> None:
        self._port = port
        self._attack = attack
        self._prepared = attack.prepare(self._post) if attack.prepare else ""
        self._stop = threading.Event()
        self.statuses: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run) for _ in range(n_connections)]

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
        path, body = self._attack.path, self._attack.make()
        if self._prepared:
            path = path.replace(PREPARED, self._prepared)
            body = body.replace(PREPARED.encode(), self._prepared.encode())
        with self._sent(self._attack.method, path, body) as link:
            if self._attack.hangs_up:
                time.sleep(0.05)
                return "hung up"
            answer = link.getresponse()
            answer.read()
            return str(answer.status)

    def _post(self, path: str, body: bytes) -> Any:
        with self._sent("POST", path, body, PREPARE_S) as link:
            answer = link.getresponse()
            data = answer.read()
            if answer.status >= 300:
                raise SystemExit(f"{path} answered {answer.status}: {data.decode()[:300]}")
            return json.loads(data)

    @contextmanager
    def _sent(
        self, method: str, path: str, body: bytes, timeout_s: float = 60.0
    ) -> Iterator[http.client.HTTPConnection]:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {ATTACKER}", "Content-Type": "application/json"}
        try:
            link.request(method, path, body, headers)
            yield link
        finally:
            link.close()


def attack_until_eof(port: int, name: str) -> None:
    """The attacking process; the measuring one closes its standard input to stop it."""
    with suppress(OSError):
        os.nice(19)  # an attacker has a machine of its own
    n_connections = TOGETHER if name == ALL else CONNECTIONS
    attackers = [Attacker(port, ATTACKS[each], n_connections) for each in _attacks(name)]
    with ExitStack() as running:
        for attacker in attackers:
            running.enter_context(attacker)
        print("attacking", flush=True)
        sys.stdin.read()
        found = sum((attacker.statuses for attacker in attackers), Counter())
        print(json.dumps(found), flush=True)
        os._exit(0)


def _attacks(name: str) -> list[str]:
    return list(ATTACKS) if name == ALL else [name]


@contextmanager
def attacking(port: int, name: str, found: Counter[str]) -> Iterator[None]:
    """Attacks from when all that they need is there until the end of the block."""
    options = ["--attack", name, "--port", str(port)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fairness", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            if "attacking" not in process.stdout.readline():
                raise RuntimeError(f"{name} could not be prepared.")
            yield
        finally:
            out, _ = process.communicate()
            found.update(json.loads(out or "{}"))


@dataclass(frozen=True)
class Models:
    """The victim's model, and another that does not fit into memory beside it."""

    own: Path
    other: Path

    @classmethod
    def random(cls, folder: Path, shape: Mapping[str, int] = SHAPE) -> Models:
        made = (
            write_checkpoint(folder / name, seed=seed, n_context=N_CONTEXT, shape=shape)
            for seed, name in enumerate((OWN_MODEL, OTHER_MODEL))
        )
        return cls(*made)

    def options(self, *, has_both: bool) -> list[str]:
        own, other = (f"{path.name}={path}" for path in (self.own, self.other))
        return ["--model", own, *(("--model", other) if has_both else ())]

    @property
    def weights_bytes(self) -> int:
        """Enough for one of them."""
        n_bytes = sum(path.stat().st_size for path in self.own.glob("*.safetensors"))
        return n_bytes * 3 // 2


@contextmanager
def serving(models: Models, *, has_both: bool) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="keepwarm-fairness-") as home:
        port = free_port()
        environ = {
            **os.environ,
            "KEEPWARM_WEIGHTS_BYTES": str(models.weights_bytes),
            "KEEPWARM_API_KEYS": f"{VICTIM},{ATTACKER}",
            "KEEPWARM_HOME": home,
            "KEEPWARM_LOG_LEVEL": "warning",
        }
        options = ["--port", str(port), *models.options(has_both=has_both)]
        process = subprocess.Popen(
            [sys.executable, "-m", "keepwarm", "serve", *options],
            env=environ,
            stdout=subprocess.DEVNULL,
        )
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


def measure(name: str, tries: int, models: Models) -> Outcome:
    """One attack on a new server: what it leaves behind is not another's fault."""
    costs = {ATTACKS[each].cost for each in _attacks(name)}
    has_both = "models" in costs
    statuses: Counter[str] = Counter()
    with serving(models, has_both=has_both) as port, Victim(port, models.own.name) as victim:
        victim.times(2 * len(APIS))
        load_ms = victim.load_ms() if has_both else 0.0
        before, _ = victim.times(tries)
        with attacking(port, name, statuses):
            time.sleep(WARM_UP_S)
            beside, slowest = victim.times(tries)
    cost = "no prefill" if costs == {"no prefill"} else "models" if has_both else "prefill"
    answers = (dict(victim.failures), dict(statuses))
    return Outcome(name, cost, round(load_ms, 1), before, beside, slowest, *answers)


def main(
    *,
    attack: Annotated[str, typer.Option(help="Only attack, with no measurement.")] = "",
    port: Annotated[int, typer.Option(help="Where to attack.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Measure these attacks.")] = None,
    tries: Annotated[int, typer.Option(help="Requests before each attack, and beside it.")] = 100,
) -> None:
    """Measure the requests of one key while another attacks."""
    if attack:
        attack_until_eof(port, attack)
    found = []
    begun = time.monotonic()
    typer.echo(f"{'attack':24}{'before':>8}{'median':>8}{'p95':>8}{'limit':>8}  ms")
    with tempfile.TemporaryDirectory(prefix="keepwarm-fairness-models-") as folder:
        models = Models.random(Path(folder))
        for name in only or [*ATTACKS, ALL]:
            found.append(measure(name, tries, models))
            typer.echo(found[-1].row())
    n_held = sum(each.held for each in found)
    minutes = (time.monotonic() - begun) / 60
    typer.echo(f"{n_held} of {len(found)} limits held; {minutes:.0f} minutes")
    if not only:
        write(report(found, tries, minutes))
    raise typer.Exit(0 if n_held == len(found) else 1)


def report(found: Sequence[Outcome], tries: int, minutes: float) -> dict[str, Any]:
    return {
        "command": f"python -m benchmarks.fairness --tries {tries}",
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": round(minutes),
        "machine": describe_machine(),
        "outcomes": [
            {**asdict(each), "limit_ms": round(each.limit_ms, 1), "held": each.held}
            for each in found
        ],
    }


def write(found: Mapping[str, Any]) -> None:
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), found))


def page(text: str, found: Mapping[str, Any]) -> str:
    """The page with its table replaced."""
    return MEASURED.sub(lambda _: "\n".join(_lines(found)) + "\n", text)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    machine, outcomes = found["machine"], found["outcomes"]
    n_held = sum(each["held"] for each in outcomes)
    n_failed = sum(sum(each["failures"].values()) for each in outcomes)
    yield (
        f"`{found['command']}`, {found['date']}, {found['minutes']} minutes on "
        f"{machine['n_cpus']} cores of {machine['architecture']}, load at the end "
        f"{machine['load'][0]}."
    )
    yield f"**{n_held} of {len(outcomes)} limits held**; {n_failed} answers to that key failed."
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|---|--:|--:|--:|---|---|---|"
    yield from map(_row, outcomes)


def _row(found: Mapping[str, Any]) -> str:
    before, beside = found["before"], found["beside"]
    answers = "; ".join(f"{status}: {n:,}" for status, n in found["statuses"].items())
    cells = (
        found["attack"],
        found["cost"],
        f"{before['median_ms']:,.0f}, {before['p95_ms']:,.0f}",
        f"{beside['median_ms']:,.0f}, {beside['p95_ms']:,.0f}, {beside['worst_ms']:,.0f}",
        f"{found['limit_ms']:,.0f}",
        "yes" if found["held"] else "**no**",
        f"`{found['slowest']}`",
        answers,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(main)
