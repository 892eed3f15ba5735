"""`keepwarm doctor`, run as a program."""

import json
import os
import re
import subprocess
import sys

import pytest

from keepwarm import __version__, blas
from keepwarm.bench.summary import LINES
from keepwarm.cache.padding import KnownVerdict, padding_book
from keepwarm.cache.padding_trial import Verdict
from tests.kit.checkpoints import write_checkpoint

PROGRAM = "import typer; from keepwarm.cli.doctor import doctor; typer.run(doctor)"
KEYS = [
    *("backend", "device", "blas", "blas_threads", "gemm_gflops"),
    *("memory_total_bytes", "memory_available_bytes"),
    *("home", "store", "free_disk_bytes", "versions", "kernels", "advice"),
    *("config", "models", "not_batched", "remotes"),
]


def doctor(home, *arguments, **environ):
    """The output of the command in a process without KEEPWARM_ variables."""
    mine = {key: value for key, value in os.environ.items() if not key.startswith("KEEPWARM_")}
    mine |= {"KEEPWARM_HOME": str(home), "COLUMNS": "200", **environ}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    run = subprocess.run(command, env=mine, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    remotes = f"{tmp_path_factory.mktemp('shared').as_uri()}, file://{home}/missing"
    return home, json.loads(doctor(home, "--json", KEEPWARM_REMOTE=remotes))


def test_models_that_are_not_batched_are_named(tmp_path):
    verdict = KnownVerdict("some/model", "0.32.2", Verdict(False, 0.5, 0.0, 97))
    padding_book(tmp_path).put("key", verdict, keep=True)
    assert json.loads(doctor(tmp_path, "--json"))["not_batched"] == ["some/model"]


def test_shared_tiers_are_measured(report):
    home, found = report
    there, missing = found["remotes"]
    assert there["problem"] == ""
    assert there["latency_s"] > 0
    assert there["bytes_per_s"] > 0
    assert missing["address"] == f"file://{home}/missing"
    assert "No such file" in missing["problem"]


def test_json_has_every_key_and_sane_values(report):
    home, found = report
    assert list(found) == KEYS
    assert found["backend"] in {"metal", "cuda", "cpu"}
    assert found["device"]
    assert found["gemm_gflops"] > 0
    assert 0 < found["memory_available_bytes"] <= found["memory_total_bytes"]
    assert found["free_disk_bytes"] > 0
    assert (found["home"], found["store"]) == (str(home), str(home / "store"))
    assert "\n" not in found["advice"]
    assert found["advice"].endswith(".")


def test_json_names_the_versions(report):
    _, found = report
    assert set(found["versions"]) == {"keepwarm", "mlx", "mlx-lm", "transformers", "python"}
    assert found["versions"]["keepwarm"] == __version__


def test_json_names_the_blas_that_was_loaded(report):
    """On Linux CPU a fast one, elsewhere MLX brings its own."""
    _, found = report
    assert (found["blas"] is not None) == blas.wanted()
    assert (found["blas_threads"] or 1) in range(1, len(blas.cpus()) + 1)


def test_the_store_can_stand_elsewhere(tmp_path):
    elsewhere = tmp_path / "not" / "yet" / "there"
    found = json.loads(
        doctor(tmp_path, "--json", KEEPWARM_STORE=str(elsewhere), KEEPWARM_BLAS="none")
    )
    assert found["store"] == str(elsewhere)
    assert found["free_disk_bytes"] > 0
    assert not elsewhere.exists()


def test_without_a_fast_blas_the_advice_says_so(tmp_path):
    found = json.loads(doctor(tmp_path, "--json", KEEPWARM_BLAS="none"))
    assert (found["blas"], found["blas_threads"]) == (None, None)
    assert ("KEEPWARM_BLAS=none" in found["advice"]) == blas.wanted()


def test_unused_cores_are_explained(tmp_path):
    found = json.loads(doctor(tmp_path, "--json", KEEPWARM_BLAS_THREADS="1"))
    idle_cores = blas.wanted() and len(blas.cpus()) > 1
    assert ("KEEPWARM_BLAS_THREADS" in found["advice"]) == idle_cores


def test_the_table_reads_the_same_facts(tmp_path):
    text = doctor(tmp_path, KEEPWARM_BLAS="none")
    for word in ("Backend", "GFLOP/s", "Memory", str(tmp_path), __version__, "Advice"):
        assert word in text


@pytest.mark.soak
def test_the_report_is_a_page_to_paste(tmp_path):
    """The README's rows on this machine, for both servers, without a path of it."""
    page = tmp_path / "report.md"
    checkpoint = write_checkpoint(tmp_path / "model", n_context=2048)
    shown = doctor(tmp_path, "--report", str(page), "--quick", KEEPWARM_MODEL=str(checkpoint))
    text = page.read_text()
    assert text.strip() in shown
    assert f"keepwarm: {__version__}" in text
    for line in LINES:
        assert len(re.findall(rf"^\| {re.escape(line.label)} \| [\d.]", text, re.MULTILINE)) == 1
    assert "GFLOP/s" in text
    assert str(tmp_path) not in text


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "keepwarm",
        "doctor",
        "--report",
        str(tmp_path / "no" / "page"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "does not exist; create it first" in run.stderr
