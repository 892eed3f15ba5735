"""Chat completions: OpenAI's request to an engine request, the answer to OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.http.content import SkippedContent, content_of
from keepwarm.server.http.synonyms import format_of, thinking_of
from keepwarm.server.http.tools import (
    TEXT_INPUT,
    allowed_tools,
    custom_arguments,
    custom_input,
    function_tool,
)
from keepwarm.server.openai.common import (
    Chunks,
    CompletionMeta,
    completion_sampling,
    top_logprobs_of,
    whole,
)
from keepwarm.server.openai.logprobs import chat_logprobs
from keepwarm.server.openai.shapes import (
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ChatTool,
    CustomChatTool,
    CustomToolCallIn,
    Function,
    FunctionName,
    NamedCustomTool,
    NamedTool,
    ToolCallIn,
)
from keepwarm.text.detokenize import Pieces
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Event,
    Finished,
    Message,
    Request,
    Result,
    Started,
    TokenInfo,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCalled,
    ToolChoice,
)
from keepwarm.text.tools import function_call

# Request


def request_of(body: ChatRequest, fields: Request, settings: Settings) -> Request:
    tools = offered_tools(body)
    wanted = thinking_of(body)
    options = {**(body.chat_template_kwargs or {}), **wanted.options}
    thinking = options.pop("enable_thinking", wanted.switch)
    is_partial = _is_partial(body, options.pop("continue_final_message", None))
    limit = body.max_completion_tokens
    max_tokens = body.max_tokens if limit is None else limit
    unread = SkippedContent.of(settings, "messages", [message.role for message in body.messages])
    return replace(
        fields,
        messages=[_message(message, i, unread) for i, message in enumerate(body.messages)],
        partial_answer=is_partial,
        unread=unread.kinds,
        tools=tools,
        tool_choice=tool_choice_of(body),
        thinking=None if thinking is None else bool(thinking),
        template_options=options,
        format=format_of(body),
        sampling=completion_sampling(body, max_tokens, top_logprobs_of(body)),
        n=body.n or 1,
    )


def _is_partial(body: ChatRequest, in_options: object) -> bool:
    """Whether the last message is to be continued."""
    name = "add_generation_prompt"
    continues = bool(body.continue_final_message or in_options)
    if continues and body.add_generation_prompt:
        raise BadField(f"{name} and continue_final_message exclude each other; send one.", name)
    if body.add_generation_prompt is False and not continues:
        raise BadField(
            f"{name} is false, so no answer is asked for; omit it, or set "
            "continue_final_message to continue the last message.",
            name,
        )
    return continues


def _message(message: ChatMessage, index: int, unread: SkippedContent) -> Message:
    """A message for the chat template; the role `developer` becomes `system`."""
    role = "system" if message.role == "developer" else message.role
    content = content_of(message.content, f"messages[{index}].content", unread)
    result: dict[str, Any] = {"role": role, "content": content} | past_calls(message)
    reasoning = message.reasoning_content or message.reasoning
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    return {key: value for key, value in named.items() if value is not None} | result


# Tools: functions, custom tools, and OpenAI's older `functions`


def offered_tools(body: ChatRequest) -> list[Tool]:
    if body.functions is not None and body.tools:
        raise BadField("functions and tools cannot be combined; send tools.", "functions")
    tools = [_offer(function) for function in body.functions or ()]
    tools += [_tool(tool) for tool in body.tools or ()]
    if isinstance(body.tool_choice, AllowedTools):
        return allowed_tools(tools, [_name_of(t) for t in body.tool_choice.allowed_tools.tools])
    return tools


def _tool(tool: ChatTool | CustomChatTool) -> Tool:
    if isinstance(tool, ChatTool):
        return _offer(tool.function)
    return function_tool(tool.custom.name, tool.custom.description, TEXT_INPUT)


def _offer(function: Function) -> Tool:
    return function_tool(function.name, function.description, function.parameters, function.strict)


def tool_choice_of(body: ChatRequest) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False and body.functions is None
    choice = body.tool_choice or body.function_call or "auto"
    if isinstance(choice, AllowedTools):
        choice = choice.allowed_tools.mode
    if isinstance(choice, str):
        return ToolChoice(choice, parallel=parallel)
    return ToolChoice("required", _name_of(choice), parallel)


def _name_of(tool: NamedTool | NamedCustomTool | FunctionName) -> str:
    match tool:
        case NamedTool():
            return tool.function.name
        case NamedCustomTool():
            return tool.custom.name
    return tool.name


def past_calls(message: ChatMessage) -> dict[str, Any]:
    """What a message of the history says about calls; older functions get ids by their names."""
    if message.role == "function":
        return {"role": "tool", "tool_call_id": _legacy_id(message.name)}
    calls = [_past_call(call) for call in message.tool_calls or ()]
    if called := message.function_call:
        calls.append(function_call(_legacy_id(called.name), called.name, called.arguments))
    return {"tool_calls": calls} if calls else {}


def _legacy_id(name: str | None) -> str:
    return f"call_{name or 'function'}"


def _past_call(call: ToolCallIn | CustomToolCallIn) -> dict[str, Any]:
    if isinstance(call, ToolCallIn):
        return call.model_dump()
    return function_call(call.id, call.custom.name, custom_arguments(call.custom.input))


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

    def begin(self, index: int, call: ToolCall) -> dict[str, Any]:
        """The delta that begins a call: its name without arguments, as clients expect."""
        if self.legacy:
            return {"function_call": {"name": call.name, "arguments": ""}}
        return {"tool_calls": [{"index": index, **self._call(call._replace(arguments=""))}]}

    def piece(self, index: int, call: ToolCall) -> dict[str, Any]:
        """A delta of the arguments; of a custom tool they must be whole."""
        arguments = {"arguments": call.arguments}
        if self.legacy:
            return {"function_call": arguments}
        if call.name in self.custom:
            custom = {"input": custom_input(call.arguments)}
            return {"tool_calls": [{"index": index, "custom": custom}]}
        return {"tool_calls": [{"index": index, "function": arguments}]}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self.custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return function_call(*call)


FUNCTIONS = CallStyle()


def call_style_of(body: ChatRequest) -> CallStyle:
    custom = [tool.custom.name for tool in body.tools or () if isinstance(tool, CustomChatTool)]
    return CallStyle(frozenset(custom), body.functions is not None)


# Answer


def completion(
    meta: CompletionMeta, result: Result, pieces: Pieces | None, calls: CallStyle = FUNCTIONS
) -> dict[str, Any]:
    """A complete answer. `pieces` is given if the client asked for logprobs."""
    choices = [_choice(i, choice, pieces, calls) for i, choice in enumerate(result.choices)]
    return whole(meta, "chat.completion", choices, result)


def _choice(index: int, choice: Choice, pieces: Pieces | None, calls: CallStyle) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.tool_calls and not choice.text else choice.text,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = message["reasoning"] = choice.reasoning
    if choice.tool_calls:
        message |= calls.message(choice.tool_calls)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(pieces, choice.tokens),
        "finish_reason": calls.reason(choice.reason),
    }


def _logprobs(pieces: Pieces | None, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
    if pieces is None:
        return None
    return {"content": chat_logprobs(pieces, tokens), "refusal": None}


class ChatStream(Chunks):
    """Chunks: the role of each choice, then deltas, finish reasons, usage, `[DONE]`.

    The last chunk has the receipt: the one with the usage, or else the last finish reason.
    """

    def __init__(
        self,
        meta: CompletionMeta,
        n: int,
        usage: bool,
        pieces: Pieces | None,
        calls: CallStyle = FUNCTIONS,
    ) -> None:
        super().__init__("chat.completion.chunk", meta, usage)
        self._n = n
        self._pieces = pieces
        self._calls = calls
        self._begun: list[list[str]] = [[] for _ in range(n)]  # ids of tool calls

    def event(self, event: Event) -> bytes:
        match event:
            case Delta():
                return self._release() + self._delta(event)
            case ToolCallDelta() | ToolCalled():
                return self._release() + self._call(event)
            case Finished():
                end = self._choice(event.choice, {}, event.tokens)
                return self._hold(end | {"finish_reason": self._calls.reason(event.reason)})
            case Started():
                role = {"role": "assistant", "content": ""}
                return b"".join(self._chunk(choice, role) for choice in range(self._n))
            case Done():
                return self._done(event)
        return b""

    def _delta(self, event: Delta) -> bytes:
        delta = {}
        if event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = event.reasoning
        if event.text:  # of a call that was malformed, if one is still open
            self._begun[event.choice] = [""] * len(self._begun[event.choice])
        if event.text or (self._pieces and event.tokens):
            delta["content"] = event.text
        return self._chunk(event.choice, delta, event.tokens) if delta else b""

    def _call(self, event: ToolCallDelta | ToolCalled) -> bytes:
        """A part of a call, or a whole one. The input of a custom tool is known at its end."""
        choice = event.choice
        if isinstance(event, ToolCallDelta):
            if event.name in self._calls.custom:
                return b""
            return self._write_call(choice, ToolCall(event.id, event.name, event.arguments))
        if event.call.id in self._begun[choice]:
            return self._chunk(choice, {}, event.tokens) if self._pieces else b""
        return self._write_call(choice, event.call, event.tokens)

    def _write_call(self, choice: int, call: ToolCall, tokens: Sequence[TokenInfo] = ()) -> bytes:
        begun, first = self._begun[choice], b""
        if call.id not in begun:
            begun.append(call.id)
            first = self._chunk(choice, self._calls.begin(len(begun) - 1, call), tokens)
        return first + self._chunk(choice, self._calls.piece(len(begun) - 1, call))

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Sequence[TokenInfo] = ()) -> bytes:
        return self._framed({"choices": [self._choice(index, delta, tokens)]})

    def _choice(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenInfo]
    ) -> dict[str, Any]:
        logprobs = _logprobs(self._pieces, tokens) if tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
