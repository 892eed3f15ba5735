"""What other servers accept: each is honoured here too, or refused by name."""

import json
import re

import openai
import pytest
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerFast

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.models.load import load
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.chat import call_style_of, custom_input
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.openai.shapes import ChatRequest
from keepwarm.text.request import (
    Choice,
    Done,
    Finished,
    Receipt,
    Result,
    ToolCall,
    ToolCalled,
    Usage,
)
from tests.kit.checkpoints import SPECIALS, make_tokenizer, write_checkpoint
from tests.server.conftest import serve

USER = {"role": "user", "content": "Well?"}
YES_OR_NO = 'root ::= "yes" | "no"'


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=[USER], temperature=0, **options)


# Numbers and stop strings.


def test_a_top_p_of_zero_is_the_likeliest_token(client):
    hot = {"extra_body": {"temperature": 2}, "max_tokens": 4}
    assert ask(client, top_p=0, **hot).choices[0].message == (
        ask(client, max_tokens=4).choices[0].message
    )


def test_no_tokens_are_empty_choices_or_with_echo_the_prompts(client):
    none = ask(client, max_tokens=0, n=2)
    assert [(c.message.content, c.finish_reason) for c in none.choices] == [("", "length")] * 2
    asked = {"model": "m", "prompt": ["One", "Two"], "echo": True, "max_tokens": 0}
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == ["One", "Two"]
    chunks = list(client.completions.create(**asked, stream=True))
    assert [c.text for chunk in chunks for c in chunk.choices if c.text] == ["One", "Two"]


# Grammars.


def test_an_answer_follows_a_grammar_of_llama_cpp(client):
    answer = ask(client, max_tokens=8, extra_body={"grammar": YES_OR_NO})
    assert answer.choices[0].message.content in ("yes", "no")
    grammar = 'start: "yes" | "no"'
    asked = {"model": "m", "prompt": "Well?", "max_tokens": 8, "extra_body": {"grammar": grammar}}
    assert client.completions.create(**asked).choices[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= "yes', "GBNF grammar cannot be read"),
        ('other ::= "yes"', "GBNF grammar cannot be read"),
        ('root ::= start\nstart ::= "yes"', "Rule 'start' already exists"),
        (f"root ::= {'(' * 5000}", "GBNF grammar cannot be read"),
        ("root ::= " + '"a" ' * 5000, "characters of GBNF; send at most 16,384"),
        ("nonsense", "cannot be compiled"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(client, grammar, why):
    with pytest.raises(openai.BadRequestError, match=why):
        ask(client, extra_body={"grammar": grammar})


HUES = ["red/green", 'the "blue"', "\n"]


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": HUES}, "|".join(map(re.escape, HUES))),
        ({"regex": r"[0-9]{2}/[a-c]{2}\/\\\\"}, r"[0-9]{2}/[a-c]{2}/\\\\"),
        ({"json": {"enum": ["oak"]}}, '"oak"'),
        ({"json": '{"enum": ["oak"]}'}, '"oak"'),
        ({"grammar": YES_OR_NO}, "yes|no"),
    ],
)
def test_an_answer_follows_the_formats_of_vllm(client, wanted, pattern):
    body = {"structured_outputs": wanted}
    answer = ask(client, max_tokens=16, extra_body=body).choices[0].message.content
    assert re.fullmatch(pattern, answer), answer
    asked = {"model": "m", "prompt": "Well?", "max_tokens": 16, "extra_body": body}
    assert re.fullmatch(pattern, client.completions.create(**asked).choices[0].text)


def test_a_schema_as_llama_cpp_takes_it(client):
    body = {"json_schema": {"const": "42"}}
    assert ask(client, max_tokens=9, extra_body=body).choices[0].message.content == '"42"'


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of"),
        ({"choice": []}, "choice"),
        ({"regex": "[.*"}, "cannot be compiled"),
        ({"regex": {"a": 1}}, "regex"),
        ({"grammar": ""}, "cannot be compiled"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": "[]"}, "not a JSON schema"),
        ({"json": {"properties": {"foo": "bar"}}}, "cannot be compiled"),
    ],
)
def test_such_a_format_that_is_none_is_refused(client, wanted, why):
    with pytest.raises(openai.BadRequestError, match=why):
        ask(client, max_tokens=1, extra_body={"structured_outputs": wanted})


def test_the_taken_token_is_among_the_likeliest(client):
    """As at OpenAI, also where none of the others are asked for."""
    answer = client.completions.create(model="m", prompt="One", max_tokens=3, logprobs=0)
    logprobs = answer.choices[0].logprobs
    taken = zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    assert logprobs.top_logprobs == [{name: logprob} for name, logprob in taken]


# Tools.

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
NOTHING = {"parameters": {"type": "object", "additionalProperties": False}}
OLD = {"name": "read", "parameters": {"type": "object"}}
CALL = ToolCall("c1", "patch", '{"input": "+ \\"ä\\""}')
READING = ToolCall("c2", "read", "{}")
META = CompletionMeta("id", 1, "m")
USAGE, RECEIPT = Usage(9, 8, 5, 2, 4.0, 100.0), Receipt(9, {}, 9, 0.0)


def told(body, *calls):
    """The message and finish reason of an answer with these calls, whole and streamed."""
    style = call_style_of(ChatRequest.model_validate(body))
    choice = Choice("", "", calls, "tool_calls", None, ())
    whole = ChatCompletion.model_validate(
        chat.completion(META, Result((choice,), USAGE, RECEIPT), None, style), strict=True
    )
    encoder = chat.ChatStream(META, 1, False, None, style)
    events = [*(ToolCalled(0, call) for call in calls), Finished(0, "tool_calls")]
    frames = b"".join(encoder.event(event) for event in (*events, Done(USAGE, RECEIPT)))
    lines = [line.removeprefix("data: ") for line in frames.decode().split("\n\n") if line]
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return whole.choices[0], chunks


def test_a_call_of_a_custom_tool_is_told_as_one():
    choice, chunks = told({"messages": [USER], "tools": [PATCH, READ]}, CALL, READING)
    custom, function = choice.message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "patch", '+ "ä"')
    assert (function.type, function.function.name) == ("function", "read")
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert calls[0]["custom"] == {"name": "patch", "input": ""}
    assert calls[1] == {"index": 0, "custom": {"input": '+ "ä"'}}


@pytest.mark.parametrize("arguments", ["{", "[]", '{"input": 5}', '{"other": "x"}'])
def test_an_input_that_is_no_text_is_shown_as_it_is(arguments):
    assert custom_input(arguments) == arguments


def test_their_calls_are_told_as_then():
    choice, chunks = told({"messages": [USER], "functions": [OLD]}, READING)
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "read"
    deltas = [chunk["delta"].get("function_call") for chunk in chunks]
    assert deltas == [{"name": "read", "arguments": ""}, {"arguments": "{}"}, None]
    assert chunks[-1]["finish_reason"] == "function_call"


def test_an_old_function_is_called(client):
    answer = ask(client, max_tokens=60, functions=[OLD | NOTHING], function_call={"name": "read"})
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.function_call.name == "read"


# A suffix.

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_a_suffix_is_written_as_the_model_wants_it(tmp_path):
    tokenizer = make_tokenizer(specials=(*SPECIALS, *FIM))
    checkpoint = write_checkpoint(tmp_path / "model", tokenizer=tokenizer)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    options = {"model": "m", "max_tokens": 4, "temperature": 0}
    with serve(load(str(checkpoint), settings), settings) as live, live.openai() as client:
        made = client.completions.create(prompt="One", suffix="three", echo=True, **options)
        asked = f"{FIM[0]}One{FIM[1]}three{FIM[2]}"
        written = client.completions.create(prompt=asked, **options)
        with pytest.raises(openai.BadRequestError, match="send text"):
            client.completions.create(prompt=[5, 6], suffix="three", **options)
    assert made.usage.prompt_tokens == written.usage.prompt_tokens
    assert made.choices[0].text == "One" + written.choices[0].text


def test_a_model_without_such_tokens_refuses_it(client):
    with pytest.raises(openai.BadRequestError, match="which this model lacks") as refused:
        client.completions.create(model="m", prompt="One", suffix="three")
    assert "raw_special_tokens" not in str(refused.value)


def test_a_setting_refuses_it():
    backend = make_tokenizer(specials=(*SPECIALS, *FIM))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert completions.required_fill_in(tokenizer, config.load({})) == FIM
    with pytest.raises(BadField, match="the setting raw_special_tokens keeps them out") as refused:
        completions.required_fill_in(tokenizer, config.load({}, raw_special_tokens=False))
    assert "lacks" not in str(refused.value)
