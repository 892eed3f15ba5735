"""Results: written, read, compared with a baseline, shown as tables and as a page."""

import json
from dataclasses import replace

import pytest
from benchmarks.requests.report import tables
from benchmarks.requests.report.compare import changes, comparable, judge
from benchmarks.requests.report.results import Claim, Note, Results, Series
from benchmarks.requests.workloads.lengths import AGAIN, COLD, HOW

from keepwarm.errors import BadInput

MACHINE = {
    "system": "Linux",
    "architecture": "any",
    "backend": "cpu",
    "device": "a processor",
    "n_cpus": 2,
    "load": [0.1, 0.1, 0.1],
    "blas": None,
    "versions": {"keepwarm": "0"},
}


def first_token(what, seconds, x):
    return Series("lengths", "keepwarm", what, "s", seconds, x, HOW[what])


RESULTS = Results(
    command="python -m benchmarks.requests",
    date="2026-01-01",
    model="tiny",
    samples=3,
    machine=MACHINE,
    targets={"keepwarm": "ours", "mlx-lm": "theirs </script>"},
    records=[
        first_token(COLD, (1.0, 1.1, 0.9), 256),
        first_token(COLD, (4.0, 4.4, 4.1), 1024),
        first_token(AGAIN, (0.1, 0.1, 0.12), 256),
        Series("pipeline", "keepwarm", "recomputed", "tokens", (10, 10, 10), 1),
        Series("pipeline", "mlx-lm", "recomputed", "tokens", (90, 90, 90), 1),
        Series("streams", "keepwarm", "throughput", "tokens/s", (30, 31, 32), 4, better="higher"),
        Series("agents", "keepwarm", "disk, all at once", "bytes", (2e6, 2e6, 2e6)),
        Claim("pipeline", "keepwarm", "recomputed ÷ new", 1.0, (1.0, 1.0, 1.01), 1.02, False),
        Claim("pipeline", "mlx-lm", "recomputed ÷ new", 3.0, (3.0, 3.0, 3.0), None, False),
        Note("stress", "mlx-lm", "failed: it did not answer"),
    ],
)


def changed(series_index, **fields):
    """The same run with one record changed."""
    records = list(RESULTS.records)
    records[series_index] = replace(records[series_index], **fields)
    return replace(RESULTS, records=records)


def test_a_file_gives_back_what_was_written(tmp_path):
    file = tmp_path / "results.json"
    RESULTS.write(file)
    assert Results.read(file) == RESULTS
    kept = json.loads(file.read_text())["series"][0]
    assert kept["samples"] == [1.0, 1.1, 0.9]
    assert kept["median"] == 1.0
    assert kept["spread"] == pytest.approx(0.2)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', '{"format": 99}', "[]"])
def test_other_files_are_refused_in_a_sentence(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"\.$"):
        Results.read(file)
    with pytest.raises(BadInput, match="cannot be read"):
        Results.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("then", "now", "better", "verdict"),
    [
        ((1.0, 1.2), (1.3, 1.4), "lower", "worse"),
        ((1.0, 1.2), (1.3, 1.4), "higher", "better"),
        ((1.0, 1.2), (0.5, 0.6), "lower", "better"),
        ((1.0, 1.2), (0.5, 0.6), "higher", "worse"),
        ((1.0, 1.2), (1.1, 1.9), "lower", "within the spread"),
        ((1.0, 1.0), (1.01, 1.01), "lower", "within the spread"),
        ((0.0,), (1.0,), "lower", "worse"),
        ((0.0,), (0.0,), "lower", "within the spread"),
    ],
)
def test_only_what_is_beyond_the_spread_is_a_change(then, now, better, verdict):
    """A regression is distinguished from noise."""
    assert judge(then, now, better) == verdict


def test_what_got_worse_is_named():
    """Timed against a stored baseline."""
    worse = changed(0, samples=(2.0, 2.2, 2.1))
    (found,) = [c for c in changes(RESULTS, worse) if c.verdict != "within the spread"]
    assert (found.what, found.verdict, found.factor) == ("cold, 256", "worse", pytest.approx(2.1))
    assert "cold, 256" in str(tables.comparison(changes(RESULTS, worse)).rows)


def test_on_another_machine_only_ratios_are_compared():
    other = replace(RESULTS, machine=MACHINE | {"n_cpus": 64})
    assert not comparable(RESULTS, other)
    assert {change.what for change in changes(RESULTS, other)} == {"recomputed ÷ new"}


def test_a_claim_says_whether_it_holds():
    ours, theirs = RESULTS.claims
    assert ours.holds is True
    assert replace(ours, value=1.03).holds is False
    assert replace(ours, at_least=True).holds is False
    assert theirs.holds is None
    assert (ours.bound, theirs.bound) == ("≤ 1.02", "")
