"""What a user of the engine meets: first tokens and gaps, through `Engine.submit`.

`python -m benchmarks.engine` takes a few minutes on a CUDA machine; `--tiny` checks that it runs.
`--long 8192,65536,131072` measures prompts of these lengths instead, and how each figure grows.
A loop over the bare model and a copy from pinned memory are measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import count, groupby, pairwise
from math import log
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.measure import GIB, Figure, pinned_gb_per_s
from benchmarks.requests.client import gaps_between
from benchmarks.requests.run import in_thread
from benchmarks.requests.targets import DROPS_PAGES, drop_pages, unwound_by_signals
from benchmarks.shapes import build, make_tokenizer
from keepwarm import config, kv
from keepwarm.cache.store import Budgets, Store
from keepwarm.device import kernels
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.answer import Answer
from keepwarm.engine.compilation import TrialRequests
from keepwarm.engine.engine import Engine
from keepwarm.errors import Cancelled, EngineFailed
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Delta, Progress, Request, Sampling

SLICE = 2048
SOLO_TOKENS = 12  # of every running answer, before another request arrives


class Running:
    """Answers that are being decoded, and when each of their tokens arrived."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.times: list[list[float]] = [[] for _ in answers]
        self._answers = answers
        pairs = zip(answers, self.times, strict=True)
        self._ends = [in_thread(partial(_read, *pair)) for pair in pairs]
        while min(map(len, self.times)) < SOLO_TOKENS:
            if any(end.done() and end.result() for end in self._ends):
                raise EngineFailed("An answer ended before the measurement.")
            time.sleep(0.005)

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """Gaps of which a part is in this time; of one that is still open, what has passed."""
        found: list[float] = []
        for times, end in zip(self.times, self._ends, strict=True):
            ended = end.result() if end.done() else until
            found += gaps_between(times, since, min(until, ended))
        return [1000 * gap for gap in found]

    def stop(self) -> None:
        for answer in self._answers:
            answer.cancel()
        wait(self._ends)


def _read(answer: Answer, times: list[float]) -> float:
    """When it ended."""
    with suppress(Cancelled):
        for event in answer:
            if isinstance(event, Delta):
                times.append(time.perf_counter())
    return time.perf_counter()


class Case:
    """One model with an engine; `unit` tokens stand for 8,192."""

    def __init__(self, model: Model, engine: Engine, unit: int, file: Path | None) -> None:
        self.model = model
        self.engine = engine
        self.unit = unit
        self._file = file
        self.figures: list[Figure] = []
        self._seeds = count(1)

    def add(
        self,
        what: str,
        value: float,
        against: float | None = None,
        goal: float | None = None,
        **notes: Any,
    ) -> None:
        figure = Figure(what, value, against, goal, notes)
        print(figure, notes or "", flush=True)
        self.figures.append(figure)
        if self._file:  # a time limit loses one only
            self._file.write_text(json.dumps({"figures": self.as_json()}, indent=1))

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(f) | {"ratio": f.ratio, "holds": f.holds} for f in self.figures]

    # requests

    def prompt(self, n_tokens: int) -> list[int]:
        """Always another one."""
        dice = np.random.default_rng(next(self._seeds))
        return [int(token) for token in dice.integers(0, 250, n_tokens)]

    def ask(self, prompt: Sequence[int], n: int = 1, policy: Policy = Policy.READ_WRITE) -> Answer:
        request = Request(
            prompt=list(prompt), sampling=Sampling(max_tokens=n, temperature=0), policy=policy
        )
        return self.engine.submit(request)

    def first_ms(self, prompt: Sequence[int], policy: Policy = Policy.READ_WRITE) -> float:
        ms = self.ask(prompt, policy=policy).result().usage.ttft_ms
        self.engine.wait_until_saved()  # the next measurement does not compete with its saves
        return ms

    @contextmanager
    def running(self, n: int) -> Iterator[Running]:
        asked = [self.ask(self.prompt(64), 3000, Policy.NO_STORE) for _ in range(n)]
        running = Running(asked)
        try:
            yield running
        finally:
            running.stop()

    def forget_live(self) -> None:
        self.engine.call(self.engine.live.clear).result()

    # measurements

    def bare(self) -> dict[int, float]:
        """Milliseconds by prompt length: slices of 2,048 tokens with nothing around them."""

        def loop() -> dict[int, float]:
            fed, started = self._fed(4 * self.unit), time.perf_counter()
            return {done: 1000 * (time.perf_counter() - started) for done, _ in fed}

        for _ in range(2):  # the first compiles
            marks = self.engine.call(loop).result()
        return {n * self.unit: marks[n * self.unit] for n in (1, 2, 3, 4)}

    def _fed(self, n_tokens: int) -> Iterator[tuple[int, kv.Caches]]:
        """The caches after every slice."""
        step, caches = min(SLICE, self.unit), kv.make_caches(self.model.module)
        for done in range(step, n_tokens + 1, step):
            self.model.module(mx.array([self.prompt(step)]), cache=caches)
            yield done, kv.evaluate(caches)

    def live_bytes(self, n_tokens: int) -> int:
        """Of a prompt; windows and states do not grow with it."""
        *_, (_, caches) = self._fed(n_tokens)
        return kv.live_bytes(caches)

    def slices(self, context: int) -> dict[int, float]:
        """Milliseconds of one slice by its length."""
        lengths = [1 << i for i in range(12) if 1 << i <= min(SLICE, self.unit)]

        def measure() -> dict[int, float]:
            return {n: median(self._one_slice(n, context) for _ in range(3)) for n in lengths}

        self.engine.call(lambda: [self._one_slice(n, context) for n in lengths]).result()
        return {n: round(ms, 2) for n, ms in self.engine.call(measure).result().items()}

    def _one_slice(self, n_tokens: int, context: int) -> float:
        caches = kv.make_caches(self.model.module)
        if context:
            self.model.module(mx.array([self.prompt(context)]), cache=caches)
        kv.evaluate(caches)
        tokens = mx.array([self.prompt(n_tokens)])
        started = time.perf_counter()
        self.model.module(tokens, cache=caches)
        kv.evaluate(caches)
        return 1000 * (time.perf_counter() - started)

    def new_shapes(self) -> None:
        """A slice at a position where none ended before, and the same again."""
        n_tokens = min(512, self.unit // 2)

        def measure() -> tuple[float, float]:
            pairs = [
                [self._one_slice(n_tokens, self.unit + 8 * i) for _ in range(2)] for i in (1, 2, 3)
            ]
            return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)

        new, again = self.engine.call(measure).result()
        self.add(f"a slice of {n_tokens} at a new position ÷ again", new, again)

    def first_requests(self) -> None:
        """The second is a token longer: every new length costs a bit."""
        for n_tokens in (20, 300):
            first, second = (self.first_ms(self.prompt(n_tokens + i)) for i in (0, 1))
            again = self.first_ms(self.prompt(n_tokens))
            what = f"first request of {n_tokens} tokens ÷ the second"
            self.add(what, first, second, 1.5, same_length_again_ms=round(again, 1))
        self.first_ms(self.prompt(2 * self.unit))

    def alone(self, bare: dict[int, float]) -> dict[Policy, float]:
        """First tokens alone; milliseconds of the shortest prompt, by policy."""
        shortest = {}
        for n in (1, 2, 4):
            n_tokens = n * self.unit
            unkept = min(self.first_ms(self.prompt(n_tokens), Policy.NO_STORE) for _ in range(2))
            self.add(f"{n_tokens:,} cold, no-store ÷ bare loop", unkept, bare[n_tokens], 1.05)
            samples, keeping = zip(*(self._kept_ms(n_tokens) for _ in range(3)), strict=True)
            kept = median(samples)
            self.add(f"{n_tokens:,} cold, kept ÷ no-store", kept, unkept, 1.05, samples=samples)
            what = "of it the engine's thread on keeping"
            self.add(what, median(keeping), kept, 0.02, samples=keeping)
            if n == 1:
                shortest = {Policy.NO_STORE: unkept, Policy.READ_WRITE: kept}
        return shortest

    def _kept_ms(self, n_tokens: int) -> tuple[float, float]:
        """To the first token, and what keeping has taken of the engine's thread by then."""
        before = self._keeping_ms()
        answer = self.ask(self.prompt(n_tokens), 8)
        next(event for event in answer if isinstance(event, Delta))
        keeping = self._keeping_ms() - before
        ttft_ms = answer.result().usage.ttft_ms
        self.engine.wait_until_saved()
        return ttft_ms, keeping

    def _keeping_ms(self) -> float:
        return float(self.engine.stats().counters["keeping_ms"])

    def beside(self, n: int, policy: Policy, alone_ms: float, goal: float) -> None:
        """The second of two: the first meets kernels for batches of this size."""
        for _ in range(2):
            with self.running(n) as running:
                before = time.perf_counter()
                answer = self.ask(self.prompt(self.unit), 1, policy)
                done = [event.done for event in answer if isinstance(event, Progress)]
                after = time.perf_counter()
            self.engine.wait_until_saved()
        gaps = running.gaps_ms(before, after)
        notes = {
            "slices": [b - a for a, b in pairwise([0, *done])],
            "solo_ms": round(median(running.gaps_ms(0.0, before)), 1),
            "max_gap_ms": round(max(gaps), 1),
        }
        what = f"{self.unit:,} cold, {policy.value}, beside {n} ÷ alone"
        self.add(what, 1000 * (after - before), alone_ms, goal, **notes)
        p95 = quantiles([*gaps, *gaps], n=20, method="inclusive")[-1]
        self.add(f"p95 gap of the {n} meanwhile", p95, None, 250.0)

    def restores(self, pinned_gb_s: float | None) -> None:
        prompt = self.prompt(4 * self.unit)
        self.first_ms(prompt)
        n_bytes = self.engine.call(lambda: self.live_bytes(len(prompt))).result()
        samples = []
        for _ in range(4):
            self.forget_live()
            samples.append(self.first_ms(prompt))
        ms = median(samples[1:])  # the first measures how fast loading is
        copy_ms = None if pinned_gb_s is None else n_bytes / pinned_gb_s / 1e6
        gb_s = round(n_bytes / ms / 1e6, 2)
        goal = 2.0 if copy_ms else None
        self.add(
            f"{len(prompt):,} from memory ÷ pinned copy",
            ms,
            copy_ms,
            goal,
            gb_s=gb_s,
            samples=samples,
        )
        for tier in ("memory", "disk"):
            self._restore_among_answers(prompt, tier)

    def _restore_among_answers(self, prompt: list[int], tier: str) -> None:
        with self.running(4) as running:
            self.forget_live()
            if tier == "disk":
                self.engine.store.clear_memory()
            before = time.perf_counter()
            result = self.ask(prompt).result()
            gaps = running.gaps_ms(before, time.perf_counter())
        notes = {"reused": result.receipt.reused, "first_ms": result.usage.ttft_ms}
        what = f"longest gap of 4 while {len(prompt):,} come from {tier}"
        self.add(what, max(gaps), None, 100.0, **notes)

    def conversation(self) -> list[int]:
        """The last prompt of six turns, computed and kept."""
        prompt: list[int] = []
        for _ in range(6):
            prompt += self.prompt(self.unit // 5)
            answer = self.ask(prompt, 8).result().choices[0]
            prompt += [each.token for each in answer.tokens]
        self.first_ms(prompt)
        return prompt

    def restarted(self, prompt: Sequence[int]) -> None:
        """Its first request to an engine that was just opened, and the same from disk again."""
        first, reused = self._clock_ms(prompt)
        self.forget_live()
        self.engine.store.clear_memory()
        later, _ = self._clock_ms(prompt)
        what = "restart: conversation of six turns ÷ from disk later"
        self.add(what, first, later, 1.3, n_tokens=len(prompt), reused=reused)

    def _clock_ms(self, prompt: Sequence[int]) -> tuple[float, dict[str, int]]:
        """By the clock of the one who asks."""
        started = time.perf_counter()
        answer = self.ask(prompt, 2)
        next(event for event in answer if isinstance(event, Delta))
        ms = 1000 * (time.perf_counter() - started)
        return ms, dict(answer.result().receipt.reused)

    def long(self, n_tokens: int) -> dict[str, float]:
        """Milliseconds to the first token of a long prompt, by where it comes from."""
        n_tokens = min(n_tokens, self.model.n_context - 8)  # the answer counts too
        prompt = self.prompt(n_tokens)
        found = {"cold, no-store": self.first_ms(self.prompt(n_tokens), Policy.NO_STORE)}
        found["cold, kept"] = self.first_ms(prompt)
        found["live"] = self.first_ms(prompt)
        found["memory"] = self._restored_ms(prompt)
        self._restore_among_answers(prompt, "memory")  # before anything is dropped
        found["disk"] = self._restored_ms(prompt, self.engine.store.clear_memory)
        if DROPS_PAGES:
            found["disk, page cache dropped"] = self._restored_ms(prompt, self._only_on_disk)
        for what, ms in found.items():
            self.add(f"{n_tokens:,} tokens, {what}", ms, ms_per_1000=round(1000 * ms / n_tokens, 2))
        self._restore_among_answers(prompt, "disk")
        return found

    def _restored_ms(
        self, prompt: Sequence[int], prepare: Callable[[], object] = lambda: None
    ) -> float:
        """The second of two: the first measures how fast loading is."""
        for _ in range(2):
            self.forget_live()
            prepare()
            ms = self.first_ms(prompt)
        return ms

    def _only_on_disk(self) -> None:
        self.engine.store.clear_memory()
        drop_pages(self.engine.store.settings.store)

    def agents(self, bare: dict[int, float]) -> None:
        """Eight that share a prefix and arrive together; the second of two."""
        for _ in range(2):
            shared = self.prompt(self.unit)
            prompts = [[*shared, *self.prompt(self.unit // 4)] for _ in range(8)]
            results = [answer.result() for answer in [self.ask(prompt, 8) for prompt in prompts]]
            self.engine.wait_until_saved()
        notes = {
            "firsts": sorted(result.usage.ttft_ms for result in results),
            "computed": sum(result.receipt.recomputed for result in results),
            "reused": [result.receipt.reused for result in results],
        }
        what = f"eight agents, {self.unit:,} shared, last first token ÷ bare"
        last = max(result.usage.ttft_ms for result in results)
        self.add(what, last, bare[3 * self.unit], 1.5, **notes)


class Kernels:
    """Which kernels were compiled when, in the files that MLX writes."""

    def __init__(self) -> None:
        self.new: dict[str, list[str]] = {}
        self._known = self._files()
        self._started = time.perf_counter()

    def saw(self, what: str) -> None:
        """What is reported begins: all that is new now belongs to what came before."""
        seconds = time.perf_counter() - self._started
        found = self._files()
        self.new[what] = sorted(found - self._known)
        self._known = found
        print(f"{seconds:7.1f} s, {len(self.new[what]):3} new kernels before: {what}", flush=True)

    def _files(self) -> set[str]:
        folder = Path(os.environ.get(kernels.VARIABLE, "none"))
        return {file.stem for file in folder.rglob("*.ptx")}


def compile_ms(model: Model, store: Store, settings: config.Settings, compiled: Kernels) -> float:
    """Milliseconds that a server spends on kernels while it is idle, if no request comes."""
    started = time.perf_counter()
    trials = TrialRequests(model, store, EngineConfig.of(settings), settings)
    for n_left, _ in groupby(trials.run(), lambda _: trials.n_left):
        compiled.saw(f"trial request {1 + trials.n_all - n_left} of {trials.n_all}")
    ms = 1000 * (time.perf_counter() - started)
    compiled.saw("requests")
    return ms


def measure(
    shape: str,
    folder: Path,
    home: Path,
    lengths: Sequence[int] = (),
    file: Path | None = None,
) -> dict[str, Any]:
    settings = config.load({"KEEPWARM_HOME": str(home)}, store=folder / "store")
    kernels.start(settings.home)
    compiled = Kernels()
    budgets = Budgets(
        memory_bytes=32 * GIB, disk_bytes=40 * GIB, queue_bytes=16 * GIB, min_free_disk_bytes=0
    )
    tokenizer = make_tokenizer(shape, folder / "tokenizer")
    model = replace(build(shape, folder), tokenizer=tokenizer)
    with Store(budgets=budgets, settings=settings) as store:
        before_ready_ms = compile_ms(model, store, settings, compiled)
        with Engine(model, store) as engine:
            gc.freeze()  # as `keepwarm serve` does: looking through all that is imported takes time
            unit = 512 if shape.startswith("tiny") else 8192
            case = Case(model, engine, unit, file)
            found = long_prompts(case, lengths) if lengths else measured(case)
            prompt = case.conversation()
    with Store(budgets=budgets, settings=settings) as store, Engine(model, store) as case.engine:
        case.restarted(prompt)
    compiled.saw("the end")
    notes = {"compile_ms": before_ready_ms, "kernels": compiled.new}
    return found | {"figures": case.as_json()} | notes


def measured(case: Case) -> dict[str, Any]:
    model, engine, unit = case.model, case.engine, case.unit
    pinned = pinned_gb_per_s()
    case.first_requests()
    bare = case.bare()
    print("bare", bare, "pinned GB/s", pinned, flush=True)
    for policy, alone_ms in case.alone(bare).items():
        case.beside(1, policy, alone_ms, 1.3)
        case.beside(4, policy, alone_ms, 1.5)
    case.agents(bare)
    case.restores(pinned)
    case.new_shapes()
    lane = engine.lane_of()
    return {
        "shape": model.name,
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
        "bare_ms": bare,
        "pinned_gb_per_s": pinned,
        "slice_ms": {context: case.slices(context) for context in (0, unit)},
        "learned": lane.restorer.rates.slices.slices,
    }


def long_prompts(case: Case, lengths: Sequence[int]) -> dict[str, Any]:
    """By length; and the exponent with which each figure grows from the first to the last."""
    case.first_requests()
    found = {n_tokens: case.long(n_tokens) for n_tokens in lengths}
    first, last = found[lengths[0]], found[lengths[-1]]
    growth = log(lengths[-1] / lengths[0]) or 1.0
    exponents = {what: round(log(last[what] / ms) / growth, 2) for what, ms in first.items()}
    print("exponents", exponents, flush=True)
    return {"shape": case.model.name, "long_ms": found, "exponents": exponents}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape: a check that it runs")
    parser.add_argument("--long", help="lengths of prompts, as 8192,65536,131072")
    parser.add_argument("--shape", help="another shape of benchmarks.shapes, as gemma-3-12b")
    parser.add_argument("--folder", type=Path, help="where to write blocks")
    parser.add_argument("--home", type=Path, help="where kernels and rates are kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    lengths = [int(length) for length in given.long.split(",")] if given.long else []
    shape = given.shape or ("tiny" if given.tiny else "llama-8b")
    with unwound_by_signals(), tempfile.TemporaryDirectory(dir=given.folder) as folder:
        home = given.home or Path(folder) / "home"
        found = measure(shape, Path(folder), home, lengths, given.json)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
