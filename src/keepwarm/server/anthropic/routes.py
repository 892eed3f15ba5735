"""Anthropic's endpoints: messages, answered as one object or as events; counting tokens."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastapi import Response

from keepwarm.server.anthropic import request as messages
from keepwarm.server.anthropic.request import CountRequest, MessagesRequest
from keepwarm.server.http.body import Fields, api_router
from keepwarm.server.http.problems import AnthropicErrorOut, Problem, anthropic_body
from keepwarm.server.http.sse import (
    EventStream,
    WholeAnswer,
    answer_docs,
    frame,
    new_id,
    progress_fields,
    receipt_dict,
)
from keepwarm.server.models.calls import ApiCall, Call
from keepwarm.server.models.host import ObservedAnswer
from keepwarm.text import request as engine_request
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
    ToolCallDelta,
    ToolCalled,
    Usage,
)

HOUR_S = 3600.0
STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class CachedPrefix(NamedTuple):
    """The prompt up to a breakpoint: how many tokens are kept, and for how long."""

    n_tokens: int
    ttl_s: float


@dataclass(frozen=True)
class MessageMeta:
    """What is known about an answer before it begins."""

    id: str
    model: str
    cached_prefixes: Sequence[CachedPrefix] = ()
    ignored_tools: Sequence[str] = ()


def message(meta: MessageMeta, result: Result) -> Fields:
    """A complete answer."""
    choice = result.choices[0]
    return {
        **_empty_message(meta),
        "content": _content(choice),
        **_end(choice.reason, choice.stop),
        "usage": usage_of(result.receipt, meta.cached_prefixes, result.usage),
        "keepwarm": receipt_dict(result.receipt, ignored_tools=meta.ignored_tools),
    }


def usage_of(
    receipt: Receipt, prefixes: Sequence[CachedPrefix], usage: Usage | None = None
) -> Fields:
    """The prompt in three parts that add up: read from the cache, newly cached, and neither."""
    cached = receipt.cached_tokens
    created = _created(cached, prefixes)
    counts: Fields = {
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


def _end(reason: str, stop: str | None) -> Fields:
    """A client runs the tools that were called also if a stop string ended the answer."""
    if stop is not None and reason != "tool_calls":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def _created(cached: int, prefixes: Sequence[CachedPrefix]) -> tuple[int, int]:
    """Tokens newly cached up to the last breakpoint, for five minutes and for an hour."""
    minutes, hour, known = 0, 0, cached
    for prefix in sorted(prefixes):
        new = max(0, prefix.n_tokens - known)
        known += new
        if prefix.ttl_s >= HOUR_S:
            hour += new
        else:
            minutes += new
    return minutes, hour


def _empty_message(meta: MessageMeta) -> Fields:
    return {
        "id": meta.id,
        "type": "message",
        "role": "assistant",
        "model": meta.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }  # usage is added when it is known


def _content(choice: Choice) -> list[Fields]:
    blocks: list[Fields] = []
    if choice.reasoning:
        signature = _signature(choice.reasoning)
        thinking = choice.reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    return [*blocks, *map(_tool_use, choice.tool_calls)]


def _tool_use(call: ToolCall) -> Fields:
    arguments = json.loads(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _signature(thinking: str) -> str:
    """Clients expect one and send it back; this server does not read it."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=24).digest()).decode()


class MessageStream:
    """Events: message start, content blocks, stop reason and usage, message stop."""

    def __init__(self, meta: MessageMeta) -> None:
        self._meta = meta
        self._index = -1  # of the last block
        self._open: str | None = None  # type of the block that is open
        self._thinking: list[str] = []  # of that block
        self._calls: list[str] = []  # ids of calls that were begun
        self._finished: Finished | None = None

    def event(self, event: Event) -> bytes:
        match event:
            case Started():
                counts = usage_of(event.receipt, self._meta.cached_prefixes)
                return _frame(
                    "message_start", message={**_empty_message(self._meta), "usage": counts}
                )
            case Delta():
                return self._delta(event)
            case ToolCallDelta() | ToolCalled():
                return self._call(event)
            case Finished():
                self._finished = event
                return self._close()
            case Done():
                return self._done(event)
        return b""

    def keep_alive(self, progress: Progress | None) -> bytes:
        return _frame("ping", keepwarm=progress_fields(progress))

    def problem(self, problem: Problem) -> bytes:
        return frame(anthropic_body(problem), "error")

    def _delta(self, event: Delta) -> bytes:
        frames = b""
        if event.reasoning:
            frames += self._ensure("thinking", {"thinking": "", "signature": ""})
            self._thinking.append(event.reasoning)
            frames += self._piece("thinking_delta", thinking=event.reasoning)
        if event.text:
            self._calls = []  # one that is still open was malformed: this is its text
            frames += self._ensure("text", {"text": ""})
            frames += self._piece("text_delta", text=event.text)
        return frames

    def _call(self, event: ToolCallDelta | ToolCalled) -> bytes:
        if isinstance(event, ToolCallDelta):
            return self._write_call(event.id, event.name, event.arguments)
        known = event.call.id in self._calls
        return (b"" if known else self._write_call(*event.call)) + self._close()

    def _write_call(self, call_id: str, name: str, arguments: str) -> bytes:
        """A part of a call."""
        start = b""
        if call_id not in self._calls:
            start = self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
            self._calls.append(call_id)
        return start + self._piece("input_json_delta", partial_json=arguments)

    def _done(self, event: Done) -> bytes:
        ended = self._finished or Finished(0, "stop")
        usage = usage_of(event.receipt, self._meta.cached_prefixes, event.usage)
        receipt = receipt_dict(event.receipt, ignored_tools=self._meta.ignored_tools)
        last = _frame(
            "message_delta", delta=_end(ended.reason, ended.stop), usage=usage, keepwarm=receipt
        )
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
    return frame({"type": kind, **fields}, kind)


router = api_router(prefix="/v1/messages", tags=["Anthropic"], errors=AnthropicErrorOut)


@router.post("", responses=answer_docs(Fields))
async def create_message(body: MessagesRequest, call: Call) -> Response:
    """Answer a conversation, as one object or as a stream of events."""
    host, request = await call.prepare(body.model, partial(message_request, body, call))
    answer = await host.submit(request, call.slot)
    prefixes = await call.slot.on_thread(_cached_prefixes, answer) if request.breakpoints else ()
    meta = MessageMeta(new_id("msg_"), host.name, prefixes, messages.ignored_tools(body))
    if body.stream:
        return EventStream(answer, MessageStream(meta))
    return WholeAnswer(answer, lambda result: message(meta, result))


@router.post("/count_tokens")
async def count_tokens(body: CountRequest, call: Call) -> Fields:
    """Count the prompt tokens of this request."""
    host, request = await call.prepare(body.model, partial(message_request, body, call))
    return {"input_tokens": await call.slot.run(host.engine.count_tokens, request)}


def message_request(body: CountRequest, call: ApiCall) -> engine_request.Request:
    session = messages.session_of(body.metadata.user_id if body.metadata else None)
    return messages.request_of(body, call.fields(body, session), call.settings)


def _cached_prefixes(answer: ObservedAnswer) -> Sequence[CachedPrefix]:
    """The prompt up to each breakpoint; none if the policy does not write."""
    prepared = answer.prepared
    if prepared is None or not prepared.request.policy.writes:
        return ()
    return [CachedPrefix(n_tokens, ttl_s or 0.0) for n_tokens, ttl_s in prepared.breakpoints]
