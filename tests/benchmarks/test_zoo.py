"""The zoo of model types: a sample here, all of them with --soak, its page in the docs."""

import subprocess
import sys
from dataclasses import replace

import pytest
from benchmarks.zoo.__main__ import examine
from benchmarks.zoo.findings import Findings, Padding, Results
from benchmarks.zoo.models import model_types
from benchmarks.zoo.page import page, summary
from benchmarks.zoo.trials import first_process

from tests.kit.generated import ARCHITECTURES, EXACT, ZOO, ZOO_ON_CUDA, exact_types

TRIALS = {"again", "next turn", "fork", "rewind", "new process", "new process, next turn"}
RIGHT = Findings(
    "a",
    "float32",
    control=0.1,
    apart={"again": 1e-6, "three at once": 3e-4, "8 bit": 0.01},
    reused={"again": (9, 10)},
    batched=True,
    padding=Padding(True, 1e-6, 1e-6, 97),
    quantised="yes",
)


@pytest.fixture(scope="module")
def results():
    return Results.read(ZOO)


# -- a sample -------------------------------------------------------------------------------------


def test_a_sample(tmp_path):
    found = examine("starcoder2", "float32", tmp_path)
    assert found.verdict == "exact"
    assert (found.batched, found.n_rows, found.quantised) == (True, 3, "yes")
    assert found.reused["again"] == found.reused["new process"] == (299, 299)
    assert found.reused["rewind again"] == (200, 200)
    assert found.reused.keys() >= TRIALS
    assert found.apart.keys() >= {*TRIALS, "three at once", "8 bit, again", "8 bit, new process"}


def test_what_cannot_run_is_named(tmp_path):
    """It needs a package that is not installed, and its import ends the program."""
    assert "olmo" in model_types()
    found = first_process("olmo", "float32", tmp_path)
    assert found.verdict.startswith("not run: ImportError: To run olmo install ai2-olmo")


# -- what it says ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "exact"),
        ({"apart": {"again": 2e-4}}, "WRONG: again"),
        ({"apart": {"again": float("inf"), "fork": 0.0}}, "WRONG: again"),
        ({"apart": {"three at once": 6e-4}}, "WRONG: three at once"),
        ({"apart": {"8 bit, new process": 0.1}}, "WRONG: 8 bit, new process"),
        ({"apart": {"again": 5e-4}, "drift": 3e-4}, "drifts"),
        ({"apart": {"again": 7e-4}, "drift": 3e-4}, "WRONG: again"),
        ({"apart": {"again": 0.2}, "drift": 0.1}, "drifts too far to tell"),
        ({"control": 1e-5}, "BLIND: no error would be seen"),
        ({"crash": "KeyError: 1"}, "CRASH: KeyError: 1"),
        ({"left_out": "needs a GPU"}, "not run: needs a GPU"),
    ],
)
def test_verdicts(change, verdict):
    found = replace(RIGHT, **change)
    assert found.verdict == verdict
    assert found.is_bad == verdict.startswith(("WRONG", "BLIND", "CRASH"))


def test_a_run_goes_on_where_it_was_left(tmp_path):
    """A type that is named is run again and replaces what was known."""
    path = tmp_path / "zoo.json"
    results = Results("python", "2026-01-01", {"versions": {}}, [RIGHT, replace(RIGHT, name="b")])
    results.write(path)
    again = Results.read(path)
    assert again == results
    assert again.known == {("a", "float32"), ("b", "float32")}
    again.put(replace(RIGHT, crash="died"))
    assert {one.name: one.crash for one in again.findings} == {"a": "died", "b": ""}
    assert "0 WRONG, 1 CRASH" in summary(again)
    assert "  - a: CRASH: died\n" in summary(again)


# -- the page -------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_results(results):
    """If it fails: `python -m tests.kit.generated`."""
    assert ARCHITECTURES.read_text() == page(results, Results.read(ZOO_ON_CUDA))
    assert EXACT.read_text() == exact_types(results)


def test_every_type_of_mlx_lm_is_in_the_results(results):
    """If it fails: `python -m benchmarks.zoo --json docs/results/zoo.json` runs what is missing."""
    assert sorted(one.name for one in results.of("float32")) == sorted(model_types())
    assert {one.name for one in results.of("bfloat16")} <= set(model_types())


def test_nothing_is_wrong(results):
    assert [one.name for one in results.findings if one.is_bad] == []
    assert all(one.left_out or one.apart.keys() >= TRIALS for one in results.findings)
    assert {one.n_rows for one in results.findings if one.batched} == {3}


@pytest.mark.soak
def test_every_type(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.zoo", "--json", str(tmp_path / "zoo.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
