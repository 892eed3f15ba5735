"""Several questions in one batch: their common prefix is prefilled once, the rest together.

    python examples/batch.py [--model NAME] [--max-tokens N]

One cache holds the common prefix. Merging it with itself gives a batch with one row per question.
The questions differ in length, so they are padded on the right; `finalize` moves the padding to
the left, where it costs nothing more.
"""

from __future__ import annotations

import argparse
from typing import Any

import keepwarm
from keepwarm import kv  # before mlx.core, so that a fast BLAS can be loaded for it

# isort: split
import mlx.core as mx

PREFIX = "The dog sleeps under the tree. The quick brown fox jumps over the dog.\n\n"
QUESTIONS = ("Who sleeps?", "Where does the dog sleep?", "What does the quick brown fox do?")


def generate_alone(model: Any, caches: kv.Caches, tokens: list[int], n: int) -> list[int]:
    """Greedy tokens for one sequence with its own caches."""
    logits = model(mx.array([tokens]), cache=caches)[:, -1]
    return decode(model, caches, logits, n)[0]


def generate_batch(model: Any, batch: kv.Caches, rows: list[list[int]], n: int) -> list[list[int]]:
    """Greedy tokens for every row of a batch; the rows may differ in length."""
    lengths = tuple(map(len, rows))
    padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
    kv.prepare(batch, kv.RightPadding(lengths))
    logits = model(mx.array(padded), cache=batch)
    kv.finalize(batch)
    last = mx.stack([logits[row, n_tokens - 1] for row, n_tokens in enumerate(lengths)])
    return decode(model, batch, last, n)


def decode(model: Any, caches: kv.Caches, logits: mx.array, n: int) -> list[list[int]]:
    """Generate n greedy tokens for every row; all of them are added to the caches."""
    steps = []
    for _ in range(n):
        steps.append(mx.argmax(logits, axis=-1))
        logits = model(steps[-1][:, None], cache=caches)[:, -1]
    rows: Any = mx.stack(steps, axis=1).tolist()
    return list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=12)
    options = parser.parse_args()
    model = keepwarm.load(options.model)
    prefix = model.tokenizer.encode(PREFIX)
    rows = [model.tokenizer.encode(question) for question in QUESTIONS]

    shared = kv.make_caches(model.module)
    model.module(mx.array([prefix]), cache=shared)
    batch = kv.merge([shared] * len(rows))
    together = generate_batch(model.module, batch, rows, options.max_tokens)

    for number, (row, answer) in enumerate(zip(rows, together, strict=True)):
        fresh = kv.make_caches(model.module)
        same = generate_alone(model.module, fresh, prefix + row, options.max_tokens) == answer
        n_held = kv.token_count(kv.extract(batch, number))
        print(f"{QUESTIONS[number]} {model.tokenizer.decode(answer)!r}")
        counts = f"{len(prefix)} shared + {len(row)} own + {len(answer)} generated"
        print(f"  {counts} = {n_held} in the cache")
        print(f"  same as alone: {same}")


if __name__ == "__main__":
    main()
