"""One contract for all APIs: which request of the engine a body becomes, and what is refused."""

import base64
from operator import attrgetter

import pytest

from keepwarm import config
from keepwarm.server.anthropic.request import CountRequest, ignored_tools
from keepwarm.server.http.body import LEAST_TOP_P, ignored_fields
from keepwarm.server.http.content import NOTE
from keepwarm.server.openai import completions
from keepwarm.server.responses.request import encode_reasoning
from keepwarm.text.request import Breakpoint, Format, ToolChoice
from tests.server.apis import (
    APIS,
    CALLER,
    CHAT,
    HELLO,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    SETTINGS,
    TALKING,
    TEXT,
)

EVERY = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
OBJECT = {"type": "object"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
YES_OR_NO = 'root ::= "yes" | "no"'


def rows(table):
    cases = [(api, *case) for api, cases in table.items() for case in cases]
    return {
        "argvalues": cases,
        "ids": [f"{case[0].name}-{number}" for number, case in enumerate(cases)],
    }


def text(words, **more):
    return {"type": "text", "text": words, **more}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def said(role, words, kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def past_call(call_id, name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool_result(content, call_id="t", **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def tool_use(call_id, name, **given):
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def function(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def function_call(call_id, name, **more):
    return {"type": "function_call", "call_id": call_id, "name": name, **more}


def function_output(call_id, output):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def tool_message(call_id, content, **more):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def seen(request, name):
    match name:
        case "tool_names":
            return [tool["function"]["name"] for tool in request.tools]
        case "deferred":
            return [tool["function"]["name"] for tool in request.tools if tool.get("deferred")]
        case "texts":
            return [texts(message["content"]) for message in request.messages]
        case _:
            return attrgetter(name)(request)


def sampled(n=1, **wanted):
    return {f"sampling.{name}": value for name, value in wanted.items()} | {"n": n}


def texts(content):
    return content if isinstance(content, str) else [part["text"] for part in content]


# Tools as each API names them

READ = {"type": "function", "function": {"name": "read", "parameters": OBJECT}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
OLD = {"name": "read", "parameters": OBJECT}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "read"}}],
    },
}
CLAUDE_READ = {"name": "read", "description": "Reads", "input_schema": OBJECT}
FETCH = {"name": "fetch", "description": "Fetches", "input_schema": OBJECT}
LATER = {**FETCH, "defer_loading": True}
FETCH_WRITTEN = (
    '<function>{"description": "Fetches", "name": "fetch", "parameters": {"type": "object"}}'
    "</function>"
)
READ_WRITTEN = FETCH_WRITTEN.replace("Fetches", "Reads").replace("fetch", "read")
CAN_BE_CALLED = "From here on this tool can be called:\n"
READ_REFERENCE = {"type": "tool_reference", "name": "read"}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
FOUND = tool_result([{"type": "tool_reference", "tool_name": "fetch"}], "1")
FLAT_READ = {"type": "function", "name": "read", "parameters": OBJECT, "strict": True}
FLAT_PATCH = {"type": "custom", "name": "patch"}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "Files",
    "tools": [FLAT_READ, FLAT_PATCH],
}
FLAT_ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "read"}],
}
SHORT = {"cache_control": {"type": "ephemeral"}}
LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

FORCED = ToolChoice("required", "read")
NAMED_PATCH = {"type": "custom", "custom": {"name": "patch"}}
FILES_READ = {"type": "function", "name": "read", "namespace": "files"}
CHOICES = {  # offered tools, choice, whether calls may be parallel, what the engine is told
    CHAT: [
        ([READ], None, None, ToolChoice("auto")),
        ([READ], "any", None, ToolChoice("required")),
        ([READ], "none", None, ToolChoice("none")),
        ([READ], function("read"), None, FORCED),
        ([READ], "required", False, ToolChoice("required", None, parallel=False)),
        ([PATCH, READ], NAMED_PATCH, None, ToolChoice("required", "patch")),
        ([PATCH, READ], ALLOWED, None, ToolChoice("required")),
    ],
    MESSAGES: [
        ([CLAUDE_READ], {"type": "auto"}, None, ToolChoice()),
        ([CLAUDE_READ], {"type": "any"}, None, ToolChoice("required")),
        ([CLAUDE_READ], {"type": "none"}, None, ToolChoice("none")),
        ([CLAUDE_READ], {"type": "tool", "name": "read"}, None, FORCED),
        (
            [CLAUDE_READ],
            {"type": "auto", "disable_parallel_tool_use": True},
            None,
            ToolChoice(parallel=False),
        ),
    ],
    RESPONSES: [
        ([FLAT_READ], "auto", None, ToolChoice()),
        ([FLAT_READ], "none", None, ToolChoice("none")),
        ([FLAT_READ], "required", None, ToolChoice("required")),
        ([FLAT_READ], "any", None, ToolChoice("required")),
        ([FLAT_READ], None, False, ToolChoice(parallel=False)),
        ([FLAT_READ], {"type": "function", "name": "read"}, None, FORCED),
        ([FLAT_READ, FILES], FILES_READ, None, ToolChoice("required", "files__read")),
        ([FLAT_PATCH], FLAT_PATCH, None, ToolChoice("required", "patch")),
        ([FLAT_READ, FLAT_PATCH], FLAT_ALLOWED, None, ToolChoice("required")),
    ],
}


@pytest.mark.parametrize(("api", "tools", "choice", "parallel", "wanted"), **rows(CHOICES))
def test_tool_choice_of_the_api_becomes_the_engines(api, tools, choice, parallel, wanted):
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    request = api.request({key: value for key, value in fields.items() if value is not None})
    assert request.tool_choice == wanted
    if choice in (ALLOWED, FLAT_ALLOWED):
        assert seen(request, "tool_names") == ["read"]
    elif len(tools) == 1:
        assert len(request.tools) == 1


CODE_SEARCH = {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}
DRAWN = {"temperature": 0.5, "top_p": 0.9}
PENALISED = {"presence_penalty": 1, "frequency_penalty": -1}


def talk(*messages, **fields):
    return {"messages": list(messages), **fields}


def items(*given, **fields):
    return {"input": list(given), **fields}


def answered(words):
    return said("assistant", words, "output_text")


CALLING = assistant("", tool_calls=[past_call("c1", "read", "{}")], reasoning_content="hm")
PARSED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": {"a": "ä"}}}
OLDER_CALL = assistant(None, function_call={"name": "read", "arguments": "{}"})
OLDER_RESULT = {"role": "function", "name": "read", "content": "Rain."}
MADE = {  # fields of the body, attributes of the request
    CHAT: [
        ({}, talk(HELLO, thinking=None) | sampled(max_tokens=None, top_logprobs=None)),
        (talk(system("S"), HELLO), talk(system("S"), HELLO)),
        (
            talk(
                {"role": "developer", "content": [text("a"), {"type": "refusal", "refusal": "b"}]}
            ),
            talk({"role": "system", "content": [text("a"), text("b")]}),
        ),
        (
            talk(CALLING | {"content": None}, tool_message("c1", "rain"), tools=[READ]),
            talk(CALLING, tool_message("c1", "rain"), tools=[READ]),
        ),
        (
            talk(assistant(None, tool_calls=[PARSED]), tool_message("c1", "rain")),
            talk(
                assistant("", tool_calls=[past_call("c1", "read", '{"a": "ä"}')]),
                tool_message("c1", "rain"),
            ),
        ),
        (talk(user("a", text("b"))), talk(user(text("a"), text("b")))),
        (
            {**DRAWN, **PENALISED, "max_completion_tokens": 5, "top_k": 40, "min_p": 0.1, "n": 2},
            sampled(max_tokens=5, top_k=40, min_p=0.1, n=2, **DRAWN, **PENALISED),
        ),
        (
            {
                "stop": "END",
                "logit_bias": {"7": -100, "8": 2.5},
                "logprobs": True,
                "top_logprobs": 3,
            },
            sampled(stop=("END",), logit_bias={7: -100, 8: 2.5}, top_logprobs=3),
        ),
        ({"stop": ["a", "b"]}, sampled(stop=("a", "b"))),
        ({"logprobs": True}, sampled(top_logprobs=0)),
        ({"max_tokens": -1}, sampled(max_tokens=None)),
        ({"max_tokens": 0}, sampled(max_tokens=0)),
        ({"max_tokens": 9, "max_completion_tokens": 0}, sampled(max_tokens=0)),
        ({"top_k": -1}, sampled(top_k=0)),
        ({"top_k": 40.0}, sampled(top_k=40)),
        ({"stop": ""}, sampled(stop=())),
        ({"stop": ["", "END"]}, sampled(stop=("END",))),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"format": Format(json=True, schema=SCHEMA)},
        ),
        ({"response_format": {"type": "json_object"}}, {"format": Format(json=True)}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"format": Format(json=True, schema=SCHEMA)},
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            {"format": Format(json=True, schema=SCHEMA)},
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            {"format": Format(json=True, schema=SCHEMA)},
        ),
        ({"response_format": {"type": "text"}}, {"format": None}),
        ({"grammar": YES_OR_NO}, {"format": Format(grammar=YES_OR_NO)}),
        ({"guided_json": SCHEMA}, {"format": Format(schema=SCHEMA)}),
        ({"guided_regex": "[ab]"}, {"format": Format(grammar="start: /[ab]/")}),
        ({"guided_choice": ["a", "b"]}, {"format": Format(grammar='start: "a" | "b"')}),
        ({"guided_grammar": YES_OR_NO}, {"format": Format(grammar=YES_OR_NO)}),
        ({"format": "json"}, {"format": Format(json=True)}),
        ({"format": SCHEMA}, {"format": Format(json=True, schema=SCHEMA)}),
        ({"format": ""}, {"format": None}),
        ({"n_predict": 5}, sampled(max_tokens=5)),
        ({"max_new_tokens": 5}, sampled(max_tokens=5)),
        ({"max_tokens": 4, "n_predict": 5}, sampled(max_tokens=4)),
        ({"stop_sequences": ["END"]}, sampled(stop=("END",))),
        ({"repeat_penalty": 1.5}, sampled(repetition_penalty=1.5)),
        ({"enable_thinking": False}, {"thinking": False}),
        ({"think": True}, {"thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"thinking": True}, {"thinking": True}),
        ({"thinking": {"type": "auto"}}, {"thinking": None}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": None}),
        ({"reasoning": "none"}, {"thinking": False}),
        ({"think": False, "reasoning": "high"}, {"thinking": False}),
        (
            {"reasoning": {"effort": "high"}},
            {"thinking": True, "template_options": {"reasoning_effort": "high"}},
        ),
        ({"reasoning_effort": "none"}, {"thinking": False}),
        (
            {"reasoning_effort": "high"},
            {"thinking": True, "template_options": {"reasoning_effort": "high"}},
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"thinking": False, "template_options": {"x": 1}},
        ),
        ({"service_tier": "auto", "store": True, "metadata": {"a": "b"}}, {"n": 1}),
        ({"tools": [PATCH, READ]}, {"tool_names": ["patch", "read"]}),
        (  # functions, from before there were tools
            talk(OLDER_CALL, OLDER_RESULT, functions=[OLD], function_call={"name": "read"}),
            talk(
                assistant("", tool_calls=[past_call("call_read", "read", "{}")]),
                tool_message("call_read", "Rain.", name="read"),
                tool_names=["read"],
                tool_choice=ToolChoice("required", "read", parallel=False),
            ),
        ),
        ({"functions": [OLD], "function_call": "none"}, {"tool_choice.mode": "none"}),
    ],
    TEXT: [
        ({}, {"prompt": "Hello", "sampling.max_tokens": completions.DEFAULT_MAX_TOKENS}),
        ({"max_tokens": -1}, sampled(max_tokens=None)),
        ({"max_tokens": 0}, sampled(max_tokens=0)),
        (
            {"response_format": {"type": "json_object"}},
            {"format": Format(json=True)},
        ),
    ],
    MESSAGES: [
        ({"system": "Be kind"}, talk(system("Be kind"), HELLO)),
        (
            {"system": [text("One"), text("Two")]},
            talk({"role": "system", "content": [text("One"), text("Two")]}, HELLO),
        ),
        (talk(HELLO, system("Linux")), talk(HELLO, system("Linux"))),
        (talk(user("a", text("b"))), talk(user(text("a"), text("b")))),
        (
            talk(
                assistant([text("Let me see."), tool_use("t1", "read", path="ä", n=1)]),
                user(tool_result([text("a"), text("b")], "t1"), text("Go on")),
            ),
            talk(
                assistant(
                    "Let me see.", tool_calls=[past_call("t1", "read", '{"path": "ä", "n": 1}')]
                ),
                tool_message("t1", "a\nb"),
                user(text("Go on")),
            ),
        ),
        *(
            (talk(user(tool_result(content, "t", is_error=True))), {"texts": [wanted]})
            for content, wanted in (
                ("Done", "Error: Done"),
                (None, "Error: "),
                ([{"type": "tool_reference", "tool_name": "grep"}], "Error: grep"),
            )
        ),
        (
            talk(
                assistant(
                    [
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "thinking", "thinking": "Hm", "signature": "x"},
                        text("Hi"),
                    ]
                ),
                HELLO,
            ),
            talk(assistant("Hi", reasoning_content="Hm"), HELLO),
        ),
        (
            {**DRAWN, "max_tokens": 7, "top_k": 3, "stop_sequences": ["", "END"]},
            sampled(max_tokens=7, top_k=3, stop=("END",), **DRAWN),
        ),
        ({"top_p": 0, "top_k": -1}, sampled(top_p=LEAST_TOP_P, top_k=0)),
        ({"max_tokens": -1}, sampled(max_tokens=None)),
        ({"max_tokens": 0}, sampled(max_tokens=0)),
        *(
            ({"thinking": {"type": kind, "budget_tokens": 2000}}, {"thinking": wanted})
            for kind, wanted in (
                *(("enabled", True), ("disabled", False)),
                *(("adaptive", None), ("between_tools", None)),
            )
        ),
        (
            {"output_config": {"effort": "max"}, "context_management": {"edits": []}},
            {"template_options": {"reasoning_effort": "high"}, "format": None},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"format": Format(json=True, schema=SCHEMA), "template_options": {}},
        ),
        (
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
            {"format": Format(json=True, schema=SCHEMA)},
        ),
        (
            {"tools": [WEB_SEARCH, CLAUDE_READ]},
            {"tools": [function("read", description="Reads", parameters=OBJECT)]},
        ),
        (  # found by the client's own search: it can be called, and the prompt's beginning stays
            talk(user(FOUND), tools=[CLAUDE_READ, LATER]),
            {"tool_names": ["read", "fetch"], "deferred": ["fetch"], "texts": [FETCH_WRITTEN]},
        ),
        (  # only Anthropic could search, so nothing waits to be found
            {"tools": [CODE_SEARCH, CLAUDE_READ, LATER]},
            {"tool_names": ["read", "fetch"], "deferred": []},
        ),
        *(
            (
                talk(
                    HELLO,
                    {"role": "system", "content": [{"type": kind, "tool": tool}]},
                    tools=[CLAUDE_READ],
                ),
                {
                    "tool_names": ["read", *deferred],
                    "deferred": deferred,
                    "texts": ["Hello", [written]],
                },
            )
            for kind, tool, deferred, written in (
                (
                    "tool_addition",
                    {"type": "tool_definition", "definition": FETCH},
                    ["fetch"],
                    CAN_BE_CALLED + FETCH_WRITTEN,
                ),
                ("tool_addition", READ_REFERENCE, [], CAN_BE_CALLED + READ_WRITTEN),
                ("tool_removal", READ_REFERENCE, [], "The tool read can no longer be called."),
            )
        ),
        (
            talk(
                HELLO,
                user(tool_result("x", "t", **SHORT), text("a", **LONG), text("b", **SHORT)),
                system=[text("One", **LONG), text("Two")],
                tools=[CLAUDE_READ, {**CLAUDE_READ, "name": "write", **SHORT}],
            ),
            {
                "texts": [["One", "Two"], "Hello", "x", ["a", "b"]],
                "breakpoints": (
                    *(Breakpoint(-1, 300), Breakpoint(0, 3600)),
                    *(Breakpoint(2, 300), Breakpoint(3, 3600)),
                ),
            },
        ),
        (talk(HELLO, HELLO, **SHORT), {"breakpoints": (Breakpoint(1, 300),)}),
    ],
    RESPONSES: [
        ({}, talk(HELLO)),
        (items(user("a", text("b"))), talk(user(text("a"), text("b")))),
        (
            items(said("developer", "Short"), said("user", "Hi"), instructions="Be kind"),
            talk(
                system("Be kind"),
                {"role": "developer", "content": [text("Short")]},
                user(text("Hi")),
            ),
        ),
        (  # what an assistant did in one turn is one message
            items(
                {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("Hm")},
                answered("I look."),
                function_call("c1", "read", arguments='{"a": 1}'),
                function_call("c2", "read", namespace="files"),
                function_output("c1", "x"),
                function_output("c2", [{"type": "input_text", "text": "y"}]),
                answered("Done."),
            ),
            talk(
                assistant(
                    "I look.",
                    reasoning_content="Hm",
                    tool_calls=[
                        past_call("c1", "read", '{"a": 1}'),
                        past_call("c2", "files__read", "{}"),
                    ],
                ),
                tool_message("c1", "x"),
                tool_message("c2", "y"),
                assistant("Done."),
            ),
        ),
        (  # what comes earlier in a turn begins another
            items(
                *(answered("One"), answered("Two")),
                *[{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}] * 2,
                answered("Two"),
            ),
            talk(assistant("One"), assistant("Two"), assistant("Two", reasoning_content="HmHm")),
        ),
        (  # a call that was cut off is text; the call itself is no part of the conversation
            items(function_call("c1", "read", status="incomplete"), answered("<tool_call>")),
            talk(assistant("<tool_call>")),
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": OBJECT}}},
            {"format": Format(json=True, schema=OBJECT)},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"format": Format(json=True)}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"format": None}),
        (
            {**DRAWN, **PENALISED, "max_output_tokens": 7},
            sampled(max_tokens=7, **DRAWN, **PENALISED),
        ),
        (
            {"reasoning": {"effort": "low"}},
            {"thinking": True, "template_options": {"reasoning_effort": "low"}},
        ),
        ({"reasoning": {"effort": "none"}}, {"thinking": False}),
        ({"reasoning": {"summary": "auto"}}, {"thinking": None}),
        ({"top_p": 0}, sampled(top_p=LEAST_TOP_P)),
        ({"max_output_tokens": -1}, sampled(max_tokens=None)),
        ({"max_output_tokens": 0}, sampled(max_tokens=0)),
    ],
    OLLAMA: [
        (
            {"options": {**DRAWN, "top_k": 40.0, "min_p": 0.1, "seed": 3, "num_predict": 7.0}},
            sampled(max_tokens=7, top_k=40, min_p=0.1, seed=3, **DRAWN),
        ),
        (
            {"options": {"stop": ["\n", ""], "repeat_penalty": 1.1, "presence_penalty": 0.5}},
            sampled(
                stop=("\n",), repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.0
            ),
        ),
        (  # what Ollama calls none
            {"options": {"num_predict": -2, "seed": -1, "top_k": -1, "min_p": None}},
            sampled(max_tokens=None, seed=None, top_k=0, min_p=None),
        ),
        (
            {"options": {"repeat_last_n": 0, "repeat_penalty": 2, **PENALISED}},
            sampled(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
        ),
        ({}, {"thinking": None}),
        ({"think": False}, {"thinking": False}),
        (
            {"think": "max", "format": "json"},
            {
                "thinking": True,
                "template_options": {"reasoning_effort": "high"},
                "format": Format(json=True),
            },
        ),
        ({"format": OBJECT}, {"format": Format(json=True, schema=OBJECT)}),
        ({"format": ""}, {"format": None}),
    ],
}


# What clients of other servers ask for, on every API that has conversations.
HARD = {"thinking": True, "template_options": {"reasoning_effort": "high"}}
SYNONYMS = [
    ({"guided_json": SCHEMA}, {"format": Format(schema=SCHEMA)}),
    ({"guided_regex": "[ab]"}, {"format": Format(grammar="start: /[ab]/")}),
    ({"guided_choice": ["a", "b"]}, {"format": Format(grammar='start: "a" | "b"')}),
    ({"format": "json"}, {"format": Format(json=True)}),
    ({"response_format": {"type": "json_object"}}, {"format": Format(json=True)}),
    ({"enable_thinking": False}, {"thinking": False}),
    ({"think": "high"}, HARD),
    ({"think": "max"}, HARD),
    ({"thinking": "high"}, HARD),
    ({"thinking": True}, {"thinking": True}),
    ({"thinking": {"type": "adaptive"}}, {"thinking": None}),
    ({"thinking": {"type": "disabled"}}, {"thinking": False}),
    ({"reasoning": "high"}, HARD),
    ({"reasoning": {"effort": "high"}}, HARD),
    ({"reasoning_effort": "none"}, {"thinking": False}),
]
# The same of sampling: Ollama has it in `options`.
SAMPLED = [
    ({"n_predict": 5}, {"max_tokens": 5}),
    ({"max_new_tokens": 5}, {"max_tokens": 5}),
    ({"max_tokens": 5.0}, {"max_tokens": 5}),
    ({"stop_sequences": ["END"]}, {"stop": ("END",)}),
    ({"stop": ["END"]}, {"stop": ("END",)}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
]


@pytest.mark.parametrize("api", TALKING, ids=lambda api: api.name)
@pytest.mark.parametrize(("fields", "wanted"), SYNONYMS)
def test_names_of_other_servers_mean_the_same_everywhere(api, fields, wanted):
    request = api.request(fields)
    assert {name: seen(request, name) for name in wanted} == wanted
    body = api.least | fields
    assert ignored_fields(api.shape.model_validate(body), body) == ()


@pytest.mark.parametrize("api", TALKING, ids=lambda api: api.name)
@pytest.mark.parametrize(("fields", "wanted"), SAMPLED)
def test_names_of_other_servers_for_sampling_too(api, fields, wanted):
    least = {name: value for name, value in api.least.items() if name != "max_tokens"}
    if api is MESSAGES and "max_tokens" not in wanted:
        least["max_tokens"] = 9
    body = least | ({"options": fields} if api is OLLAMA else fields)
    read = api.shape.model_validate(body)
    request = api.request_of(read, SETTINGS)
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert ignored_fields(read, body) == ()


@pytest.mark.parametrize(("api", "fields", "wanted"), **rows(MADE))
def test_fields_of_the_api_become_the_engines(api, fields, wanted):
    request = api.request(fields)
    assert {name: seen(request, name) for name in wanted} == wanted


@EVERY
def test_caller_of_a_request_is_told_to_the_engine(api):
    request = api.request({})
    assert (request.tenant, request.agent, request.timeout_s) == ("t", "me", 60.0)


def test_negative_seed_of_chat_becomes_one_that_the_engine_takes():
    assert 0 <= CHAT.request({"seed": -1}).sampling.seed < 2**63


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompt_of_a_text_completion_has_four_forms(prompt, wanted):
    body = TEXT.shape.model_validate({"prompt": prompt})
    made = completions.requests_of(body, CALLER, lambda: pytest.fail("there is no suffix"))
    assert [request.prompt for request in made] == wanted


@pytest.mark.parametrize("api", [MESSAGES, OLLAMA], ids=lambda api: api.name)
def test_answer_that_the_client_began_is_continued(api):
    begun = api.request({"messages": [HELLO, assistant("The answer is (")]})
    assert (begun.partial_answer, len(begun.messages)) == (True, 2)
    assert not api.request({}).partial_answer
    if api is OLLAMA:
        assert not api.request({"messages": [HELLO, assistant("")]}).partial_answer
    else:
        body = CountRequest.model_validate({"messages": [HELLO, assistant("It is (")]})
        assert api.request_of(body, SETTINGS).partial_answer


CUSTOM_GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
CUSTOM = {
    CHAT: [
        (
            {"type": "custom", "custom": {"name": "x", "format": CUSTOM_GRAMMAR}},
            "tools[].custom.format",
        )
    ],
    RESPONSES: [({"type": "custom", "name": "x", "format": CUSTOM_GRAMMAR}, "tools[].format")],
}


@pytest.mark.parametrize(("api", "tool", "ignored"), **rows(CUSTOM))
def test_custom_tool_is_a_function_with_one_text_and_its_grammar_is_ignored(api, tool, ignored):
    body = api.least | {"tools": [tool]}
    (function,) = api.request(body).tools
    assert function["function"]["name"] == "x"
    assert function["function"]["parameters"]["required"] == ["input"]
    assert ignored_fields(api.shape.model_validate(body), body) == (ignored,)


def test_tools_that_only_anthropic_runs_are_named():
    """A set of an MCP server's tools has no name of its own."""
    toolset = {"type": "mcp_toolset", "mcp_server_name": "files"}
    body = MESSAGES.least | {"tools": [WEB_SEARCH, CLAUDE_READ, toolset]}
    assert ignored_tools(MESSAGES.shape.model_validate(body)) == ["web_search", "mcp_toolset"]
    assert MESSAGES.refusal({"tools": [{"input_schema": OBJECT}]}).kind == "tools[0].name"
    change = {"type": "tool_definition", "definition": WEB_SEARCH}
    added = {"role": "system", "content": [{"type": "tool_addition", "tool": change}]}
    body = talk(HELLO, added, added, tools=[CLAUDE_READ], max_tokens=9)
    assert ignored_tools(MESSAGES.shape.model_validate(body)) == ["web_search"]
    request, refusal = MESSAGES.request(body), ["The tool web_search cannot be called."]
    assert seen(request, "tool_names") == ["read"]
    assert seen(request, "texts") == ["Hello", refusal, refusal]


# Refused


REFUSED = {  # fields of the body, the field that the error names
    CHAT: [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
        *(
            ({"messages": [user(text("see"), {"type": kind, kind: {}})]}, "messages[0].content[1]")
            for kind in ("image_url", "input_audio", "file", "video_url")
        ),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1000}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"stop": [1]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 200}}, "logit_bias.1"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [PATCH], "tool_choice": ALLOWED}, "tool_choice"),
        ({"functions": [OLD], "tools": [READ]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"grammar": YES_OR_NO, "response_format": {"type": "json_object"}}, "grammar"),
        ({"keepwarm": {"cache": "always"}}, "keepwarm.cache"),
    ],
    TEXT: [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "suffix": "b"}, "echo"),
    ],
    MESSAGES: [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user(text("a"), {"type": "image"})]}, "messages[0].content[1]"),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"output_format": {"type": "json_object"}}, "output_format.type"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [{"name": "read"}]}, "tools.input_schema"),
    ],
    RESPONSES: [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "mesage", "id": "x"}]}, "input"),
        ({"input": [HELLO, {"type": "function_call", "name": 5}]}, "input[1].name"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "read"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [function_output("c", {"stdout": "x"})]}, "input[0].output"),
        ({"input": [said("user", "x", "input_image")]}, "input[0].content[0]"),
        ({"input": [user({"type": "input_text"})]}, "input[0].content[0]"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"tools": [FLAT_PATCH], "tool_choice": FLAT_ALLOWED}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
    OLLAMA: [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 1.5}}, "options.num_predict"),
        ({"options": {"top_k": True}}, "options.top_k"),
        ({"options": {"stop": [1]}}, "options.stop[0]"),
        ({"options": {"stop": ["a"] * 17}}, "options.stop"),
        ({"options": []}, "options"),
        ({"format": "yaml"}, "format"),
        ({"think": "loud"}, "think"),
        ({"keep_alive": True}, "keep_alive"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "owl", "content": "hu"}]}, "messages[0].role"),
        ({"messages": [user("hu")]}, "messages[0].content"),
        (
            {"messages": [assistant("", tool_calls=[{"function": {"name": 1}}])]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"messages": [{**HELLO, "images": ["aGk="]}]}, "messages[0].images[0]"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    ],
}


@pytest.mark.parametrize(("api", "fields", "param"), **rows(REFUSED))
def test_wrong_field_is_refused_by_its_path(api, fields, param):
    assert api.refusal(fields).kind == param


def test_field_of_several_types_is_wrong_as_that_which_it_is():
    assert "at most 16 items" in CHAT.refusal({"stop": ["a"] * 17}).message
    assert "should be a valid string" in CHAT.refusal({"stop": 5}).message
    assert CHAT.refusal({"temperature": "x", "top_p": 5}).kind == "temperature"
    assert "'none'" not in MESSAGES.refusal({"thinking": 5}).message


def test_wrong_tokens_of_a_logit_bias_are_listed():
    bias = {"5": 1} | dict.fromkeys(["oak", "-1", "1234567890"], 1)
    assert "not 'oak', '-1', '1234567890'" in CHAT.refusal({"logit_bias": bias}).message


# Parts that a text model cannot read: notes in the history, refused in the newest message


IMAGE, RESULT, SUMMARY = (NOTE.format(kind) for kind in ("image", "tool result", "summary"))
PNG = base64.b64encode(b"\x89PNG").decode()
CODED = base64.b64encode("Grüße\n".encode()).decode()
NEXT = [assistant("I see."), {"role": "user", "content": "Well?"}]
ASKED = NEXT[1]
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
CLAUDE_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}
FLAT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
LENIENT = config.load({}, skip_unreadable=True)


def history(api, *given):
    return {"input" if api is RESPONSES else "messages": list(given)}


def with_image(api, n_images=1):
    if api is OLLAMA:
        return {"role": "user", "content": "Look.", "images": ["aGk="] * n_images}
    image = {CHAT: CHAT_IMAGE, MESSAGES: CLAUDE_IMAGE, RESPONSES: FLAT_IMAGE}[api]
    return user(*[image] * n_images)


@pytest.mark.parametrize("api", TALKING, ids=lambda api: api.name)
def test_image_is_a_note_in_the_history_and_refused_in_the_newest_message(api):
    image, old = with_image(api), history(api, with_image(api), *NEXT)
    wanted = f"Look.\n{IMAGE}" if api is OLLAMA else [IMAGE]
    made = api.request(old)
    assert (seen(made, "texts")[0], made.unread) == (wanted, ("image",))
    assert api.request(history(api, with_image(api, 2), *NEXT)).unread == ("image",)
    (name,) = old
    place = "images[0]" if api is OLLAMA else "content[0]"
    refused = api.refusal(history(api, *NEXT, image))
    assert refused.kind == f"{name}[2].{place}"
    behind = history(api, image, system("Be kind."))
    assert api.refusal(behind).kind == f"{name}[0].{place}"
    lenient = api.request(history(api, *NEXT, image), LENIENT)
    assert (seen(lenient, "texts")[2], lenient.unread) == (wanted, ("image",))
    assert api.request(history(api, *NEXT)).unread == ()


def called(api):
    """A question, a call, its result."""
    if api is RESPONSES:
        return [ASKED, function_call("c", "look", arguments="{}"), function_output("c", "See.")]
    if api is MESSAGES:
        return [ASKED, assistant([tool_use("c", "look")]), user(tool_result("See.", "c"))]
    arguments = {} if api is OLLAMA else "{}"
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [ASKED, assistant("", tool_calls=[call]), tool_message("c", "See.")]


@pytest.mark.parametrize("api", TALKING, ids=lambda api: api.name)
def test_image_right_behind_tool_results_is_one_of_them(api):
    """APIs whose results are text have no other place for it; the user did not put it there."""
    image = with_image(api)
    made = api.request(history(api, *called(api), image))
    assert made.unread == ("image",)
    assert IMAGE in texts(made.messages[-1]["content"])
    assert IMAGE in str(api.request(history(api, *called(api), image, system("S"))).messages)
    api.refusal(history(api, *called(api), *NEXT, image))


def claude_result(kind, content):
    block = {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": content}
    return [ASKED, assistant([block]), ASKED]


def shell_output(output):
    return [ASKED, {"type": "shell_call_output", "call_id": "c", "output": output}]


def chat_file(name, data):
    return user({"type": "file", "file": {"filename": name, "file_data": data}})


def document(source):
    return user({"type": "document", "title": "a.txt", "source": source})


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
SEARCHED = {"type": "search_result", "source": "x.org", "title": "Oslo"}
PAGE = {"type": "document", "source": {"type": "text", "data": "Rain."}, "title": None}
FOREIGN = {"type": "reasoning", "id": "r", "encrypted_content": "gAAAAB", "summary": []}
COMPACTION = {"type": "compaction", "id": "c", "encrypted_content": "gAAAAB"}
HI = {"type": "message", "role": "assistant", "content": "Hi."}
READABLE = {  # messages, number of one, what is read of it (or all of it), what is unread
    CHAT: [
        ([user("Rain", "?")], 0, ["Rain", "?"], ()),
        (  # results of tools are the history, also in the newest message
            [
                ASKED,
                assistant(None, tool_calls=[past_call("c", "look", "{}")]),
                tool_message("c", [CHAT_IMAGE]),
            ],
            *(2, [IMAGE], ("image",)),
        ),
        ([chat_file("a.md", CODED)], 0, ["a.md\nGrüße\n"], ()),
        ([chat_file("a.md", f"data:text/plain;base64,{CODED}")], 0, ["a.md\nGrüße\n"], ()),
        *(
            ([chat_file(name, data), *NEXT], 0, [NOTE.format("file")], ("file",))
            for name, data in (
                ("a.pdf", CODED),
                ("a", CODED),
                ("a.txt", base64.b64encode(b"\xff\xfe").decode()),
                ("a.txt", "not base64"),
                ("a.txt", f"data:application/pdf;base64,{CODED}"),
            )
        ),
        # The note does not quote what a client made up.
        ([user({"type": "hologram-77"}), *NEXT], 0, [NOTE.format("part")], ("part",)),
    ],
    MESSAGES: [
        *(  # Claude Code sends a PDF that it read beside the result; the user did not put it there
            (
                [
                    ASKED,
                    assistant([tool_use("t", "look")]),
                    user(tool_result([CLAUDE_IMAGE], "t"), PDF),
                ],
                *(number, wanted, ("document", "image")),
            )
            for number, wanted in ((2, IMAGE), (3, [NOTE.format("document")]))
        ),
        (
            [
                ASKED,
                assistant(
                    [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        text("Rain."),
                    ]
                ),
                ASKED,
            ],
            *(1, NOTE.format("tool call") + RESULT + "Rain.", ("tool call", "tool result")),
        ),
        *(
            (claude_result(kind, content), 1, RESULT, ("tool result",))
            for kind, content in (
                ("web_fetch", {"type": "web_fetch_result", "url": "x.org", "content": PAGE}),
                ("code_execution", {"type": "code_execution_result", "stdout": "1", "content": []}),
                ("bash_code_execution", {"type": "bash_code_execution_result", "return_code": 0}),
                (
                    "text_editor_code_execution",
                    {"type": "text_editor_code_execution_view_result", "content": "x = 1"},
                ),
                (
                    "tool_search",
                    {
                        "type": "tool_search_tool_search_result",
                        "tool_references": [{"type": "tool_reference", "tool_name": "look"}],
                    },
                ),
                ("advisor", {"type": "advisor_result", "text": "Wait."}),
                ("web_search", {"type": "web_search_tool_result_error", "error_code": "gone"}),
            )
        ),
        *(
            ([ASKED, assistant([{"type": "compaction", "content": content}]), ASKED], 1, *wanted)
            for content, *wanted in (("They met.", "They met.", ()), (None, SUMMARY, ("summary",)))
        ),
        (
            [ASKED, assistant([{"type": "redacted_thinking", "data": "Em"}, text("Hi.")]), ASKED],
            *(1, assistant("Hi."), ("reasoning",)),
        ),
        *(
            ([document(source)], 0, ["a.txt\nGrüße\n"], ())
            for source in (
                {"type": "text", "media_type": "text/plain", "data": "Grüße\n"},
                {"type": "base64", "media_type": "text/plain", "data": CODED},
                {"type": "content", "content": "Grüße\n"},
                {"type": "content", "content": [text("Grüße\n")]},
            )
        ),
        (
            [user(SEARCHED | {"content": [text("Rain."), CLAUDE_IMAGE]}), *NEXT],
            *(0, [f"Oslo\nx.org\nRain.\n{IMAGE}"], ("image",)),
        ),
    ],
    RESPONSES: [
        (
            [ASKED, function_call("c", "look", arguments="{}"), function_output("c", [FLAT_IMAGE])],
            *(2, tool_message("c", IMAGE), ("image",)),
        ),
        # A summary of another server: the conversation before it is lost to this model.
        ([COMPACTION, ASKED], 0, assistant(SUMMARY), ("summary",)),
        (
            [COMPACTION | {"encrypted_content": encode_reasoning("They met.")}, ASKED],
            *(0, "They met.", ()),
        ),
        ([ASKED, FOREIGN, HI, ASKED], 1, assistant("Hi."), ("reasoning",)),
        *(
            ([ASKED, FOREIGN | {"encrypted_content": encode_reasoning(words)}, HI, ASKED], 1, *made)
            for words, *made in (
                ("They met.", assistant("Hi.", reasoning_content="They met."), ()),
                ("", assistant("Hi."), ()),
            )
        ),
        *(
            ([ASKED, item, ASKED], 1, assistant(NOTE.format("tool call")), ("tool call",))
            for item in (
                {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
                {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}},
            )
        ),
        *(  # whatever an item of an unknown type holds, and wherever it stands
            (given, 1, {"role": "user", "content": NOTE.format("part")}, ("part",))
            for hologram in (
                {"type": "hologram", "content": {"depth": 3}, "name": 7, "role": "projector"},
                {"type": "hologram", "input": [1], "arguments": [1], "call_id": 5},
                {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
            )
            for given in ([ASKED, hologram, ASKED], [ASKED, hologram])
        ),
        (shell_output("a.txt"), 1, {"role": "user", "content": "a.txt"}, ()),
        *(
            (shell_output(output), 1, {"role": "user", "content": RESULT}, ("tool result",))
            for output in (
                [{"stdout": "a.txt", "stderr": ""}],
                {"type": "computer_screenshot", "image_url": "x"},
            )
        ),
        (
            [user({"type": "input_file", "filename": "a.txt", "file_data": CODED})],
            *(0, ["a.txt\nGrüße\n"], ()),
        ),
    ],
}


@pytest.mark.parametrize(("api", "given", "number", "wanted", "unread"), **rows(READABLE))
def test_part_is_read_as_text_or_noted_as_unread(api, given, number, wanted, unread):
    made = api.request(history(api, *given))
    message = made.messages[number]
    read = message if isinstance(wanted, dict) else texts(message["content"])
    assert (read, made.unread) == (wanted, unread)
    if unread == ("file",):
        assert api.refusal(history(api, *given[:1])).kind == "messages[0].content[0]"


CUSTOM_CALL = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": '+ "ä"'}}
FLAT_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": '+ "ä"'}
FLAT_OUTPUT = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."}
CALLED = {
    CHAT: [([ASKED, assistant(None, tool_calls=[CUSTOM_CALL]), tool_message("c", "Done.")],)],
    RESPONSES: [([ASKED, FLAT_CALL, FLAT_OUTPUT],)],
}


@pytest.mark.parametrize(("api", "given"), **rows(CALLED))
def test_past_custom_call_is_a_function_with_one_argument(api, given):
    made = api.request(history(api, *given))
    assert made.messages[1]["tool_calls"] == [past_call("c", "patch", '{"input": "+ \\"ä\\""}')]
    assert made.messages[2] == tool_message("c", "Done.")
    assert made.unread == ()
