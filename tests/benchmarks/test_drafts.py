"""The benchmark of drafts runs, and sees that no answer changes."""

import subprocess
import sys

import pytest
from benchmarks.drafts import ASKED, Trial, compare

from keepwarm import config
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint


def test_answers_of_a_tiny_model_are_the_same_with_drafts(tmp_path):
    model = load(str(write_checkpoint(tmp_path)), config.load({}, home=None))
    said = compare(model, Trial([ASKED["records"], ASKED["prose"]], 0.8, 12), 1)
    assert said.endswith(" 0 different")


@pytest.mark.soak
def test_answers_of_the_trained_model_are_the_same_with_drafts():
    command = [sys.executable, "-m", "benchmarks.drafts", "--tokens", "24", "--turns", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.endswith(" 0 different") for line in lines)
