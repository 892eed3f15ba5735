"""Text completions as the official client sees them."""

import pytest

PROMPTS = ["The quick brown fox", "In 1984 there were"]


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


@pytest.fixture(scope="module")
def endless(live):
    return {str(token): -100 for token in live.host.engine.model.tokenizer.eos_token_ids}


def ask(client, prompt=PROMPTS[0], **options):
    options = {"max_tokens": 6, **options}
    return client.completions.create(model="tiny", prompt=prompt, **options)


def joined(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text for choice in choices)


def test_text_and_tokens_are_one_prompt(live, client):
    answer = ask(client)
    tokenizer = live.host.engine.model.tokenizer
    tokens = tokenizer.encode(PROMPTS[0])
    assert answer.usage.prompt_tokens == len(tokens)
    again = ask(client, tokens)
    assert again.choices[0].text == answer.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1


def test_several_prompts_answer_in_order(client):
    alone = [ask(client, prompt).choices[0].text for prompt in PROMPTS]
    both = ask(client, PROMPTS)
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.completion_tokens > 6
    chunks = list(ask(client, PROMPTS, stream=True, stream_options={"include_usage": True}))
    assert [joined(chunks, index) for index in range(2)] == alone
    assert chunks[-1].usage.prompt_tokens == both.usage.prompt_tokens
    assert chunks[-1].model_extra["keepwarm"]["recomputed"] == 2


def test_several_prompts_of_tokens(live, client):
    tokenizer = live.host.engine.model.tokenizer
    both = ask(client, [tokenizer.encode(prompt) for prompt in PROMPTS], n=2)
    assert len(both.choices) == 4
    assert both.choices[0].text == both.choices[1].text != both.choices[2].text


def test_echo(client):
    plain = ask(client).choices[0].text
    assert ask(client, echo=True).choices[0].text == PROMPTS[0] + plain
    assert joined(ask(client, echo=True, stream=True)) == PROMPTS[0] + plain


def test_logprobs(live, client):
    bias = {str(token): -100 for token in live.host.engine.model.tokenizer.eos_token_ids}
    choice = ask(client, logprobs=2, logit_bias=bias).choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 6
    assert all(1 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    assert choice.logprobs.text_offset[0] == 0


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


def test_streamed_logprobs_say_where_each_token_stands(client, endless):
    """Put together, the pieces of a stream are those of a whole answer, offsets included."""
    options = {"logprobs": 2, "logit_bias": endless, "n": 2, "max_tokens": 8}
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
