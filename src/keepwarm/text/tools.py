"""Tools: how a prompt offers them, and how a model's answer calls them; see `docs/answers.md`.

A model keeps its own format if its template renders tools and its calls can be parsed. Every
other model gets Keepwarm's tool block in the system message, and calls in Keepwarm's format.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.partial_calls import (
    HARMONY_HEADER,
    HEADERS,
    JSON_HEADER,
    CallHeader,
    PartialToolCalls,
)
from keepwarm.text.request import Message, Tool, ToolCall
from keepwarm.text.template import BETWEEN, Template, is_deep

Parser: TypeAlias = Callable[[str, Any], Any]  # as in mlx-lm: (body, tools) to one call or a list

UNKNOWN_TOOL = "tool_choice names a tool that is not in tools; add it or choose another."
BLOCK = """\
# Tools

You may call one or more of these functions to help with the request:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "<function>", "arguments": {{"<parameter>": <value>}}}}
</tool_call>
What it returns comes back between <tool_response> and </tool_response>."""

DEFERRED = (
    "deferred"  # a tool with this key can be called, but the client itself shows it to the model
)
STRICT = "strict"  # of a function: the arguments of its calls follow its schema
_BEFORE_CALL = "\n"  # also between two
_HARMONY = {"<|channel|>", "<|message|>", "<|call|>"}
_COUNTED = re.compile(r"(.+):\d+")  # Kimi K2's ids, from which its template takes the name
_HARMONY_CALL = re.compile(r"([\w.-]+).*?<\|message\|>(.*)", re.DOTALL)


@dataclass(frozen=True)
class CallMarkers:
    """The delimiters of a call: all that rendering needs to know of a format."""

    start: str
    end: str  # empty: a call lasts until the answer ends
    native: bool = True  # the template renders tools; otherwise `BLOCK` does


@dataclass(frozen=True)
class ToolFormat(CallMarkers):
    """The delimiters of a call, and the parser of the text between them."""

    parse: Parser = field(kw_only=True)
    header: CallHeader | None = field(default=None, kw_only=True)  # None: calls are not JSON
    before: str = field(default="", kw_only=True)  # blank, between text and a call

    @property
    def markers(self) -> CallMarkers:
        """The format without its parser, which may not be sent to another process."""
        return CallMarkers(self.start, self.end, self.native)


class TemplateInput(NamedTuple):
    """Messages and tools as they are passed to a chat template."""

    messages: list[Message]
    tools: list[Tool] | None


class CallReader:
    """Parses the calls of one answer. A call of a tool that was not offered does not count."""

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Tool],
        *,
        parallel: bool = True,
        is_bound: bool = False,
    ) -> None:
        """`is_bound`: no text comes before a call, so that one that is cut off is no text."""
        self.format = tool_format
        self.parallel = parallel
        self.is_bound = is_bound
        is_json = tool_format.header is not None
        self._tools = [dict(tool) if is_json else _with_plain_types(tool) for tool in tools]
        self._names = {tool["function"]["name"] for tool in tools}
        self._ids: set[str] = set()  # of the calls so far

    def begin(self) -> PartialToolCalls:
        """What is read after a delimiter that begins calls."""
        most = sys.maxsize if self.parallel else 1
        return PartialToolCalls(self.format.header, self._names, self._own_id, most)

    def read(self, body: str) -> list[ToolCall]:
        """The calls between two delimiters, with the ids that the model wrote; empty if they are
        not well-formed.
        """
        try:
            parsed = self.format.parse(body, self._tools)
            calls = [self._call(each) for each in (parsed if _is_list(parsed) else [parsed])]
        except Exception:  # a parser may raise anything on malformed text
            return []
        return calls if self.parallel else calls[:1]

    def _call(self, parsed: Mapping[str, Any]) -> ToolCall:
        name, arguments = parsed["name"], parsed.get("arguments", parsed.get("parameters"))
        if arguments is None:
            arguments = {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict) or is_deep(arguments):
            raise ValueError(name)
        return ToolCall(str(parsed.get("id") or ""), name, _json(arguments))

    def _own_id(self, call_id: str) -> str:
        """The model's id, or another if it wrote none, or has used it in this answer already."""
        counted = _COUNTED.fullmatch(call_id)
        number = len(self._ids)
        while not call_id or call_id in self._ids:
            call_id = f"{counted[1]}:{number}" if counted else self._new_id()
            number += 1
        self._ids.add(call_id)
        return call_id

    def _new_id(self) -> str:
        # Mistral's templates refuse ids that are not nine letters or digits.
        mistral = self.format.start == "[TOOL_CALLS]"
        return secrets.token_hex(5)[:9] if mistral else f"call_{secrets.token_hex(12)}"


def tool_format(tokenizer: Any, template: Template) -> ToolFormat:
    """The model's own format if its template renders tools and its calls can be parsed."""
    if not template.renders_tools:
        return OURS
    if is_harmony(tokenizer):
        return HARMONY
    if tokenizer.has_tool_calling:
        markers = tokenizer.tool_call_start, tokenizer.tool_call_end
        header = HEADERS.get(markers[0], JSON_HEADER)
        known = header if parses(tokenizer.tool_parser, header.example) else None
        before = template.before_call
        return ToolFormat(*markers, parse=tokenizer.tool_parser, header=known, before=before)
    return OURS


def parses(parse: Parser, body: str) -> bool:
    """Whether a parser reads this text as f(a=1)."""
    properties = {"a": {"type": "integer"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    try:
        parsed = parse(body, tools)
        call = parsed[0] if isinstance(parsed, list) else parsed
        return bool(call["name"] == "f" and call["arguments"] == {"a": 1})
    except Exception:  # a parser may raise anything on another format
        return False


def without_null(schema: Any) -> Mapping[str, Any]:
    """The schema of a parameter that is a type or null as the type's."""
    if not isinstance(schema, Mapping):
        return {}
    for key in ("type", "anyOf", "oneOf"):
        given = schema.get(key)
        ways = given if isinstance(given, list) else []
        others = [each for each in ways if each not in ("null", {"type": "null"})]
        if len(others) == 1:
            return {**schema, "type": others[0]} if key == "type" else without_null(others[0])
    return schema


def _with_plain_types(tool: Tool) -> dict[str, Any]:
    """For a parser that takes each argument for what its parameter's `type` says."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    named = schema.get("properties")
    if not isinstance(named, Mapping):
        return dict(tool)
    properties = {name: without_null(each) for name, each in named.items()}
    return {**tool, "function": {**function, "parameters": {**schema, "properties": properties}}}


def is_harmony(tokenizer: Any) -> bool:
    """Whether the model writes in the channels of gpt-oss, which mlx-lm does not separate."""
    numbers = [tokenizer.convert_tokens_to_ids(each) for each in _HARMONY]
    known = [number for number in numbers if number is not None]
    return set(tokenizer.convert_ids_to_tokens(known)) >= _HARMONY  # else the unknown token


def canonical_tools(tools: Iterable[Tool]) -> list[Tool]:
    """The tools sorted by name, with sorted keys: reordered tools give the same prompt."""
    checked = [_checked(tool) for tool in tools]
    texts = sorted((tool["function"]["name"], json.dumps(tool, sort_keys=True)) for tool in checked)
    return [json.loads(text) for _, text in texts]


def adapt_to_template(
    markers: CallMarkers,
    messages: Sequence[Message],
    tools: Iterable[Tool],
    *,
    tools_first: bool = True,
) -> TemplateInput:
    """Messages and tools as the model's template can render them."""
    tools = [tool for tool in tools if not tool.get(DEFERRED)]
    if not markers.native:
        return TemplateInput(write_tools_as_text(messages, tools, tools_first), None)
    return TemplateInput(list(messages), _as_offered(tools) or None)


def tool_block(tools: Iterable[Tool]) -> str:
    """The part of the system message that offers tools where the template does not."""
    return BLOCK.format(tools="\n".join(_json(tool) for tool in _as_offered(tools)))


def write_tools_as_text(
    messages: Sequence[Message], tools: Iterable[Tool], tools_first: bool = True
) -> list[Message]:
    """The conversation with tools in the system message, and calls and results as text.

    Tools come before the system text, which differs more often between sessions.
    """
    written: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            written.append({"role": "user", "content": "\n".join(map(_result_text, group))})
        else:
            written.extend(map(_with_call_text, group))
    tools = list(tools)
    return _with_system(written, tool_block(tools), tools_first) if tools else written


def call_text(name: str, arguments: str) -> str:
    """A call in Keepwarm's format."""
    text = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {text}, "arguments": {arguments}}}\n</tool_call>'


def _with_system(messages: list[Message], block: str, block_first: bool) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        system = messages[0].get("content") or ""
        parts = (block, system) if block_first else (system, block)
        return [{**messages[0], "content": BETWEEN.join(parts)}, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _with_call_text(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [call_text(call["name"], _arguments_text(call["arguments"])) for call in calls]
    if not texts:
        return message
    content = [message["content"]] if message.get("content") else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _BEFORE_CALL.join(content + texts)}


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _checked(tool: Tool) -> Tool:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadInput('A tool must be {"type": "function", "function": {"name": …}}.')
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise BadInput(f"The parameters of tool {function['name']!r} must be a JSON schema.")
    return tool


def _as_offered(tools: Iterable[Tool]) -> list[Tool]:
    return [{**tool, "function": described(tool["function"])} for tool in canonical_tools(tools)]


def described(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as a prompt shows it: whether it is strict is no matter of the model."""
    return {key: value for key, value in function.items() if key != STRICT}


def _json(value: Any) -> str:
    """JSON with the order and spaces that templates write, so that the prefix is the same."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises on a lone surrogate, which no client could receive
    return text


def _is_list(parsed: Any) -> bool:
    return isinstance(parsed, list) and bool(parsed)


def _parse_ours(body: str, _tools: Any = None) -> Any:
    return json.loads(body)


def _parse_harmony(body: str, _tools: Any = None) -> dict[str, Any]:
    match = _HARMONY_CALL.fullmatch(body)
    if match is None:
        raise ValueError("no message")
    return {"name": match[1], "arguments": json.loads(match[2])}


OURS = ToolFormat(
    *("<tool_call>", "</tool_call>"),
    native=False,
    parse=_parse_ours,
    header=JSON_HEADER,
    before=_BEFORE_CALL,
)
HARMONY = ToolFormat("to=functions.", "", parse=_parse_harmony, header=HARMONY_HEADER)


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as a message has it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def assistant_message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An answer as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [function_call(*call) for call in calls]
    return message


def signature_of(name: Any, arguments: Any) -> str:
    """A call in canonical form, to compare calls; a client may have sent no JSON, or an object."""
    with suppress(TypeError, ValueError, RecursionError):
        arguments = json.loads(arguments)
    try:
        return json.dumps([name, arguments], sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # keys of several types
        return repr([name, arguments])


def calls_of_round(messages: Sequence[Message]) -> set[str]:
    """The signatures of the calls that the model made last, since the user last spoke."""
    signatures: set[str] = set()
    for message in messages:
        if message["role"] == "user":
            signatures = set()
        elif message["role"] == "assistant":
            made = [call.get("function") or {} for call in message.get("tool_calls") or ()]
            signatures = {signature_of(call.get("name"), call.get("arguments")) for call in made}
    return signatures
