"""More of text completions through the official client: choices, seeds, stops, logprobs."""

import pytest

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


@pytest.fixture(scope="module")
def endless(live):
    return {str(token): -100 for token in live.host.engine.model.tokenizer.eos_token_ids}


def ask(client, **options):
    return client.completions.create(**{"model": "m", "prompt": PROMPT, "max_tokens": 8} | options)


def joined(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text for choice in choices)


def test_choices_and_seeds(client):
    """The same seed says the same, another one something else; streams say it too."""
    options = {"n": 3, "temperature": 1.0}
    first, again, other = (ask(client, seed=seed, **options) for seed in (7, 7, 8))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert [choice.text for choice in again.choices] == texts
    assert [choice.text for choice in other.choices] != texts
    chunks = list(ask(client, seed=7, stream=True, **options))
    assert [joined(chunks, index) for index in range(3)] == texts


def test_stop_strings_end_the_answer(client, endless):
    options = {"max_tokens": 24, "logit_bias": endless}
    whole = ask(client, **options).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    answer = ask(client, stop=[stop, "never said"], **options).choices[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    chunks = list(ask(client, stop=stop, stream=True, **options))
    assert joined(chunks) == whole[: whole.index(stop)]
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert ends[-1] == "stop"


def test_streamed_logprobs_say_where_each_token_stands(client, endless):
    """Put together, the pieces of a stream are those of a whole answer, offsets included."""
    options = {"logprobs": 2, "logit_bias": endless, "n": 2}
    whole = ask(client, **options)
    chunks = list(ask(client, stream=True, **options))
    for index, choice in enumerate(whole.choices):
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == index]
        parts = [part for part in parts if part]
        assert len(parts) > 1
        for name in ("tokens", "text_offset"):
            streamed = [value for part in parts for value in getattr(part, name)]
            assert streamed == getattr(choice.logprobs, name)
        streamed = [value for part in parts for value in part.token_logprobs]
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert all(len(top) <= 3 for part in parts for top in part.top_logprobs)
        places = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
        assert all(choice.text.startswith(token, place) for place, token in places)
