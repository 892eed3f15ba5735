"""The next token from the logits: the best one, or one drawn at a temperature from a seeded key."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

Sampler: TypeAlias = Callable[[mx.array], mx.array]  # logits (1, vocabulary) to tokens (1,)


def make_sampler(temperature: float, seed: int | None = None) -> Sampler:
    """Greedy at temperature 0; else each call draws with the next key of the seed's own chain.

    The chain belongs to the sampler: equal seeds give equal draws whatever else runs beside it.
    Without a seed the draws differ from run to run.
    """
    if temperature == 0:
        return _best
    key = mx.random.key(secrets.randbits(63) if seed is None else seed)

    def draw(logits: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        return mx.random.categorical(logits.astype(mx.float32) / temperature, key=now)

    return draw


def _best(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)
