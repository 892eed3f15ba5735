"""Text completions as the official client sees them."""

import openai
import pytest

PROMPTS = ["The quick brown fox", "In 1984 there were"]


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


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


def test_a_stream_says_what_a_whole_answer_says(client):
    assert joined(ask(client, stream=True)) == ask(client).choices[0].text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"suffix": "!"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"echo": True, "logprobs": 1, "suffix": "x"}, "echo"),
        ({"prompt": [[]]}, None),
        ({"prompt": [1, -5]}, None),
        ({"prompt": [1, 10**9]}, None),
        ({"prompt": ["ok", "x" * 40000]}, None),
    ],
)
def test_what_is_refused(client, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    if param is not None:
        assert refused.value.param == param
