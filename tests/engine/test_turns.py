"""Which requests start while MAX_PREFILLS prompts are already being prefilled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.engine.scheduler import MAX_EXTRA_PREFILLS, MAX_PREFILLS
from keepwarm.text.request import Started
from tests.kit.engines import Exam, ask, engine_on, held
from tests.kit.runs import prompt_of

SLICE = 64
LONG = 10 * SLICE


@pytest.fixture(params=["llama", "mamba2"])
def engine(models, tmp_path, request) -> Iterator[Engine]:
    with engine_on(models.of(request.param), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = SLICE
        yield engine


def long_prompts(n: int, n_tokens: int = LONG) -> list[list[int]]:
    return [prompt_of(n_tokens, seed=100 + i) for i in range(n)]


def warmed(engine: Engine, seed: int) -> list[int]:
    """A prompt of which all but the last token is cached."""
    prompt = prompt_of(300, seed)
    engine.submit(ask(prompt, 1)).result()
    return prompt


def first_tokens(answers: Sequence[Answer]) -> list[float]:
    return [answer.result().usage.ttft_ms for answer in answers]


def test_a_warm_request_does_not_wait_for_cold_ones(engine, models):
    """One token to feed need not wait until a long prompt is prefilled."""
    exam = Exam(models.module(engine.model.name))
    prompt = warmed(engine, seed=1)
    with held(engine):
        cold = [engine.submit(ask(long, 2)) for long in long_prompts(MAX_PREFILLS + 1)]
        warm = engine.submit(ask(prompt, 2))
    result = warm.result()
    exam.add(prompt, result.choices[0])
    assert result.receipt.cached_tokens == len(prompt) - 1
    assert result.usage.ttft_ms < min(first_tokens(cold))
    exam.check()


def test_an_urgent_request_does_not_wait_for_them(engine):
    """It has a long prompt, but a higher priority than all that are prefilled."""
    with held(engine):
        longer = long_prompts(MAX_PREFILLS + 1, 5 * LONG)  # this thread may be late
        plain = [engine.submit(ask(long, 2)) for long in longer]
    assert isinstance(next(plain[MAX_PREFILLS - 1]), Started)  # all places are taken
    urgent = engine.submit(ask(prompt_of(LONG, seed=99), 2, priority=1, agent="urgent"))
    urgent.result()
    assert engine.requests()[0].agent == "urgent"  # the first that ended
    for answer in plain:
        answer.cancel()


def test_extra_prefills_are_limited(engine):
    """Even an urgent request waits once all extra prefills are taken."""
    engine._scheduler.slice_sizer.max_slice = 16
    answers = []
    for number in range(MAX_PREFILLS + MAX_EXTRA_PREFILLS):
        prompt = prompt_of(3000, seed=number)
        answers.append(engine.submit(ask(prompt, 1, priority=max(0, number - MAX_PREFILLS + 1))))
        assert isinstance(next(answers[-1]), Started)
    answers.append(engine.submit(ask(prompt_of(20), 1, priority=MAX_EXTRA_PREFILLS + 1)))
    for _ in range(3):
        engine.call(lambda: None).result()
    stats = engine.stats()
    for answer in answers:
        answer.cancel()
    assert (stats.prefilling, stats.waiting) == (MAX_PREFILLS + MAX_EXTRA_PREFILLS, 1)
