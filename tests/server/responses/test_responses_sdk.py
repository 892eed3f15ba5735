"""OpenAI's responses as the official client sees them, on a real engine with a tiny model."""

import asyncio

import openai
import pytest

from tests.server.conftest import N_CONTEXT

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


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def ask(client, given=WORDS, **options):
    return client.responses.create(model="any", input=given, **{"max_output_tokens": 8, **options})


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


# Tools and formats.


def test_a_function_in_a_namespace_is_called_by_both_names(client):
    namespace = {"type": "namespace", "name": "sky", "description": "Sky", "tools": [WEATHER]}
    forced = {"tools": [namespace, {"type": "web_search"}], "tool_choice": "required"}
    answer = ask(client, max_output_tokens=300, **forced)
    call = answer.output[0]
    assert (call.name, call.namespace) == ("weather", "sky")
    assert answer.model_extra["keepwarm"]["ignored_tools"] == ["web_search"]


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


# API keys, sessions and errors


def test_stream_of_one_turn_over_the_context_fails_with_the_event_that_codex_knows(client):
    """Codex compacts at this event and its code, and gives up at a status of 400."""
    made = list(ask(client, "9" * (N_CONTEXT + 1), stream=True, truncation="auto"))
    assert [event.type for event in made] == ["response.created", "response.failed"]
    failed = made[-1].response
    assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
    assert f"maximum context length is {N_CONTEXT - 1} tokens" in failed.error.message
