"""One turn of a conversation: a question, rounds of tool calls, an answer.

`SessionTurn` neither calls the engine nor runs tools, so that sync and async callers share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from keepwarm.engine.answer import sum_receipts, sum_usages
from keepwarm.errors import BadInput, RepeatedToolCall
from keepwarm.session.tool_functions import Toolbox, ToolResult
from keepwarm.text.request import (
    FinishReason,
    Message,
    Receipt,
    Result,
    ToolCall,
    Usage,
)
from keepwarm.text.tools import signature_of

MAX_ROUNDS = 8

# A text, or the results of the last reply's pending calls by call id.
Question: TypeAlias = str | Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """The answer to a question; `usage` and `receipt` are totals of all rounds."""

    text: str  # of the last round
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

    def __init__(self, question: Question, toolbox: Toolbox) -> None:
        self.question = question
        self.messages: list[Message] = []
        self.is_over = False
        self._toolbox = toolbox
        self._rounds: list[Result] = []
        self._results: list[ToolResult] = []
        self._pending: tuple[ToolCall, ...] = ()
        self._previous: set[str] = set()  # calls of the previous round

    def begin(self, messages: Sequence[Message]) -> None:
        """Append the question to the conversation so far."""
        self.messages = [*messages, *_as_messages(self.question, messages)]

    def add_answer(self, result: Result) -> list[ToolCall]:
        """Add an answer; returns its calls that are to be run now."""
        self._rounds.append(result)
        choice = result.choices[0]
        self._refuse_repeated(choice.tool_calls)
        self.messages.append(_assistant_message(choice.text, choice.reasoning, choice.tool_calls))
        may_run = len(self._rounds) <= MAX_ROUNDS
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
            last.text,
            last.reasoning,
            tuple(self._results),
            self._pending,
            last.reason,
            sum_usages([result.usage for result in self._rounds]),
            sum_receipts([result.receipt for result in self._rounds]),
            tuple(self._rounds),
        )

    def _refuse_repeated(self, calls: Sequence[ToolCall]) -> None:
        now = {signature_of(call.name, call.arguments) for call in calls}
        if again := now & self._previous:
            text = "".join(result.choices[0].text for result in self._rounds)
            raise RepeatedToolCall(
                f"The model made the same tool call twice in a row, {min(again)}; the turn was "
                "discarded. Rephrase the question.",
                text,
            )
        self._previous = now


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
