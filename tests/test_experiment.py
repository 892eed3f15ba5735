"""The injection experiment: on a tiny model here, and its kept output with the default model."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.checkpoints import write_checkpoint

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SCRIPT = EXPERIMENTS / "injection.py"
ROW = re.compile(r"\| ([a-z, ]+) \| (\d+) \| (\d+) \| (\d+) \| (.*) \|")
RUNS = [
    "prompt, no cache",
    "prompt, cache from the file",
    "more text, no cache",
    "more text, cache from the file",
    "more text, new process",
    "more text, cache of another prompt",
]


def rows(page: str) -> dict[str, tuple[int, int, int, str]]:
    """Tokens in the cache, new and prefilled, and the text, by run."""
    return {
        name: (int(held), int(new), int(prefilled), text)
        for name, held, new, prefilled, text in ROW.findall(page)
    }


def check(page: str) -> None:
    """S1-01, S1-10: only new tokens are prefilled, and the text is that of a run without cache."""
    found = rows(page)
    assert list(found) == RUNS
    assert all(new == prefilled for _, new, prefilled, _ in found.values())
    first, again, cold, warm, resumed, wrong = found.values()
    assert (first[0], cold[0]) == (0, 0)
    assert again == (first[1] - 1, 1, 1, first[3])
    assert warm == resumed
    assert warm[0] + warm[1] == cold[1]
    assert warm[3] == cold[3] != wrong[3]
    assert "NO" not in page


def test_the_experiment_passes(tmp_path):
    """S1-02, S1-03, S1-05, S1-08, S1-09, S1-11: the script also starts the new process."""
    checkpoint = write_checkpoint(tmp_path / "model")
    command = [sys.executable, SCRIPT, "--model", checkpoint, "--max-tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].startswith("Passed on ")
    check(done.stdout)


def test_the_kept_output_passed_with_the_default_model():
    """S1-17, S1-18, S2-06: with its date and versions."""
    kept = (EXPERIMENTS / "injection.md").read_text()
    versions = r"mlx \d+\.\d+\.\d+, mlx-lm \d+\.\d+\.\d+, keepwarm "
    assert re.search(rf"^Passed on \d{{4}}-\d\d-\d\d with smollm2, {versions}", kept, re.MULTILINE)
    check(kept)


@pytest.fixture(scope="module")
def injection():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("injection", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("row", "change", "n_failed"),
    [
        (1, {"generated": [9]}, 1),
        (1, {"n_prefilled": 8}, 2),
        (3, {"n_prefilled": 24}, 1),
        (3, {"generated": [9]}, 1),
        (4, {"generated": [9]}, 1),
        (5, {"generated": [2]}, 1),
    ],
)
def test_a_run_that_is_wrong_is_seen(injection, row, change, n_failed):
    made = [[1], [1], [2], [2], [2], [3]]
    runs = [injection.Run("", 7, 1, 1, tokens) for tokens in made]
    assert all(injection.checks(runs).values())
    runs[row] = runs[row]._replace(**change)
    assert list(injection.checks(runs).values()).count(False) == n_failed
