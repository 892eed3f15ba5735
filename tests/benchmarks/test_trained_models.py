"""The small trained models are published as mlx-lm reads them, and copy."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.training.corpus import END_OF_TEXT
from benchmarks.training.kinds import KINDS
from benchmarks.training.samples import AGAIN, FIRST_PLAIN

from keepwarm.models.load import load

FOLDER = Path(__file__).parents[2] / "benchmarks" / "models"
MAX_BYTES = 16 << 20


@pytest.fixture(params=KINDS)
def folder(request):
    return FOLDER / request.param


def test_each_is_small(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_BYTES


def test_each_copies_random_tokens(folder):
    model = load(str(folder)).module
    span = np.random.default_rng(0).integers(FIRST_PLAIN, 4096, 200).tolist()
    found = mx.argmax(model(mx.array([[END_OF_TEXT, *span, AGAIN, *span[:-1]]])), axis=-1)
    right = np.array(found)[0, -len(span) :] == span
    assert right.mean() >= 0.95
