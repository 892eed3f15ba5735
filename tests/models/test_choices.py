"""Models by memory: every figure follows from the row's config."""

import json
import re

import pytest

from keepwarm.models.choices import FILE, LEAST_TOKENS, USABLE, all_choices
from tests.kit.choices import figures

ROWS = {row["id"]: row for row in json.loads(FILE.read_text())}
GIB = 1 << 30


@pytest.mark.parametrize("name", ROWS)
def test_figures_are_those_of_the_config(name):
    row = ROWS[name]
    assert figures(row) == {key: row[key] for key in figures_of(row)}


def figures_of(row):
    return ("n_weights", "weights_bytes", "kv_bytes_per_token", "kv_fixed_bytes")


def test_published_sizes_are_met():
    """Sizes that the sources name, from other hands: files of 22.23 GB, and counts of weights."""
    by_name = {choice.id: choice for choice in all_choices()}
    oss = by_name["lmstudio-community/gpt-oss-20b-MLX-8bit"]
    assert oss.weights_bytes == pytest.approx(22.23e9, rel=0.001)
    counts = {"Qwen3-8B-4bit": 8.2e9, "Qwen3-30B-A3B-Instruct-2507-4bit": 30.5e9}
    for name, n_weights in counts.items():
        assert by_name[f"mlx-community/{name}"].n_weights == pytest.approx(n_weights, rel=0.005)


def test_every_row_has_sources_and_a_date():
    for row in ROWS.values():
        assert row["sources"], row["id"]
        assert all(url.startswith("https://") for url in row["sources"])
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", row["read"])
        assert row["licence"]
    assert len(all_choices()) == len(ROWS)


def test_what_fits_leaves_room():
    for choice in all_choices():
        sizes = [size for size in (8, 16, 24, 32, 48, 64, 96, 128) if choice.fits(size * GIB)]
        least = min(LEAST_TOKENS, choice.n_context)
        assert choice.n_bytes(least) <= USABLE * sizes[0] * GIB
        assert choice.n_tokens(sizes[0] * GIB) >= least
        smaller = choice.n_bytes(least) / USABLE - 1
        assert not choice.fits(int(smaller) - choice.kv_bytes_per_token)
        n_all = choice.n_tokens(1 << 50)
        assert choice.fits(1 << 50, n_all)
        assert not choice.fits(1 << 50, n_all + 1)


def test_on_a_cpu_a_weight_takes_four_bytes():
    choice = all_choices()[0]
    assert choice.in_fp32().weights_bytes == 4 * choice.n_weights
    assert choice.in_fp32().kv_bytes_per_token == 2 * choice.kv_bytes_per_token
