"""The price of a codec is measured on what would be stored, and its page is that of its results."""

import json

import numpy as np
import pytest
from benchmarks.price.__main__ import interval, runs
from benchmarks.price.codecs import CODECS, PLAIN_4, Q4, Q8, rounded
from benchmarks.price.page import markdown
from benchmarks.price.trials import Reader, says_the_same, score
from mlx_lm.tokenizer_utils import load as load_tokenizer

from keepwarm.models.load import Model
from tests.kit.engines import write_tiny
from tests.kit.generated import PRICE, PRICE_RESULTS, price
from tests.kit.models import tiny
from tests.kit.runs import prompt_of

N_TOKENS = 1100  # four blocks and an open one


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    module = tiny("llama")
    path = write_tiny(tmp_path_factory.mktemp("model"), "llama", module)
    model = Model("llama", path, module, load_tokenizer(path), {}, 4096)
    return Reader(model, prompt_of(N_TOKENS))


@pytest.mark.parametrize(("codec", "lossy"), [(Q8, (0, 1024)), (Q4, (256, 768))])
def test_only_the_rows_are_rounded_that_a_codec_says(reader, codec, lossy):
    exact, kept = (c[0].keys[..., :N_TOKENS, :] for c in (reader._caches, reader._round(codec)))
    differs = np.abs(np.array(exact) - np.array(kept)).max((0, 1, 3)) > 0
    start, end = lossy
    assert differs[start:end].all()
    assert not differs[:start].any()
    assert not differs[end:].any()


def test_fewer_bits_cost_more(reader):
    tokens = prompt_of(64, seed=1)
    exact = reader.logits(tokens, None)
    prices = [score(reader, tokens, exact, codec).divergence.mean() for codec in (Q8, Q4, PLAIN_4)]
    assert 0 < prices[0] < prices[1] < prices[2]


def test_an_answer_is_compared_token_by_token(reader):
    question = prompt_of(8, seed=2)
    answer = reader.answer(question, 4)
    assert says_the_same(reader, question, answer, None)
    for place in range(4):
        other = [token ^ (place == number) for number, token in enumerate(answer)]
        assert not says_the_same(reader, question, other, None)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_no_number_is_further_off_than_a_step(codec):
    rows = np.random.default_rng(7).standard_normal((2, 512, 64)).astype(np.float32)
    for rounding in (codec.keys, codec.values):
        step = (rows.max() - rows.min()) / (2**rounding.bits - 1)
        assert np.abs(rounded(rows, rounding) - rows).max() < 1.1 * step


def test_bytes_are_those_of_the_goals():
    assert Q8.times_smaller(8192) == pytest.approx(16 / 8.5)
    assert Q4.times_smaller(8192) > 3.0
    assert PLAIN_4.times_smaller(8192) == pytest.approx(16 / 4.5)


def test_intervals_and_runs():
    mean, low, high = interval(np.arange(320.0))
    assert low < mean == 159.5 < high
    assert runs(np.array([0, 1, 1, 0, 1], bool)) == [slice(1, 3), slice(4, 5)]


def test_a_codec_that_misses_its_goal_is_not_offered():
    results = json.loads(PRICE_RESULTS.read_text())
    verdict = next(line for line in markdown(results).splitlines() if line.startswith("| q8 |"))
    assert verdict.endswith("| yes |")
    results["models"]["attention"]["2048"]["codecs"]["q8"]["kl"][0] = 0.0006
    verdict = next(line for line in markdown(results).splitlines() if line.startswith("| q8 |"))
    assert verdict.endswith("| **no** |")


def test_the_page_is_that_of_the_results():
    assert price(PRICE.read_text()) == PRICE.read_text()
