"""OpenAI's responses as pure functions: reasoning, tools, events to JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from keepwarm import config
from keepwarm.prefix.policy import Policy
from keepwarm.server.http.problems import Problem
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.responses.events import (
    ResponseBuilder,
    ResponseStream,
    answer_options_of,
    initial_response,
)
from keepwarm.server.responses.request import (
    decode_reasoning,
    encode_reasoning,
    items_of,
    offered_tools,
    request_of,
)
from keepwarm.server.responses.shapes import ResponsesRequest, ResponseTool
from keepwarm.text.request import (
    Delta,
    Done,
    Finished,
    KVOptions,
    Progress,
    Receipt,
    Started,
    ToolCall,
    ToolCalled,
    Usage,
)
from keepwarm.text.sampling_rules import DrawRules

SETTINGS = config.load({})
CALLER = RequestFields("", None, Policy.READ_WRITE, False, KVOptions(), None)
EVENTS = TypeAdapter(ResponseStreamEvent)
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True}
SEARCH = {"type": "web_search"}
PATCH = {"type": "custom", "name": "patch"}
NAMESPACE = {"type": "namespace", "name": "files", "description": "Files", "tools": [READ, PATCH]}


def body(**fields):
    return ResponsesRequest.model_validate({"input": "Hello", **fields})


@given(st.text())
def test_encoded_reasoning_comes_back(text):
    assert decode_reasoning(encode_reasoning(text)) == text


@pytest.mark.parametrize("foreign", [None, "", "gAAAAB", "keepwarm1:%%%", "keepwarm1:/w=="])
def test_reasoning_of_another_server_is_ignored(foreign):
    assert decode_reasoning(foreign) == ""


# Tools and options.


def test_a_custom_tool_is_called_with_text():
    made = builder(tools=[PATCH]).add(ToolCalled(0, ToolCall("c", "patch", '{"input": "+ x"}')))
    item = made[-1]["item"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "+ x")
    kinds = [event["type"].removeprefix("response.") for event in made[1:3]]
    assert kinds == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    for number, event in enumerate(made):
        EVENTS.validate_python({**event, "sequence_number": number})


def test_functions_are_offered_and_hosted_tools_left_out():
    tools = offered_tools([ResponseTool.model_validate(tool) for tool in (READ, SEARCH, NAMESPACE)])
    names = [tool["function"]["name"] for tool in tools.tools]
    assert names == ["read", "files__read", "files__patch"]
    assert tools.names["files__read"] == ("read", "files", False)
    assert tools.names["files__patch"].custom
    assert tools.ignored == ["web_search"]


# Answers.

RECEIPT = Receipt(20, {"live": 5}, 15, 1.0, scrubbed=("budget",))
USAGE = Usage(20, 5, 8, 3, 1.0, 2.0)
CALL = ToolCall("call_1", "files__read", '{"path": "a"}')
ANSWER = [
    Started(RECEIPT),
    Progress(10, 20),
    Delta(0, reasoning="Let "),
    Delta(0, reasoning="me see"),
    Delta(0, text="Hel"),
    Delta(0, text="lo"),
    ToolCalled(0, CALL),
    Finished(0, "tool_calls"),
    Done(USAGE, RECEIPT),
]
FIELDS = {
    "tools": [NAMESPACE, SEARCH],
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low"},
}


def builder(kept=None, **fields):
    given = body(**fields)
    request = request_of(given, items_of(given.input), CALLER, SETTINGS)
    options = answer_options_of(given, offered_tools(given.tools or ()), request)
    keep = (kept if kept is not None else []).append
    return ResponseBuilder(initial_response(given, "tiny", request, DrawRules()), options, keep)


def streamed(events, made):
    stream = ResponseStream(made)
    return parse(b"".join(stream.event(event) for event in events))


def parse(data):
    """Every event, its name checked against its type and its shape by the SDK's own types."""
    parsed = []
    for each in data.decode().split("\n\n")[:-1]:
        name, line = each.split("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENTS.validate_python(value)
        parsed.append(value)
    return parsed


def test_the_whole_sequence_of_events():
    events = streamed(ANSWER, builder(**FIELDS))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == [0] * 7 + [1] * 7 + [2] * 4
    opened, closed = (
        [e["item"]["id"] for e in events if e["type"] == f"response.output_item.{what}"]
        for what in ("added", "done")
    )
    assert opened == closed == [item["id"] for item in events[-1]["response"]["output"]]


def test_what_an_answer_holds():
    kept = []
    made = builder(kept, **FIELDS)
    answer = streamed(ANSWER, made)[-1]["response"]
    Response.model_validate(answer)
    thought, text, call = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
    assert decode_reasoning(thought["encrypted_content"]) == "Let me see"
    assert text["content"][0]["text"] == "Hello"
    assert (call["name"], call["namespace"], call["call_id"]) == ("read", "files", "call_1")
    assert answer["usage"]["input_tokens_details"] == {
        "cached_tokens": 5,
        "cache_write_tokens": 15,
    }
    assert answer["usage"]["total_tokens"] == 28
    assert answer["keepwarm"]["ignored_tools"] == ["web_search"]
    assert answer["keepwarm"]["scrubbed"] == ["budget"]
    assert answer["tools"] == [NAMESPACE, SEARCH]
    assert (answer["metadata"], answer["reasoning"]["effort"]) == ({"a": "b"}, "low")
    assert kept == [made.response]


def test_whole_response_equals_the_streamed_one():
    made = builder(**FIELDS)
    for event in ANSWER:
        made.add_whole(event)
    stream = streamed(ANSWER, builder(**FIELDS))
    assert without_ids(made.response) == without_ids(stream[-1]["response"])


def without_ids(response):
    items = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
    times = {"created_at": 0, "completed_at": 0}
    return json.loads(json.dumps(response | times | {"id": "", "output": items}))


def test_an_answer_that_had_no_room_is_incomplete():
    events = [Started(RECEIPT), Delta(0, text="Hel"), Finished(0, "length"), Done(USAGE, RECEIPT)]
    last = streamed(events, builder())[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_signs_of_life_and_last_words():
    kept = []
    stream = ResponseStream(builder(kept))
    stream.event(Started(RECEIPT))
    (alive,) = parse(stream.keep_alive(Progress(5, 20)))
    assert alive["type"] == "response.in_progress"
    assert alive["sequence_number"] == 2
    assert alive["keepwarm"] == {"prompt_tokens_done": 5, "prompt_tokens": 20}
    stream.event(Delta(0, text="Hel"))
    *_, last = parse(stream.problem(Problem(500, "It failed.")))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "It failed."}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert kept == []


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Problem(429, "x", "rate_limit_exceeded"), "rate_limit_exceeded"),
        (Problem(504, "x", "timeout"), "server_error"),
        (Problem(400, "x"), "invalid_prompt"),
    ],
)
def test_failures_have_codes_that_clients_know(problem, code):
    (event,) = parse(ResponseStream(builder()).problem(problem))
    assert event["response"]["error"]["code"] == code
