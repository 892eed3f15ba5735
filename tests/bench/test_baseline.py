"""The measurement that is kept as the baseline: what it must hold, and what it says."""

from pathlib import Path

import pytest

from keepwarm.bench import tables
from keepwarm.bench.results import Results
from keepwarm.bench.run import Sizes

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def kept():
    return Results.read(RESULTS / "baseline.json")


def ours(kept, workload, what):
    """Medians by where they were taken."""
    found = kept.of(workload, what)
    return {series.x: series.median for series in found if series.target == "keepwarm"}


def test_the_baseline_is_that_of_the_page(kept):
    """S0-49: measured and recorded, every sample of it, on what machine and with what versions."""
    page = (RESULTS / "bench.md").read_text()
    assert tables.markdown(kept).strip() in page
    assert all(len(series.samples) >= 3 for series in kept.series)
    assert {"mlx", "mlx-lm", "python"} <= kept.machine["versions"].keys()


def test_a_long_prompt_that_is_known_starts_more_than_twice_as_soon(kept):
    """S0-49, S0-72: with the default model, again and after the process was killed."""
    assert Sizes().chat > 512
    (cold,) = ours(kept, "chat", "cold").values()
    for what in ("exact repeat", "after a restart"):
        (warm,) = ours(kept, "chat", what).values()
        assert cold > 2 * warm
        (cached,) = ours(kept, "chat", f"cached, {what}").values()
        assert cached > 512


def test_tokens_a_second_and_first_tokens_are_in_it(kept):
    """S2-29: beside another server's, so that what comes later can be compared with both."""
    for target in ("keepwarm", "mlx-lm"):
        units = {series.unit for series in kept.series if series.target == target}
        assert {"s", "tokens/s", "tokens"} <= units


def test_more_streams_give_more_tokens_a_second(kept):
    """S3-57: 1, 2, 4 and 8 at once."""
    rate = ours(kept, "streams", "throughput")
    assert set(rate) == {1, 2, 4, 8}
    assert rate[8] > rate[4] > rate[1]
    assert rate[8] > 2 * rate[1]
