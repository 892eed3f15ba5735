"""Sequences share a batch only if each gets there what it gets alone."""

from functools import partial

import pytest

from keepwarm.engine.engine import Engine
from keepwarm.engine.padding import PROMPT
from keepwarm.state_file import MACHINE, StateFile
from tests.kit import engines
from tests.kit.engines import Exam, ask, held
from tests.kit.runs import prompt_of

# Sparse blocks of cache slots, a mask along the wrong axis.
WRONG = {"minimax_m3_vl": 1e-4, "gemma2": 1e-4}
PROMPTS = [prompt_of(n, seed=n) for n in (70, 40, 57)]
LONG_ENOUGH = 45  # tokens of an answer that outlasts the trial

engine_on = partial(engines.engine_on, tries_padding=True)


def at_once(engine: Engine, n_tokens: int) -> list:
    with held(engine):
        answers = [engine.submit(ask(prompt, n_tokens)) for prompt in PROMPTS]
    return [answer.result() for answer in answers]


def kept_verdicts(home) -> dict:
    return StateFile(home / MACHINE, "padding", dict).read()


def tried(model) -> bool:
    return (1, len(PROMPT)) in model.module.shapes


def widest(model) -> int:
    return max(rows for rows, _ in model.module.shapes)


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_in_a_batch_runs_alone(models, tmp_path, name, caplog):
    model, exam = models.of(name), Exam(models.module(name), WRONG[name])
    with engine_on(model, tmp_path) as engine:
        assert engine.stats().shares_batches is None
        for n_tokens in (LONG_ENOUGH, 2):
            model.module.shapes.clear()
            for prompt, result in zip(PROMPTS, at_once(engine, n_tokens), strict=True):
                exam.add(prompt, result.choices[0])
        assert widest(model) == 1
        assert engine.stats().shares_batches is False
        assert engine.stats().counters["rebuilt_batches"] == 0
    exam.check()
    assert f"{name} computes other numbers for padded rows" in caplog.text


def test_what_is_equal_shares_a_batch_and_is_tried_once(models, tmp_path):
    """The verdict is kept in a file, for the next start too."""
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        at_once(engine, LONG_ENOUGH)
        assert tried(model)
        assert engine.stats().shares_batches
    with engine_on(model, tmp_path) as engine:
        at_once(engine, 8)
        assert widest(model) == 3
        assert not tried(model)


def test_one_request_after_another_is_no_reason_to_try(models, tmp_path):
    model = models.of("llama")
    for _ in range(2):
        with engine_on(model, tmp_path) as engine:
            for prompt in PROMPTS:
                engine.submit(ask(prompt, 2)).result()
            assert not tried(model)
    assert not kept_verdicts(tmp_path)


def test_several_answers_to_one_request_are_a_reason(models, tmp_path):
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        engine.submit(ask(PROMPTS[0], 2, n=2)).result()
        assert tried(model)


def test_running_answers_go_on_during_a_trial(models, tmp_path):
    """One pass of the trial a step: an answer of a few tokens ends before it."""
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        first = engine.submit(ask(PROMPTS[0], 8))
        next(iter(first))
        second = engine.submit(ask(PROMPTS[1], 2))
        first.result()
        second.result()
        assert engine.stats().shares_batches is None


def test_a_model_that_fails_in_a_batch_runs_alone(models, tmp_path, caplog):
    """It takes one position for all rows. Without a trial every batch of it would be rebuilt."""
    model, exam = models.of("gpt_bigcode"), Exam(models.module("gpt_bigcode"))
    with engine_on(model, tmp_path) as engine:
        for prompt, result in zip(PROMPTS, at_once(engine, LONG_ENOUGH), strict=True):
            exam.add(prompt, result.choices[0])
        assert engine.stats().counters["rebuilt_batches"] == 0
    exam.check()
    assert "fails in a batch" in caplog.text
    assert not kept_verdicts(tmp_path)  # it may have been lack of memory


@pytest.mark.parametrize("name", ["gemma3n", "kimi_k3", "plamo3"])
def test_models_that_keep_arrays_of_their_first_call_answer(models, tmp_path, name):
    """Here the first call is made by the thread that starts the engine."""
    model = models.of(name)
    with engine_on(model, tmp_path) as engine:
        assert engine.submit(ask(PROMPTS[0], 2)).result().choices[0].tokens


def test_a_state_that_is_still_short_decodes_alone(models, tmp_path):
    """The state of `longcat_flash_ngram` grows with its first tokens; nobody else fails for it."""
    name, prompts = "longcat_flash_ngram", [prompt_of(n, seed=n) for n in (40, 2, 30, 1)]
    model, exam = models.of(name), Exam(models.module(name), 0.05)  # it drifts
    with engines.engine_on(model, tmp_path) as engine:
        with held(engine):
            answers = [engine.submit(ask(prompt, 6)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            exam.add(prompt, answer.result().choices[0])
        assert engine.stats().counters["rebuilt_batches"] == 0
    exam.check()
    assert widest(model) == 2


def test_a_state_that_grows_comes_back_from_disk(models, tmp_path):
    model, prompt = models.of("longcat_flash_ngram"), prompt_of(70)
    for reused in (0, len(prompt) - 1):
        with engines.engine_on(model, tmp_path) as engine:
            result = engine.submit(ask(prompt, 4)).result()
            assert result.receipt.cached_tokens == reused
            engine.wait_until_saved()
