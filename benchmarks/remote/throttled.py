"""First tokens of prompts that a Redis behind a slow line has, by three engines in turn: one that
always loads them, one that never does, and one that chooses.

What the third takes, over the better of the other two, is what its estimates cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.kit.redis_server import redis_server

from benchmarks.remote.engines import engine_at, first_ms, tier_of
from benchmarks.remote.lines import slow_lines
from benchmarks.shapes import SHAPES, build, make_tokenizer
from keepwarm.cache.restore.rates import Rates
from keepwarm.engine.engine import Engine
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy

SHAPE = "small"
RATES = (5, 50, 500)  # MB/s
N_TOKENS = 1100
GOAL = 1.1
PATIENT = 1e5  # bytes a second: nothing is late for an engine that expects no more
MB = 1e6
SOON = 60.0


@dataclass(frozen=True)
class Line:
    """Medians of first tokens in ms, at so many MB/s, and of what choosing takes over the better
    of the others in the same round: so a machine that is busy now and then does not matter.
    """

    mb_per_s: int
    always_ms: float
    never_ms: float
    chosen_ms: float
    ratio: float
    n_loaded: int  # of the prompts of the engine that chooses
    n_prompts: int

    @property
    def holds(self) -> bool:
        return self.ratio <= GOAL

    def __str__(self) -> str:
        return (
            f"{self.mb_per_s:>3} MB/s  always {self.always_ms:8.1f} ms  never {self.never_ms:8.1f} "
            f"ms  chosen {self.chosen_ms:8.1f} ms ({self.n_loaded} of {self.n_prompts} loaded)  "
            f"{self.ratio:.2f} {'yes' if self.holds else 'NO'}"
        )


class AlwaysLoad(Rates):
    """Computing seems to take for ever."""

    def prefill_s(self, start: int, end: int) -> float:
        return 1e6 * (end - start)


class Trio:
    """Three engines for one line."""

    def __init__(self, always: Engine, never: Engine, chosen: Engine) -> None:
        self._always, self._never, self._chosen = always, never, chosen
        restorer = always.lane_of().restorer
        restorer.rates = AlwaysLoad(**vars(restorer.rates))
        self.always_ms: list[float] = []
        self.never_ms: list[float] = []
        self.chosen_ms: list[float] = []
        self.n_loaded = 0

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """What computing and loading cost is learned, as by a server that runs for a while."""
        for prompt in prompts:
            first_ms(self._chosen, prompt, Policy.READ_ONLY)

    def measure(self, prompt: Sequence[int], number: int) -> None:
        """In turn, and none is always the first."""
        variants = [self._always_loads, self._never_loads, self._chooses]
        for n in range(3):
            variants[(number + n) % 3](prompt)

    def _always_loads(self, prompt: Sequence[int]) -> None:
        restorer, tier = self._always.lane_of().restorer, tier_of(self._always)
        until = time.monotonic() + SOON
        while (restorer.n_shared(prompt) or 0) < len(prompt) - 1:  # a question may be late
            if time.monotonic() > until:
                raise RuntimeError("What was shared is not found.")
            restorer.ask(prompt, Policy.READ_ONLY)
        tier.speed.bytes_per_s = PATIENT
        taken_ms, receipt = first_ms(self._always, prompt, Policy.READ_ONLY)
        if receipt.reused.get("shared") != len(prompt) - 1:
            raise RuntimeError(f"It was not loaded: {receipt.reused}")
        self.always_ms.append(taken_ms)

    def _never_loads(self, prompt: Sequence[int]) -> None:
        self.never_ms.append(first_ms(self._never, prompt, Policy.READ_ONLY)[0])

    def _chooses(self, prompt: Sequence[int]) -> None:
        taken_ms, receipt = first_ms(self._chosen, prompt, Policy.READ_ONLY)
        self.chosen_ms.append(taken_ms)
        self.n_loaded += "shared" in receipt.reused

    def line(self, mb_per_s: int) -> Line:
        better = min(self.always_ms, self.never_ms, key=statistics.median)
        ratios = [mine / best for mine, best in zip(self.chosen_ms, better, strict=True)]
        return Line(
            mb_per_s,
            statistics.median(self.always_ms),
            statistics.median(self.never_ms),
            statistics.median(self.chosen_ms),
            statistics.median(ratios),
            self.n_loaded,
            len(ratios),
        )


def measure(folder: Path, rounds: int, rates: Sequence[int] = RATES) -> list[Line]:
    model = build(SHAPE, folder / "model", quantised=False)
    tokenizer = make_tokenizer(SHAPE, folder / "tokenizer")
    model = Model(model.name, model.path, model.module, tokenizer, {}, model.n_context)
    with redis_server(folder) as server, ExitStack() as stack:
        *prompts, first, second = [_prompt(seed) for seed in range(rounds + 2)]
        _share(model, folder / "first", server.url, [*prompts, first, second])
        ports = stack.enter_context(slow_lines(server.port, [MB * rate for rate in rates]))
        never = stack.enter_context(engine_at(model, folder / "never"))
        trios = []
        for mb_per_s, port in zip(rates, ports, strict=True):
            url = f"redis://127.0.0.1:{port}"
            homes = [folder / f"{name}-{mb_per_s}" for name in ("always", "chosen")]
            always, chosen = (stack.enter_context(engine_at(model, at, url)) for at in homes)
            trios.append(Trio(always, never, chosen))
        for trio in trios:
            trio.warm_up([*(_prompt(-1 - n) for n in range(3)), first, second])
        for number, prompt in enumerate(prompts):
            for trio in trios:
                trio.measure(prompt, number)
    return [trio.line(rate) for trio, rate in zip(trios, rates, strict=True)]


def _prompt(seed: int) -> list[int]:
    vocabulary = SHAPES[SHAPE]["vocab_size"]
    drawn = np.random.default_rng(seed + 100).integers(0, vocabulary, N_TOKENS)
    return [int(token) for token in drawn]


def _share(model: Model, home: Path, url: str, prompts: Sequence[Sequence[int]]) -> None:
    with engine_at(model, home, url) as first:
        restorer = first.lane_of().restorer
        for prompt in prompts:
            first_ms(first, prompt, Policy.DURABLE)
            if (tried := restorer.share(prompt[:-1])) is not None:
                tried.result(SOON)
            if (restorer.n_shared(prompt) or 0) < len(prompt) - 1:
                raise RuntimeError("It does not keep what is shared.")
