"""Chat completions as the official client sees them, on a real engine with a tiny model."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import openai
import pydantic
import pytest

from tests.kit.waiting import wait_until
from tests.server.conftest import N_CONTEXT

USER = [{"role": "user", "content": "What is the answer to the question?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["here", "there"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


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


def is_idle(live):
    stats = live.host.engine.stats()
    return not (stats.waiting or stats.prefilling or stats.decoding)


def test_a_whole_answer(client):
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 8


def test_the_same_again_is_warm_and_says_so(client):
    """What was read once is reported as cached, in usage, header and body."""
    messages = [{"role": "user", "content": "How warm is the dog under the tree? " * 40}]
    first = ask(client, messages)
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, max_tokens=8
    )
    second, receipt = raw.parse(), json.loads(raw.headers["x-keepwarm-receipt"])
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert receipt["recomputed"] == 1
    assert receipt["exact"] is True
    assert sum(receipt["reused"].values()) == second.usage.prompt_tokens - 1
    assert second.model_extra["keepwarm"] == receipt


def test_a_stream_says_what_a_whole_answer_says(client):
    """Streamed and whole answers take the same path."""
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert chunks[-1].model_extra["keepwarm"]["recomputed"] == 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_ends_with_its_end(client):
    chunks = list(ask(client, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason
    assert chunks[-1].model_extra["keepwarm"]["prompt_tokens"] > 0


def test_a_streams_headers_carry_the_receipt(client):
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=USER, max_tokens=4, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert json.loads(response.headers["x-keepwarm-receipt"])["prompt_tokens"] > 0


def test_the_async_client(live):
    async def run():
        async with live.async_openai() as client:
            whole = await ask(client)
            chunks = [chunk async for chunk in await ask(client, stream=True)]
            return whole, chunks

    whole, chunks = asyncio.run(run())
    assert joined(chunks) == whole.choices[0].message.content


def test_many_at_once_answer_as_alone(live, client):
    questions = [[{"role": "user", "content": f"Question {n} of the user?"}] for n in range(6)]
    alone = [ask(client, question).choices[0].message.content for question in questions]
    with ThreadPoolExecutor(6) as threads:
        streams = threads.map(lambda question: list(ask(client, question, stream=True)), questions)
        assert [joined(chunks) for chunks in streams] == alone


def test_choices_and_seeds(client):
    options = {"n": 3, "temperature": 1.0, "seed": 7}
    first, second = ask(client, **options), ask(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    chunks = list(ask(client, stream=True, **options))
    assert [joined(chunks, index) for index in range(3)] == texts


def test_stop_strings_end_the_answer(live, client):
    whole = ask(client, logit_bias=no_end(live), max_tokens=24).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    answer = ask(client, logit_bias=no_end(live), max_tokens=24, stop=[stop, "never said"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    chunks = list(ask(client, logit_bias=no_end(live), max_tokens=24, stop=stop, stream=True))
    assert joined(chunks) == whole[: whole.index(stop)]


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


class Verdict(pydantic.BaseModel):
    warm: bool
    place: str = pydantic.Field(pattern="^(here|there)$")


def test_a_schema_is_kept_to(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Verdict, max_tokens=200
    )
    verdict = answer.choices[0].message.parsed
    assert isinstance(verdict, Verdict)


def test_a_tool_is_called_and_its_result_is_read(client):
    """Two turns: the call is forced by the grammar; all else is the real path."""
    options = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    answer = ask(client, parallel_tool_calls=False, **options)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["place"] in ("here", "there")

    turn = [*USER, choice.message.model_dump(exclude_none=True)]
    turn.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    second = ask(client, turn, tools=[WEATHER])
    assert second.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 1


def test_streamed_tool_calls_are_put_together(client):
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        model="tiny", messages=USER, tools=[WEATHER], tool_choice=named, max_tokens=200
    ) as stream:
        stream.until_done()
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.id
    assert json.loads(call.function.arguments)["place"] in ("here", "there")


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("by-header", {"extra_headers": {"X-Keepwarm-Agent": "by-header"}}),
        ("by-body", {"extra_body": {"keepwarm": {"agent": "by-body"}}}),
        ("by-key", {"prompt_cache_key": "by-key"}),
        ("by-session", {"extra_headers": {"x-session-id": "by-session"}}),
    ],
)
def test_an_agent_is_known_by_header_body_or_the_clients_own_field(live, client, name, options):
    """Whichever way a conversation is named, it is kept under that name."""
    ask(client, **options)
    agents = live.host.engine.store.on_disk.agents
    wait_until(lambda: name in [agent.id for agent in agents.all()])


def test_why_it_missed_is_said_on_request(client):
    messages = [{"role": "user", "content": "Nobody has asked this before: 9 8 7?"}]
    answer = ask(client, messages, extra_body={"keepwarm": {"explain": True}})
    assert answer.model_extra["keepwarm"]["miss"]["reason"] in ("new", "diverged")


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


# What is refused, and how.


def test_a_prompt_over_the_context(client):
    """In the words that opencode, aider and others look for; in another process if very long."""
    said = f"maximum context length is {N_CONTEXT - 1} tokens"
    for n, stream in product((2 * N_CONTEXT, 70_000), (False, True)):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            ask(client, [{"role": "user", "content": "x" * n}], stream=stream)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": []}, "messages"),
        ({"n": 1000}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_bad_requests_name_the_field(live, fields, param):
    body = {"model": "tiny", "messages": USER, "max_tokens": 4} | fields
    answer = live.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


NESTED = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        NESTED,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": '
        b'{"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": [{"type":'
        b' "function", "function": {"name": "a", "parameters": {"type": 5}}}],'
        b' "tool_choice": "required"}',
        b'{"messages": [{"role": "user", "content": "x"}], "keepwarm": {"agent": "../x"}}',
        b'{"messages": [{"role": "tool", "content": "x"}], "max_tokens": 100000000000}',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_body_is_answered_with_500(live, body, stream):
    if stream:
        body = body.replace(b'{"messages"', b'{"stream": true, "max_tokens": 2, "messages"', 1)
    answer = live.post("/v1/chat/completions", body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there(live):
    assert live.get("/v1/nothing").status_code == 404
    assert live.get("/v1/chat/completions").status_code == 405
    assert live.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"


def test_health(live):
    assert live.get("/health/live").json() == {"status": "ok"}
    assert live.get("/health/ready").json() == {"status": "ok"}


def test_the_document_is_there_and_true(live):
    document = live.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in chat["responses"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "ChatRequest"
    )
    assert live.get("/docs").status_code == 200


# Clients that leave, keys, limits, cost.


def test_a_streamed_token_costs_less_than_half_a_millisecond(live):
    """Processor time of all that is HTTP, a token: reading events, JSON, writing the socket."""
    body = {"messages": USER, "stream": True, "max_tokens": 400, "logit_bias": no_end(live)}
    live.post("/v1/chat/completions", body)
    before = live.http_seconds()
    answer = live.post("/v1/chat/completions", body)
    seconds = live.http_seconds() - before
    n_chunks = answer.text.count("data: ")
    assert n_chunks > 200
    assert seconds / 400 < 0.0005


def test_a_client_that_leaves_frees_the_engine(live):
    """The answer is cancelled within a step, and what was read of the prompt is kept."""
    messages = [{"role": "user", "content": "A long question? " * 60}]
    with live.openai() as client:
        stream = ask(client, messages, stream=True, max_tokens=8000, logit_bias=no_end(live))
        for _ in range(3):
            next(stream)
        stream.close()
        wait_until(lambda: is_idle(live), 20)
        again = ask(client, messages)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_a_client_that_leaves_a_whole_answer_frees_the_engine(live):
    with live.openai(timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        ask(client, max_tokens=8000, logit_bias=no_end(live))
    wait_until(lambda: is_idle(live), 20)


def test_keys_are_tenants(serving):
    """One key never finds the blocks of another."""
    with serving(api_keys="one,two") as live:
        with live.openai(api_key="three") as client, pytest.raises(openai.AuthenticationError):
            ask(client)
        cached = {}
        for key in ("one", "two", "one"):
            with live.openai(api_key=key) as client:
                cached.setdefault(key, []).append(
                    ask(client).usage.prompt_tokens_details.cached_tokens
                )
        assert cached["two"] == [0]
        assert cached["one"][0] == 0 < cached["one"][1]


def test_limits_speak_the_clients_language(serving):
    with serving(rate_per_minute=1, max_body_bytes=4000) as live, live.openai() as client:
        with pytest.raises(openai.APIStatusError) as large:
            ask(client, [{"role": "user", "content": "x" * 5000}])
        assert large.value.status_code == 413
        with pytest.raises(openai.RateLimitError) as limited:
            ask(client)
        assert int(limited.value.response.headers["retry-after"]) >= 1


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


def test_a_deadline_is_said_in_the_stream_or_as_a_status(serving):
    with serving(request_timeout_s=0.3) as live, live.openai() as client:
        options = {"max_tokens": 8000, "logit_bias": no_end(live)}
        with pytest.raises(openai.APIStatusError, match=r"within 0\.3 seconds") as late:
            ask(client, **options)
        assert late.value.status_code == 504
        assert int(late.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.APIError, match=r"within 0\.3 seconds"):
            list(ask(client, stream=True, **options))
