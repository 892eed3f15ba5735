"""Calls whose arguments stream, on all three APIs, with the published SDKs.

The tiny model is forced to call; the grammar leaves it no choice of text.
"""

import json

import pytest

from keepwarm.server.anthropic.events import MessageMeta, MessageStream
from keepwarm.server.openai.chat import ChatStream
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.responses.events import CallItems
from keepwarm.text.request import Delta, ToolCall, ToolCallDelta, ToolCalled

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["é here"]}, "days": {"enum": [[1, 2.5]]}},
    "required": ["place", "days"],
}
ARGUMENTS = '{"place": "é here", "days": [1, 2.5]}'
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
USER = [{"role": "user", "content": "What is the weather?"}]
CHAT = {
    "model": "x",
    "messages": USER,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
MESSAGES = {
    "model": "x",
    "messages": USER,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather"},
}
RESPONSES = {
    "model": "x",
    "input": "What is the weather?",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "weather"},
}
CUT = 60  # tokens: in the middle of the arguments


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


@pytest.fixture(scope="module")
def claude(live):
    return live.anthropic()


def test_chat_completions(client):
    whole = client.chat.completions.create(**CHAT, n=2, max_tokens=200)
    deltas = [[], []]
    for chunk in client.chat.completions.create(**CHAT, n=2, max_tokens=200, stream=True):
        for choice in chunk.choices:
            deltas[choice.index] += choice.delta.tool_calls or []
    for choice, calls in zip(whole.choices, deltas, strict=True):
        made = choice.message.tool_calls[0]
        assert made.function.arguments == ARGUMENTS
        assert len(calls) > 10
        assert (calls[0].function.name, calls[0].function.arguments) == ("weather", "")
        assert [call.index for call in calls] == [0] * len(calls)
        assert [call.id for call in calls[1:]] == [None] * (len(calls) - 1)
        assert "".join(call.function.arguments for call in calls) == ARGUMENTS


def test_the_older_functions(client):
    asked = {"model": "x", "messages": USER, "functions": [FUNCTION], "max_tokens": 200}
    asked["function_call"] = {"name": "weather"}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls = [c.delta.function_call for chunk in chunks for c in chunk.choices]
    pieces = [call.arguments for call in calls if call]
    assert len(pieces) > 10
    assert "".join(pieces) == ARGUMENTS


def test_a_custom_tool_is_reported_whole(client):
    tool = {"type": "custom", "custom": {"name": "shell"}}
    asked = {**CHAT, "tools": [tool], "max_tokens": 60, "stream": True}
    chunks = list(client.chat.completions.create(**asked))
    inputs = [
        call.model_extra["custom"]["input"]
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert len(inputs) in (0, 2)  # it may be cut off, but comes in one piece


def test_messages(claude):
    whole = claude.messages.create(**MESSAGES, max_tokens=200)
    with claude.messages.stream(**MESSAGES, max_tokens=200) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert len(pieces) > 10
    assert "".join(pieces) == ARGUMENTS
    assert streamed.content[0].input == whole.content[0].input == json.loads(ARGUMENTS)
    assert streamed.stop_reason == "tool_use"


def test_responses(client):
    whole = client.responses.create(**RESPONSES, max_output_tokens=200)
    events = list(client.responses.create(**RESPONSES, max_output_tokens=200, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert len(pieces) > 10
    assert "".join(pieces) == done.arguments == whole.output[0].arguments == ARGUMENTS
    assert events[-1].response.output[0].arguments == ARGUMENTS


def test_a_call_that_is_cut_off_is_text_beside_what_was_sent_of_it(client, claude):
    """The text is that of the answer as a whole; SDKs can read what came of the call."""
    whole = client.chat.completions.create(**CHAT, max_tokens=CUT).choices[0].message
    assert whole.content.startswith("<tool_call>")
    assert whole.tool_calls is None
    with client.chat.completions.stream(**CHAT, max_tokens=CUT) as stream:
        events = list(stream)
    last = [event for event in events if event.type == "chunk"][-1].snapshot.choices[0]
    assert (last.message.content, last.finish_reason) == (whole.content, "length")
    sent = last.message.tool_calls[0].function.arguments
    assert ARGUMENTS.startswith(sent)
    assert sent not in ("", ARGUMENTS)

    with claude.messages.stream(**MESSAGES, max_tokens=CUT) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["tool_use", "text"]
    assert (message.content[1].text, message.stop_reason) == (whole.content, "max_tokens")

    (unstreamed,) = client.responses.create(**RESPONSES, max_output_tokens=CUT).output
    assert unstreamed.content[0].text == whole.content
    with client.responses.stream(**RESPONSES, max_output_tokens=CUT) as stream:
        response = list(stream)[-1].response
    call, said = response.output
    assert (call.type, call.status, said.content[0].text) == (
        "function_call",
        "incomplete",
        whole.content,
    )
    again = client.responses.create(
        model="x", input="And now?", previous_response_id=response.id, max_output_tokens=1
    )
    assert again.status == "incomplete"  # the broken call is no part of the conversation


# What is rare: an id that comes again after its call failed, and calls that are closed together.


BEGUN = ToolCallDelta(0, "f:0", "f", '{"a"')
AFTER = [Delta(0, text="<broken"), BEGUN, ToolCalled(0, ToolCall("f:0", "f", '{"a"'))]


def test_an_id_may_come_again_after_its_call_failed():
    chat = ChatStream(CompletionMeta("c", 0, "m"), 1, False, None)
    frames = b"".join(chat.event(event) for event in [BEGUN, *AFTER]).decode()
    assert frames.count('"id": "f:0"') == 2
    assert '"index": 1, "id": "f:0"' in frames
    messages = MessageStream(MessageMeta("m", "m"))
    frames = b"".join(messages.event(event) for event in [BEGUN, *AFTER]).decode()
    assert frames.count("content_block_start") == frames.count("content_block_stop") == 6
    items = CallItems({}, {"id": "resp_1", "output": []})
    items.add(BEGUN)
    items.close()
    assert next(frame["type"] for frame in items.add(BEGUN)) == "response.output_item.added"


def test_calls_that_end_together_are_closed_in_order():
    output = []
    items = CallItems({}, {"id": "resp_1", "output": output})
    events = [BEGUN, ToolCallDelta(0, "f:1", "f", "{}")]
    events += [
        ToolCalled(0, ToolCall("f:0", "f", '{"a"')),
        ToolCalled(0, ToolCall("f:1", "f", "{}")),
    ]
    frames = [frame for event in events for frame in items.add(event)]
    assert [(item["call_id"], item["status"]) for item in output] == [
        ("f:0", "completed"),
        ("f:1", "completed"),
    ]
    assert [frame["output_index"] for frame in frames] == [0] * 4 + [1] * 4
