"""`quantized_kv_start`: what comes before it is computed exactly, then quantised, warm or cold."""

from __future__ import annotations

from typing import Any

import pytest

from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Choice, KVOptions
from tests.kit.engines import ask, engine_on, held, tokens_of
from tests.kit.runs import prompt_of

START = 200
KV = KVOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=START)
APART = 1e-3  # of a logprob; rows that were computed from quantised ones are 0.1 apart

# Rows alone, windows beside them, states in the same layer.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 32},
    "falcon_h1": {"head_dim": 32},
}


@pytest.fixture(scope="module", params=WIDE)
def model(request, models) -> Model:
    return models.of(request.param, **WIDE[request.param])


def asked(prompt: list[int], n: int = 5, policy: Policy = Policy.READ_WRITE):
    return ask(prompt, n, policy=policy, kv=KV)


def apart(one: Choice, other: Choice) -> float:
    """The largest difference of a logprob that both answers show, while their tokens are equal."""
    worst = 0.0
    for a, b in zip(one.tokens, other.tokens, strict=True):
        known = {top.token: top.logprob for top in b.top}
        worst = max([worst, *(abs(t.logprob - known[t.token]) for t in a.top if t.token in known)])
        if a.token != b.token:
            break
    return worst


def test_a_conversation_that_outgrows_the_start_is_answered_as_a_cold_one(model, tmp_path):
    """Over restarts, with an answer that is exact beyond the start."""
    tokens, n_known = prompt_of(190), []
    rows_only = model.name == "llama"
    for n_answer, n_new in ((20, 30), (5, 40), (5, 1)):
        with engine_on(model, tmp_path) as engine:
            cold = engine.submit(asked(tokens, n_answer, Policy.NO_STORE)).result().choices[0]
            warm = engine.submit(asked(tokens, n_answer)).result()
            n_known.append(warm.receipt.cached_tokens)
            assert warm.receipt.exact == (len(tokens) < START)
            assert apart(cold, warm.choices[0]) < APART
        tokens = [*tokens, *tokens_of(warm.choices[0]), *prompt_of(n_new, seed=n_new)]
    # Exact rows beyond the start are of no use; others can be restored at the end of the prompt.
    assert n_known == [0, START if rows_only else 189, 245]


@pytest.mark.parametrize("n_shared", [150, START, 260])
def test_prompts_that_arrive_together_are_answered_as_cold_ones(model, tmp_path, n_shared):
    """They part before the start, at it and after it, while the first is being computed."""
    prompts = [[*prompt_of(n_shared), seed, *prompt_of(100, seed=seed)] for seed in (1, 2)]
    with engine_on(model, tmp_path) as engine:
        requests = [asked(p, policy=Policy.NO_STORE) for p in prompts]
        colds = [engine.submit(request).result().choices[0] for request in requests]
        with held(engine):
            answers = [engine.submit(asked(prompt)) for prompt in prompts]
        warm = [answer.result() for answer in answers]
        assert warm[1].receipt.cached_tokens == n_shared
        # A prompt of the same beginning, afterwards.
        third = engine.submit(asked([*prompts[0][:n_shared], 3, 4, 5])).result().receipt
        assert third.cached_tokens == n_shared
    for cold, result in zip(colds, warm, strict=True):
        assert apart(cold, result.choices[0]) < APART


def test_a_prompt_that_ends_at_the_start(model, tmp_path):
    """All of it is exact, its answer is quantised."""
    prompt = prompt_of(START)
    with engine_on(model, tmp_path) as engine:
        cold = engine.submit(asked(prompt, policy=Policy.NO_STORE)).result().choices[0]
        first = engine.submit(asked(prompt)).result()
        again = engine.submit(asked(prompt)).result()
        assert again.receipt.cached_tokens == START - 1
        assert apart(cold, first.choices[0]) < APART
        assert apart(cold, again.choices[0]) < APART
        said = [*prompt, *tokens_of(again.choices[0]), 1]
        assert engine.submit(asked(said)).result().receipt.cached_tokens == len(said) - 1
