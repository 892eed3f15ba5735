"""Dynamic batching: sequences join and leave the batch while others continue.

    python examples/dynamic_batching.py [--model NAME]

A new sequence is prefilled alone and joins the running batch with `extend`; a finished one leaves
with `filter_rows`. Neither changes a token of the others.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import keepwarm
from keepwarm import kv  # before mlx.core, so that a fast BLAS can be loaded for it

# isort: split
import mlx.core as mx


class Job(NamedTuple):
    name: str
    text: str
    arrives: int  # the step at which it joins
    n: int  # tokens to generate


JOBS = (
    Job("A", "The quick brown fox jumps over the lazy", 0, 9),
    Job("B", "In 1984 there were 365 days, 12 months and", 0, 4),
    Job("C", "The dog sleeps", 2, 5),
    Job("D", "What is the answer to the question that", 6, 4),
)


def serve(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """The tokens of every job, from one batch that each job joins when it arrives."""
    generated: dict[str, list[int]] = {job.name: [] for job in JOBS}
    batch: kv.Caches = []
    running: list[Job] = []
    for step in range(max(job.arrives + job.n for job in JOBS)):
        for job in JOBS:
            if job.arrives == step:
                caches, first = prefill(model, tokenizer.encode(job.text))
                generated[job.name].append(first)
                batch = join(batch, caches)
                running.append(job)
        stay = [row for row, job in enumerate(running) if len(generated[job.name]) < job.n]
        running = [running[row] for row in stay]
        print(f"step {step}: {' '.join(job.name for job in running) or 'idle'}")
        if not running:
            batch = []
            continue
        kv.filter_rows(batch, stay)
        newest = mx.array([generated[job.name][-1:] for job in running])
        for job, token in zip(running, best(model(newest, cache=batch)), strict=True):
            generated[job.name].append(token)
    return generated


def join(batch: kv.Caches, caches: kv.Caches) -> kv.Caches:
    """The batch with one more row."""
    row = kv.merge([caches])
    if not batch:
        return row
    kv.extend(batch, row)
    return batch


def prefill(model: Any, tokens: list[int]) -> tuple[kv.Caches, int]:
    """Caches of one sequence, and the token that follows it."""
    caches = kv.make_caches(model)
    return caches, best(model(mx.array([tokens]), cache=caches))[0]


def best(logits: mx.array) -> list[int]:
    tokens: Any = mx.argmax(logits[:, -1], axis=-1).tolist()
    return list(tokens)


def generate_alone(model: Any, tokens: list[int], n: int) -> list[int]:
    caches, token = prefill(model, tokens)
    generated = [token]
    while len(generated) < n:
        generated += best(model(mx.array([generated[-1:]]), cache=caches))
    return generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    model = keepwarm.load(parser.parse_args().model)
    generated = serve(model.module, model.tokenizer)
    for job in JOBS:
        alone = generate_alone(model.module, model.tokenizer.encode(job.text), job.n)
        print(f"{job.name}: {model.tokenizer.decode(generated[job.name])!r}")
        print(f"  same as alone: {alone == generated[job.name]}")


if __name__ == "__main__":
    main()
