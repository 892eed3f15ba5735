"""First tokens while a shared tier is gone, in turn with an engine that has none.

Refused is a server that was killed, paused one that accepts and never answers. Before the breaker
opens a request may wait for one deadline; then nobody asks. A running answer does not wait at all:
its longest pause beside these requests is that of the engine without a shared tier.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.kit.redis_server import RedisServer, redis_server

from benchmarks.engine import Running
from benchmarks.remote.engines import engine_at, first_ms, tier_of
from benchmarks.shapes import build, make_tokenizer
from keepwarm.engine.engine import Engine
from keepwarm.models.load import Model
from keepwarm.remote.tier import ASK_S
from keepwarm.text.request import Delta, Request, Sampling

N_TOKENS = 1200  # what is computed sooner than in 20 ms is not asked for; longer is noisier
OPENS_AFTER = 3  # requests
STREAM_TOKENS = 4000  # more than are decoded meanwhile
SOON = 60.0


@dataclass(frozen=True)
class Outage:
    """First tokens in ms; `waits` are the differences to the engine without a shared tier."""

    how: str
    without_ms: float
    with_ms: float
    p95_wait_ms: float  # before the breaker opens
    longest_wait_ms: float  # the same
    pause_ms: float  # of a running answer while the first requests wait
    pause_without_ms: float
    recovery_s: float

    @property
    def holds(self) -> bool:
        allowed = self.without_ms + max(2.0, 0.02 * self.without_ms)
        waits = self.p95_wait_ms <= 1000 * ASK_S + 20
        waits_once = self.longest_wait_ms < 2 * 1000 * ASK_S
        runs_on = self.pause_ms <= 1.1 * self.pause_without_ms + 2
        in_time = waits and waits_once and self.recovery_s <= 10
        return self.with_ms <= allowed and in_time and runs_on

    def __str__(self) -> str:
        return (
            f"{self.how:<8} first token {self.with_ms:.1f} ms, without {self.without_ms:.1f} ms; "
            f"before the breaker opens p95 +{self.p95_wait_ms:.1f} ms, "
            f"longest +{self.longest_wait_ms:.1f} ms; a running answer pauses for "
            f"{self.pause_ms:.1f} ms, without {self.pause_without_ms:.1f} ms; "
            f"recovered in {self.recovery_s:.1f} s; {'yes' if self.holds else 'NO'}"
        )


class Rounds(NamedTuple):
    n_outages: int
    n_after: int  # requests of each, once nobody asks any more


def measure(folder: Path, rounds: Rounds) -> list[Outage]:
    model = build("tiny", folder / "model", quantised=False)
    tokenizer = make_tokenizer("tiny", folder / "tokenizer")
    model = Model(model.name, model.path, model.module, tokenizer, {}, model.n_context)
    with redis_server(folder) as server, ExitStack() as stack:
        without = stack.enter_context(engine_at(model, folder / "without"))
        shared = stack.enter_context(engine_at(model, folder / "with", server.url))
        for _ in range(5):  # compiled, connected, measured
            _first_ms(without), _first_ms(shared)
        steady = _steady_prompt(without)
        return [
            _outage(how, server, (without, shared), steady, rounds) for how in ("refused", "paused")
        ]


def _outage(
    how: str,
    server: RedisServer,
    engines: tuple[Engine, Engine],
    steady: list[int],
    rounds: Rounds,
) -> Outage:
    without, shared = engines
    before, after_with, after_without, recoveries = [], [], [], []
    pauses: tuple[list[float], list[float]] = [], []
    for _ in range(rounds.n_outages):
        with _outage_of(server, how):
            for _ in range(OPENS_AFTER):
                before.append(-_first_ms(without) + _first_ms(shared))
            _check_open(shared)
            for _ in range(rounds.n_after):
                after_without.append(_first_ms(without))
                after_with.append(_first_ms(shared))
        recoveries.append(_recovery_s(shared))
        with _outage_of(server, how):
            for engine, found in zip(engines, pauses, strict=True):
                found.append(_pause_ms(engine, steady))
            _check_open(shared)
        recoveries.append(_recovery_s(shared))
    p95 = sorted(before)[math.ceil(0.95 * len(before)) - 1]
    pause_without, pause = map(statistics.median, pauses)
    return Outage(how, statistics.median(after_without), statistics.median(after_with), p95,
                  max(before), pause, pause_without, max(recoveries))  # fmt: skip


@contextmanager
def _outage_of(server: RedisServer, how: str) -> Iterator[None]:
    server.kill() if how == "refused" else server.pause()
    yield
    server.start() if how == "refused" else server.go_on()


def _check_open(engine: Engine) -> None:
    if not tier_of(engine).is_open:
        raise RuntimeError("The shared tier was not asked, so nothing is measured.")


def _steady_prompt(engine: Engine) -> list[int]:
    """One whose answer shows every token at once: many are parts of characters, and wait."""
    n_tokens = 100
    sampling = Sampling(max_tokens=n_tokens, temperature=0)
    for number in range(256):
        prompt = [number] * 16
        answer = engine.submit(Request(prompt=prompt, sampling=sampling))
        if sum(isinstance(event, Delta) for event in answer) >= n_tokens - 5:
            return prompt
    raise RuntimeError("No answer of the model is a text.")


def _pause_ms(engine: Engine, prompt: list[int]) -> float:
    """The longest of a running answer, beside as many requests as open the breaker."""
    sampling = Sampling(max_tokens=STREAM_TOKENS, temperature=0)
    answer = engine.submit(Request(prompt=prompt, sampling=sampling))
    running, began = Running([answer]), time.perf_counter()
    for _ in range(OPENS_AFTER):
        _first_ms(engine)
    pauses = running.gaps_ms(began, time.perf_counter())
    running.stop()
    return max(pauses)


def _recovery_s(engine: Engine) -> float:
    """Until it is used again, without a restart."""
    began, tier = time.monotonic(), tier_of(engine)
    while tier.is_open:
        if time.monotonic() - began > SOON:
            raise RuntimeError("The shared tier is not used again.")
        time.sleep(0.01)
    return time.monotonic() - began


def _first_ms(engine: Engine) -> float:
    """Of a prompt that nobody has seen."""
    return first_ms(engine, list(os.urandom(N_TOKENS)))[0]
