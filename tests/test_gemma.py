"""Gemma 3 from a directory, as a real one comes: small here, random, with windows that turn."""

import json
import os

import pytest

import keepwarm
from keepwarm.text.request import Request, Sampling
from tests.kit.engines import write_tiny
from tests.kit.models import COMMON, CONFIGS, WINDOW, tiny
from tests.kit.runs import prompt_of

NAME = "gemma3_text"


def write(directory, window):
    """A checkpoint that is loaded like any other."""
    write_tiny(directory, NAME, tiny(NAME))
    config = json.loads((directory / "config.json").read_text())
    config = {**COMMON, **CONFIGS[NAME], **config, "sliding_window": window}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_a_conversation_longer_than_its_window_outlives_a_restart(tmp_path):
    """All but the last token of it comes from disk, and the answer is the same."""
    outlives_a_restart(write(tmp_path / "model", WINDOW), prompt_of(10 * WINDOW), tmp_path)


@pytest.mark.real_model
def test_a_conversation_of_a_real_model_outlives_a_restart(tmp_path):
    """Longer than the windows of Gemma 3."""
    outlives_a_restart(os.environ["REAL_MODEL_DIR"], prompt_of(1500), tmp_path)


def outlives_a_restart(checkpoint, prompt, tmp_path):
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=8, temperature=0))
    results = []
    for _ in range(2):
        model = keepwarm.load(checkpoint)
        with keepwarm.Store(tmp_path / "store") as store, keepwarm.Engine(model, store) as engine:
            results.append(engine.submit(request).result())
    cold, warm = results
    assert (cold.receipt.reused, warm.receipt.reused) == ({}, {"disk": len(prompt) - 1})
    assert warm.choices[0].text == cold.choices[0].text
