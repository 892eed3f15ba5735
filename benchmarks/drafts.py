"""What drafts are worth: the same answers with and without them, in turn.

`python -m benchmarks.drafts [MODEL]` asks a model for turns of the transcripts
(benchmarks/transcripts), each behind the messages that came before it. What it says is its own.
With `--scripted` it says what the transcript says, and its steps cost what they cost. By default
the small trained model of the repository, which copies as large models do.

Time is what a client sees of a turn whose prompt is warm. Every answer is compared: a draft must
not change it. None is kept: the second of the two would be drafted from the first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

import keepwarm
from benchmarks.gate import HERE, KINDS, TRANSCRIPTS, read
from keepwarm import blas, config
from keepwarm.models.load import Model, load
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Message, Request, Result, Sampling

MODEL = HERE / "models" / "attention"


class Turn(NamedTuple):
    """What is asked, and what the transcript answers."""

    kind: str
    messages: Sequence[Message]
    answer: str


def turns(kind: str, n: int, n_characters: int) -> list[Turn]:
    """Of one kind, evenly spread over all transcripts, with the messages since the user's latest;
    those with no more characters.
    """
    found = []
    for name in TRANSCRIPTS:
        messages = read(name)
        for i, message in enumerate(messages):
            if message.get("kind") == kind:
                found.append(Turn(kind, _before(messages, i), message["content"]))
    fitting = [turn for turn in found if _n_characters(turn.messages) <= n_characters]
    return fitting[:: max(1, len(fitting) // n)][:n]


def _before(messages: Sequence[Message], i: int) -> list[Message]:
    start = max(k for k in range(i) if messages[k]["role"] == "user")
    return [{"role": m["role"], "content": m["content"]} for m in messages[start:i]]


def _n_characters(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


class ScriptedModel:
    """A model whose every step costs what it costs, and whose next tokens are given."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.tokens: list[int] = []  # of the prompt and the answer, once they are known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _call(self, tokens: mx.array, cache: Any, given: dict[str, Any]) -> mx.array:
        logits: mx.array = self._module(tokens, cache=cache, **given)
        return logits

    def __call__(self, tokens: mx.array, cache: Any = None, **given: Any) -> mx.array:
        if not self.tokens:
            return self._call(tokens, cache, given)
        offset: Any = mx.array(cache[0].offset).item()
        start, n = offset + 1, tokens.shape[1]
        logits = self._call(tokens, cache, given)
        following = [*self.tokens[start : start + n], *[0] * n][:n]
        high = mx.full((1, n, 1), 1e4, logits.dtype)
        return mx.put_along_axis(logits, mx.array(following)[None, :, None], high, axis=-1)


class Measured(NamedTuple):
    seconds: float
    cpu_seconds: float
    result: Result

    @property
    def tokens(self) -> list[int]:
        return [info.token for info in self.result.choices[0].tokens]


def measure(engine: keepwarm.Engine, request: Request) -> Measured:
    began, cpu_began = time.perf_counter(), time.process_time()
    result = engine.submit(request).result()
    return Measured(time.perf_counter() - began, time.process_time() - cpu_began, result)


@dataclass
class Compared:
    """Answers with and without drafts."""

    off: list[Measured] = field(default_factory=list)
    on: list[Measured] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for one in self.on:
            counts.update(one.result.receipt.speculation or {})
        pairs = list(zip(self.off, self.on, strict=True))
        ratios = sorted(a.cpu_seconds / max(1e-9, b.cpu_seconds) for a, b in pairs)
        return {
            "times": _ratio([m.seconds for m in self.off], [m.seconds for m in self.on]),
            "times, CPU": _ratio(
                [m.cpu_seconds for m in self.off], [m.cpu_seconds for m in self.on]
            ),
            "lowest": round(ratios[0], 2),  # of one turn
            "highest": round(ratios[-1], 2),
            "tokens a step": round(1 + counts["accepted"] / max(1, counts["steps"]), 2),
            "drafted": counts["drafted"],
            "right": round(counts["accepted"] / max(1, counts["drafted"]), 2),
            "tokens": sum(len(one.tokens) for one in self.on),
            "answers": len(pairs),
            "different": sum(a.tokens != b.tokens for a, b in pairs),
        }


def _ratio(off: Sequence[float], on: Sequence[float]) -> float:
    return round(sum(off) / max(1e-9, sum(on)), 2)


@dataclass
class Trial:
    """How answers are asked for."""

    n_tokens: int = 96
    temperature: float = 0.0
    scripted: bool = False

    def request(self, turn: Turn) -> Request:
        sampling = Sampling(max_tokens=self.n_tokens, temperature=self.temperature, seed=7)
        return Request(messages=turn.messages, sampling=sampling, policy=Policy.READ_ONLY)


def compare(model: Model, trial: Trial, asked: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """Figures by kind of turn. Whether drafts come first changes from one of a kind to the next."""
    script = ScriptedModel(model.module)
    used = replace(model, module=script) if trial.scripted else model
    found: dict[str, Compared] = {}
    with engine_of(used) as engine:
        for turn in asked:
            on = trial.request(turn)
            if trial.scripted:
                prompt = engine.prepare(on).tokens
                script.tokens = [*prompt, *model.tokenizer.encode(turn.answer), 0]
            both = [on, replace(on, speculation=False)]
            prompt_only = replace(both[1], sampling=replace(on.sampling, max_tokens=1))
            engine.submit(replace(prompt_only, policy=Policy.READ_WRITE)).result()  # warm from now
            compared = found.setdefault(turn.kind, Compared())
            is_odd = len(compared.on) % 2
            measured = [measure(engine, request) for request in both[:: 1 if is_odd else -1]]
            for one in measured:
                is_on = one.result.receipt.speculation is not None
                (compared.on if is_on else compared.off).append(one)
    return {kind: compared.figures() for kind, compared in found.items()}


@contextmanager
def engine_of(model: Model) -> Iterator[keepwarm.Engine]:
    """In a store of its own, after the model was tried."""
    with tempfile.TemporaryDirectory() as home:
        settings = config.load({"KEEPWARM_HOME": home}, speculation="auto")
        with (
            keepwarm.Store(settings=settings) as store,
            keepwarm.Engine(model, store, settings=settings) as engine,
        ):
            sharing = engine.lane_of().sharing
            while not sharing.is_decided:
                engine.call(sharing.step).result()
            yield engine


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--turns", type=int, default=6, help="of each kind")
    parser.add_argument("--characters", type=int, default=8000, help="of a prompt, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    blas.start()
    model = load(given.model, config.load({}, home=None))
    # In turn, so that what others do on the machine meets all kinds alike.
    by_kind = [turns(kind, given.turns, given.characters) for kind in KINDS]
    asked = [turn for some in zip(*by_kind, strict=False) for turn in some]
    found = compare(model, Trial(given.tokens, given.temperature, given.scripted), asked)
    for kind, figures in found.items():
        print(f"{kind:6}", ", ".join(f"{name} {figure}" for name, figure in figures.items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
