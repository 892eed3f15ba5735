"""Whether mlx-lm, on this machine, says what torch said: logits, copies and needles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm import load

from keepwarm import blas

from .corpus import read_files, roots, tokenized
from .samples import Make, Sample, Samples
from .tokenizer import load as load_tokenizer

CORPUS_BYTES = 3_000_000
MAX_APART = 2e-2  # of logits in float32, where the two libraries round differently
MAX_LOST = 0.05  # of the accuracy on the card, over a few rows


class Checked(NamedTuple):
    apart: float
    accuracy: dict[str, float]
    wrong: list[str]


def check(folder: Path, rows: int) -> Checked:
    card = json.loads((folder / "card.json").read_text())
    blas.start()
    model = _loaded(folder)
    apart = _apart(model, folder)
    accuracy = {name: _accuracy(model, make, card, rows) for name, make in _trials(card).items()}
    wrong = [
        f"{name}: {found:.4f}, on the card {card['figures'][name]['accuracy']:.4f}"
        for name, found in accuracy.items()
        if found < card["figures"][name]["accuracy"] - MAX_LOST
    ]
    if apart > MAX_APART:
        wrong.append(f"logits are {apart:.2g} apart")
    return Checked(apart, accuracy, wrong)


def _loaded(folder: Path) -> Any:
    """In float32: on a CPU other types take minutes."""
    model = load(str(folder))[0]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def _apart(model: Any, folder: Path) -> float:
    """The largest difference from the logits that torch computed."""
    reference: Any = mx.load(str(folder / "reference.safetensors"))
    tokens, logits = reference["tokens"], reference["logits"]
    found = model(tokens, cache=model.make_cache() if hasattr(model, "make_cache") else None)
    return float(np.abs(np.array(found[:, -logits.shape[1] :] - logits)).max())


def _trials(card: dict[str, Any]) -> dict[str, Make]:
    tokenizer = load_tokenizer()
    corpus = tokenized(read_files(roots(), CORPUS_BYTES), tokenizer)
    samples = Samples(corpus.train, tokenizer)
    return {
        "copy random tokens": lambda rng, n: samples.copy_of_random(rng, n, card["copied"]),
        "copy code": lambda rng, n: samples.copy_of_code(rng, n, card["copied"]),
        "needle in random tokens": samples.needles_in_random,
        "needle in code": samples.needles_in_text,
    }


def _accuracy(model: Any, make: Make, card: dict[str, Any], rows: int) -> float:
    rng = np.random.default_rng(3)
    samples = [make(rng, card["context"] + 1) for _ in range(rows)]
    right = np.concatenate([_right(model, sample) for sample in samples])
    return float(right.mean())


def _right(model: Any, sample: Sample) -> Any:
    """Which answer tokens the model finds most likely."""
    found = mx.argmax(model(mx.array(sample.tokens[None, :-1])), axis=-1)
    return (np.array(found)[0] == sample.tokens[1:])[sample.answers[1:]]
