"""The benchmarks run, and saving and restoring stay within their memory bound."""

import json
import os
import subprocess
import sys

import pytest
from benchmarks.caches import Shape
from benchmarks.measure import Peak

from benchmarks import batch, store
from benchmarks import kv as single

# Both kinds of layer: 2 that keep all of 8,192 tokens and 10 with a window, 218 MB together.
MEDIUM = Shape("medium", n_layers=12, n_heads=8, width=256, window=1024, global_every=6)


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks in a child process, without choosing a BLAS."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"KEEPWARM_BLAS": "none", "PYTHONUTF8": "1", "COLUMNS": "200"},
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One run on small caches: its output, its JSON file and its drawing."""
    folder = tmp_path_factory.mktemp("bench")
    file, drawing = folder / "results.json", folder / "store.png"
    run = bench("--quick", "--json", file, "--plot", drawing)
    assert run.returncode == 0, run.stderr
    return run.stdout, file.read_text(), drawing.read_bytes()


@pytest.mark.soak
def test_everything_is_measured(quick):
    found = json.loads(quick[1])
    single_ops = {"slice", "save", "restore", "merge", "copy, fresh", "copy, touched", "write"}
    batch_ops = {"roll", "join", "leave", "filter", "extract", "merge", "copy, fresh"}
    assert {s["what"] for s in found["speeds"] if s["case"] == "small"} == single_ops | {
        "mlx-lm save",
        "mlx-lm load",
    }
    assert batch_ops <= {s["what"] for s in found["speeds"] if "batch of 8" in s["case"]}
    assert {p["what"] for p in found["peaks"]} == {"save", "restore"}
    assert {len(d["lengths"]) for d in found["densities"]} == {1, 2, 4, 8}
    assert found["skipped"] == []
    n_samples = {speed["what"]: len(speed["seconds"]) for speed in found["speeds"]}
    assert n_samples["put"] == n_samples["write"] == store.SAMPLES
    assert n_samples["restore, warm"] == n_samples["read, warm"] == store.READ_SAMPLES
    assert {cost["n_blocks"] for cost in found["costs"]} == {100, 1000}
    assert "mx.load, warm" in n_samples
    assert "mx.load, warm" in quick[0]
    assert quick[2].startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def medium_peaks(tmp_path_factory):
    return {p.what: p for p in single.peaks(MEDIUM, 8192, tmp_path_factory.mktemp("blocks"))}


@pytest.mark.parametrize("what", ["save", "restore"])
def test_memory_stays_within_its_bound(what, medium_peaks):
    """Peak RSS minus baseline is at most 1.1 times the live cache's bytes plus two blocks."""
    peak = medium_peaks[what]
    assert peak.live_bytes > 200e6
    assert peak.holds, f"{peak.growth_bytes / 1e6:.0f} of {peak.live_bytes / 1e6:.0f} MB live"


def test_saving_needs_no_second_cache(medium_peaks):
    peak = medium_peaks["save"]
    assert peak.growth_bytes < 3 * peak.block_bytes


def test_a_restored_cache_is_seen_in_memory(medium_peaks):
    """A control: the measurement sees memory at all."""
    assert medium_peaks["restore"].growth_bytes > 0.9 * medium_peaks["restore"].live_bytes


@pytest.mark.parametrize(("growth", "holds"), [(1_300, True), (1_301, False)])
def test_the_bound_can_fail(growth, holds):
    assert Peak("any", 1, "save", 1_000, 100, growth).holds is holds


@pytest.mark.parametrize(("n_rows", "padded"), [(1, 1), (2, 4 / 3), (4, 8 / 5), (8, 16 / 9)])
def test_a_batch_holds_its_rows_and_their_padding_only(n_rows, padded):
    """Variable lengths waste nothing beyond padding; equal lengths nothing at all."""
    shape = Shape("plain", n_layers=2, n_heads=2, width=32)
    merged = [d for d in batch.densities(shape, n_rows, 1024) if d.when == "merged"]
    expected = {(1024,) * n_rows: 1, tuple(1024 * (i + 1) // n_rows for i in range(n_rows)): padded}
    for found in merged:
        assert found.ratio == pytest.approx(expected[found.lengths], rel=0.01)
