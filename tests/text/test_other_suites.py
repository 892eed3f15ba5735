"""Cases that the suites of vLLM, SGLang and llama.cpp have, in our own words.

Which answers a request with tools allows: by `tool_choice`, with a format, with strict tools, after
reasoning, and which arguments. `docs/results/comparison.md` says where those servers answer
otherwise.
"""

import pytest

from keepwarm.text.request import Format, ToolChoice
from keepwarm.text.tools import STRICT, call_text
from tests.kit.tokenizers import WITH_TOOLS
from tests.text.test_prepare import model_with, prepared_by

AUTO, NONE, REQUIRED = ToolChoice("auto"), ToolChoice("none"), ToolChoice("required")
NAMED = ToolChoice("required", "forecast")
FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = Format(
    schema={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
)
SAID = {
    "words": "It rains.",
    "object": '{"ok": true}',
    "call": call_text("forecast", '{"city": "Oslo", "days": 3}'),
    "other call": call_text("clock", "{}"),
    "wrong call": call_text("forecast", '{"city": "Oslo", "days": "three"}'),
}
SAID["two calls"] = f"{SAID['call']}\n{SAID['other call']}"
SAID["words, call"] = f"Let me see. {SAID['call']}"
SAID["object, call"] = SAID["object"] + SAID["call"]
ONE_CALL, ANY_CALL = {"call"}, {"call", "other call", "two calls"}
TEXT, EVERYTHING = {"words", "object"}, set(SAID)


def tools(strict=False):
    forecast = {"name": "forecast", "parameters": FORECAST, STRICT: strict}
    return [{"type": "function", "function": each} for each in (forecast, {"name": "clock"})]


def one(choice):
    return ToolChoice(choice.mode, choice.name, parallel=False)


def may_end_with(model, text, **wishes):
    """Whether the answer may be this text and end there."""
    matcher = prepared_by(model, **wishes).new_matcher()
    if matcher is None:
        return True
    for token in model.tokenizer.encode(text, add_special_tokens=False):
        if not matcher.mask()[token]:
            return False
        matcher.advance(token)
    return matcher.finished or bool(matcher.mask()[model.tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Calls begin with plain text, as in the block for models without tools of their own."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return model_with(tmp_path_factory.mktemp("plain"), template)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    return model_with(tmp_path_factory.mktemp("thinker"), WITH_TOOLS, special)


@pytest.mark.parametrize(
    ("choice", "format_", "strict", "fit"),
    [
        (AUTO, None, False, EVERYTHING),
        (AUTO, None, True, EVERYTHING - {"wrong call"}),
        (AUTO, FORMAT, False, {"object"} | ANY_CALL),
        (AUTO, FORMAT, True, {"object"} | ANY_CALL),
        (one(AUTO), FORMAT, False, {"object", "call", "other call"}),
        (REQUIRED, None, False, ANY_CALL),
        (REQUIRED, FORMAT, False, ANY_CALL),
        (REQUIRED, FORMAT, True, ANY_CALL),
        (one(REQUIRED), None, False, {"call", "other call"}),
        (NAMED, None, False, ONE_CALL),
        (NAMED, FORMAT, False, ONE_CALL),
        (NONE, None, True, TEXT),
        (NONE, FORMAT, True, {"object"}),
    ],
)
def test_which_answers_a_tool_choice_allows(plain, choice, format_, strict, fit):
    wishes = {"tools": tools(strict), "tool_choice": choice, "format": format_}
    assert {name for name, text in SAID.items() if may_end_with(plain, text, **wishes)} == fit


@pytest.mark.parametrize(
    ("choice", "format_", "thinking", "fit"),
    [
        (REQUIRED, None, None, ANY_CALL),
        (NAMED, None, None, ONE_CALL),
        (AUTO, FORMAT, None, {"object"} | ANY_CALL),
        (NONE, FORMAT, None, {"object"}),
        (AUTO, FORMAT, False, set()),
    ],
)
def test_reasoning_comes_before_calls_and_formats(thinker, choice, format_, thinking, fit):
    wishes = {"tools": tools(), "tool_choice": choice, "format": format_, "thinking": thinking}
    thought = {name: f"<think>A call?</think>{text}" for name, text in SAID.items()}
    assert {name for name, text in thought.items() if may_end_with(thinker, text, **wishes)} == fit


@pytest.mark.parametrize(
    ("schema", "fit", "unfit"),
    [
        (FORECAST, ['{"city": "Oslo", "days": 7, "unit": "F"}'], ['{"city": "Oslo"}']),
        (FORECAST, [], ['{"city": "Oslo", "days": 3, "more": 1}', "{}", "null", "[]"]),
        (FORECAST, [], ['{"city": "Oslo", "days": 8}', '{"city": "Oslo", "days": 0}']),
        (FORECAST, [], ['{"city": "Oslo", "days": 3, "unit": "K"}', '{"city": null, "days": 3}']),
        (None, ["{}"], ['{"any": 1}', "null"]),
        ({}, ["{}"], ['{"any": 1}', "null"]),
        ({"type": "object"}, ["{}", '{"any": 1}'], ["null"]),
        ({"type": "object", "properties": {}}, ["{}"], ['{"any": 1}']),
        (
            {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}},
            ["{}", '{"n": null}', '{"n": 5}'],
            ['{"n": "5"}'],
        ),
        (
            {
                "type": "object",
                "properties": {"at": {"$ref": "#/$defs/place"}},
                "required": ["at"],
                "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
            },
            ['{"at": {"x": 1.5}}', '{"at": {}}'],
            ['{"at": {"y": 1}}', '{"at": 1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"tags": {"type": "array", "items": {"type": "string"}}},
            },
            ['{"tags": []}', '{"tags": ["a {", "}"]}'],
            ['{"tags": [1]}', '{"tags": "a"}'],
        ),
        (
            {"type": "object", "properties": {"by": {"anyOf": [{"const": "x"}, {"type": "null"}]}}},
            ['{"by": "x"}', '{"by": null}'],
            ['{"by": "y"}'],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ['{"a": 1}'],
            ['{"a": ""}'],
        ),
    ],
)
def test_arguments_of_a_forced_call_follow_the_schema(plain, schema, fit, unfit):
    function = {"name": "f"} if schema is None else {"name": "f", "parameters": schema}
    wishes = {"tools": [{"type": "function", "function": function}], "tool_choice": REQUIRED}
    found = {each: may_end_with(plain, call_text("f", each), **wishes) for each in (*fit, *unfit)}
    assert found == dict.fromkeys(fit, True) | dict.fromkeys(unfit, False)
