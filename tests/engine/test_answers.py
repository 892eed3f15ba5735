"""One answer at a time: what it is fed and counted as, where it ends, and what repeats it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.text.request import Result
from tests.kit.engines import Exam, Models, ask, engine_on, tokens_of
from tests.kit.models import WINDOW
from tests.kit.runs import prefill, prompt_of


@pytest.fixture
def engine(models: Models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        yield engine


def answer(engine: Engine, *asked, **wishes) -> Result:
    return engine.submit(ask(*asked, **wishes)).result()


def said(engine: Engine, *asked, **wishes) -> list[int]:
    return tokens_of(answer(engine, *asked, **wishes).choices[0])


async def for_a_moment(answer: Answer) -> None:
    async with asyncio.timeout(0.01):
        await answer.wait()


def test_whoever_stops_waiting_cancels(monkeypatch):
    cancelled: list[Answer] = []
    first, second = Answer(cancelled.append), Answer(cancelled.append)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.result()
    with pytest.raises(TimeoutError):
        asyncio.run(for_a_moment(second))
    assert cancelled == [first, second]


# -- what is fed, and what is counted -------------------------------------------------------------


def test_what_is_counted_is_what_the_model_was_fed(engine):
    fed = 0
    for n_tokens in (1, 2, 64, 65, 256, 257, 582):
        result = answer(engine, prompt_of(n_tokens, seed=n_tokens), 4)
        usage, receipt = result.usage, result.receipt
        assert usage.prompt_tokens == receipt.prompt_tokens == receipt.recomputed == n_tokens
        assert (usage.cached_tokens, receipt.reused, usage.completion_tokens) == (0, {}, 4)
        fed += n_tokens + 4
        assert engine.model.module.fed == fed
        assert min(usage.ttft_ms, usage.tokens_per_second) > 0
    assert answer(engine, prompt_of(5), 1).usage.tokens_per_second == 0, "one token has no rate"


def test_a_repeat_is_fed_one_token(engine):
    prompt = prompt_of(300)
    first = said(engine, prompt, 5)
    fed = engine.model.module.fed
    again = answer(engine, prompt, 5)
    assert tokens_of(again.choices[0]) == first
    assert (again.usage.cached_tokens, again.receipt.recomputed) == (299, 1)
    assert engine.model.module.fed - fed == 1 + 5


@pytest.mark.parametrize(("n_tokens", "place"), [(WINDOW - 10, "live"), (WINDOW + 60, "memory")])
def test_a_window_that_has_not_slid_is_trimmed(models, tmp_path, n_tokens, place):
    """A live cache is trimmed if possible; if its window has slid, blocks are used."""
    model, exam = models.of("gemma3_text"), Exam(models.module("gemma3_text"))
    first = prompt_of(n_tokens)
    second = [*first[:16], *prompt_of(20, seed=5)]
    with engine_on(model, tmp_path) as engine:
        answer(engine, first, 3)
        parted = answer(engine, second, 10)
        assert parted.receipt.reused == {place: 16}
        exam.add(second, parted.choices[0])
    exam.check()


def test_a_wrong_cache_would_be_seen(engine, models):
    """The control: with rows of other tokens under the right ledger the answer differs."""
    module = models.module("llama")
    exam, prompt = Exam(module), prompt_of(100)
    wrong = prefill(module, make_prompt_cache(module), prompt_of(99, seed=9))
    namespace = engine.lane_of().restorer.namespace
    assert engine.call(lambda: engine.live.put(namespace, prompt[:99], wrong)).result()
    result = answer(engine, prompt, 10)
    assert result.receipt.reused == {"live": 99}
    exam.add(prompt, result.choices[0])
    with pytest.raises(AssertionError, match="step 0"):
        exam.check()


# -- where it ends --------------------------------------------------------------------------------


def test_the_context_ends_the_answer(models, tmp_path):
    with engine_on(replace(models.of("llama"), n_context=40), tmp_path) as engine:
        for n_prompt, n_wanted in ((30, 100), (30, None), (39, 100)):
            (choice,) = answer(engine, prompt_of(n_prompt), n_wanted).choices
            assert len(choice.tokens) == 40 - n_prompt
            assert choice.reason == "length"


# -- what repeats it ------------------------------------------------------------------------------


def test_a_seed_makes_the_draws_repeatable_whatever_the_process_draws(engine):
    def draw(seed: int | None) -> list[int]:
        return said(engine, prompt_of(20), 20, temperature=1.0, seed=seed)

    first = draw(1)
    mx.random.seed(99)
    mx.random.normal((10,))
    assert draw(1) == first
    assert draw(2) != first
    assert draw(None) != draw(None)
