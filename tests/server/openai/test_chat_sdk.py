"""Chat completions as the official client sees them, on a real engine with a tiny model."""

import asyncio
import json

import openai
import pytest

USER = [{"role": "user", "content": "What is the answer to the question?"}]


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def ask(client, messages=USER, **options):
    options = {"max_tokens": 8, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def joined(chunks, index=0):
    """The text of one choice, put together from its deltas."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def no_end(live):
    """A bias that keeps a random model from ending its answer by itself."""
    return {str(token): -100 for token in live.host.engine.model.tokenizer.eos_token_ids}


def test_a_stream_without_usage_ends_with_its_end(client):
    chunks = list(ask(client, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason
    assert chunks[-1].model_extra["keepwarm"]["prompt_tokens"] > 0


def test_the_async_client(live):
    async def run():
        async with live.async_openai() as client:
            whole = await ask(client)
            chunks = [chunk async for chunk in await ask(client, stream=True)]
            return whole, chunks

    whole, chunks = asyncio.run(run())
    assert joined(chunks) == whole.choices[0].message.content


def test_choices_and_seeds(client):
    options = {"n": 3, "temperature": 1.0, "seed": 7}
    first, second = ask(client, **options), ask(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    chunks = list(ask(client, stream=True, **options))
    assert [joined(chunks, index) for index in range(3)] == texts


def test_logprobs_join_to_the_answer(live, client):
    options = {"logprobs": True, "top_logprobs": 2, "logit_bias": no_end(live)}
    choice = ask(client, **options).choices[0]
    shown = choice.logprobs.content
    assert len(shown) == 8
    text = bytes(byte for token in shown for byte in token.bytes).decode(errors="replace")
    assert text == choice.message.content
    for token in shown:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    chunks = list(ask(client, stream=True, **options))
    logprobs = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [token.token for each in logprobs for token in each.content] == [
        token.token for token in shown
    ]


def test_logit_bias_moves_the_choice(live, client):
    token = live.host.engine.model.tokenizer.encode("x", add_special_tokens=False)[0]
    answer = ask(client, logit_bias={str(token): 100}, max_tokens=5)
    assert answer.choices[0].message.content == "xxxxx"
    assert answer.choices[0].finish_reason == "length"


def test_json_is_json(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=400, temperature=0.8)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def test_list_content_and_roles(client):
    parts = [{"type": "text", "text": "Be brief."}]
    answer = ask(client, [{"role": "developer", "content": parts}, *USER])
    plain = ask(client, [{"role": "system", "content": "Be brief."}, *USER])
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert plain.usage.prompt_tokens_details.cached_tokens == plain.usage.prompt_tokens - 1


def test_what_the_cache_may_do_is_asked_by_header_or_body(client):
    messages = [{"role": "user", "content": "Keep this question to yourself, will you?"}]
    for _ in range(2):
        answer = ask(client, messages, extra_headers={"X-Keepwarm-Cache": "no-store"})
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for policy in ("no-store", "read-only"):
        ask(client, messages, extra_body={"keepwarm": {"cache": policy}})
    answer = ask(client, messages, extra_body={"keepwarm": {"cache": "durable", "agent": "me"}})
    n_shared = answer.usage.prompt_tokens_details.cached_tokens
    assert n_shared < answer.usage.prompt_tokens - 1
    with pytest.raises(openai.BadRequestError, match="cache policy"):
        ask(client, extra_headers={"X-Keepwarm-Cache": "sometimes"})


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


# What is refused, and how.


def test_the_document_is_there_and_true(live):
    document = live.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in chat["responses"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "ChatRequest"
    )
    assert live.get("/docs").status_code == 200


# Clients that leave, keys, limits, cost.


def test_another_models_name(serving):
    with serving(strict_model=True) as live, live.openai() as client:
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model="gpt-9", messages=USER)
        assert refused.value.code == "model_not_found"


def test_a_restart_finds_what_was_read(serving, tmp_path):
    """The same conversation, another process' worth of server, the same prefix."""
    messages = [{"role": "user", "content": "What is kept is warm tomorrow. " * 30}]
    with serving(home=tmp_path) as live, live.openai() as client:
        before = ask(client, messages)
    with serving(home=tmp_path) as live, live.openai() as client:
        after = ask(client, messages)
    assert after.usage.prompt_tokens_details.cached_tokens == after.usage.prompt_tokens - 1
    assert after.choices[0].message.content == before.choices[0].message.content
    assert after.model_extra["keepwarm"]["reused"]["disk"] > 0


def test_draining_lets_answers_end_and_says_why_it_cuts_the_rest(serving):
    """Running streams end by themselves within the time, or with words inside the stream."""
    with serving(drain_s=0.5) as live, live.openai() as client:
        stream = ask(client, stream=True, max_tokens=8000, logit_bias=no_end(live))
        next(stream)
        live.host.drain(0.5)
        with pytest.raises(openai.APIError, match=r"stop|shut"):
            list(stream)
        with pytest.raises(openai.APIStatusError) as refused:
            ask(client)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
