"""Anthropic's messages as pure functions: sessions, usage, events to JSON."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from keepwarm.server.anthropic.events import (
    CachedPrefix,
    MessageMeta,
    MessageStream,
    message,
    usage_of,
)
from keepwarm.server.anthropic.request import session_of
from keepwarm.server.http.problems import Problem
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Finished,
    Progress,
    Receipt,
    Result,
    Started,
    ToolCall,
    ToolCalled,
    Usage,
)

EVENTS = TypeAdapter(RawMessageStreamEvent)


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
