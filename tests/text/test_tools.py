"""Tools in the prompt, calls out of the answer."""

import json
import pkgutil
import re
from pathlib import Path

import mlx_lm.tool_parsers
import pytest

from keepwarm.errors import BadInput
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Request
from keepwarm.text.template import MAX_DEPTH, Template
from keepwarm.text.tools import (
    BLOCK,
    OURS,
    CallReader,
    adapt_to_template,
    call_text,
    calls_of_round,
    canonical_tools,
    signature_of,
    tool_block,
    tool_format,
    write_tools_as_text,
)
from tests.kit.checkpoints import CHATML
from tests.kit.tokenizers import WITH_TOOLS, make
from tests.text.formats import ARGUMENTS, CALLS, CLOCK, HARMONY_TOKENS, WEATHER

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
            {"id": "2", "function": {"name": "clock", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "assistant", "content": "Rain at noon."},
]


def test_mlx_lm_parses_these_formats():
    """A new format needs a sample call."""
    names = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert names == set(CALLS)


def format_of(tokenizer):
    return tool_format(tokenizer, Template.of(tokenizer))


def test_the_format_is_the_models_own_if_the_template_renders_tools_and_calls_parse(tmp_path):
    assert format_of(make(tmp_path / "a", parser="qwen3_coder")).native
    assert format_of(make(tmp_path / "b", parser="qwen3_coder", template=CHATML)) is OURS
    assert format_of(make(tmp_path / "c")) is OURS  # renders tools, but has no parser for calls
    harmony = make(tmp_path / "d", special=[f"<|{name}|>" for name in HARMONY_TOKENS])
    assert format_of(harmony).start == "to=functions."


def test_reordered_tools_give_the_same_prompt(tmp_path):
    """By name, keys sorted; another schema is another prompt."""
    turned = json.loads(json.dumps(WEATHER))
    turned["function"] = dict(reversed(turned["function"].items()))
    assert canonical_tools([WEATHER, CLOCK]) == canonical_tools([CLOCK, turned])
    assert tool_block([WEATHER, CLOCK]) == tool_block([CLOCK, turned])
    turned["function"]["parameters"]["required"] = []
    assert tool_block([WEATHER, CLOCK]) != tool_block([CLOCK, turned])
    for template in (CHATML, WITH_TOOLS):
        tokenizer = make(tmp_path, template=template, parser="json_tools")
        prompter = Prompter(tokenizer)
        prompts = [
            prompter.render(Request(messages=TALK[:2], tools=tools))
            for tools in ([WEATHER, CLOCK], [CLOCK, WEATHER])
        ]
        assert prompts[0].tokens == prompts[1].tokens
        assert "get_weather" in prompts[0].text


@pytest.mark.parametrize("tool", [{}, {"function": {}}, {"function": "f"}, {"type": "web_search"}])
def test_what_is_no_function_is_refused(tool):
    with pytest.raises(BadInput, match="A tool must be"):
        canonical_tools([tool])


def test_parameters_that_are_no_schema_are_refused():
    with pytest.raises(BadInput, match="parameters of tool 'f' must be a JSON schema"):
        canonical_tools([{"function": {"name": "f", "parameters": ["a"]}}])


def test_our_block_reaches_a_template_without_tools(tmp_path):
    tokenizer = make(tmp_path, template=CHATML)
    assert adapt_to_template(OURS, TALK, [WEATHER, CLOCK]).tools is None
    prompter = Prompter(tokenizer)
    text = prompter.render(Request(messages=TALK, tools=[WEATHER, CLOCK])).text
    assert text.startswith("<|im_start|>system\n# Tools")
    assert f"{tool_block([WEATHER, CLOCK])}\n\nBe brief.<|im_end|>" in text
    as_before = Prompter(tokenizer, stable_first="off")
    text = as_before.render(Request(messages=TALK, tools=[WEATHER, CLOCK])).text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(canonical_tools([WEATHER])[0]) in text
    results = (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>"
    )
    assert results in text
    calls = call_text("get_weather", ARGUMENTS) + "\n" + call_text("clock", "{}")
    assert f"<|im_start|>assistant\n{calls}<|im_end|>" in text


def test_text_beside_a_call_stands_before_it():
    message = {**TALK[2], "content": "Let me see."}
    assert write_tools_as_text([message], [])[0]["content"].startswith("Let me see.\n<tool_call>\n")


def test_without_a_system_message_the_block_is_one():
    messages = write_tools_as_text(TALK[1:2], [WEATHER])
    assert messages == [{"role": "system", "content": tool_block([WEATHER])}, TALK[1]]
    assert write_tools_as_text(TALK[:2], []) == TALK[:2]


def test_the_block_is_documented():
    page = Path(__file__).parents[2] / "docs" / "answers.md"
    assert BLOCK.replace("{{", "{").replace("}}", "}") in page.read_text()


def test_ids(tmp_path):
    """Keepwarm's; the model's own where it writes one; nine characters for Mistral."""
    ids = {}
    for parser in ("json_tools", "kimi_k2", "mistral"):
        reader = CallReader(format_of(make(tmp_path / parser, parser=parser)), [WEATHER])
        body = re.sub(r"^<[^>]*>|^\[TOOL_CALLS\]|<[^>]*>$", "", CALLS[parser])
        (call,) = reader.begin().finish(reader.read(body))
        ids[parser] = call.id
    assert re.fullmatch(r"call_[0-9a-f]{24}", ids["json_tools"])
    assert ids["kimi_k2"] == "functions.get_weather:0"
    assert re.fullmatch(r"[0-9a-f]{9}", ids["mistral"])


def test_arguments_keep_their_order_and_their_letters():
    reader = CallReader(OURS, [CLOCK])
    (call,) = reader.read('{"name": "clock", "arguments": {"z": "é", "a": [1.5,true,null]}}')
    assert call.arguments == '{"z": "é", "a": [1.5, true, null]}'
    (call,) = reader.read('{"name": "clock", "arguments": "{\\"a\\": 1}"}')
    assert call.arguments == '{"a": 1}'
    (call,) = reader.read('{"name": "clock", "arguments": null}')
    assert call.arguments == "{}"


def test_a_call_nested_deeper_than_a_body_may_be_is_none():
    """No answer could hold it, and no later request."""
    call = '{"name": "clock", "arguments": {"a": %s}}'
    reader = CallReader(OURS, [CLOCK])
    assert reader.read(call % ("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)))
    assert not reader.read(call % ("[" * MAX_DEPTH + "]" * MAX_DEPTH))


def test_small_models_may_write_a_list():
    one = '{"name": "clock", "arguments": {}}'
    assert len(CallReader(OURS, [CLOCK]).read(f"[{one}, {one}]")) == 2
    assert len(CallReader(OURS, [CLOCK], parallel=False).read(f"[{one}, {one}]")) == 1
    assert not CallReader(OURS, [CLOCK]).read(f"[{one}, 3]")


ODD_CALLS = [  # as a program may have noted them, for a template that accepts them
    {},
    {"function": None},
    {"function": {"name": "look"}},
    {"function": {"name": "look", "arguments": {"a": 1, 2: "b"}}},
    {"function": {"name": "look", "arguments": "{"}},
]


@pytest.mark.parametrize("call", ODD_CALLS)
def test_calls_without_names_or_arguments_can_be_compared(call):
    made = {"function": {"name": "look", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call, made]}]
    assert signature_of("look", {"a": 1}) in calls_of_round(messages)
    assert len(calls_of_round(messages)) == 2
