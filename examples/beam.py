"""Beam search: the most likely continuations in one batch, chosen anew at every step.

    python examples/beam.py [--model NAME] [--max-tokens N] [--width N]

The rows of the next batch are chosen from those of the last one: a beam that is continued twice is
kept twice, a beam that is not continued is dropped. Nothing is prefilled again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import keepwarm
from keepwarm import kv  # before mlx.core, so that a fast BLAS can be loaded for it

# isort: split
import mlx.core as mx

PROMPT = "The quick brown fox jumps over the lazy"


class Beam(NamedTuple):
    tokens: tuple[int, ...]
    score: float  # the sum of its tokens' log-probabilities
    parent: int = 0  # its row in the previous batch


def search(model: Any, prompt: list[int], width: int, n: int) -> list[Beam]:
    """The `width` best continuations of `n` tokens that a beam search finds, best first."""
    single = kv.make_caches(model)
    logprobs = log_softmax(model(mx.array([prompt]), cache=single)[:, -1])
    beams, batch = [Beam((), 0.0)], kv.merge([single])
    for _ in range(n):
        beams = best_children(beams, logprobs, width)
        kv.filter_rows(batch, [beam.parent for beam in beams])
        newest = mx.array([[beam.tokens[-1]] for beam in beams])
        logprobs = log_softmax(model(newest, cache=batch)[:, -1])
    return beams


def log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def best_children(beams: Sequence[Beam], logprobs: mx.array, width: int) -> list[Beam]:
    """The best continuations of all beams."""
    candidates = []
    for row, beam in enumerate(beams):
        tokens: Any = mx.argpartition(-logprobs[row], width - 1)[:width].tolist()
        for token in tokens:
            score = beam.score + value(logprobs[row, token])
            candidates.append(Beam((*beam.tokens, token), score, row))
    return sorted(candidates, key=lambda beam: -beam.score)[:width]


def value(scalar: mx.array) -> float:
    number: Any = scalar.item()
    return float(number)


def score_alone(model: Any, prompt: list[int], tokens: Sequence[int]) -> float:
    """The same score from a single pass over the whole sequence."""
    logprobs = log_softmax(model(mx.array([[*prompt, *tokens]]), cache=kv.make_caches(model))[0])
    first = len(prompt) - 1
    return sum(value(logprobs[first + i, token]) for i, token in enumerate(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--width", type=int, default=3)
    options = parser.parse_args()
    model = keepwarm.load(options.model)
    prompt = model.tokenizer.encode(PROMPT)
    for beam in search(model.module, prompt, options.width, options.max_tokens):
        difference = abs(beam.score - score_alone(model.module, prompt, beam.tokens))
        print(f"{beam.score:8.3f} {model.tokenizer.decode(beam.tokens)!r}")
        print(f"  same score alone: {difference < 1e-3}")


if __name__ == "__main__":
    main()
