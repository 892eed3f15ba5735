"""When loading from a shared tier is faster than computing."""

import pytest

from keepwarm.cache.restore.points import USUAL_TOKENS, PointSizes
from keepwarm.cache.restore.rates import LoadSize, Rates, RatesFile
from keepwarm.cli.break_even import MOST_TOKENS, ModelCosts, break_even, describe
from keepwarm.kv import make_caches, probe
from keepwarm.prefix.blocks import Namespace
from keepwarm.remote.opening import RemoteReport

MB = 1e6


def costs(tokens_per_s=100.0, token_bytes=MB, point_bytes=0):
    size = LoadSize("model", token_bytes, point_bytes)
    return ModelCosts("org/model", Rates(prefill_tokens_per_s=tokens_per_s), size)


def tier(bytes_per_s, latency_s=0.0):
    return RemoteReport("redis://somewhere", latency_s, bytes_per_s)


@pytest.mark.parametrize(
    ("model", "remote", "expected"),
    [
        (costs(), tier(200 * MB), 256),
        (costs(), tier(50 * MB), None),
        (costs(), tier(200 * MB, latency_s=0.01), 256),
        (costs(), tier(200 * MB, latency_s=1.0), 4096),  # 4 s are a tenth of 4,000 / 100
        (costs(point_bytes=1000 * MB), tier(200 * MB), 1024),  # n / 100 = 5 + n / 200 at 1,000
        (costs(), tier(100.01 * MB, latency_s=1e6), None),
    ],
)
def test_loading_wins_from_this_length_on(model, remote, expected):
    assert break_even(model, remote) == expected


def test_a_context_that_makes_computing_dearer_counts():
    """What a token costs grows with those before it: a slow tier wins for long prompts only."""
    model = costs()
    for start in range(0, 4096, 512):
        model.rates.saw_slice(512, start, 5.12 + 512 * start * 1e-6)
    n_tokens = break_even(model, tier(90 * MB))
    assert 512 < n_tokens < MOST_TOKENS
    assert not model.is_faster(tier(90 * MB), n_tokens - 256)


def test_the_sentence():
    assert describe(costs(), tier(200 * MB)) == (
        "loading beats computing from 256 tokens on "
        "(200 MB/s, or 200 tokens/s of model, against 100 computed)"
    )
    assert describe(costs(), tier(50 * MB)) == (
        "computing beats loading up to 131,072 tokens "
        "(50.0 MB/s, or 50 tokens/s of model, against 100 computed)"
    )
    assert describe(costs(), tier(200 * MB, latency_s=60.0)) == (
        "too far, never asked: computing beats loading up to 131,072 tokens "
        "(200 MB/s, or 200 tokens/s of model, against 100 computed)"
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mamba"])
def test_what_is_loaded_is_known_from_the_layout(models, architecture):
    """Rows of every token, and windows and states once."""
    module = models.module(architecture)
    layout = probe(module, make_caches(module))
    sizes = PointSizes(layout)
    size = sizes.to_load("model")
    assert (size.token_bytes > 0) == (architecture != "mamba")
    assert (size.point_bytes > 0) == (architecture != "llama")
    whole = sizes.rows(USUAL_TOKENS) + sizes.point(USUAL_TOKENS)
    assert size.n_bytes(USUAL_TOKENS) == whole


def test_the_latest_rates_of_a_model_are_found_again(tmp_path):
    file = RatesFile(tmp_path)
    first, second = (Namespace(bytes([n]) * 32) for n in (1, 2))
    for name, n_bytes in ((first, 1.0), (second, 2.0), (first, 3.0)):
        file.of(name, LoadSize("/models/a", n_bytes, 0)).saw_slice(256, 0, 1.0)
    file.of(Namespace(b"3" * 32), LoadSize("/models/a", 4.0, 0))  # nothing was measured
    file.save()
    again = RatesFile(tmp_path)
    assert again.latest("/models/a").size == LoadSize("/models/a", 3.0, 0)
    assert again.latest("/models/b") is None
