"""What a model has learned: loss on files that it has not seen, copies, needles, tool calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

from .batches import Batch, made
from .net import autocast
from .samples import Make, Samples


class Figures(NamedTuple):
    """Over the answers of some rows, or over all tokens where there are none."""

    loss: float
    accuracy: float  # of single tokens
    whole: float  # of answers, every token of which is right
    top_probability: float
    n_tokens: int


class Sizes(NamedTuple):
    context: int
    copied: int
    rows: int


FULL = Sizes(context=4096, copied=2000, rows=32)
TINY = Sizes(context=512, copied=200, rows=1)


def trials(samples: Samples, sizes: Sizes) -> dict[str, Make]:
    return {
        "prose": samples.prose,
        "code": samples.code,
        "copy random tokens": partial(samples.copy_of_random, n_copied=sizes.copied),
        "copy code": partial(samples.copy_of_code, n_copied=sizes.copied),
        "needle in random tokens": samples.needles_in_random,
        "needle in code": samples.needles_in_text,
        "tool calls": samples.tools,
    }


def evaluate(net: nn.Module, samples: Samples, sizes: Sizes, device: str) -> dict[str, Figures]:
    figures = {}
    for name, make in trials(samples, sizes).items():
        rng = np.random.default_rng(7)
        parts = [
            measured(net, made(make, rng, 1, sizes.context).to(device)) for _ in range(sizes.rows)
        ]
        figures[name] = _mean(parts)
    return figures


def quick(net: nn.Module, samples: Samples, length: int, rows: int, device: str) -> list[float]:
    """Accuracy of copies of random tokens and of needles in code, while training."""
    rng = np.random.default_rng(7)
    makes: list[Callable[..., Batch]] = [
        partial(made, partial(samples.copy_of_random, n_copied=length // 2 - 24)),
        partial(made, samples.needles_in_text),
    ]
    batches = [make(rng, rows, length).to(device) for make in makes]
    return [measured(net, batch).accuracy for batch in batches]


def measured(net: nn.Module, batch: Batch) -> Figures:
    device = batch.tokens.device.type
    with torch.inference_mode(), autocast(device):
        logits = net(batch.tokens[:, :-1]).float()
    wanted = batch.tokens[:, 1:]
    answers = batch.answers if batch.answers.any() else torch.ones_like(batch.answers)
    log_probabilities = F.log_softmax(logits, -1)
    loss = -log_probabilities.gather(-1, wanted[..., None])[..., 0]
    top, guess = log_probabilities.max(-1)
    right = guess == wanted
    return Figures(
        loss[answers].mean().item(),
        right[answers].float().mean().item(),
        _whole(right.cpu().numpy(), answers.cpu().numpy()),
        top.exp()[answers].mean().item(),
        int(answers.sum()),
    )


def _whole(right: np.ndarray, answers: np.ndarray) -> float:
    """The share of runs of answer tokens that are right from end to end."""
    found = []
    for row, is_answer in zip(right, answers, strict=True):
        edges = np.flatnonzero(np.diff(np.r_[0, is_answer.astype(int), 0]))
        found += [row[start:end].all() for start, end in edges.reshape(-1, 2)]
    return float(np.mean(found))


def _mean(parts: list[Figures]) -> Figures:
    """Rows weigh as much as they have answer tokens."""
    sizes = [part.n_tokens for part in parts]
    loss, accuracy, whole, top, _ = np.average(parts, axis=0, weights=sizes)
    return Figures(float(loss), float(accuracy), float(whole), float(top), sum(sizes))
