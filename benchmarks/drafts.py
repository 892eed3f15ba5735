"""What drafts are worth: the same answers with and without them, in turn.

`python -m benchmarks.drafts [MODEL]`. By default the small trained model of the repository, which
copies as large models do. Requests run alone and then four at a time, greedy and sampled. Every
answer is compared: a draft must not change it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import keepwarm
from keepwarm import blas, config
from keepwarm.models.load import Model, load
from keepwarm.text.request import Request, Result, Sampling

MODEL = Path(__file__).parent / "models" / "attention"
CODE = """def load(path):
    with open(path) as f:
        data = json.load(f)
    result = []
    for item in data["items"]:
        result.append(item["name"])
    return result
"""
ASKED = {
    "copy": f"Copy this text exactly:\n{3 * CODE}",
    "edit": f"Rename this function to load_names and change nothing else:\n{CODE}",
    "records": "Repeat these lines:\n" + "\n".join(f'{{"id": {i}, "ok": true}}' for i in range(9)),
    "prose": "Why is the sky blue? Answer in three sentences.",
}
SAMPLINGS = {"greedy": 0.0, "sampled": 0.8}


class Measured(NamedTuple):
    seconds: float
    results: list[Result]


class Trial(NamedTuple):
    """What is asked, at the same time, and how."""

    asked: list[str]
    temperature: float
    n_tokens: int


def run(model: Model, speculation: str, trial: Trial) -> Measured:
    """In an engine and a store of its own, after answers that are not measured."""
    with tempfile.TemporaryDirectory() as home:
        settings = config.load({"KEEPWARM_HOME": home}, speculation=speculation)
        sampling = Sampling(max_tokens=trial.n_tokens, temperature=trial.temperature, seed=7)
        requests = [
            Request(messages=[{"role": "user", "content": text}], sampling=sampling)
            for text in trial.asked
        ]
        with (
            keepwarm.Store(settings=settings) as store,
            keepwarm.Engine(model, store, settings=settings) as engine,
        ):
            for _ in range(2):  # prompts become warm, the model is tried, costs are learned
                for request in requests:
                    engine.submit(request).result()
                while speculation == "auto" and engine.lane_of().sharing.allowed is None:
                    time.sleep(0.01)
            began = time.perf_counter()
            results = [answer.result() for answer in [engine.submit(one) for one in requests]]
            return Measured(time.perf_counter() - began, results)


def compare(model: Model, trial: Trial, n_turns: int) -> str:
    """How many times faster, tokens a step, and whether any answer differs."""
    ratios, n_different, counts = [], 0, {"steps": 0, "drafted": 0, "accepted": 0}
    for _ in range(n_turns):
        off, on = (run(model, which, trial) for which in ("off", "auto"))
        ratios.append(off.seconds / on.seconds)
        pairs = zip(off.results, on.results, strict=True)
        n_different += sum(a.choices[0].text != b.choices[0].text for a, b in pairs)
        for result in on.results:
            for key, number in (result.receipt.speculation or {}).items():
                counts[key] += number
    per_step = 1 + counts["accepted"] / max(1, counts["steps"])
    hit_rate = counts["accepted"] / max(1, counts["drafted"])
    return (
        f"{median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast, "
        f"{per_step:.2f} tokens a step, {hit_rate:4.0%} of drafted right, {n_different} different"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    blas.start()
    model = load(given.model, config.load({}, home=None))
    for sampling, temperature in SAMPLINGS.items():
        for name, asked in {
            **{k: [v] for k, v in ASKED.items()},
            "all four": [*ASKED.values()],
        }.items():
            trial = Trial(asked, temperature, given.tokens)
            print(f"{name + ', ' + sampling:20}", compare(model, trial, given.turns), flush=True)


if __name__ == "__main__":
    main()
