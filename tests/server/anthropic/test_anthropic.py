"""Anthropic's messages as pure functions: JSON to a request, events to JSON."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.prefix.policy import Policy
from keepwarm.server.anthropic.events import (
    CachedPrefix,
    MessageMeta,
    MessageStream,
    message,
    usage_of,
)
from keepwarm.server.anthropic.request import ignored_tools, request_of, session_of
from keepwarm.server.anthropic.shapes import CountRequest, MessagesRequest
from keepwarm.server.http.problems import Problem
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.text.request import (
    Breakpoint,
    Choice,
    Delta,
    Done,
    Finished,
    KVOptions,
    Progress,
    Receipt,
    Result,
    Started,
    ToolCall,
    ToolCalled,
    ToolChoice,
    Usage,
)

SETTINGS = config.load({})
CALLER = RequestFields("", None, Policy.READ_WRITE, False, KVOptions(), None)
HELLO = {"role": "user", "content": "Hello"}
SHORT = {"cache_control": {"type": "ephemeral"}}
LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
READ = {"name": "read", "description": "Reads", "input_schema": {"type": "object"}}
EVENTS = TypeAdapter(RawMessageStreamEvent)


def asked(*messages, shape=MessagesRequest, **fields):
    if shape is MessagesRequest:
        fields.setdefault("max_tokens", 9)
    return request_of(body(*messages, shape=shape, **fields), CALLER, SETTINGS)


def body(*messages, shape=MessagesRequest, **fields):
    return shape.model_validate({"messages": list(messages) or [HELLO], **fields})


def text(words, **more):
    return {"type": "text", "text": words, **more}


# Messages.


def test_a_system_text_comes_first():
    assert asked(system="Be kind").messages == [{"role": "system", "content": "Be kind"}, HELLO]


def test_system_blocks_stay_apart():
    messages = asked(system=[text("One"), text("Two")]).messages
    assert messages[0] == {"role": "system", "content": [text("One"), text("Two")]}


def test_system_messages_stay_where_they_stand():
    late = {"role": "system", "content": "Linux"}
    assert asked(HELLO, late).messages == [HELLO, late]


def test_a_tool_call_and_what_it_gave():
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "ä", "n": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")]}
    messages = asked(
        HELLO,
        {"role": "assistant", "content": [text("Let me see."), call]},
        {"role": "user", "content": [result, text("Go on")]},
    ).messages
    function = {"name": "read", "arguments": '{"path": "ä", "n": 1}'}
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        {"role": "user", "content": [text("Go on")]},
    ]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("Done", "Error: Done"),
        (None, "Error: "),
        ([{"type": "tool_reference", "tool_name": "grep"}], "Error: grep"),
    ],
)
def test_results_of_tools_that_failed_say_so(content, wanted):
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    assert asked({"role": "user", "content": [result]}).messages[0]["content"] == wanted


def test_past_thinking_goes_along_under_its_own_name():
    thought = {"type": "thinking", "thinking": "Hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = {"role": "assistant", "content": [hidden, thought, text("Hi")]}
    messages = asked(HELLO, said, HELLO).messages
    assert messages[1] == {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"}


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([text("a"), {"type": "image", "source": {}}], "messages[0].content[1]"),
        ([{"type": "document"}], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "tool_result"}], "messages[0].content[0].tool_use_id"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(content, param):
    with pytest.raises(BadField) as error:
        asked({"role": "user", "content": content})
    assert error.value.param == param


def test_an_answer_that_the_client_began_is_continued():
    begun = {"role": "assistant", "content": "The answer is ("}
    for shape in (CountRequest, MessagesRequest):
        assert asked(HELLO, begun, shape=shape).partial_answer
        assert len(asked(HELLO, begun, shape=shape).messages) == 2
        assert not asked(HELLO, shape=shape).partial_answer


# Wishes.


def test_sampling_and_stops():
    sampling = asked(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"]
    ).sampling
    assert (sampling.max_tokens, sampling.temperature) == (7, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.stop) == (0.9, 3, ("END",))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("enabled", True), ("disabled", False), ("adaptive", None), ("between_tools", None)],
)
def test_thinking(kind, wanted):
    assert asked(thinking={"type": kind, "budget_tokens": 2000}).thinking is wanted


def test_effort_and_format_are_given_on():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    request = asked(output_config=output, context_management={"edits": []})
    assert request.template_options == {"reasoning_effort": "high"}
    assert request.format.schema == schema


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "read"}, ToolChoice("required", "read")),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            ToolChoice("auto", None, parallel=False),
        ),
    ],
)
def test_tool_choice(choice, wanted):
    request = asked(tools=[READ], tool_choice=choice)
    assert request.tool_choice == wanted
    function = {"name": "read", "description": "Reads", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]


def test_tools_that_only_anthropic_runs_are_left_out_and_named():
    search = {"type": "web_search_20250305", "name": "web_search"}
    given = body(tools=[search, READ], max_tokens=1)
    assert [tool["function"]["name"] for tool in asked(tools=[search, READ]).tools] == ["read"]
    assert ignored_tools(given) == ["web_search"]


FETCH = {"name": "fetch", "description": "Fetches", "input_schema": {"type": "object"}}
WRITTEN = (
    '<function>{"description": "Fetches", "name": "fetch", "parameters": {"type": "object"}}'
    "</function>"
)


def names(request, deferred):
    return [t["function"]["name"] for t in request.tools if bool(t.get("deferred")) is deferred]


def test_a_deferred_tool_is_written_where_it_was_found():
    """Found by the client's own search: it can be called, and the prompt's beginning stays."""
    tools = [READ, {**FETCH, "defer_loading": True}]
    found = {"type": "tool_result", "tool_use_id": "1"}
    found["content"] = [{"type": "tool_reference", "tool_name": "fetch"}]
    request = asked({"role": "user", "content": [found]}, tools=tools)
    assert names(request, deferred=False) == ["read"]
    assert names(request, deferred=True) == ["fetch"]
    assert request.messages[0]["content"] == WRITTEN


def test_no_tool_is_deferred_where_only_anthropic_could_search():
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}
    request = asked(tools=[search, READ, {**FETCH, "defer_loading": True}])
    assert names(request, deferred=False) == ["read", "fetch"]


@pytest.mark.parametrize(
    ("kind", "tool", "text"),
    [
        ("tool_addition", {"type": "tool_definition", "definition": FETCH}, WRITTEN),
        ("tool_addition", {"type": "tool_reference", "name": "read"}, '"name": "read"'),
        ("tool_removal", {"type": "tool_reference", "name": "read"}, "read can no longer"),
    ],
)
def test_a_message_of_the_system_changes_the_tools(kind, tool, text):
    change = {"role": "system", "content": [{"type": kind, "tool": tool}]}
    request = asked(HELLO, change, tools=[READ])
    assert text in request.messages[1]["content"][0]["text"]
    assert names(request, deferred=False) == ["read"]
    assert names(request, deferred=True) == ["fetch"] * ("definition" in tool)


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "grep"}, {"type": "tool"}, {"type": "tool", "name": "ws"}]
)
def test_a_choice_of_what_is_not_there_is_refused(choice):
    with pytest.raises(BadField, match="not in tools"):
        asked(tools=[READ, {"type": "web_search_1", "name": "ws"}], tool_choice=choice)


def test_any_without_tools_is_refused():
    with pytest.raises(BadField, match="tools is empty"):
        asked(tool_choice={"type": "any"})


def test_a_tool_without_a_schema_is_refused():
    with pytest.raises(BadField, match="'read' has no input_schema"):
        asked(tools=[{"name": "read"}])


# Breakpoints.


def test_breakpoints_stand_at_the_end_of_their_message():
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x", **SHORT}
    request = asked(
        HELLO,
        {"role": "user", "content": [result, text("a", **LONG), text("b", **SHORT)]},
        system=[text("One", **LONG), text("Two")],
        tools=[READ, {**READ, "name": "write", **SHORT}],
    )
    assert [m["role"] for m in request.messages] == ["system", "user", "tool", "user"]
    assert request.breakpoints == (
        Breakpoint(-1, 300),
        Breakpoint(0, 3600),
        Breakpoint(2, 300),
        Breakpoint(3, 3600),
    )


def test_a_breakpoint_of_the_whole_body_stands_at_its_end():
    assert asked(HELLO, HELLO, **SHORT).breakpoints == (Breakpoint(1, 300),)


# Whose conversation it is.


@pytest.mark.parametrize(
    ("user_id", "wanted"),
    [
        (None, None),
        ("", None),
        ("me", "me"),
        ('{"device_id": "d", "session_id": "s-1"}', "s-1"),
        ('{"device_id": "d"}', '{"device_id": "d"}'),
        ("17", "17"),
        (
            "user_ab_account__session_0f8b9c1e-1111-2222-3333-444455556666",
            "0f8b9c1e-1111-2222-3333-444455556666",
        ),
    ],
)
def test_the_session_in_a_user_id(user_id, wanted):
    assert session_of(user_id) == wanted


# Usage.


@given(
    prompt=st.integers(1, 500),
    cached=st.integers(0, 500),
    kept=st.lists(
        st.builds(CachedPrefix, st.integers(0, 500), st.sampled_from([300.0, 3600.0])), max_size=4
    ),
)
def test_the_parts_of_a_prompt_add_up(prompt, cached, kept):
    cached = min(cached, prompt)
    kept = [mark._replace(n_tokens=min(mark.n_tokens, prompt)) for mark in kept]
    usage = usage_of(receipt(prompt, cached), kept)
    created = usage["cache_creation_input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + created == prompt
    assert sum(usage["cache_creation"].values()) == created
    assert created == max(0, max([k.n_tokens for k in kept], default=0) - cached)
    assert usage["cache_read_input_tokens"] == cached


def test_newly_kept_tokens_are_told_by_their_time():
    usage = usage_of(receipt(100, 10), [CachedPrefix(60, 300.0), CachedPrefix(40, 3600.0)])
    assert usage["input_tokens"] == 40
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": 30,
        "ephemeral_5m_input_tokens": 20,
    }


# Answers.


def receipt(prompt=20, cached=5):
    reused = {"live": cached} if cached else {}
    return Receipt(prompt, reused, prompt - cached, 1.0)


USAGE = Usage(20, 5, 8, 3, 1.0, 2.0)
CALL = ToolCall("call_1", "read", '{"path": "a"}')
META = MessageMeta("msg_1", "tiny", [CachedPrefix(12, 300.0)], ["web_search"])
ANSWER = [
    Started(receipt()),
    Progress(10, 20),
    Delta(0, reasoning="Let "),
    Delta(0, reasoning="me see"),
    Delta(0, text="Hel"),
    Delta(0, text=""),
    Delta(0, text="lo"),
    ToolCalled(0, CALL),
    ToolCalled(0, CALL._replace(id="call_2")),
    Finished(0, "tool_calls"),
    Done(USAGE, receipt()),
]


def streamed(events, meta=META):
    stream = MessageStream(meta)
    return parse(b"".join(stream.event(event) for event in events))


def parse(data):
    """Every event, its name checked against its type and its shape by the SDK's own types."""
    parsed = []
    for each in data.decode().split("\n\n")[:-1]:
        name, line = each.split("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] not in ("ping", "error"):
            EVENTS.validate_python(value)
        parsed.append(value)
    return parsed


def test_the_whole_sequence_of_events():
    events = streamed(ANSWER)
    assert [(e["type"], e.get("index")) for e in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    kinds = [delta["type"] for delta in deltas]
    assert kinds == (
        ["thinking_delta"] * 2 + ["signature_delta"] + ["text_delta"] * 2 + ["input_json_delta"] * 2
    )
    assert deltas[5]["partial_json"] == CALL.arguments


def test_what_a_stream_says_at_its_ends():
    first, *_, last, _ = streamed(ANSWER)
    assert first["message"]["usage"]["cache_read_input_tokens"] == 5
    assert first["message"]["usage"]["cache_creation_input_tokens"] == 7
    assert first["message"]["stop_reason"] is None
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 8
    assert last["keepwarm"]["ignored_tools"] == ["web_search"]
    assert last["keepwarm"]["recomputed"] == 15


def test_a_stream_says_the_same_as_a_whole_answer():
    calls = (CALL, CALL._replace(id="call_2"))
    choice = Choice("Hello", "Let me see", calls, "tool_calls", None, ())
    whole = message(META, Result((choice,), USAGE, receipt()))
    Message.model_validate(whole)
    assert put_together(streamed(ANSWER)) == whole


def put_together(events):
    """What a client makes of a stream."""
    made = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                made["content"].append(event["content_block"])
            case "content_block_delta":
                block, (_, *pieces) = made["content"][event["index"]], event["delta"].items()
                for key, value in pieces:
                    if key == "partial_json":
                        block["input"] = json.loads(value)
                    else:
                        block[key] += value
            case "message_delta":
                made |= event["delta"] | {k: event[k] for k in ("usage", "keepwarm")}
    return made


@pytest.mark.parametrize(
    ("finished", "reason", "stop"),
    [
        (Finished(0, "stop"), "end_turn", None),
        (Finished(0, "length"), "max_tokens", None),
        (Finished(0, "stop", "END"), "stop_sequence", "END"),
        (Finished(0, "tool_calls"), "tool_use", None),
    ],
)
def test_why_an_answer_ended(finished, reason, stop):
    events = streamed([Started(receipt()), finished, Done(USAGE, receipt())])
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    choice = Choice("", "", (), finished.reason, finished.stop, ())
    whole = message(META, Result((choice,), USAGE, receipt()))
    assert (whole["content"], whole["stop_reason"]) == ([], reason)


def test_signs_of_life_and_last_words():
    stream = MessageStream(META)
    (ping,) = parse(stream.keep_alive(Progress(5, 20)))
    assert ping == {"type": "ping", "keepwarm": {"prompt_tokens_done": 5, "prompt_tokens": 20}}
    (error,) = parse(stream.problem(Problem(503, "Stopping.")))
    assert error["error"] == {"type": "overloaded_error", "message": "Stopping."}
