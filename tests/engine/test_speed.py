"""What reuse is worth in seconds, as ratios; `benchmarks.requests` measures at length."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import pytest

from keepwarm.prefix.policy import Policy
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of


class Timed(NamedTuple):
    seconds: float  # until the last token
    first_s: float
    n_cached: int
    tokens: list[int]


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    with engine_on(models.of("llama"), tmp_path_factory.mktemp("home")) as engine:
        engine.submit(ask([1, 2, 3])).result()  # what only a first request costs
        yield engine


def timed(engine, prompt, n, policy=Policy.READ_WRITE):
    request = ask(prompt, n, top_logprobs=None, policy=policy)
    started = perf_counter()
    result = engine.submit(request).result()
    seconds, tokens = perf_counter() - started, tokens_of(result.choices[0])
    return Timed(seconds, result.usage.ttft_ms / 1000, result.receipt.cached_tokens, tokens)


def test_a_long_prompt_again_is_answered_in_less_than_half_the_time(engine):
    """100 new tokens after 3,900; the first of them, and all of them."""
    prompts = [prompt_of(3900, seed) for seed in range(2)]
    cold, again = ([timed(engine, prompt, 100) for prompt in prompts] for _ in range(2))
    assert {run.n_cached for run in cold} == {0}
    assert {run.n_cached for run in again} == {3899}
    assert min(run.first_s for run in cold) > 2 * min(run.first_s for run in again)
    assert min(run.seconds for run in cold) > 2 * min(run.seconds for run in again)


def six_turns(engine, policy, seed):
    """Seconds that a conversation takes."""
    tokens, seconds = prompt_of(3500, seed), 0.0
    for turn in range(6):
        run = timed(engine, tokens, 8, policy)
        seconds += run.seconds
        tokens = [*tokens, *run.tokens, *prompt_of(50, seed=turn)]
    return seconds


def test_a_conversation_takes_at_least_60_percent_less_time(engine):
    """Against the same six turns without a cache."""
    policies = (Policy.READ_WRITE, Policy.NO_STORE)
    pairs = [[six_turns(engine, policy, seed) for policy in policies] for seed in (10, 11)]
    on, off = (min(each) for each in zip(*pairs, strict=True))  # others use the machine too
    assert 1 - on / off >= 0.6
