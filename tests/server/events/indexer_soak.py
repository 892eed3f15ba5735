"""Does NVIDIA's stock indexer agree with our own look-up? Through puts, evictions, a lost message,
and a restart.

python -m tests.server.events.indexer_soak     writes docs/results/indexer.md
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from keepwarm.cache.store import Budgets
from keepwarm.engine.engine import Engine
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.server.app import create_app
from keepwarm.server.kv_events import INTERVAL_S, REMIND_S
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from tests.kit import engines
from tests.kit.redis_server import free_port
from tests.server.conftest import running
from tests.server.processes import ROOT

PAGE = ROOT / "docs" / "results" / "indexer.md"
N_PROMPTS = 1000  # asked in each phase
START_S = 120.0
WORKER = 1
LOST = "lost messages, before anything else is told"  # then it cannot agree
MEMORY_BYTES, DISK_BYTES = 2 << 20, 6 << 20


class Indexer:
    """A process of `python -m dynamo.indexer`, which knows one server."""

    def __init__(self, events: str, replay: str) -> None:
        if importlib.util.find_spec("dynamo") is None:
            pytest.skip("needs `ai-dynamo-runtime`")
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._client = httpx.Client(base_url=self._url, timeout=60)
        worker = {"instance_id": WORKER, "endpoint": events, "replay_endpoint": replay}
        self._wait(lambda: self._register(worker))

    def _register(self, worker: dict[str, Any]) -> bool:
        body = {**worker, "model_name": "tiny", "block_size": BLOCK_TOKENS}
        try:
            return self._client.post("/register", json=body).is_success
        except httpx.TransportError:
            return False

    def _wait(self, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not happened():
            assert time.monotonic() < until
            time.sleep(0.05)

    def n_matched(self, tokens: Sequence[int]) -> int:
        """Tokens that some tier of the server has, as far as the indexer knows."""
        body = {"token_ids": list(tokens), "model_name": "tiny"}
        found = self._client.post("/query", json=body).json()["instances"]
        return int(found[str(WORKER)]["longest_matched"]) if str(WORKER) in found else 0

    def close(self) -> None:
        self._client.close()
        self.process.kill()
        self.process.wait()


class Phase(NamedTuple):
    """What was asked after something had happened."""

    name: str
    n_asked: int
    n_equal: int
    by_depth: dict[int, int]  # prompts by the blocks that were found


class Prompts:
    """A random tree of blocks, so that prompts part at many places; those that were run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._blocks = [self._block() for _ in range(12)]
        self.run: list[list[int]] = []

    def _block(self) -> list[int]:
        return [self._random.randrange(128) for _ in range(BLOCK_TOKENS)]

    def some(self) -> list[int]:
        """One to four blocks of the tree, then a few tokens."""
        depth = self._random.randint(1, 4)
        chosen = [self._random.choice(self._blocks) for _ in range(depth)]
        tail = self._block()[: self._random.randint(1, 40)]
        return [token for block in (*chosen, tail) for token in block]

    def asked(self) -> list[int]:
        """One that was run, cut somewhere and perhaps continued, or any."""
        if self._random.random() < 0.2:
            return self.some()
        known = self._random.choice(self.run)
        cut = self._random.randint(1, len(known))
        return [*known[:cut], *(self.some() if self._random.random() < 0.5 else [])]


class LosingSocket:
    """Sends nothing, as a network that loses messages."""

    def send_multipart(self, parts: object) -> None:
        return


class Machine(NamedTuple):
    engine: Engine
    publisher: Any

    @contextmanager
    def losing(self) -> Iterator[None]:
        plain, self.publisher._events = self.publisher._events, LosingSocket()
        yield
        self._wait()
        self.publisher._events = plain

    def run(self, prompts: Prompts, n_prompts: int) -> None:
        for _ in range(n_prompts):
            prompts.run.append(prompts.some())
            self.engine.submit(engines.ask(prompts.run[-1], 1)).result()
        self._wait()

    def _wait(self) -> None:
        """Until all is told, and has arrived."""
        self.engine.wait_until_saved()
        time.sleep(2 * REMIND_S + 8 * INTERVAL_S)

    def n_matched(self, tokens: Sequence[int]) -> int:
        """Tokens in whole blocks by our own look-up."""
        lane, more = self.engine.lane_of(), [*tokens, 0]  # the last one is never reused
        n_found = max(lane.restorer.stored_prefix(more).n_tokens, lane.n_live(more))
        return n_found // BLOCK_TOKENS * BLOCK_TOKENS

    def compare(self, name: str, indexer: Indexer, prompts: Prompts) -> Phase:
        asked = [prompts.asked() for _ in range(N_PROMPTS)]
        own = [self.n_matched(tokens) for tokens in asked]
        told = [indexer.n_matched(tokens) for tokens in asked]
        n_equal = sum(a == b for a, b in zip(own, told, strict=True))
        return Phase(name, N_PROMPTS, n_equal, Counter(n // BLOCK_TOKENS for n in own))


@contextmanager
def machine(model: Any, home: Path, addresses: Sequence[str]) -> Iterator[Machine]:
    names = {"KEEPWARM_KV_EVENTS": ",".join(addresses), "KEEPWARM_KV_EVENTS_TOKEN_IDS": "1"}
    budgets = Budgets(MEMORY_BYTES, disk_bytes=DISK_BYTES, min_free_disk_bytes=0)
    small = engines.memory(live_bytes=1 << 20)
    with engines.engine_on(model, home, environment=names, budgets=budgets, memory=small) as engine:
        settings = engine.store.settings
        app = create_app(Models(EngineHost(engine, "tiny"), settings), settings)
        with running(app, settings):
            one = Machine(engine, app.state.events)
            one._wait()
            yield one


def measure(model: Any, home: Path) -> list[Phase]:
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    prompts, phases = Prompts(seed=7), []
    indexer = Indexer(*addresses)
    try:
        with machine(model, home, addresses) as one:
            one.run(prompts, 10)
            phases.append(one.compare("puts", indexer, prompts))
            one.run(prompts, 50)
            evicted = {name: each.evicted for name, each in one.engine.store.tier_stats().items()}
            assert evicted["memory"], evicted
            assert evicted["disk"], evicted
            phases.append(one.compare("evictions from memory and disk", indexer, prompts))
            with one.losing():
                one.run(prompts, 10)
                phases.append(one.compare(LOST, indexer, prompts))
            one._wait()
            phases.append(one.compare("the last number told again", indexer, prompts))
            with one.losing():
                one.run(prompts, 10)
            one.run(prompts, 3)
            phases.append(one.compare("lost messages, and others after them", indexer, prompts))
        with machine(model, home, addresses) as one:
            phases.append(one.compare("a restart of the server", indexer, prompts))
            one.run(prompts, 5)
            phases.append(one.compare("puts after it", indexer, prompts))
    finally:
        indexer.close()
    return phases


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = engines.Models(Path(directory) / "models").of("llama")
        phases = measure(model, Path(directory) / "home")
    rows = [
        f"| {phase.name} | {phase.n_asked} | {phase.n_equal} | "
        + ", ".join(f"{n}: {phase.by_depth[n]}" for n in sorted(phase.by_depth))
        + " |"
        for phase in phases
    ]
    lines = [
        "# KV events and a stock indexer",
        "",
        "`python -m tests.server.events.indexer_soak`: `python -m dynamo.indexer` of "
        "ai-dynamo-runtime 1.6.1 subscribes to a server with a tiny model, and is asked for random "
        "prompts: does it find as many whole blocks as the server's own look-up does?",
        "",
        "| after | prompts | equal | prompts by blocks found |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
    PAGE.write_text("\n".join(lines))
    sys.stdout.write(PAGE.read_text())


if __name__ == "__main__":
    main()
