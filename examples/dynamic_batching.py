"""Dynamic batching: sequences join and leave while the others go on.

    python examples/dynamic_batching.py [--model NAME]

A new sequence is read alone and joins the running batch with `extend`; one that has ended leaves
with `filter_rows`. Neither changes a token of the rest.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import keepwarm
from keepwarm import kv  # before mlx.core: the first import of that fixes the BLAS

# isort: split
import mlx.core as mx


class Job(NamedTuple):
    name: str
    text: str
    arrives: int  # the step at which it joins
    n: int  # tokens to make


JOBS = (
    Job("A", "The quick brown fox jumps over the lazy", 0, 9),
    Job("B", "In 1984 there were 365 days, 12 months and", 0, 4),
    Job("C", "The dog sleeps", 2, 5),
    Job("D", "What is the answer to the question that", 6, 4),
)


def serve(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """The answer of every job, all from one batch that they join when they arrive."""
    made: dict[str, list[int]] = {job.name: [] for job in JOBS}
    batch: kv.Caches = []
    running: list[Job] = []
    for step in range(max(job.arrives + job.n for job in JOBS)):
        for job in JOBS:
            if job.arrives == step:
                caches, first = read(model, tokenizer.encode(job.text))
                made[job.name].append(first)
                batch = join(batch, caches)
                running.append(job)
        stay = [row for row, job in enumerate(running) if len(made[job.name]) < job.n]
        running = [running[row] for row in stay]
        print(f"step {step}: {' '.join(job.name for job in running) or 'nobody'}")
        if not running:
            batch = []
            continue
        kv.filter_rows(batch, stay)
        newest = mx.array([made[job.name][-1:] for job in running])
        for job, token in zip(running, best(model(newest, cache=batch)), strict=True):
            made[job.name].append(token)
    return made


def join(batch: kv.Caches, caches: kv.Caches) -> kv.Caches:
    """The batch with one more row."""
    row = kv.merge([caches])
    if not batch:
        return row
    kv.extend(batch, row)
    return batch


def read(model: Any, tokens: list[int]) -> tuple[kv.Caches, int]:
    """Caches of one sequence, and the token that follows it."""
    caches = kv.make_caches(model)
    return caches, best(model(mx.array([tokens]), cache=caches))[0]


def best(logits: mx.array) -> list[int]:
    tokens: Any = mx.argmax(logits[:, -1], axis=-1).tolist()
    return list(tokens)


def alone(model: Any, tokens: list[int], n: int) -> list[int]:
    caches, token = read(model, tokens)
    made = [token]
    while len(made) < n:
        made += best(model(mx.array([made[-1:]]), cache=caches))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    model = keepwarm.load(parser.parse_args().model)
    made = serve(model.module, model.tokenizer)
    for job in JOBS:
        tokens = model.tokenizer.encode(job.text)
        print(f"{job.name}: {model.tokenizer.decode(made[job.name])!r}")
        print(f"  same as alone: {alone(model.module, tokens, job.n) == made[job.name]}")


if __name__ == "__main__":
    main()
