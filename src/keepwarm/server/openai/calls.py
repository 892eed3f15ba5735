"""Tools and calls of chat completions: functions, custom tools, and OpenAI's older `functions`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from keepwarm.errors import BadField
from keepwarm.server.openai.shapes import (
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ChatTool,
    CustomChatTool,
    CustomToolCallIn,
    CustomToolCallOut,
    FunctionName,
    NamedCustomTool,
    NamedTool,
    ToolCallIn,
    ToolCallOut,
)
from keepwarm.text.request import Tool, ToolCall, ToolChoice

# A custom tool, whose input is text, is a function with this one argument.
TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class CallStyle(NamedTuple):
    """How a client is told of calls."""

    custom: frozenset[str] = frozenset()  # names of custom tools
    legacy: bool = False  # by `function_call`, as before there were tools

    def message(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """The fields of a message that makes these calls."""
        if self.legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self._call(call) for call in calls]}

    def reason(self, reason: str) -> str:
        return "function_call" if self.legacy and reason == "tool_calls" else reason

    def begin(self, index: int, call_id: str, name: str) -> dict[str, Any]:
        """The delta that begins a call: its name without arguments, as clients expect."""
        if self.legacy:
            return {"function_call": {"name": name, "arguments": ""}}
        return {"tool_calls": [{"index": index, **self._call(ToolCall(call_id, name, ""))}]}

    def piece(self, index: int, name: str, arguments: str) -> dict[str, Any]:
        """A delta of the arguments; of a custom tool they must be whole."""
        if self.legacy:
            return {"function_call": {"arguments": arguments}}
        said: dict[str, Any] = {"function": {"arguments": arguments}}
        if name in self.custom:
            said = {"custom": {"input": custom_input(arguments)}}
        return {"tool_calls": [{"index": index, **said}]}

    def _call(self, call: ToolCall) -> ToolCallOut | CustomToolCallOut:
        if call.name in self.custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}  # type: ignore[typeddict-item]
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}  # type: ignore[typeddict-item]


FUNCTIONS = CallStyle()


def call_style_of(body: ChatRequest) -> CallStyle:
    custom = [tool.custom.name for tool in body.tools or () if isinstance(tool, CustomChatTool)]
    return CallStyle(frozenset(custom), body.functions is not None)


def custom_input(arguments: str) -> str:
    """The text in the arguments of a custom tool."""
    try:
        given = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return given if isinstance(given, str) else arguments


def custom_call(name: str, text: str) -> dict[str, str]:
    """The call of a custom tool, as the call of a function."""
    return {"name": name, "arguments": json.dumps({"input": text}, ensure_ascii=False)}


def custom_function(name: str, description: str | None) -> dict[str, Any]:
    """A custom tool, as a function."""
    about = {} if description is None else {"description": description}
    return {"name": name, **about, "parameters": TEXT_INPUT}


# Requests


def offered_tools(body: ChatRequest) -> list[Tool]:
    if body.functions is not None and body.tools:
        raise BadField("functions and tools cannot be combined; send tools.", "functions")
    functions = [function.model_dump(exclude_none=True) for function in body.functions or ()]
    functions += [_function(tool) for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {_name_of(tool) for tool in choice.allowed_tools.tools}
        _check_known(allowed, {function["name"] for function in functions})
        functions = [function for function in functions if function["name"] in allowed]
    return [{"type": "function", "function": function} for function in functions]


def tool_choice_of(body: ChatRequest, tools: Sequence[Tool]) -> ToolChoice:
    names = {tool["function"]["name"] for tool in tools}
    parallel = body.parallel_tool_calls is not False and body.functions is None
    choice = body.tool_choice or body.function_call or "auto"
    if isinstance(choice, AllowedTools):
        return ToolChoice(choice.allowed_tools.mode, None, parallel)
    if not isinstance(choice, str):
        name = _name_of(choice)
        _check_known({name}, names)
        return ToolChoice("required", name, parallel)
    if choice == "required" and not names:
        raise BadField(
            "tool_choice is required, but tools is empty; send tools or omit tool_choice.",
            "tool_choice",
        )
    return ToolChoice(choice, None, parallel)


def past_calls(message: ChatMessage) -> dict[str, Any]:
    """What a message of the history says about calls; older functions get ids by their names."""
    if message.role == "function":
        return {"role": "tool", "tool_call_id": _legacy_id(message.name)}
    calls = [_past_call(call) for call in message.tool_calls or ()]
    if message.function_call is not None:
        named = message.function_call
        calls.append(_function_call(_legacy_id(named.name), named.model_dump()))
    return {"tool_calls": calls} if calls else {}


def _legacy_id(name: str | None) -> str:
    return f"call_{name or 'function'}"


def _past_call(call: ToolCallIn | CustomToolCallIn) -> dict[str, Any]:
    if isinstance(call, ToolCallIn):
        return call.model_dump()
    return _function_call(call.id, custom_call(call.custom.name, call.custom.input))


def _function_call(call_id: str, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": function}


def _function(tool: ChatTool | CustomChatTool) -> dict[str, Any]:
    if isinstance(tool, ChatTool):
        return tool.function.model_dump(exclude_none=True)
    return custom_function(tool.custom.name, tool.custom.description)


def _name_of(tool: NamedTool | NamedCustomTool | FunctionName) -> str:
    match tool:
        case NamedTool():
            return tool.function.name
        case NamedCustomTool():
            return tool.custom.name
    return tool.name


def _check_known(named: set[str], known: set[str]) -> None:
    if not named <= known:
        raise BadField(
            "tool_choice names a tool that is not in tools; add it or choose another.",
            "tool_choice",
        )
