"""`benchmarks.requests` as a subprocess: it starts its servers and writes its result files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.requests.__main__ import main
from benchmarks.requests.report.results import Results
from benchmarks.requests.suite import WORKLOADS

from tests.cli import environment
from tests.kit.checkpoints import write_checkpoint


def measure(home, *arguments, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.requests", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=environment(home, **PLAIN),
        capture_output=True,
        check=False,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), n_context=16384)


@pytest.fixture(scope="module")
def ran(checkpoint, tmp_path_factory):
    """One short run that starts both servers on the same model."""
    home = tmp_path_factory.mktemp("home")
    both = ("--target", "keepwarm", "--target", "mlx-lm")
    kept = [f"--{kind}={home / name}" for kind, name in FILES.items()]
    arguments = ("pipeline", "agents", "--quick", "--samples", 1, "--model", checkpoint)
    run = measure(home, *arguments, *both, *kept)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode(), home


# Without a BLAS of its own nothing has to be chosen first.
PLAIN = {"COLUMNS": "200", "KEEPWARM_BLAS": "none"}
FILES = {"json": "r.json", "html": "r.html", "markdown": "r.md", "save-baseline": "b.json"}


@pytest.mark.soak
def test_two_servers_side_by_side(ran):
    """Both count the same prompts; mlx-lm's launcher is the real server on the same weights."""
    results = Results.read(ran[1] / "r.json")
    assert list(results.targets) == ["keepwarm", "mlx-lm"]
    assert results.notes == []
    first = {s.target: s for s in results.of("pipeline", "new") if s.x == 1}
    assert first["keepwarm"].samples == first["mlx-lm"].samples
    shared = "times the shared prompt is prefilled, all at once"
    times = {c.target: c.value for c in results.claims if c.what == shared}
    assert times["keepwarm"] <= 1.02
    assert times["mlx-lm"] > 0.9


@pytest.mark.soak
def test_all_is_shown_and_kept(ran):
    out, home = ran
    assert "Ratios within this run" in out
    # A few more than 1 where a random answer has half a character: it is not spliced in again.
    row = r"recomputed ÷ new tokens from turn 2 +1(\.[01]\d*)? +\d"
    assert re.search(row, out), out
    assert "<svg" in (home / "r.html").read_text()
    assert (home / "r.md").read_text().startswith("# Results of")
    assert (home / "b.json").read_text() == (home / "r.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonsense"], "'nonsense' is not a workload; choose from"),
        (["late", "--target", "nobody"], "is not a target"),
        (["late", "--json", "missing/r.json"], "create it first"),
        (["late", "--compare", "missing.json"], "cannot be read"),
        (["late", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_arguments_of_the_benchmark_are_one_sentence(
    monkeypatch, capsys, checkpoint, arguments, sentence
):
    model = [] if "--model" in arguments else ["--model", str(checkpoint)]
    monkeypatch.setattr(sys, "argv", ["requests", *arguments, *model])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.soak
def test_every_workload_on_every_target(checkpoint, tmp_path):
    """Restarts and overhead too: a minute or two."""
    every = [word for name in ("engine", "keepwarm", "mlx-lm") for word in ("--target", name)]
    file = tmp_path / "r.json"
    arguments = ("--quick", "--samples", 1, "--model", checkpoint, "--json", file)
    assert measure(tmp_path, *arguments, *every, timeout=900).returncode == 0
    found = Results.read(file)
    assert found.workloads == list(WORKLOADS)
    assert [(n.workload, n.target) for n in found.notes] == [("persistence", "mlx-lm")]
