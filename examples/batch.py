"""Several questions in one batch: the opening they share is read once, the rest side by side.

    python examples/batch.py [--model NAME] [--max-tokens N]

One cache holds the opening. Merged with itself it becomes a batch of one row a question; the
questions differ in length, so the slice is padded on the right and `finalize` turns that into
padding on the left, where it costs nothing more.
"""

from __future__ import annotations

import argparse
from typing import Any

import keepwarm
from keepwarm import kv  # before mlx.core: the first import of that fixes the BLAS

# isort: split
import mlx.core as mx

OPENING = "The dog sleeps under the tree. The quick brown fox jumps over the dog.\n\n"
QUESTIONS = ("Who sleeps?", "Where does the dog sleep?", "What does the quick brown fox do?")


def read_alone(model: Any, caches: kv.Caches, tokens: list[int], n: int) -> list[int]:
    """Greedy tokens for one sequence in caches of its own."""
    logits = model(mx.array([tokens]), cache=caches)[:, -1]
    return decode(model, caches, logits, n)[0]


def read_together(model: Any, batch: kv.Caches, rows: list[list[int]], n: int) -> list[list[int]]:
    """Greedy tokens for every row of a batch; the rows may differ in length."""
    lengths = tuple(map(len, rows))
    padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
    kv.prepare(batch, kv.RightPadding(lengths))
    logits = model(mx.array(padded), cache=batch)
    kv.finalize(batch)
    last = mx.stack([logits[row, n_tokens - 1] for row, n_tokens in enumerate(lengths)])
    return decode(model, batch, last, n)


def decode(model: Any, caches: kv.Caches, logits: mx.array, n: int) -> list[list[int]]:
    """The n best tokens of every row, one after the other; all of them are fed."""
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
    opening = model.tokenizer.encode(OPENING)
    rows = [model.tokenizer.encode(question) for question in QUESTIONS]

    shared = kv.make_caches(model.module)
    model.module(mx.array([opening]), cache=shared)
    batch = kv.merge([shared] * len(rows))
    together = read_together(model.module, batch, rows, options.max_tokens)

    for number, (row, answer) in enumerate(zip(rows, together, strict=True)):
        fresh = kv.make_caches(model.module)
        same = read_alone(model.module, fresh, opening + row, options.max_tokens) == answer
        n_held = kv.token_count(kv.extract(batch, number))
        print(f"{QUESTIONS[number]} {model.tokenizer.decode(answer)!r}")
        print(
            f"  {len(opening)} shared + {len(row)} of its own + {len(answer)} made = {n_held} held"
        )
        print(f"  same as alone: {same}")


if __name__ == "__main__":
    main()
