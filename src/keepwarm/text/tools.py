"""Tools: how a prompt offers them, how a model's answer calls them. `docs/tools.md` has the texts.

A model whose template renders tools, in a format that mlx-lm reads, keeps its own. Every other
model gets our tool block in the system message and answers in our format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.request import Message, Tool, ToolCall

Parser: TypeAlias = Callable[[str, Any], Any]  # of mlx-lm: body and tools to one call or a list

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

DEFERRED = "deferred"  # a tool with this key can be called; where it is shown is the client's care
_HARMONY = {"<|channel|>", "<|message|>", "<|call|>"}
_HARMONY_CALL = re.compile(r"([\w.-]+).*?<\|message\|>(.*)", re.DOTALL)
_PROBE = "keepwarm_probe"  # a name that no template writes by itself


@dataclass(frozen=True)
class ToolFormat:
    """Between which marks a model writes a call, and who reads what stands between them."""

    start: str
    end: str  # empty: a call lasts until the answer ends
    parse: Parser
    native: bool = True  # the template renders tools; otherwise the block above does


class Offer(NamedTuple):
    """What to give to a chat template."""

    messages: list[Message]
    tools: list[Tool] | None


class CallReader:
    """Reads the calls of one answer. A call of a tool that was not offered is no call."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Tool], *, parallel: bool = True
    ) -> None:
        self.format = tool_format
        self.parallel = parallel
        self._tools = [dict(tool) for tool in tools]
        self._names = {tool["function"]["name"] for tool in tools}

    def read(self, body: str) -> list[ToolCall]:
        """The calls that stand between two marks; none where it is not a well-formed call."""
        try:
            parsed = self.format.parse(body, self._tools)
            calls = [self._call(each) for each in (parsed if _is_list(parsed) else [parsed])]
        except Exception:  # a parser may raise anything on what a model writes
            return []
        return calls if self.parallel else calls[:1]

    def _call(self, parsed: Mapping[str, Any]) -> ToolCall:
        name, arguments = parsed["name"], parsed.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError(name)
        call_id = parsed.get("id") or self._new_id()
        return ToolCall(str(call_id), name, _json(arguments))

    def _new_id(self) -> str:
        # Mistral's templates refuse ids that are not nine letters or digits.
        mistral = self.format.start == "[TOOL_CALLS]"
        return secrets.token_hex(5)[:9] if mistral else f"call_{secrets.token_hex(12)}"


def tool_format(tokenizer: Any) -> ToolFormat:
    """The model's own format where its template and mlx-lm know one, else ours."""
    if not renders_tools(tokenizer):
        return OURS
    if is_harmony(tokenizer):
        return HARMONY
    if tokenizer.has_tool_calling:
        return ToolFormat(tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser)
    return OURS


def is_harmony(tokenizer: Any) -> bool:
    """Whether the model speaks in the channels of gpt-oss, which mlx-lm does not separate."""
    return bool(tokenizer.get_vocab().keys() >= _HARMONY)


def renders_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows the model which tools there are: tried out."""
    if not tokenizer.has_chat_template:
        return False
    schema = {"type": "object", "properties": {}, "required": []}
    function = {"name": _PROBE, "description": "", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    try:
        ask = [{"role": "user", "content": "?"}]
        text = tokenizer.apply_chat_template(ask, tools=tools, tokenize=False)
    except Exception:  # a template is a program: it may raise anything
        return False
    return _PROBE in text


def canonical_tools(tools: Iterable[Tool]) -> list[Tool]:
    """The same tools by name, keys sorted: reordered tools give the same prompt."""
    checked = [_checked(tool) for tool in tools]
    texts = sorted((tool["function"]["name"], json.dumps(tool, sort_keys=True)) for tool in checked)
    return [json.loads(text) for _, text in texts]


def offer(tool_format: ToolFormat, messages: Sequence[Message], tools: Iterable[Tool]) -> Offer:
    """Messages and tools as the model's template can render them."""
    tools = [tool for tool in tools if not tool.get(DEFERRED)]
    if not tool_format.native:
        return Offer(with_tools(messages, tools), None)
    return Offer([_with_objects(message) for message in messages], canonical_tools(tools) or None)


def tool_block(tools: Iterable[Tool]) -> str:
    """What the system message says of tools when the template has no words for them."""
    return BLOCK.format(tools="\n".join(_json(tool) for tool in canonical_tools(tools)))


def with_tools(messages: Sequence[Message], tools: Iterable[Tool]) -> list[Message]:
    """The conversation in plain text: tools in the system message, calls and results as text."""
    plain: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            plain.append({"role": "user", "content": "\n".join(map(_result_text, group))})
        else:
            plain.extend(map(_with_call_text, group))
    tools = list(tools)
    return _with_system(plain, tool_block(tools)) if tools else plain


def call_text(name: str, arguments: str) -> str:
    """A call in our format."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _with_system(messages: list[Message], block: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{block}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _with_call_text(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [call_text(call["name"], _arguments_text(call["arguments"])) for call in calls]
    if not texts:
        return message
    content = [message["content"]] if message.get("content") else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(content + texts)}


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _with_objects(message: Message) -> Message:
    """Arguments as objects: clients send them as JSON text, templates want to walk through them."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call) for call in calls]} if calls else message


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    # An object already, or no JSON: then the template gets it as it came.
    with suppress(TypeError, ValueError, RecursionError):
        value = json.loads(function["arguments"] or "{}")
        _json(value)  # half characters, and what nests too deep, stay text
        function["arguments"] = value
    return {**call, "function": function}


def _checked(tool: Tool) -> Tool:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadInput('A tool must be {"type": "function", "function": {"name": …}}.')
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise BadInput(f"The parameters of tool {function['name']!r} must be a JSON schema.")
    return tool


def _json(value: Any) -> str:
    """In the order and with the spaces in which templates write it, so that a prefix stays one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a surrogate pair cannot be sent to anybody
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


OURS = ToolFormat("<tool_call>", "</tool_call>", _parse_ours, native=False)
HARMONY = ToolFormat("to=functions.", "", _parse_harmony)
