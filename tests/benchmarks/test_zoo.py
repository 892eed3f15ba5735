"""The zoo of model types: a sample here, all of them with --soak."""

import subprocess
import sys
from math import inf

import pytest
from benchmarks.zoo.models import model_types
from benchmarks.zoo.page import page
from benchmarks.zoo.trials import Findings, examine


@pytest.mark.parametrize(
    ("name", "batched", "quantised"),
    [("starcoder2", True, "yes"), ("minimax_m3_vl", False, "refused")],
)
def test_a_sample(tmp_path, name, batched, quantised):
    found = examine(name, tmp_path)
    assert found.verdict == "exact"
    assert (found.batched, found.quantised) == (batched, quantised)
    assert found.reused["again"] == found.reused["restart"] == (299, 299)
    assert {"again", "next turn", "fork", "rewind", "three at once"} < found.apart.keys()


def test_what_cannot_run_is_named(tmp_path):
    """It needs a package that is not installed, and its import ends the program."""
    assert "olmo" in model_types()
    assert examine("olmo", tmp_path).verdict.startswith("not run: SystemExit")


def test_the_page_shows_what_is_wrong():
    right = Findings("a", apart={"again": 1e-6}, reused={"again": (9, 10)}, quantised="yes")
    wrong = Findings("b", apart={"again": 0.1, "fork": 0.0}, drift=1e-6)
    failed = Findings("c", apart={"failed": inf})
    text = page([right, wrong, failed], "1", "a machine", 1e-4)
    assert "| a | exact |" in text
    assert "9 of 10" in text
    assert "| b | WRONG: again |" in text
    assert "3 types, 3 run here; 1 exact" in text
    assert "2 wrong (b, c)" in text


@pytest.mark.soak
def test_every_type():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.zoo"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
