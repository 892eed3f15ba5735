"""One turn of a conversation: a question, rounds of tool calls, an answer.

Python functions are tools: their schemas come from signature and docstring. An error in a tool is
reported to the model, which can then correct its call. `SessionTurn` neither calls the engine nor
runs tools, so that sync and async callers share it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from keepwarm.engine.answer import sum_receipts, sum_usages
from keepwarm.errors import BadInput, RepeatedToolCall
from keepwarm.session.gate import acting_for_task
from keepwarm.text.request import (
    FinishReason,
    Message,
    Receipt,
    Result,
    Tool,
    ToolCall,
    Usage,
)
from keepwarm.text.tools import canonical_tools, signature_of

Function: TypeAlias = Callable[..., Any]

_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ARG = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*(?:\n\1\s+.*)*)", re.MULTILINE)
MAX_ROUNDS = 8
# A text, or the results of the last reply's pending calls by call id.
Question: TypeAlias = str | Mapping[str, str]
RepeatRule: TypeAlias = Literal["raise", "return"]


class ToolResult(NamedTuple):
    """A call that was run, and its result as the model sees it."""

    call: ToolCall
    result: str  # the error, if it failed
    failed: bool = False


class Toolbox:
    """A session's tools. Functions are run here; tools given as schemas are left to the caller."""

    def __init__(self, tools: Iterable[Tool | Function] = ()) -> None:
        self.tools = tuple(tools)  # as given
        self.schemas = canonical_tools(map(_schema, self.tools))
        self._functions = {_name(tool): tool for tool in self.tools if callable(tool)}
        if len({schema["function"]["name"] for schema in self.schemas}) < len(self.tools):
            raise BadInput("Two tools have the same name; give each a name of its own.")

    def runs(self, call: ToolCall) -> bool:
        return call.name in self._functions

    def run(self, call: ToolCall) -> ToolResult:
        """Run a function in this thread."""
        function = self._functions[call.name]
        if inspect.iscoroutinefunction(function):
            raise BadInput(f"The tool {call.name!r} is async; use `arespond`, or `async for`.")
        try:
            result = validate_call(function)(**json.loads(call.arguments))
        except Exception as error:  # a tool may raise anything
            return _failed(call, error)
        return ToolResult(call, _text(result))

    async def arun(self, call: ToolCall) -> ToolResult:
        """Await a coroutine function; run a plain function in a thread of its own."""
        function = self._functions[call.name]
        if not inspect.iscoroutinefunction(function):
            with acting_for_task():
                return await asyncio.to_thread(self.run, call)
        try:
            result = await validate_call(function)(**json.loads(call.arguments))
        except Exception as error:
            return _failed(call, error)
        return ToolResult(call, _text(result))


def schema_of(function: Function) -> Tool:
    """A function's tool schema."""
    name = _name(function)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        parameters = adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        reason = str(error).partition(".")[0]
        raise BadInput(f"The tool {name!r} cannot be described as JSON: {reason}.") from error
    if parameters.get("type") != "object":
        raise BadInput(f"The tool {name!r} takes arguments without names; give each a name.")
    doc = inspect.cleandoc(function.__doc__ or "")
    _describe(parameters.get("properties", {}), doc)
    described = {"description": text} if (text := _ARGS.sub("", doc).strip()) else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _schema(tool: Tool | Function) -> Tool:
    return schema_of(tool) if callable(tool) else tool


def _name(function: Function) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


class _Untitled(GenerateJsonSchema):
    """Without titles: they repeat the names of arguments, and cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _describe(properties: Mapping[str, dict[str, Any]], doc: str) -> None:
    """Add descriptions from the docstring's `Args:`; those of annotations take precedence."""
    found = _ARGS.search(doc)
    for _, name, text in _ARG.findall(found[1]) if found else ():
        if name in properties and text.strip():
            properties[name].setdefault("description", " ".join(text.split()))


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    if isinstance(error, ValidationError):
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return ToolResult(call, f"Error: {'; '.join(wrong)}", failed=True)
    return ToolResult(call, f"Error: {type(error).__name__}: {error}", failed=True)


def _text(result: Any) -> str:
    return (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )


@dataclass(frozen=True)
class Reply:
    """The answer to a question; `usage` and `receipt` are totals of all rounds."""

    text: str  # of the last round; of all of them, where a repeated call ended it
    reasoning: str  # of the last round
    calls: tuple[ToolResult, ...]  # that the session ran, in order
    pending: tuple[ToolCall, ...]  # for the caller to run; answer with `respond({id: result})`
    reason: FinishReason  # why the last round ended
    usage: Usage
    receipt: Receipt
    rounds: tuple[Result, ...]  # the answer of each round


class SessionTurn:
    """The state of a turn. Until `is_over`: ask `messages`, `add_answer`, run the calls that it
    returns, and `add_result` of each.
    """

    def __init__(
        self, question: Question, toolbox: Toolbox, repeated_calls: RepeatRule = "raise"
    ) -> None:
        """After calls that repeat the previous round's the turn is over: `raise` discards it,
        `return` leaves them to the caller, as those after the last round."""
        self.question = question
        self.messages: list[Message] = []
        self.is_over = False
        self._toolbox = toolbox
        self._rounds: list[Result] = []
        self._results: list[ToolResult] = []
        self._pending: tuple[ToolCall, ...] = ()
        self._previous: set[str] = set()  # calls of the previous round
        self._rule = repeated_calls
        self._is_repeated = False

    def begin(self, messages: Sequence[Message]) -> None:
        """Append the question to the conversation so far."""
        self.messages = [*messages, *_as_messages(self.question, messages)]

    def add_answer(self, result: Result) -> list[ToolCall]:
        """Add an answer; returns its calls that are to be run now."""
        self._rounds.append(result)
        choice = result.choices[0]
        self._compare(choice.tool_calls)
        self.messages.append(_assistant_message(choice.text, choice.reasoning, choice.tool_calls))
        may_run = len(self._rounds) <= MAX_ROUNDS and not self._is_repeated
        ours = [call for call in choice.tool_calls if may_run and self._toolbox.runs(call)]
        self._pending = tuple(call for call in choice.tool_calls if call not in ours)
        self.is_over = not ours or bool(self._pending)
        return ours

    def add_result(self, result: ToolResult) -> None:
        self._results.append(result)
        self.messages.append(_tool_message(result.call.id, result.call.name, result.result))

    @property
    def reply(self) -> Reply:
        if not self.is_over:
            raise BadInput("The answer is not complete yet; read the stream to its end first.")
        last = self._rounds[-1].choices[0]
        return Reply(
            self._text if self._is_repeated else last.text,
            last.reasoning,
            tuple(self._results),
            self._pending,
            last.reason,
            sum_usages([result.usage for result in self._rounds]),
            sum_receipts([result.receipt for result in self._rounds]),
            tuple(self._rounds),
        )

    @property
    def _text(self) -> str:
        """Of all rounds."""
        return "".join(result.choices[0].text for result in self._rounds)

    def _compare(self, calls: Sequence[ToolCall]) -> None:
        """With those of the previous round."""
        now = {signature_of(call.name, call.arguments) for call in calls}
        again, self._previous = now & self._previous, now
        self._is_repeated = bool(again)
        if again and self._rule == "raise":
            raise RepeatedToolCall(
                f"The model made the same tool call twice in a row, {min(again)}; the turn was "
                "discarded. Rephrase the question.",
                self._text,
            )


def pending_calls(messages: Sequence[Message]) -> dict[str, str]:
    """The calls of the last answer that have no result yet: names by call id."""
    calls: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            made = message.get("tool_calls") or ()
            calls = {call["id"]: call["function"]["name"] for call in made}
        elif message["role"] == "tool":
            calls.pop(message["tool_call_id"], None)
    return calls


def _as_messages(question: Question, messages: Sequence[Message]) -> list[Message]:
    waiting = pending_calls(messages)
    if isinstance(question, str):
        if waiting:
            raise BadInput(
                f"Tool calls wait for their results ({', '.join(waiting)}); "
                "send the results by call id, or rewind."
            )
        return [{"role": "user", "content": question}]
    if waiting.keys() != question.keys():
        raise BadInput(
            f"Results were sent for {sorted(question)}, but the pending calls are "
            f"{sorted(waiting)}; send one for each."
        )
    return [_tool_message(call, name, question[call]) for call, name in waiting.items()]


def _assistant_message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_as_call(call) for call in calls]
    return message


def _as_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_message(call: str, name: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call, "name": name, "content": text}
