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
from keepwarm.prefix.policy import Policy
from keepwarm.server.anthropic import request as messages
from keepwarm.server.anthropic.shapes import MessageIn, MessagesRequest
from keepwarm.server.http.body import LEAST_TOP_P, ignored_fields
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.chat import call_style_of, custom_input
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.server.responses import request as responses
from keepwarm.server.responses.shapes import ResponsesRequest
from keepwarm.text.request import (
    Choice,
    Done,
    Finished,
    Format,
    KVOptions,
    Receipt,
    Result,
    ToolCall,
    ToolCalled,
    ToolChoice,
    Usage,
)
from tests.kit.checkpoints import SPECIALS, make_tokenizer, write_checkpoint
from tests.server.conftest import serve

SETTINGS = config.load({})
CALLER = RequestFields("", None, Policy.READ_WRITE, False, KVOptions(), None)
USER = {"role": "user", "content": "Well?"}
YES_OR_NO = 'root ::= "yes" | "no"'


def asked(**fields):
    body = ChatRequest.model_validate({"messages": [USER], **fields})
    return chat.request_of(body, CALLER, SETTINGS)


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=[USER], temperature=0, **options)


# Numbers and stop strings.


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 0}, "max_tokens", 0),
        ({"max_tokens": 9, "max_completion_tokens": 0}, "max_tokens", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 40.0}, "top_k", 40),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["", "END"]}, "stop", ("END",)),
    ],
)
def test_other_ways_to_write_a_number(fields, name, value):
    assert getattr(asked(**fields).sampling, name) == value


@pytest.mark.parametrize("fields", [{"top_k": 2.5}, {"top_k": -2}, {"max_tokens": -2}])
def test_what_nobody_accepts(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        asked(**fields)


@pytest.mark.parametrize("top_p", [0, 0.5])
def test_the_other_apis_too(top_p):
    message = MessagesRequest(messages=[MessageIn(**USER)], max_tokens=1, top_p=top_p, top_k=-1)
    assert (message.top_p, message.top_k) == (top_p or LEAST_TOP_P, 0)
    assert ResponsesRequest(input="a", top_p=top_p).top_p == message.top_p


@pytest.mark.parametrize(("given", "limit"), [(-1, None), (0, 0), (9, 9)])
def test_the_other_apis_count_tokens_alike(given, limit):
    message = MessagesRequest(messages=[MessageIn(**USER)], max_tokens=given)
    assert messages.request_of(message, CALLER, SETTINGS).sampling.max_tokens == limit
    body = ResponsesRequest(input="a", max_output_tokens=given)
    items = responses.items_of(body.input)
    assert responses.request_of(body, items, CALLER, SETTINGS).sampling.max_tokens == limit


def test_empty_stop_sequences_are_dropped():
    given = ["", "END"]
    message = MessagesRequest(messages=[MessageIn(**USER)], max_tokens=1, stop_sequences=given)
    assert messages.request_of(message, CALLER, SETTINGS).sampling.stop == ("END",)


def no_suffix():
    pytest.fail("there is no suffix")


def test_a_text_completion_too():
    def sampling(**fields):
        body = CompletionRequest.model_validate({"prompt": "a", **fields})
        return completions.requests_of(body, CALLER, no_suffix)[0].sampling

    assert sampling().max_tokens == completions.DEFAULT_MAX_TOKENS
    assert sampling(max_tokens=-1).max_tokens is None
    assert sampling(max_tokens=0).max_tokens == 0


def test_a_top_p_of_zero_is_the_likeliest_token(client):
    hot = {"extra_body": {"temperature": 2}, "max_tokens": 4}
    assert ask(client, top_p=0, **hot).choices[0].message == (
        ask(client, max_tokens=4).choices[0].message
    )


def test_no_tokens_are_an_empty_answer_with_usage(client):
    answer = ask(client, max_tokens=0, n=2)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == [("", "length")] * 2
    assert answer.usage.completion_tokens == 0
    chunks = list(ask(client, max_tokens=0, stream=True, stream_options={"include_usage": True}))
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None, "length"]
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_no_tokens_with_echo_are_the_prompts(client):
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


def test_a_grammar_beside_another_format_is_refused():
    assert asked(grammar=YES_OR_NO).format == Format(grammar=YES_OR_NO)
    with pytest.raises(BadField, match="cannot be combined"):
        asked(grammar=YES_OR_NO, response_format={"type": "json_object"})


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


def test_tokens_that_are_none_are_named():
    wrong = ["oak", "-1", "1234567890"]
    with pytest.raises(BadField, match="not 'oak', '-1', '1234567890'"):
        asked(logit_bias={"5": 1} | dict.fromkeys(wrong, 1))


# Tools.

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
NOTHING = {"parameters": {"type": "object", "additionalProperties": False}}
OLD = {"name": "read", "parameters": {"type": "object"}}
CALL = ToolCall("c1", "patch", '{"input": "+ \\"ä\\""}')
READING = ToolCall("c2", "read", "{}")
META = CompletionMeta("id", 1, "m")
USAGE, RECEIPT = Usage(9, 8, 5, 2, 4.0, 100.0), Receipt(9, {}, 9, 0.0)


def names(request):
    return [tool["function"]["name"] for tool in request.tools]


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


def test_a_custom_tool_is_a_function_with_one_text():
    request = asked(
        tools=[PATCH, READ], tool_choice={"type": "custom", "custom": {"name": "patch"}}
    )
    assert names(request) == ["patch", "read"]
    assert request.tools[0]["function"]["parameters"]["required"] == ["input"]
    assert request.tool_choice == ToolChoice("required", "patch")


def test_the_grammar_of_a_custom_tool_is_named_and_not_enforced():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    given = [PATCH, {"type": "custom", "custom": {"name": "x", "format": grammar}}]
    assert names(asked(tools=given)) == ["patch", "x"]
    body = {"messages": [USER], "tools": given}
    named = ignored_fields(ChatRequest.model_validate(body), body)
    assert named == ("tools[].custom.format",)
    body = {"input": "a", "tools": [{"type": "custom", "name": "x", "format": grammar}]}
    read = ResponsesRequest.model_validate(body)
    made = responses.request_of(read, responses.items_of("a"), CALLER, SETTINGS)
    assert names(made) == ["x"]
    assert ignored_fields(read, body) == ("tools[].format",)


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


def test_only_allowed_tools_are_offered():
    named = {"type": "function", "function": {"name": "read"}}
    allowed = {"mode": "required", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    request = asked(tools=[PATCH, READ], tool_choice=choice)
    assert names(request) == ["read"]
    assert request.tool_choice == ToolChoice("required")
    with pytest.raises(BadField, match="not in tools"):
        asked(tools=[PATCH], tool_choice=choice)


def test_functions_from_before_there_were_tools():
    past = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "read", "arguments": "{}"},
        },
        {"role": "function", "name": "read", "content": "Rain."},
    ]
    request = asked(messages=past, functions=[OLD], function_call={"name": "read"})
    assert names(request) == ["read"]
    assert request.tool_choice == ToolChoice("required", "read", parallel=False)
    called, result = request.messages[1:]
    assert called["tool_calls"][0]["function"] == {"name": "read", "arguments": "{}"}
    assert (result["role"], result["content"]) == ("tool", "Rain.")
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    assert asked(functions=[OLD], function_call="none").tool_choice.mode == "none"
    with pytest.raises(BadField, match="cannot be combined"):
        asked(functions=[OLD], tools=[READ])


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
