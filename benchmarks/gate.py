"""What drafts are worth on transcripts, where the cost of a step is known.

`python -m benchmarks.gate [--json FILE]`. The answers of three transcripts (benchmarks/transcripts)
are given; drafts, hit rates and the gate are the engine's own, only the device is not there: a step
costs what was published for it, with noise. So the figures are bounds: no host time is in them.

Then what a model with states could gain, which takes nothing back: it would feed the right tokens
again, from the state before the step. And tokens a step if every draft is fed: ours, those of
llama.cpp's `ngram-simple`, written anew from its documentation, and those that a schema forces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer

from keepwarm.engine.drafts import (
    MAX_DRAFT,
    MAX_MATCH,
    BatchSize,
    DraftGate,
    Others,
    Proposal,
    RowDrafts,
)
from keepwarm.prefix.blocks import as_text
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text.grammar import GrammarMatcher, Grammars
from keepwarm.text.request import Format
from keepwarm.text.rewritten import rewritten

HERE = Path(__file__).parent
TRANSCRIPTS = ("edits", "writes", "prose")
KINDS = ("tool", "edit", "write", "prose")
# A step of one row by its tokens, against one of one token. M4 Pro: a product of 5,120 x 17,408
# weights of 4 bits (MLX issue 3852). M5 Max: a whole pass of 70B (MLX issue 3791). An M1 reads the
# weights again for every token. The CPU: smollm2 with MKL, two cores.
CURVES: dict[str, dict[int, float]] = {
    "M1": {1: 1.0, 2: 2.0, 16: 16.0},
    "M4 Pro": {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 12: 4.5, 16: 5.9},
    "M5 Max": {1: 1.0, 3: 1.11, 5: 1.42, 8: 2.2, 11: 3.2, 16: 3.9},
    "CPU": {1: 1.0, 2: 1.28, 4: 1.96, 8: 2.42, 16: 3.4},
}
NOISE = 0.05
N_RECORDS = 8
RECORD = {
    "type": "object",
    "properties": {
        "subject": {"type": "string"},
        "text_length": {"type": "integer"},
        "needs_review": {"type": "boolean"},
        "author_role": {"enum": ["user", "assistant", "tool"]},
    },
    "required": ["subject", "text_length", "needs_review", "author_role"],
}
NGRAM_SIZES = (12, 3)  # llama.cpp's default, and our shortest match
LEAST = 0.98  # times as fast, of anything on any device
CPU_GOALS = {"tool": 1.4, "edit": 1.4, "write": 1.4}


@dataclass
class Spent:
    """On answers of one kind; seconds in plain steps."""

    n_tokens: int = 0
    n_steps: int = 0
    seconds: float = 0.0


@dataclass
class Device:
    """Runs one row; each step costs what the curve says."""

    curve: dict[int, float]
    replays: bool = False  # what is right is fed again, if not all of a draft was
    always: bool = False  # feeds every draft
    recent: RecentPrompts = field(default_factory=RecentPrompts)
    spent: dict[str, Spent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = DraftGate(self.recent)
        self._dice = np.random.default_rng(0)

    def cost(self, width: int) -> float:
        return float(np.interp(width, list(self.curve), list(self.curve.values())))

    def answer(
        self,
        drafts: RowDrafts,
        n_prompt: int,
        answer: Sequence[int],
        kind: str,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        spent, done = self.spent.setdefault(kind, Spent()), 0
        while done < len(answer):
            size = BatchSize(1, n_prompt + done)
            may_search = self.always or self.gate.may_search(size)
            proposal = drafts.propose(grammar.fitted if grammar else list) if may_search else None
            width = 1 + MAX_DRAFT if self.always else self.gate.width([proposal], size)
            draft = proposal.tokens[: width - 1] if proposal else ()
            n_right = _n_common(draft, answer[done:-1])
            for token in answer[done : done + n_right + 1]:
                drafts.saw(token)
                if grammar:
                    grammar.advance(token)
            n_again = 1 + n_right if self.replays and n_right < len(draft) else 0
            cost = self.cost(1 + len(draft)) + (self.cost(n_again) if n_again else 0)
            noisy = cost * (1 + NOISE * abs(self._dice.standard_normal()))
            self.gate.saw_step(size, 1 + len(draft), n_right, noisy, n_again)
            done += n_right + 1
            spent.n_steps += 1
            spent.seconds += cost
        spent.n_tokens += len(answer)


class NgramSimple:
    """llama.cpp's simplest rule: what followed the last place with the same `n` tokens."""

    def __init__(self, n: int, tokens: Sequence[int], _: Others) -> None:
        self._n = n
        self._text = as_text(tokens)

    def append(self, token: int) -> None:
        self._text += chr(token)

    def propose(self) -> Proposal | None:
        found = self._text.rfind(self._text[-self._n :], 0, -1)
        following = self._text[found + self._n :][:MAX_DRAFT]
        return Proposal(MAX_MATCH, list(map(ord, following))) if found >= 0 else None


def _n_common(draft: Sequence[int], following: Sequence[int]) -> int:
    pairs = enumerate(zip(draft, following, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(draft), len(following)))


def play(device: Device, messages: Sequence[dict[str, Any]], tokenizer: Any, *, own: bool) -> None:
    """A transcript; with `own` drafts come from the conversation itself alone."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    tokens: list[int] = []
    results: list[list[int]] = []  # as calls would write them back, the latest first
    for message in messages:
        text = encode(message["content"])
        tokens += encode(f"\n{message['role']}:\n")
        if message["role"] == "assistant":
            some = ([], None) if own else (results, "tenant")
            drafts = device.gate.drafts_for(tokens, *some)
            device.answer(drafts, len(tokens), text, message["kind"])
        results = [*map(encode, rewritten([message], as_json=True)), *results]
        tokens += text
        device.recent.remember("tenant", tokens)


def read(name: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads((HERE / f"transcripts/{name}.json").read_text())
    return messages


def measure(device: Device, *, own: bool = False) -> dict[str, dict[str, float]]:
    """Times as fast and tokens a step, by kind of answer; all transcripts one after the other."""
    tokenizer = load_tokenizer(HERE / "models/attention")
    for name in TRANSCRIPTS:
        play(device, read(name), tokenizer, own=own)
    return {
        kind: {
            "times": round(spent.n_tokens / spent.seconds, 3),
            "tokens a step": round(spent.n_tokens / spent.n_steps, 2),
            "tokens": spent.n_tokens,
        }
        for kind, spent in device.spent.items()
    }


def structured(*, forced: bool, seen: bool) -> float:
    """Tokens a step of short JSON answers by one schema, `seen` in one conversation."""
    tokenizer = load_tokenizer(HERE / "models/attention")
    grammars = Grammars(tokenizer, len(tokenizer.vocab), tokenizer.eos_token_ids)
    device, tokens = Device(CURVES["CPU"], always=True), list[int]()
    for message in read("edits")[: 4 * N_RECORDS : 4]:
        record = {"subject": message["content"][:20], "text_length": len(message["content"])}
        record |= {"needs_review": message["role"] == "tool", "author_role": message["role"]}
        answer = tokenizer.encode(json.dumps(record), add_special_tokens=False)
        drafts = device.gate.drafts_for(tokens if seen else (), [], None)
        grammar = grammars.compile(Format(schema=RECORD)) if forced else None
        device.answer(drafts, len(tokens), answer, "records", grammar)
        tokens += answer
    spent = device.spent["records"]
    return round(spent.n_tokens / spent.n_steps, 2)


def missed(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """The goals that are not reached."""
    return [
        f"{curve}, {kind}: {figures['times']}"
        for curve, kinds in found.items()
        for kind, figures in kinds.items()
        if figures["times"] < max(LEAST, CPU_GOALS.get(kind, 0) if curve == "CPU" else 0)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = {name: measure(Device(curve)) for name, curve in CURVES.items()}
    for name, curve in CURVES.items():
        found[f"{name}, states"] = measure(Device(curve, replays=True))
    others = {"CPU, the conversation alone": measure(Device(CURVES["CPU"]), own=True)}
    others["every draft fed"] = measure(Device(CURVES["CPU"], always=True))
    others["the conversation's alone"] = measure(Device(CURVES["CPU"], always=True), own=True)
    for n in NGRAM_SIZES:
        device = Device(CURVES["CPU"], always=True)
        device.gate.source = partial(NgramSimple, n)
        others[f"llama.cpp's rule, n = {n}"] = measure(device, own=True)
    print(f"{'times as fast · tokens a step':<32}", *(f"{kind:>12}" for kind in KINDS))
    for name, kinds in {**found, **others}.items():
        cells = (f"{kinds[k]['times']:.2f} · {kinds[k]['tokens a step']:.2f}" for k in KINDS)
        print(f"{name:<32}", *(f"{cell:>12}" for cell in cells))
    for forced, seen in ((False, False), (True, False), (False, True), (True, True)):
        figure = structured(forced=forced, seen=seen)
        print(f"records, schema {forced}, earlier ones {seen}: {figure} tokens a step")
    if given.json:
        given.json.write_text(json.dumps({**found, **others}, indent=1) + "\n")
    if short := missed(found):
        sys.exit("missed: " + "; ".join(short))


if __name__ == "__main__":
    main()
