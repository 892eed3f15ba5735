"""What is used of MLX and mlx-lm is current, pinned, and what a layer's cache has to offer."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from keepwarm.kv.codec import encode
from keepwarm.kv.kinds import is_batched
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache
from tests.contract.rows import filled

ROOT = Path(__file__).parents[2]
CODE = [path for name in ("src", "examples") for path in ROOT.glob(f"{name}/**/*.py")]


# Memory.


def test_no_deprecated_memory_function_is_called():
    """What MLX has itself is not asked of `mx.metal`, where it is deprecated."""
    moved = {name for name in dir(mx.metal) if hasattr(mx, name)} - {"is_available"}
    assert {"set_cache_limit", "set_wired_limit", "clear_cache", "device_info"} <= moved
    code = "\n".join(path.read_text() for path in CODE)
    assert set(re.findall(r"mx\.metal\.(\w+)", code)) <= {"is_available"}
    assert {"set_cache_limit", "set_wired_limit"} <= set(re.findall(r"mx\.(\w+)\(", code))


# Versions.


@pytest.mark.parametrize("name", ["mlx", "mlx-lm"])
def test_versions_are_pinned_and_the_reasons_are_written_down(name):
    """From the release that was tried to the next one that may break."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    (wanted,) = [d for d in project["dependencies"] if re.match(rf"{name}>", d)]
    low, high = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", wanted).groups()
    assert number(low) <= number(version(name)) < number(high)
    assert number(high)[:2] == (number(low)[0], number(low)[1] + 1)
    page = (ROOT / "docs" / "caches.md").read_text()
    assert re.search(rf"^\| {name} ≥ {low}, < {high} \| .{{40,}} \|$", page, re.MULTILINE)


def number(text):
    return tuple(int(part) for part in text.split("."))


# Names that do not exist.


# What a layer's cache offers.


OF_ROWS = ("keys", "values", "offset", "state", "update_and_fetch", "is_trimmable")
OF_BATCHES = ("left_padding", "prepare", "finalize", "filter", "extend", "extract")
SINGLE = [KVCache, QuantizedKVCache, QuantKVCache, ConcatenateKVCache]
BOUNDED = [lambda: RotatingKVCache(8), lambda: BatchRotatingKVCache(8, [0])]
BATCHED = [lambda: BatchKVCache([0]), lambda: BatchQuantizedKVCache([0])]


@pytest.mark.parametrize("make", [*SINGLE, *BOUNDED, *BATCHED, lambda: ChunkedKVCache(8)])
def test_every_cache_of_rows_offers_the_same(make):
    """Offset, update, state, trimming, mask, a bound where there is one; and the arrays to
    evaluate, which mlx-lm has no name for and the codec gives."""
    cache = make()
    assert all(hasattr(cache, name) for name in OF_ROWS)
    assert not hasattr(cache, "meta_state")
    # What slides by chunks is masked by its model.
    assert hasattr(cache, "make_mask") == (not isinstance(cache, ChunkedKVCache))
    assert hasattr(cache, "max_size") == (make in BOUNDED)
    assert all(hasattr(cache, name) for name in OF_BATCHES) == is_batched(cache)
    assert hasattr(cache, "trim") or not cache.is_trimmable()
    filled(cache, 5)
    arrays = encode(cache).arrays()
    assert arrays
    mx.eval(arrays)


@pytest.mark.parametrize("make", [*SINGLE, *BOUNDED, *BATCHED])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_a_mask_is_absent_causal_or_an_array(make, n_tokens):
    mask = make().make_mask(n_tokens, return_array=False, window_size=None)
    assert mask is None or isinstance(mask, mx.array) or mask == "causal"
    if n_tokens > 1:
        assert mask is not None


# Reports.


def test_every_known_defect_has_its_report():
    """The texts name the tests, and the tests that they name exist."""
    found = set()
    for path in (ROOT / "tests" / "contract").glob("*.py"):
        found |= set(re.findall(r"^def (test_defect_\w+)", path.read_text(), re.MULTILINE))
    page = (ROOT / "docs" / "results" / "upstream.md").read_text()
    assert set(re.findall(r"`(test_defect_\w+)`", page)) == found
    for section in page.split("\n## ")[1:]:
        assert "Expected: " in section, section.splitlines()[0]
