"""Anthropic's messages as the official client sees them, on a real engine with a tiny model."""

import asyncio
import json
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.kit.waiting import wait_until
from tests.server.conftest import N_CONTEXT, read_vocabulary

USER = [{"role": "user", "content": "What is the answer to the question?"}]
LONG = "The other dog sleeps under the tree while the quick fox jumps. " * 30
WEATHER = {
    "name": "weather",
    "description": "The weather at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
BREAKPOINT = {"cache_control": {"type": "ephemeral"}}


class Weather(BaseModel):
    place: Literal["here", "there"]


def connect(live, kind=anthropic.Anthropic, **options):
    return kind(base_url=live.url, max_retries=0, timeout=300, **{"api_key": "any", **options})


@pytest.fixture(scope="module")
def client(live):
    with connect(live) as client:
        yield client


def ask(client, messages=USER, **options):
    return client.messages.create(
        **{"model": "claude-any", "max_tokens": 8, "messages": messages, **options}
    )


def prompt_tokens(usage):
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(parts)


def test_a_whole_answer(client):
    answer = ask(client)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert [block.type for block in answer.content] in ([], ["text"])
    assert 1 <= answer.usage.output_tokens <= 8


def test_a_stream_says_what_a_whole_answer_says(client):
    """Streamed and whole answers take the same path."""
    whole = ask(client)
    with client.messages.stream(model="x", max_tokens=8, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content)
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)


def test_the_receipt_comes_with_the_last_event(client):
    events = list(ask(client, stream=True))
    assert [events[0].type, events[-2].type, events[-1].type] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2].model_extra["keepwarm"]["prompt_tokens"] == prompt_tokens(
        events[0].message.usage
    )


def test_asynchronously(live):
    async def both():
        async with connect(live, anthropic.AsyncAnthropic) as client:
            whole = await ask(client)
            async with client.messages.stream(model="x", max_tokens=8, messages=USER) as stream:
                return whole, await stream.get_final_message()

    whole, streamed = asyncio.run(both())
    assert [b.model_dump() for b in whole.content] == [
        b.model_dump(exclude={"parsed_output"}) for b in streamed.content
    ]


def test_the_beta_address_is_the_same(client):
    answer = client.beta.messages.create(
        model="x",
        max_tokens=4,
        messages=USER,
        betas=["context-management-2025-06-27"],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "high"},
    )
    assert answer.usage.output_tokens <= 4


# Tools and formats.


def test_a_tool_is_called_and_its_result_read(client):
    """A whole turn of tools; the second request begins with what the first one left."""
    forced = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200}
    first = ask(client, **forced)
    assert first.stop_reason == "tool_use"
    call = next(block for block in first.content if block.type == "tool_use")
    assert (call.name, call.input["place"] in ("here", "there")) == ("weather", True)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    messages = [
        *USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = ask(client, messages, tools=[WEATHER])
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage)


def test_a_streamed_call_is_the_same(client):
    forced = {
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 200,
    }
    whole = ask(client, **forced)
    with client.messages.stream(model="x", messages=USER, **forced) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "input_json" in kinds
    calls = [[b.input for b in m.content if b.type == "tool_use"] for m in (whole, streamed)]
    assert calls[0] == calls[1] != []
    assert streamed.stop_reason == "tool_use"


def test_a_tool_of_anthropics_servers_is_left_out_and_named(client):
    answer = ask(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert answer.model_extra["keepwarm"]["ignored_tools"] == ["web_search"]


def test_structured_output(client):
    answer = client.messages.parse(model="x", max_tokens=500, messages=USER, output_format=Weather)
    assert answer.parsed_output.place in ("here", "there")


def test_a_stop_sequence_is_named(client):
    text = ask(client, max_tokens=12).content[0].text
    stop = text[2:4]
    answer = ask(client, max_tokens=12, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


# The cache.


def test_breakpoints_are_told_exactly(live):
    """What is read, what is newly kept up to the last breakpoint, and the rest add up."""
    with connect(live) as client:
        system = [{"type": "text", "text": f"Breakpoints. {LONG}", **BREAKPOINT}]
        first = ask(client, system=system)
        usage = first.usage
        alone = client.messages.count_tokens(model="x", messages=USER, system=system)
        assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens > 300
        assert 0 < usage.input_tokens < 60
        assert prompt_tokens(usage) == alone.input_tokens
        again = ask(client, system=system).usage
        assert (again.input_tokens, again.cache_creation_input_tokens) == (1, 0)
        assert again.cache_read_input_tokens == alone.input_tokens - 1


def test_without_breakpoints_nothing_is_told_as_newly_kept(client):
    usage = ask(client, system=f"None. {LONG}").usage
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens > 300


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind."},
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"messages": [*USER, {"role": "system", "content": "Linux"}]},
    ],
)
def test_the_count_is_what_generation_sees(client, fields):
    given = {"messages": USER, **fields}
    counted = client.messages.count_tokens(model="x", **given)
    assert counted.input_tokens == prompt_tokens(ask(client, **given).usage)


# API keys and sessions


def test_the_session_of_claude_code_is_an_agent(live, client):
    """The same agent from `metadata.user_id`, from its header, and through every API."""
    session = "0f8b9c1e-1111-2222-3333-444455556666"
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": session})
    ask(client, metadata={"user_id": user})
    wait_for_agent(live, session)
    ask(client, extra_headers={"X-Claude-Code-Session-Id": "in-a-header"})
    wait_for_agent(live, "in-a-header")


def wait_for_agent(live, name):
    wait_until(lambda: name in {a.id for a in live.host.engine.store.on_disk.agents.all()})


# What is wrong.


def test_bad_requests_have_anthropics_shape(client):
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, [{"role": "user", "content": [{"type": "image", "source": {}}]}])
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0]" in error.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_headers": {"X-Keepwarm-Scrub": "everything"}}, "scrubbing rule"),
        ({"extra_headers": {"X-Keepwarm-Cache": "often"}}, "cache policy"),
    ],
)
def test_what_is_wrong_is_named(client, fields, named):
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error") as error:
        ask(client, **fields)
    assert named in str(error.value)


@pytest.mark.parametrize("times", [1, 100])
def test_a_prompt_over_the_context_is_refused_in_the_words_that_clients_know(client, times):
    """Claude Code then shortens its conversation; very long ones are not even tokenised."""
    said = rf"prompt is too long: \d+ tokens > {N_CONTEXT - 1} maximum"
    with pytest.raises(anthropic.BadRequestError, match=said):
        ask(client, [{"role": "user", "content": "9" * (N_CONTEXT + 1) * times}])


def test_a_wrong_key_is_refused(serving):
    with serving(api_keys="right") as live, connect(live, api_key="right") as client:
        assert ask(client, max_tokens=1).usage.output_tokens == 1
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            ask(client.with_options(api_key="wrong"))


def test_too_often_says_when_to_come_back(serving):
    with serving(rate_per_minute=1) as live, connect(live) as client:
        ask(client, max_tokens=1)
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as error:
            ask(client, max_tokens=1)
        assert int(error.value.response.headers["retry-after"]) >= 1


def test_switching_scrubbing_off_by_header_and_by_setting(serving):
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]

    def scrubbed(client, **options):
        answer = ask(client, system=system, max_tokens=1, **options)
        return answer.model_extra["keepwarm"]["scrubbed"]

    with serving(scrub="-billing-header") as live, connect(live) as client:
        assert scrubbed(client) == []
        headers = {"X-Keepwarm-Scrub": "billing-header"}
        assert scrubbed(client, extra_headers=headers) == ["billing-header"]


def test_a_stream_that_fails_says_so_in_the_stream(serving):
    """The time is up while the answer is being written."""
    with serving(request_timeout_s=3.0) as live, connect(live) as client:
        long = {"type": "json_schema", "schema": {"type": "string", "minLength": 9000}}
        read_vocabulary(live, long["schema"])
        stream = ask(client, output_config={"format": long}, max_tokens=9000, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="timeout_error"):
            list(stream)
