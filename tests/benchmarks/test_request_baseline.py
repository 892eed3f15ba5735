"""The stored baseline: what it must contain, and what the pages quote from it."""

import json
import re
from pathlib import Path

import pytest
from benchmarks.requests.report import tables
from benchmarks.requests.report.results import Results

from tests.kit import generated

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ONE_PASS = {"trace", "stress"}  # their samples are requests
AT_THE_END = "at the end of the workload"  # measured once


@pytest.fixture(scope="module")
def kept():
    return Results.read(RESULTS / "baseline.json")


def test_the_baseline_is_that_of_the_page(kept):
    """Every sample is recorded, with machine and versions."""
    page = (RESULTS / "bench.md").read_text()
    assert tables.markdown(kept).strip() in page
    assert kept.samples >= 3
    sampled = [series for series in kept.series if series.workload not in ONE_PASS]
    sampled = [series for series in sampled if AT_THE_END not in series.how]
    assert all(len(series.samples) >= kept.samples for series in sampled)
    assert {"mlx", "mlx-lm", "python"} <= kept.machine["versions"].keys()


# What the README quotes.


def test_what_the_readme_says_was_measured():
    """No figure is finer than its samples agree on."""
    page = generated.README.read_text()
    assert generated.MEASURED.search(page)
    assert page == generated.readme(page), "run: python -m tests.kit.generated"
    assert "±" not in page
    assert "| Process start to first answer, after `kill -9` (s) | 5.19 | 3.03 |" in page
    finer = {"29.2 ±12%": "29", "0.331 ±86%": "0.33", "0.422 ±4%": "0.422", "9.97 ±10%": "9.97"}
    assert {cell: generated.SPREAD.sub(generated.rounded_median, cell) for cell in finer} == finer


def test_the_readme_tells_both_cold_times(kept):
    """A prompt of 2,048 tokens was cold twice in the run, and another server was faster once."""
    found = [*kept.of("lengths", "cold"), *kept.of("prefill", "TTFT, alone")]
    ours, theirs, later, their_later = (
        f"{each.median:.3g}" if each.spread <= 0.1 else f"{each.median:.2g}"
        for each in found
        if each.x in (2048, None)
    )
    said = f"{ours} s against {theirs} above, {later} against {their_later} in [another part]"
    assert said in generated.README.read_text()


def test_the_figures_of_the_gpu_are_those_of_its_files():
    shaped = json.loads((RESULTS / "shaped-h200-llama-8b.json").read_text())
    engine = json.loads((RESULTS / "engine-h200.json").read_text())["figures"]
    long = json.loads((RESULTS / "engine-long-h200.json").read_text())["figures"]
    medians = {each["what"]: each["median_ms"] for each in shaped if each["n_tokens"] == 32768}
    figures = {each["what"]: each["value"] for each in [*engine, *long]}
    ways = ("cold, kept", "disk, page cache dropped", "disk", "memory", "live")
    expected = {
        "32,768": [
            figures["32,768 cold, kept ÷ no-store"],
            *(medians[f"from disk, pages {pages}"] for pages in ("dropped", "warm")),
            figures["32,768 from memory ÷ pinned copy"],
            medians["live"],
        ],
        **{n: [figures[f"{n} tokens, {way}"] for way in ways] for n in ("65,536", "131,064")},
    }
    rows = re.findall(r"^\| ([\d,]+) \| (.+) \|$", generated.README.read_text(), re.MULTILINE)
    assert {n: row.split(" | ") for n, row in rows} == {
        n: [two_digits(ms / 1000) for ms in row] for n, row in expected.items()
    }


def two_digits(seconds):
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 10 else 0}f}"
