"""First tokens while a shared tier is gone, in turn with an engine that has none.

Refused is a server that was killed, paused one that accepts and never answers. Before the breaker
opens a request may wait for one deadline; then nobody asks.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.kit.redis_server import RedisServer, redis_server

from benchmarks.remote.engines import engine_at, first_ms, tier_of
from benchmarks.shapes import build, make_tokenizer
from keepwarm.engine.engine import Engine
from keepwarm.models.load import Model
from keepwarm.store.remote.tier import ASK_S

N_TOKENS = 4000  # what is computed sooner than in 20 ms is not asked for
OPENS_AFTER = 3  # requests
SOON = 60.0


@dataclass(frozen=True)
class Outage:
    """First tokens in ms; `waits` are the differences to the engine without a shared tier."""

    how: str
    without_ms: float
    with_ms: float
    worst_wait_ms: float  # p95, before the breaker opens
    recovery_s: float

    @property
    def holds(self) -> bool:
        allowed = self.without_ms + max(2.0, 0.02 * self.without_ms)
        in_time = self.worst_wait_ms <= 1000 * ASK_S + 20 and self.recovery_s <= 10
        return self.with_ms <= allowed and in_time

    def __str__(self) -> str:
        return (
            f"{self.how:<8} first token {self.with_ms:.1f} ms, without {self.without_ms:.1f} ms; "
            f"before the breaker opens p95 +{self.worst_wait_ms:.1f} ms; "
            f"recovered in {self.recovery_s:.1f} s; {'yes' if self.holds else 'NO'}"
        )


def measure(folder: Path, rounds: int, n_after: int) -> list[Outage]:
    model = build("tiny", folder / "model", quantised=False)
    tokenizer = make_tokenizer("tiny", folder / "tokenizer")
    model = Model(model.name, model.path, model.module, tokenizer, {}, model.n_context)
    with redis_server(folder) as server, ExitStack() as stack:
        without = stack.enter_context(engine_at(model, folder / "without"))
        shared = stack.enter_context(engine_at(model, folder / "with", server.url))
        for _ in range(5):  # compiled, connected, measured
            _first_ms(without), _first_ms(shared)
        return [
            _outage(how, server, (without, shared), rounds, n_after)
            for how in ("refused", "paused")
        ]


def _outage(
    how: str, server: RedisServer, engines: tuple[Engine, Engine], rounds: int, n_after: int
) -> Outage:
    without, shared = engines
    before, after_with, after_without, recoveries = [], [], [], []
    for _ in range(rounds):
        server.kill() if how == "refused" else server.pause()
        for _ in range(OPENS_AFTER):
            before.append(-_first_ms(without) + _first_ms(shared))
        if not tier_of(shared).breaker.is_open:
            raise RuntimeError("The shared tier was not asked, so nothing is measured.")
        for _ in range(n_after):
            after_without.append(_first_ms(without))
            after_with.append(_first_ms(shared))
        server.start() if how == "refused" else server.go_on()
        recoveries.append(_recovery_s(shared))
    p95 = sorted(before)[math.ceil(0.95 * len(before)) - 1]
    return Outage(how, statistics.median(after_without), statistics.median(after_with), p95,
                  max(recoveries))  # fmt: skip


def _recovery_s(engine: Engine) -> float:
    """Until it is used again, without a restart."""
    began, tier = time.monotonic(), tier_of(engine)
    while tier.breaker.is_open:
        if time.monotonic() - began > SOON:
            raise RuntimeError("The shared tier is not used again.")
        time.sleep(0.01)
    return time.monotonic() - began


def _first_ms(engine: Engine) -> float:
    """Of a prompt that nobody has seen."""
    return first_ms(engine, list(os.urandom(N_TOKENS)))[0]
