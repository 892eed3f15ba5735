"""`echo` with `logprobs`: the tokens of a prompt are scored, whatever of it is cached."""

import mlx.core as mx
import pytest

from keepwarm.errors import BadInput
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Request, Sampling

PROMPT = "The fox said that it had seen a dog near the river. " * 4  # more than one slice
SHORT = "A dog 🦊."


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


@pytest.fixture(scope="module")
def model(live):
    return live.host.engine.model


def ask(client, prompt=PROMPT, **options):
    asked = {"model": "m", "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2}
    return client.completions.create(**asked | options)


def scores_of(model, tokens):
    """By one forward pass."""
    logits = model.module(mx.array([tokens]))[0].astype(mx.float32)
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()


def test_scores_are_those_of_a_plain_forward_pass(client, model):
    ask(client, logprobs=None, max_tokens=1)  # now the prompt is cached
    answer = ask(client)
    choice, tokens = answer.choices[0], model.tokenizer.encode(PROMPT)
    logprobs = choice.logprobs
    assert len(logprobs.token_logprobs) == len(tokens) + 3
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    rows = scores_of(model, tokens)
    expected = [row[token] for row, token in zip(rows, tokens[1:], strict=False)]
    assert logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-3)
    best = [max(row) for row in rows[:-1]]
    tops = [max(top.values()) for top in logprobs.top_logprobs[1 : len(tokens)]]
    assert tops == pytest.approx(best, abs=1e-3)
    assert {len(top) for top in logprobs.top_logprobs[1:]} <= {1, 2, 3}  # and the one taken
    for name, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(name)
    receipt = answer.model_extra["keepwarm"]
    assert (receipt["scored"], receipt["recomputed"]) == (len(tokens), len(tokens))
    assert receipt["reused"] == {}


@pytest.mark.parametrize("n_tokens", [1, 2, 65, 80, 129])
def test_a_prompt_whose_last_slice_is_one_token(client, n_tokens):
    (choice,) = ask(client, [5 + n for n in range(n_tokens)], max_tokens=0).choices
    assert len(choice.logprobs.token_logprobs) == n_tokens


def test_nothing_of_it_is_kept(client):
    prompt = "Nobody has asked this before, and it is long enough to be kept. " * 6
    ask(client, prompt)
    plain = ask(client, prompt, logprobs=None)
    assert plain.model_extra["keepwarm"]["reused"] == {}


def test_without_an_answer_only_the_prompt_is_scored(client, model):
    n_tokens = len(model.tokenizer.encode(SHORT))
    for answer in (ask(client, SHORT, max_tokens=0), ask(client, [SHORT, SHORT], max_tokens=0)):
        for choice in answer.choices:
            assert choice.text == SHORT
            assert len(choice.logprobs.tokens) == n_tokens
            assert "".join(choice.logprobs.tokens).startswith("A dog ")


@pytest.mark.parametrize("prompt", [SHORT, [SHORT, "Another prompt"]])
def test_a_stream_says_the_same(client, prompt):
    whole = ask(client, prompt, n=2, seed=1)
    texts, scores = {}, {}
    for chunk in ask(client, prompt, n=2, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            found = choice.logprobs.token_logprobs if choice.logprobs else []
            scores.setdefault(choice.index, []).extend(found)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert scores.keys() == texts.keys()
    for choice in whole.choices:
        assert scores[choice.index][0] is None
        expected = choice.logprobs.token_logprobs[1:]
        assert scores[choice.index][1:] == pytest.approx(expected, abs=1e-3)


def test_a_prompt_that_may_be_restored_cannot_be_scored():
    with pytest.raises(BadInput, match="NO_STORE"):
        Request(prompt="x", score_prompt=True, sampling=Sampling(top_logprobs=0))
    with pytest.raises(BadInput, match="top_logprobs"):
        Request(prompt="x", score_prompt=True, policy=Policy.NO_STORE)
