"""Anthropic's messages: the answer as Anthropic writes it, whole or as events."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from keepwarm.server.anthropic.shapes import (
    AnthropicUsage,
    MessageOut,
    MessageReceipt,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from keepwarm.server.http.problems import Problem, anthropic_body
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.sse import frame, progress_json
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Event,
    Finished,
    Progress,
    Receipt,
    Result,
    Started,
    ToolCall,
    ToolCalled,
    Usage,
)

HOUR_S = 3600.0
STOP_REASONS: Mapping[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class CachedPrefix(NamedTuple):
    """A breakpoint: so many tokens of the prompt are kept for so long."""

    n_tokens: int
    ttl_s: float


@dataclass(frozen=True)
class MessageMeta:
    """What is known of an answer before it begins."""

    id: str
    model: str
    kept: Sequence[CachedPrefix] = ()
    ignored_tools: Sequence[str] = ()


def message(heading: MessageMeta, result: Result) -> MessageOut:
    """A whole answer."""
    choice = result.choices[0]
    return {
        **_begun(heading),
        "content": _content(choice),
        "stop_reason": stop_reason(choice.reason, choice.stop),
        "stop_sequence": choice.stop,
        "usage": usage_of(result.receipt, heading.kept, result.usage),
        "keepwarm": _receipt(heading, result.receipt),
    }


def usage_of(
    receipt: Receipt, kept: Sequence[CachedPrefix], usage: Usage | None = None
) -> AnthropicUsage:
    """The prompt in three parts that add up: read from the cache, newly kept, and neither."""
    cached = receipt.cached_tokens
    created = _created(cached, kept)
    counts: AnthropicUsage = {
        "input_tokens": receipt.prompt_tokens - cached - sum(created),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": sum(created),
        "cache_creation": {
            "ephemeral_5m_input_tokens": created[0],
            "ephemeral_1h_input_tokens": created[1],
        },
        "output_tokens": usage.completion_tokens if usage else 0,
    }
    if usage:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def stop_reason(reason: str, stop: str | None) -> StopReason:
    return "stop_sequence" if stop is not None else STOP_REASONS[reason]


def _created(cached: int, kept: Sequence[CachedPrefix]) -> tuple[int, int]:
    """Tokens newly kept up to the last breakpoint, for minutes and for an hour."""
    minutes, hour, known = 0, 0, cached
    for mark in sorted(kept):
        new = max(0, mark.n_tokens - known)
        known += new
        if mark.ttl_s >= HOUR_S:
            hour += new
        else:
            minutes += new
    return minutes, hour


def _begun(heading: MessageMeta) -> MessageOut:
    return {
        "id": heading.id,
        "type": "message",
        "role": "assistant",
        "model": heading.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }  # type: ignore[typeddict-item]  # usage comes when it is known


def _content(choice: Choice) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if choice.reasoning:
        signature = _signature(choice.reasoning)
        thinking = choice.reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    return [*blocks, *map(_tool_use, choice.tool_calls)]


def _tool_use(call: ToolCall) -> ToolUseBlock:
    given = json.loads(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _signature(thinking: str) -> str:
    """Clients send it back with the thinking; nobody reads it here."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=24).digest()).decode()


def _receipt(heading: MessageMeta, receipt: Receipt) -> MessageReceipt:
    fields: MessageReceipt = receipt_dict(receipt)  # type: ignore[assignment]
    if heading.ignored_tools:
        fields["ignored_tools"] = list(heading.ignored_tools)
    return fields


class MessageStream:
    """Events: the message's start, its content block by block, how it ended, its end."""

    def __init__(self, heading: MessageMeta) -> None:
        self._heading = heading
        self._index = -1  # of the last block
        self._open: str | None = None  # the type of the block that is being written
        self._thinking: list[str] = []  # of that block
        self._finished: Finished | None = None

    def event(self, event: Event) -> bytes:
        match event:
            case Started():
                counts = usage_of(event.receipt, self._heading.kept)
                return _frame("message_start", message={**_begun(self._heading), "usage": counts})
            case Delta():
                return self._delta(event)
            case ToolCalled():
                return self._tool_called(event.call)
            case Finished():
                self._finished = event
                return self._close()
            case Done():
                return self._done(event)
        return b""

    def keep_alive(self, progress: Progress | None) -> bytes:
        return _frame("ping", keepwarm=json.loads(progress_json(progress)))

    def problem(self, problem: Problem) -> bytes:
        return frame(json.dumps(anthropic_body(problem)), "error")

    def _delta(self, event: Delta) -> bytes:
        frames = b""
        if event.reasoning:
            frames += self._ensure("thinking", {"thinking": "", "signature": ""})
            self._thinking.append(event.reasoning)
            frames += self._piece("thinking_delta", thinking=event.reasoning)
        if event.text:
            frames += self._ensure("text", {"text": ""})
            frames += self._piece("text_delta", text=event.text)
        return frames

    def _tool_called(self, call: ToolCall) -> bytes:
        begun = self._begin("tool_use", {"id": call.id, "name": call.name, "input": {}})
        given = self._piece("input_json_delta", partial_json=call.arguments)
        return begun + given + self._close()

    def _done(self, event: Done) -> bytes:
        ended = self._finished or Finished(0, "stop")
        delta = {"stop_reason": stop_reason(ended.reason, ended.stop), "stop_sequence": ended.stop}
        usage = usage_of(event.receipt, self._heading.kept, event.usage)
        receipt = _receipt(self._heading, event.receipt)
        last = _frame("message_delta", delta=delta, usage=usage, keepwarm=receipt)
        return last + _frame("message_stop")

    def _ensure(self, kind: str, block: Mapping[str, Any]) -> bytes:
        return b"" if self._open == kind else self._begin(kind, block)

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        before = self._close()
        self._index += 1
        self._open = kind
        content = {"type": kind, **block}
        return before + _frame("content_block_start", index=self._index, content_block=content)

    def _piece(self, kind: str, **fields: Any) -> bytes:
        return _frame("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._piece("signature_delta", signature=_signature("".join(self._thinking)))
        self._open, self._thinking = None, []
        return signed + _frame("content_block_stop", index=self._index)


def _frame(kind: str, **fields: Any) -> bytes:
    return frame(json.dumps({"type": kind, **fields}), kind)
