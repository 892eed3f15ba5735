"""What the suites of vLLM, SGLang and llama.cpp ask of a server's calls, in our own words.

By OpenAI's client, with a tiny model whose forced calls are real. `docs/results/comparison.md` says
where those servers answer otherwise.
"""

import json
from collections import defaultdict

import openai
import pytest

ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", 'Rome {"}', "\\"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NAMES = ("weather", "forecast")
TOOLS = [{"type": "function", "function": {"name": n, "parameters": WEATHER}} for n in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": WEATHER} for name in NAMES]
OBJECT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": WEATHER}}
NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


def ask(client, **fields):
    asked = {"model": "any", "messages": ASK, "max_tokens": 90, "temperature": 0, **fields}
    return client.chat.completions.create(**asked)


def respond(client, **fields):
    return client.responses.create(**{"model": "any", "input": "Oslo?", "temperature": 0, **fields})


def streamed(client, **fields):
    """What a stream says of each choice: calls, text, reasons; each name, id and role once."""
    calls, texts, reasons = defaultdict(dict), defaultdict(str), defaultdict(list)
    roles = defaultdict(int)
    for chunk in ask(client, stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            assert "tool_calls" not in delta.model_fields_set or delta.tool_calls
            assert not reasons[choice.index], "something follows the end"
            roles[choice.index] += delta.role is not None
            texts[choice.index] += delta.content or ""
            for piece in delta.tool_calls or ():
                made = calls[choice.index]
                assert piece.index in (len(made), len(made) - 1), "calls come one by one"
                is_new = piece.index == len(made)
                assert (piece.id is not None, piece.function.name is not None) == (is_new, is_new)
                name, arguments = made.get(piece.index, (piece.function.name, ""))
                made[piece.index] = (name, arguments + (piece.function.arguments or ""))
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert set(roles.values()) == {1}
    return {i: (list(calls[i].values()), texts[i], reasons[i]) for i in roles}


def whole(client, **fields):
    choices = ask(client, **fields).choices
    for choice in choices:
        assert choice.message.tool_calls is None or choice.message.tool_calls
    return {
        choice.index: (
            [
                (made.function.name, made.function.arguments)
                for made in choice.message.tool_calls or ()
            ],
            choice.message.content or "",
            [choice.finish_reason],
        )
        for choice in choices
    }


@pytest.mark.parametrize("format_", [{}, {"response_format": OBJECT}], ids=["", "format"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", set(NAMES)), (NAMED, {"forecast"})],
    ids=["required", "named"],
)
def test_forced_calls_are_the_same_streamed_and_end_each_choice(client, choice, names, format_):
    asks = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "n": 2, **format_}
    found = whole(client, **asks)
    assert streamed(client, **asks) == found
    assert found.keys() == {0, 1}
    for calls, text, reasons in found.values():
        ((name, arguments),) = calls
        assert name in names
        assert json.loads(arguments).keys() == {"city", "unit"}
        assert (text, reasons) == ("", ["tool_calls"])


def test_a_format_without_calls_is_the_same_streamed(client):
    asks = {"tools": TOOLS, "tool_choice": "none", "response_format": OBJECT, "max_tokens": 400}
    found = whole(client, **asks)
    assert streamed(client, **asks) == found
    calls, text, reasons = found[0]
    assert (calls, reasons) == ([], ["stop"])
    assert json.loads(text)["unit"] in ("C", "F")


CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}
PAST = [*ASK, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, RESULT]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
        {"tools": TOOLS, "parallel_tool_calls": None},
        {"tools": TOOLS, "messages": PAST},
        {"tools": TOOLS, "response_format": OBJECT, "tool_choice": "auto"},
    ],
    ids=json.dumps,
)
def test_what_other_servers_take_or_refuse_is_answered(client, fields):
    (choice,) = ask(client, **{"max_tokens": 2, **fields}).choices
    assert choice.finish_reason == "length"


def test_strict_beside_the_function_is_named_as_ignored(client):
    answer = ask(client, tools=[{**each, "strict": True} for each in TOOLS], max_tokens=2)
    assert answer.keepwarm["ignored_fields"] == ["tools[].strict"]


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"tool_choice": "required"}),
        ("chat", {"tools": [], "tool_choice": "required"}),
        ("chat", {"tool_choice": NAMED}),
        ("chat", {"tools": TOOLS[:1], "tool_choice": NAMED}),
        ("chat", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
        ("chat", {"tools": TOOLS, "tool_choice": "sometimes"}),
        ("responses", {"tool_choice": "required"}),
        ("responses", {"tools": [], "tool_choice": "required"}),
        ("responses", {"tool_choice": FLAT[1]}),
        ("responses", {"tools": FLAT[:1], "tool_choice": {"type": "function", "name": "forecast"}}),
        ("responses", {"tools": FLAT, "tool_choice": {"type": "function"}}),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused_by_its_field(client, api, fields):
    asks = {"chat": ask, "responses": respond}[api]
    with pytest.raises(openai.BadRequestError) as refused:
        asks(client, **fields)
    assert refused.value.param.startswith("tool_choice")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "forecast"}])
def test_items_of_a_response_are_begun_and_ended_in_pairs(client, choice):
    """And the arguments of an item are those of its pieces."""
    asked = {"tools": FLAT, "tool_choice": choice, "parallel_tool_calls": False, "stream": True}
    began, pieces, ended = [], defaultdict(str), {}
    for event in respond(client, **asked):
        match event.type:
            case "response.output_item.added":
                began.append(event.item.id)
                assert event.item.arguments == ""
            case "response.function_call_arguments.delta":
                pieces[event.item_id] += event.delta
            case "response.function_call_arguments.done":
                assert pieces[event.item_id] == event.arguments
            case "response.output_item.done":
                ended[event.item.id] = event.item.arguments
            case "response.completed":
                output = {item.id: item.arguments for item in event.response.output}
    assert list(ended) == began
    assert ended == pieces == output
