"""Ollama's answers: one object, or lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

from keepwarm.server.http.problems import Problem, ollama_body
from keepwarm.server.http.sse import line, receipt_dict
from keepwarm.server.models.embedding import Embeddings, shortened
from keepwarm.server.openai.logprobs import Pieces, chat_logprobs
from keepwarm.text.request import (
    Delta,
    Done,
    Event,
    Finished,
    Progress,
    Receipt,
    Result,
    TokenInfo,
    ToolCall,
    ToolCalled,
    Usage,
)

Fields: TypeAlias = dict[str, Any]  # of a JSON object
NANOSECONDS = 1_000_000_000


def chat_part(text: str, thinking: str, calls: Sequence[Fields] = ()) -> Fields:
    """What an answer of `/api/chat`, or a line of it, says."""
    message: Fields = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def generate_part(text: str, thinking: str, _: Sequence[Fields] = ()) -> Fields:
    """The same for `/api/generate`, which offers no tools."""
    return {"response": text, **({"thinking": thinking} if thinking else {})}


Part: TypeAlias = Callable[..., Fields]


@dataclass(frozen=True)
class AnswerMeta:
    """What is known of an answer before it begins."""

    model: str
    part: Part
    began: float = field(default_factory=time.perf_counter)
    load_s: float = 0.0
    n_dropped: int = 0
    pieces: Pieces | None = None  # if logprobs were asked for

    def fields(
        self, part: Fields, tokens: Sequence[TokenInfo] = (), *, done: bool = False
    ) -> Fields:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        fields = {"model": self.model, "created_at": now, **part, "done": done}
        if self.pieces is not None and (tokens or done):
            fields["logprobs"] = chat_logprobs(self.pieces, tokens)
        return fields

    def end(self, reason: str, usage: Usage, receipt: Receipt) -> Fields:
        """What the end of an answer says besides its text."""
        rate = usage.tokens_per_second
        decode_s = usage.completion_tokens / rate if rate > 0 else 0.0
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _ns(time.perf_counter() - self.began),
            "load_duration": _ns(self.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(usage.ttft_ms / 1000 - self.load_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(decode_s),
            "keepwarm": receipt_dict(receipt, dropped_messages=self.n_dropped),
        }


def _ns(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, int(seconds * NANOSECONDS))


def _call(index: int, call: ToolCall) -> Fields:
    arguments = json.loads(call.arguments)
    return {
        "id": call.id,
        "function": {"index": index, "name": call.name, "arguments": arguments},
    }


def whole(meta: AnswerMeta, result: Result) -> Fields:
    """A complete answer."""
    (choice,) = result.choices
    calls = [_call(index, call) for index, call in enumerate(choice.tool_calls)]
    fields = meta.fields(meta.part(choice.text, choice.reasoning, calls), choice.tokens, done=True)
    return fields | meta.end(choice.reason, result.usage, result.receipt)


def embedded(meta: AnswerMeta, dimensions: int | None, found: Embeddings) -> Fields:
    """The vectors of `/api/embed`."""
    return {
        "model": meta.model,
        "embeddings": [shortened(each, dimensions).tolist() for each in found.vectors],
        "total_duration": _ns(time.perf_counter() - meta.began),
        "load_duration": _ns(meta.load_s),
        "prompt_eval_count": found.n_tokens,
        "keepwarm": receipt_dict(found.receipt),
    }


def unanswered(model: str, part: Part, reason: str) -> Fields:
    """For a request that only loads or unloads a model."""
    return AnswerMeta(model, part).fields(part("", ""), done=True) | {"done_reason": reason}


class AnswerLines:
    """A line for each piece of text and each call; the last one has counts and the receipt."""

    def __init__(self, meta: AnswerMeta) -> None:
        self._meta = meta
        self._n_calls = 0
        self._end = Finished(0, "stop")

    def event(self, event: Event) -> bytes:
        meta = self._meta
        match event:
            case Delta() if event.text or event.reasoning or (meta.pieces and event.tokens):
                return line(meta.fields(meta.part(event.text, event.reasoning), event.tokens))
            case ToolCalled():
                call = _call(self._n_calls, event.call)
                self._n_calls += 1
                return line(meta.fields(meta.part("", "", [call]), event.tokens))
            case Finished():
                self._end = event
            case Done():
                last = meta.fields(meta.part("", ""), self._end.tokens, done=True)
                return line(last | meta.end(self._end.reason, event.usage, event.receipt))
        return b""

    def keep_alive(self, _: Progress | None) -> bytes:
        """An empty piece of text, which all clients take."""
        return line(self._meta.fields(self._meta.part("", "")))

    def problem(self, problem: Problem) -> bytes:
        return line(ollama_body(problem))
