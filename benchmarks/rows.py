"""Rows that end where they end, and several tokens a step: what they cost and what they give.

`python -m benchmarks.rows --json FILE` takes four minutes on an H200; `--tiny` checks on any
machine that it runs. Kernels for rows are tried first, as a server does while it is idle. Then:

    answers    whole answers through the engine, with and without drafts in turn. The model is
               scripted, so that the next token is known, and each drafted one is right with a
               probability of its own; then tokens with and without drafts, beside a batch and alone
    verify     several tokens a row, of which all but the first are taken back
    plain      a token a row: our rows, also with a second token that is taken back, against
               mlx-lm's batches (and one row alone), pipelined and one step after the other
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from benchmarks.decode import Report, median_ms, note
from benchmarks.requests.targets import unwound_by_signals
from benchmarks.shapes import SHAPES, build, make_tokenizer
from keepwarm import config, kv
from keepwarm.cache.store import Budgets, Store
from keepwarm.engine.drafts import (
    MAX_DRAFT,
    MIN_MATCH,
    BatchSize,
    Others,
    Proposal,
    SeenTexts,
    StepCosts,
)
from keepwarm.engine.engine import Engine
from keepwarm.models import row_products
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Delta, Request, Result, Sampling

PARTS = ("answers", "verify", "plain")
PLAIN_ROWS = (1, 4, 8, 16, 2, 32, 64)
VERIFY_ROWS = (1, 4, 8)
WIDTHS = (1, 2, 3, 5, 8)
ANSWER_ROWS = (1, 4, 8)
GOALS = {0.6: (1.05, 1.6, 1.8), 0.8: (1.6, 2.4, 2.8), None: (0.98, 0.98, 0.98)}  # by rows
LEARNING = 6  # runs before the gate is measured: it tries widths as it can afford them
ROUNDS = 2  # with and without drafts
MAX_GB = 60  # of keys and values
STEPS = 8
MEMORY_BYTES = 8 << 30  # so that only first answers wait for their prompts
STRIDE = 7919  # from a token of the scripted text to the next


# Steps of caches


class Caches:
    """Batches of random keys and values; rows of two lengths, as in use."""

    def __init__(self, model: Any, shape: Mapping[str, Any], context: int) -> None:
        self.model = model
        self.context = context
        self._heads, self._size = shape["num_key_value_heads"], shape["head_dim"]
        self.dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32

    def gigabytes(self, n_rows: int) -> float:
        row = sum(self._n_kept(cache) for cache in kv.make_caches(self.model))
        return float(2 * n_rows * row * self._heads * self._size * self.dtype.size / 1e9)

    def _n_kept(self, cache: Any) -> int:
        return min(self.context, getattr(cache, "max_size", None) or self.context)

    def one(self, n_tokens: int) -> kv.Caches:
        caches = kv.make_caches(self.model)
        for cache in caches:
            shape = (1, self._heads, n_tokens, self._size)
            keys, values = (mx.random.normal(shape).astype(self.dtype) for _ in range(2))
            cache.update_and_fetch(keys, values)
        return kv.evaluate(caches)

    def batch(self, n_rows: int, *, own_ends: bool) -> kv.Caches:
        """Copies of two rows."""
        rows = [self.one(self.context - n) for n in range(min(2, n_rows))]
        batch = kv.merge(rows, own_ends=own_ends)
        kv.filter_rows(batch, [i % len(rows) for i in range(n_rows)])
        return kv.evaluate(batch)


class StepTimes(NamedTuple):
    ms: float  # as the engine runs steps: the next is enqueued before this one's tokens are read
    host_ms: float  # of it to build and enqueue one
    apart_ms: float  # one step after the other
    more_gb: float  # than before, at most: a buffer that a step in flight uses is copied


def step_times(model: Any, caches: kv.Caches, n_rows: int, width: int = 1) -> StepTimes:
    """Of one token a row; with `width` of two, a second is fed and taken back."""
    rest = mx.zeros((n_rows, width - 1), mx.int32)

    def step(tokens: mx.array) -> mx.array:
        fed = mx.concatenate([tokens, rest], axis=1) if width > 1 else tokens
        following = mx.argmax(model(fed, cache=caches)[:, :1], axis=-1)
        if width > 1:
            kv.trim(caches, [width - 1] * n_rows)
        mx.async_eval(following)
        return following

    tokens = step(mx.ones((n_rows, 1), mx.int32))
    mx.eval(tokens)
    apart = median_ms(lambda: mx.eval(step(tokens)))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    times, host = [], []
    for _ in range(STEPS + 3):
        began = time.perf_counter()
        following = step(tokens)
        host.append(1000 * (time.perf_counter() - began))
        tokens.tolist()
        tokens = following
        times.append(1000 * (time.perf_counter() - began))
    mx.eval(tokens)
    more_gb = (mx.get_peak_memory() - before) / 1e9
    return StepTimes(*(round(x, 2) for x in (median(times[3:]), median(host[3:]), apart, more_gb)))


def plain_times(caches: Caches, n_rows: int) -> dict[str, Any]:
    """A step by class, twice in turn: the faster one counts."""
    if caches.gigabytes(n_rows) > MAX_GB:
        return {"skipped": f"{caches.gigabytes(n_rows):.0f} GB of keys and values"}
    rows = partial(caches.batch, n_rows, own_ends=True)
    ways = {
        "mlx-lm": (partial(caches.batch, n_rows, own_ends=False), 1),
        "rows": (rows, 1),
        "rows, two tokens": (rows, 2),
    }
    if n_rows == 1:
        ways["alone"] = partial(caches.one, caches.context), 1
    times: dict[str, list[StepTimes]] = {name: [] for name in ways}
    for name in [*ways, *reversed(ways)]:
        make, width = ways[name]
        times[name].append(step_times(caches.model, make(), n_rows, width))
        mx.clear_cache()
    best = {name: min(found) for name, found in times.items()}
    base = best.get("alone", best["mlx-lm"]).ms
    found: dict[str, Any] = {name: one._asdict() for name, one in best.items()}
    found["rows, times as fast"] = round(base / best["rows"].ms, 2)
    note(f"plain, context {caches.context}, rows {n_rows}", found)
    return found


def verify_times(caches: Caches, n_rows: int) -> dict[str, Any]:
    """Milliseconds of a step by tokens a row; all but one of them are taken back."""
    batch = caches.batch(n_rows, own_ends=True)

    def step(width: int) -> None:
        mx.eval(mx.argmax(caches.model(mx.ones((n_rows, width), mx.int32), cache=batch), axis=-1))
        kv.trim(batch, [width - 1] * n_rows)

    found = {width: round(median_ms(partial(step, width)), 2) for width in WIDTHS}
    ratios = {width: round(ms / found[1], 2) for width, ms in found.items()}
    mx.clear_cache()
    note(f"verify, context {caches.context}, rows {n_rows}, ms", found)
    return {"ms": found, "times one": ratios}


# Answers


class ScriptedModel:
    """A model whose every step costs what it costs, and whose next token is known."""

    def __init__(self, module: Any, n_vocab: int) -> None:
        self._module = module
        self._n_vocab = n_vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, tokens: mx.array, cache: Any = None, **given: Any) -> mx.array:
        logits = self._module(tokens, cache=cache, **given)
        following = (tokens.astype(mx.int32) + STRIDE) % self._n_vocab
        high = mx.full((*tokens.shape, 1), 1e4, logits.dtype)
        return mx.put_along_axis(logits, following[..., None], high, axis=-1)


class KnownText(SeenTexts):
    """Drafts of a text that is known; each token is right with a probability of its own."""

    def __init__(self, text: Sequence[int], right: float) -> None:
        super().__init__(())
        self._text = text
        self._right = right
        self._n_seen = 0
        self._dice = np.random.default_rng(len(text))

    def append(self, token: int) -> None:
        del token
        self._n_seen += 1

    def propose(self) -> Proposal | None:
        following = self._text[self._n_seen : self._n_seen + MAX_DRAFT]
        is_right = self._dice.random(len(following)) < self._right
        tokens = [t if right else t ^ 1 for t, right in zip(following, is_right, strict=True)]
        return Proposal(MIN_MATCH, tokens) if tokens else None


class NotedCosts(StepCosts):
    """Remembers what every step with drafts took, by tokens a row."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[int, list[float]] = {}

    def saw(self, size: BatchSize, width: int, seconds: float) -> None:
        super().saw(size, width, seconds)
        self.noted.setdefault(width, []).append(1000 * seconds)

    def table(self) -> dict[int, list[float]]:
        """By width: how many, the first, which may compile kernels, and the median, ms."""
        return {
            width: [len(times), round(times[0], 1), round(median(times), 1)]
            for width, times in sorted(self.noted.items())
        }


class Answers:
    """Whole answers of a model, through an engine with and one without drafts."""

    def __init__(self, model: Model, folder: Path, n_prompt: int, n_tokens: int) -> None:
        self.model = model
        self.n_vocab = model.config["vocab_size"]
        self.scripted = replace(model, module=ScriptedModel(model.module, self.n_vocab))
        self._folder = folder
        self._n_prompt = n_prompt
        self._n_tokens = n_tokens

    @contextmanager
    def engine(self, model: Model, speculation: str) -> Iterator[Engine]:
        """Its rows may share a batch, which was tried before."""
        settings = config.load({"KEEPWARM_HOME": str(self._folder)}, speculation=speculation)
        budgets = Budgets(memory_bytes=MEMORY_BYTES, disk=False)
        with (
            Store(budgets=budgets, settings=settings) as store,
            Engine(model, store, settings=settings) as engine,
        ):
            sharing = engine.lane_of().sharing
            while not sharing.is_decided:
                engine.call(sharing.step).result()
            yield engine

    def requests(self, n_rows: int, *engines: Engine) -> list[Request]:
        """Their prompts are warm. No answer is kept: it would be a draft of the same one again."""
        dice = np.random.default_rng(n_rows)
        requests = [
            Request(
                prompt=dice.integers(10, self.n_vocab - 10, self._n_prompt).tolist(),
                sampling=Sampling(max_tokens=self._n_tokens, temperature=0),
                policy=Policy.READ_ONLY,
            )
            for _ in range(n_rows)
        ]
        for engine in engines:
            run(engine, [replace(r, policy=Policy.READ_WRITE) for r in _unanswered(requests)])
        return requests

    def speed(self, n_rows: int) -> dict[str, Any]:
        """Times as fast with drafts as without, by how often a drafted token is right."""
        found: dict[str, Any] = {}
        with self.engine(self.scripted, "off") as plain, self.engine(self.scripted, "auto") as fast:
            requests = self.requests(n_rows, plain, fast)
            run(plain, requests)
            costs = _note_costs(fast)
            for right, goals in GOALS.items():
                _set_source(fast, SeenTexts if right is None else partial(self._known_text, right))
                learning = [_per_step(run(fast, requests)) for _ in range(LEARNING)]
                on, off = [], []
                for _ in range(ROUNDS):
                    on.append(rate_of(fast, requests))
                    off.append(rate_of(plain, requests)[0])
                name = "nothing to draft" if right is None else f"right {right}"
                rates = [rate for rate, _ in on]
                found[name] = {
                    "times": round(sum(rates) / sum(off), 2),
                    "goal": goals[ANSWER_ROWS.index(n_rows)],
                    "tokens/s": [round(rate) for rate in rates],
                    "off, tokens/s": [round(rate) for rate in off],
                    "tokens a step": [_per_step(results) for _, results in on],
                    "while learning": learning,
                }
                note(f"answers, rows {n_rows}, {name}", found[name])
        found["steps"] = note(f"answers, rows {n_rows}, steps, first ms, median", costs.table())
        return found

    def _known_text(self, right: float, prompt: Sequence[int], _: Others) -> KnownText:
        numbers = range(1, self._n_tokens + 1)
        return KnownText([(prompt[-1] + STRIDE * i) % self.n_vocab for i in numbers], right)

    def agreement(self) -> dict[str, Any]:
        """Tokens of the unscripted model before the first that differs."""
        with self.engine(self.model, "off") as plain, self.engine(self.model, "auto") as fast:
            requests = self.requests(4, plain, fast)
            together, again = (_tokens(run(plain, requests)) for _ in range(2))
            known = {
                tuple(r.prompt or ()): text for r, text in zip(requests, together, strict=True)
            }
            _set_source(fast, lambda prompt, _: KnownText(known[tuple(prompt)], 0.8))
            for _ in range(LEARNING):
                run(fast, requests)
            drafted = run(fast, requests)
            alone = [result for request in requests for result in run(plain, [request])]
        found = {
            "with drafts and without": _agree(_tokens(drafted), together),
            "alone and in a batch of 4": _agree(_tokens(alone), together),
            "the same again": _agree(again, together),
            "tokens a step": _per_step(drafted),
        }
        note("agreement", found)
        return found


def _set_source(engine: Engine, source: Callable[[Sequence[int], Others], SeenTexts]) -> None:
    gate = engine.lane_of().gate
    assert gate is not None
    gate.source = source


def _note_costs(engine: Engine) -> NotedCosts:
    """From now on, with nothing known."""
    gate, costs = engine.lane_of().gate, NotedCosts()
    assert gate is not None
    gate.costs = costs
    return costs


def _unanswered(requests: Sequence[Request]) -> list[Request]:
    return [replace(r, sampling=replace(r.sampling, max_tokens=1)) for r in requests]


def run(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    answers = [engine.submit(request) for request in requests]
    return [answer.result() for answer in answers]


def rate_of(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Result]]:
    """Tokens a second while all rows decode: from the last one's first token to the first end."""
    answers = [engine.submit(request) for request in requests]
    for answer in answers:
        next(event for event in answer if isinstance(event, Delta))
    began, n_before = time.perf_counter(), engine.ledger.counters()["generated_tokens"]
    with ThreadPoolExecutor(len(answers)) as readers:
        reading = [readers.submit(answer.result) for answer in answers]
        wait(reading, return_when=FIRST_COMPLETED)
        seconds = time.perf_counter() - began
        n_tokens = engine.ledger.counters()["generated_tokens"] - n_before
    return float(n_tokens / seconds), [one.result() for one in reading]


def _per_step(results: Sequence[Result]) -> float:
    """Tokens of a row."""
    counts = [result.receipt.speculation or {} for result in results]
    return round(1 + sum(c["accepted"] for c in counts) / sum(c["steps"] for c in counts), 2)


def _tokens(results: Sequence[Result]) -> list[list[int]]:
    return [[info.token for info in result.choices[0].tokens] for result in results]


def _agree(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    n_same = sum(
        next(
            (i for i, pair in enumerate(zip(*both, strict=True)) if len(set(pair)) > 1),
            len(both[0]),
        )
        for both in zip(ones, others, strict=True)
    )
    return f"{n_same} of {sum(map(len, others))}"


# The program


def measure(
    report: Report,
    folder: Path,
    shapes: Sequence[str],
    contexts: Sequence[int],
    parts: Sequence[str],
) -> None:
    """One shape after the other: what does not fit into the time is of the last."""
    for shape in shapes:
        started: list[Model] = []
        report.stage(f"{shape}: model", partial(start, shape, folder, started.append))
        for model in started:
            if shape == shapes[0] and "answers" in parts:
                measure_answers(report, folder, model)
            for context in contexts:
                caches = Caches(model.module, SHAPES[shape], context)
                measure_steps(report, shape, caches, parts)


def start(shape: str, folder: Path, use: Callable[[Model], None]) -> dict[str, Any]:
    """`use` gets the model."""
    model = build(shape, folder)
    began, trials = time.perf_counter(), row_products.speed_up(model.module, folder)
    if trials:
        list(trials.run())
    use(replace(model, tokenizer=make_tokenizer(shape, folder / f"{shape}-words")))
    seconds = round(time.perf_counter() - began, 1)
    found = {"products tried": trials.n_all if trials else 0, "seconds": seconds}
    return dict(note(f"{shape}: ready", found))


def measure_answers(report: Report, folder: Path, model: Model) -> None:
    answers = Answers(model, folder, *((40, 40) if model.n_context <= 8192 else (1024, 128)))
    for n_rows in ANSWER_ROWS:
        report.stage(f"{model.name}: answers", partial(answers.speed, n_rows), n_rows)
    report.stage(f"{model.name}: agreement", answers.agreement)


def measure_steps(report: Report, shape: str, caches: Caches, parts: Sequence[str]) -> None:
    ways = {"verify": (verify_times, VERIFY_ROWS), "plain": (plain_times, PLAIN_ROWS)}
    for part in (part for part in ways if part in parts):
        times, row_numbers = ways[part]
        for n_rows in row_numbers:
            name = f"{shape}: {part}, context {caches.context}"
            report.stage(name, partial(times, caches, n_rows), n_rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows", description=__doc__)
    parser.add_argument("--shapes", default="llama-8b,gemma-3-12b", help="the first one answers")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a check that it runs")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; later stages wait")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shapes = "tiny,tiny-windows" if given.tiny else given.shapes
    report = Report(given.json, given.budget)
    with unwound_by_signals(), tempfile.TemporaryDirectory() as folder:
        contexts = (64,) if given.tiny else (1024, 8192)
        measure(report, Path(folder), shapes.split(","), contexts, given.only)
    print("failed stages:", report.failed or "none", flush=True)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
