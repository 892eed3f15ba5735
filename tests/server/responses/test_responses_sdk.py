"""OpenAI's responses as the official client sees them, on a real engine with a tiny model."""

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.kit.waiting import wait_until
from tests.server.conftest import N_CONTEXT, read_vocabulary

WORDS = "What is the answer to the question?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


LONG_TEXT = {"type": "string", "minLength": 9000}


class Weather(BaseModel):
    place: Literal["here", "there"]


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def ask(client, given=WORDS, **options):
    return client.responses.create(model="any", input=given, **{"max_output_tokens": 8, **options})


def test_a_whole_answer(client):
    answer = ask(client, instructions="Be kind.", metadata={"a": "b"})
    assert (answer.object, answer.model, answer.metadata) == ("response", "tiny", {"a": "b"})
    assert answer.status in ("completed", "incomplete")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens <= 8
    assert answer.instructions == "Be kind."


def test_the_same_again_is_warm_and_says_so(client):
    """What was read once is reported as cached, in usage and in the receipt."""
    words = "How warm is the dog under the tree in responses? " * 20
    first, second = ask(client, words), ask(client, words)
    assert second.output_text == first.output_text
    details = second.usage.input_tokens_details
    assert details.cached_tokens == second.usage.input_tokens - 1
    assert details.cache_write_tokens == 1
    assert second.model_extra["keepwarm"]["recomputed"] == 1


def test_a_stream_says_what_a_whole_answer_says(client):
    """Streamed and whole answers take the same path."""
    whole = ask(client)
    with client.responses.stream(model="x", input=WORDS, max_output_tokens=8) as stream:
        events = list(stream)
        final = stream.get_final_response() if whole.status == "completed" else None
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert final is None or final.output_text == text


@pytest.mark.parametrize(
    ("options", "n_top"),
    [({"top_logprobs": 2}, 2), ({"include": ["message.output_text.logprobs"]}, 0)],
)
def test_logprobs(client, options, n_top):
    """Of the message's tokens, alike whole, in pieces and at the end of a stream."""
    (part,) = ask(client, **options).output[0].content
    assert part.logprobs
    assert all(each.logprob < 1e-4 for each in part.logprobs)
    assert {len(each.top_logprobs) for each in part.logprobs} == {n_top}
    events = list(ask(client, stream=True, **options))
    pieces = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    (done,) = [e.logprobs for e in events if e.type == "response.output_text.done"]
    named = [each.token for each in part.logprobs]
    assert [each.token for each in done] == named
    assert [each.token for piece in pieces for each in piece] == named[: sum(map(len, pieces))]
    final = events[-1].response.output[0].content[0].logprobs
    assert [(each.token, each.logprob) for each in final] == [(e.token, e.logprob) for e in done]
    assert events[-1].response.top_logprobs == n_top


def test_without_a_wish_there_are_no_logprobs(client):
    assert ask(client).output[0].content[0].logprobs == []


def test_asynchronously(live):
    async def both():
        async with live.async_openai() as client:
            whole = await ask(client)
            stream = await ask(client, stream=True)
            return whole, [event async for event in stream]

    whole, events = asyncio.run(both())
    assert events[-1].response.output_text == whole.output_text


def test_an_answer_without_room_is_incomplete(client):
    answer = ask(client, max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


# Tools and formats.


def test_a_tool_is_called_and_its_result_read(client):
    """A whole turn of tools; the second request begins with what the first one left."""
    forced = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200}
    given = [{"role": "user", "content": WORDS}]
    first = ask(client, given, store=False, **forced)
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, call.status) == ("weather", "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    second = ask(client, [*given, *first.output, result], store=False, tools=[WEATHER])
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_streamed_call_is_the_same(client):
    named = {"type": "function", "name": "weather"}
    forced = {"tools": [WEATHER], "tool_choice": named, "max_output_tokens": 200}
    whole = ask(client, **forced)
    events = list(ask(client, stream=True, **forced))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [e.arguments for e in done] == [item.arguments for item in whole.output]
    assert Weather.model_validate_json(done[0].arguments)


def test_a_function_in_a_namespace_is_called_by_both_names(client):
    namespace = {"type": "namespace", "name": "sky", "description": "Sky", "tools": [WEATHER]}
    forced = {"tools": [namespace, {"type": "web_search"}], "tool_choice": "required"}
    answer = ask(client, max_output_tokens=300, **forced)
    call = answer.output[0]
    assert (call.name, call.namespace) == ("weather", "sky")
    assert answer.model_extra["keepwarm"]["ignored_tools"] == ["web_search"]


def test_structured_output(client):
    answer = client.responses.parse(
        model="x", input=WORDS, text_format=Weather, max_output_tokens=500
    )
    assert answer.output_parsed.place in ("here", "there")


# Answers by their id.


def test_an_answer_is_continued_by_its_id(client):
    first = ask(client, "One, two.")
    second = ask(client, "Three.", previous_response_id=first.id)
    whole = [
        {"role": "user", "content": "One, two."},
        *first.output,
        {"role": "user", "content": "Three."},
    ]
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens == ask(client, whole).usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_streamed_answer_is_kept_as_well(client):
    *_, last = ask(client, stream=True)
    assert client.responses.retrieve(last.response.id).output == last.response.output


def test_an_answer_is_shown_and_forgotten(client):
    answer = ask(client)
    shown = client.responses.retrieve(answer.id)
    assert shown.model_dump() == answer.model_dump()
    items = client.responses.input_items.list(answer.id)
    assert [item.content for item in items.data] == [WORDS]
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="not found; send the whole"):
        client.responses.retrieve(answer.id)


def test_an_answer_that_is_not_to_be_kept_is_not(client):
    answer = ask(client, store=False)
    assert answer.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_an_unknown_answer_cannot_be_continued(client):
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, previous_response_id="resp_gone")
    assert error.value.body["type"] == "invalid_request_error"
    assert "'resp_gone'" in error.value.body["message"]


def test_items_are_referred_to_by_their_id(client):
    first = ask(client)
    given = [
        {"role": "user", "content": WORDS},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "Go on."},
    ]
    counted = ask(client, given).usage.input_tokens
    assert counted == ask(client, "Go on.", previous_response_id=first.id).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="msg_gone"):
        ask(client, [{"type": "item_reference", "id": "msg_gone"}])


def test_one_key_does_not_see_the_answers_of_another(serving):
    with serving(api_keys="one,two") as live, live.openai(api_key="one") as one:
        answer = ask(one)
        assert one.responses.retrieve(answer.id).id == answer.id
        with pytest.raises(openai.NotFoundError):
            one.with_options(api_key="two").responses.retrieve(answer.id)


def test_the_count_is_what_generation_sees(client):
    given = {"instructions": "Be kind.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(model="x", input=WORDS, **given)
    assert counted.input_tokens == ask(client, **given).usage.input_tokens


# API keys, sessions and errors


def test_the_session_of_codex_is_an_agent(live, client):
    """The same agent from `prompt_cache_key` and from the header."""

    def known(name):
        return name in {agent.id for agent in live.host.engine.store.on_disk.agents.all()}

    ask(client, prompt_cache_key="codex-in-the-body")
    wait_until(lambda: known("codex-in-the-body"))
    ask(client, extra_headers={"session-id": "codex-in-a-header"})
    wait_until(lambda: known("codex-in-a-header"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"given": []}, "input"),
        ({"given": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"given": [{"type": "message", "role": "user", "content": 1}]}, "input[0].content"),
        (
            {"given": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
    ],
)
def test_what_is_wrong_is_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **fields)
    assert error.value.body["type"] == "invalid_request_error"
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"background": True, "store": False}, "omit store"),
        ({"conversation": {"id": "conv_1"}}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "instructions"),
    ],
)
def test_what_is_not_here_says_what_is(client, fields, instead):
    with pytest.raises(openai.BadRequestError, match=instead):
        ask(client, **fields)


def test_a_prompt_over_the_context_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "9" * (N_CONTEXT + 1))
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("truncation", ["disabled", "auto"])
def test_a_stream_over_the_context_fails_with_the_event_that_codex_knows(client, truncation):
    """Codex compacts at this event and its code, and gives up at a status of 400."""
    made = list(ask(client, "9" * (N_CONTEXT + 1), stream=True, truncation=truncation))
    assert [event.type for event in made] == ["response.created", "response.failed"]
    failed = made[-1].response
    assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
    assert f"maximum context length is {N_CONTEXT - 1} tokens" in failed.error.message


def test_a_stream_that_fails_says_so_in_the_stream(serving):
    """The time is up while the answer is being written."""
    schema = {"type": "json_schema", "name": "long", "schema": LONG_TEXT}
    with serving(request_timeout_s=3.0) as live, live.openai() as client:
        read_vocabulary(live, LONG_TEXT)
        *_, last = ask(client, text={"format": schema}, max_output_tokens=9000, stream=True)
        assert last.type == "response.failed"
        assert last.response.error.code == "server_error"
