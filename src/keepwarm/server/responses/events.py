"""OpenAI's responses: answers in OpenAI's format, as one object or as events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.engine.answer import collect
from keepwarm.server.http.problems import Problem
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.sse import AnswerLike, frame, new_id, progress_json
from keepwarm.server.openai.shapes import LogprobOut
from keepwarm.server.openai.tokens import Pieces, chat_logprobs
from keepwarm.server.responses.calls import CallItems, Frames
from keepwarm.server.responses.request import OfferedTools, QualifiedName, encode_reasoning
from keepwarm.server.responses.shapes import (
    ENCRYPTED_REASONING,
    Failure,
    ResponseOut,
    ResponseReceipt,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from keepwarm.text.request import (
    Delta,
    Done,
    Event,
    Finished,
    Progress,
    Request,
    Result,
    Started,
    TokenInfo,
    ToolCallDelta,
    ToolCalled,
)
from keepwarm.text.sampling_rules import DrawRules

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(frozen=True)
class AnswerOptions:
    """The parts of a request that its answer depends on."""

    names: Mapping[str, QualifiedName]
    ignored_tools: Sequence[str]
    encrypted: bool  # include reasoning for the client to send back
    writes: bool  # whether the policy stores what is computed
    n_dropped: int = 0  # items dropped by truncation
    pieces: Pieces | None = None  # if the client asked for logprobs


def answer_options_of(
    body: ResponsesRequest,
    offered: OfferedTools,
    asked: Request,
    n_dropped: int = 0,
    pieces: Pieces | None = None,
) -> AnswerOptions:
    encrypted, writes = ENCRYPTED_REASONING in (body.include or ()), asked.policy.writes
    return AnswerOptions(offered.names, offered.ignored, encrypted, writes, n_dropped, pieces)


def initial_response(
    body: ResponsesRequest, model: str, asked: Request, defaults: DrawRules
) -> ResponseOut:
    """The response before generation: status and the options that hold."""
    rules = defaults.of(asked.sampling)
    given = body.model_dump(
        include={"tools", "tool_choice", "reasoning", "text"}, exclude_none=True, by_alias=True
    )
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "background": bool(body.background),
        "conversation": None,
        "instructions": body.instructions,
        "frequency_penalty": asked.sampling.frequency_penalty,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.tool_choice.parallel,
        "presence_penalty": asked.sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": rules.temperature,
        "text": {"format": {"type": "text"}} | given.get("text", {}),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_shown_tool(tool) for tool in given.get("tools", [])],
        "top_logprobs": asked.sampling.top_logprobs or 0,
        "top_p": rules.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "access_programs": None,
        "image": None,
        "moderation": None,
        "prompt_cache_diagnostics": None,
        "prompt_cache_options": None,
        "tool_usage": None,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as it was sent; a function with all of its fields."""
    optional = ("description", "parameters", "strict") if tool["type"] == "function" else ()
    return dict.fromkeys(optional) | tool


class BuiltAnswer:
    """An answer whose events also go to a `ResponseBuilder`."""

    def __init__(self, answer: AnswerLike, builder: ResponseBuilder) -> None:
        self._answer = answer
        self._builder = builder

    def cancel(self) -> None:
        self._answer.cancel()

    async def wait(self) -> Result:
        return collect([event async for event in self])

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._answer:
            if not isinstance(event, ToolCallDelta):  # a call that fails is text, as a whole
                self._builder.add(event)
            yield event


class ResponseBuilder:
    """Builds a response, and returns the stream events for each engine event."""

    def __init__(
        self, response: ResponseOut, options: AnswerOptions, on_done: Callable[[ResponseOut], None]
    ) -> None:
        """`on_done` is called with the complete response."""
        self.response = response
        self._options = options
        self._on_done = on_done
        self._item: dict[str, Any] | None = None  # the open item
        self._text: list[str] = []  # of the open item
        self._logprobs: list[LogprobOut] = []  # of the open item; empty for reasoning
        self._calls = CallItems(options.names, response["output"])
        self._cut = False  # the answer reached its length limit

    def add(self, event: Event) -> Frames:
        match event:
            case Started():
                self.response["status"] = "in_progress"
                return [self.state("created"), self.state("in_progress")]
            case Delta():
                thought = self._write("reasoning", event.reasoning)
                return thought + self._write("message", event.text, event.tokens)
            case ToolCallDelta() | ToolCalled():
                return self._close_text() + self._calls.add(event)
            case Finished():
                self._cut = event.reason == "length"
                self._add_logprobs(event.tokens)
                return self._close("incomplete" if self._cut else "completed")
            case Done():
                return [self._done(event)]
        return []

    def fail(self, problem: Problem) -> Frames:
        """End the response with an error."""
        self.response["error"] = _failure(problem)
        self.response["status"] = "failed"
        return [*self._close("incomplete"), self.state("failed")]

    def cancel(self) -> Frames:
        """End the response at the client's wish."""
        events = self._close("incomplete")
        self.response["status"] = "cancelled"
        return [*events, self.state("incomplete")]

    def state(self, name: str) -> dict[str, Any]:
        """An event with the response as it is now."""
        return {"type": f"response.{name}", "response": dict(self.response)}

    def _done(self, event: Done) -> dict[str, Any]:
        status: Status = "incomplete" if self._cut else "completed"
        if self._cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["status"] = status
        self.response["completed_at"] = int(time.time())
        self.response["usage"] = usage_of(event, self._options.writes)
        self.response["keepwarm"] = _receipt(event, self._options)
        self._on_done(self.response)
        return self.state(status)

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _write(self, kind: str, text: str, tokens: Sequence[TokenInfo] = ()) -> Frames:
        if not text:
            return []
        opened = [] if self._item and self._item["type"] == kind else self._open(kind)
        self._text.append(text)
        return [*opened, self._piece("delta", self._add_logprobs(tokens), delta=text)]

    def _add_logprobs(self, tokens: Sequence[TokenInfo]) -> list[LogprobOut]:
        """Logprobs of new tokens of a message, also added to those of the whole message."""
        if self._options.pieces is None or self._item is None or self._kind != "message":
            return []
        new = chat_logprobs(self._options.pieces, tokens)
        self._logprobs += new
        return new

    def _open(self, kind: str) -> Frames:
        closed = self._close()
        if kind == "message":
            fields = {"id": new_id("msg_"), "role": "assistant", "content": []}
        else:
            fields = {"id": new_id("rs_"), "summary": [], "content": []}
        self._item = {"type": kind, "status": "in_progress", **fields}
        return [*closed, self._item_event("added"), self._part_event("added", "")]

    def _close(self, status: str = "completed") -> Frames:
        return self._calls.close() + self._close_text(status)

    def _close_text(self, status: str = "completed") -> Frames:
        """End the open message or reasoning."""
        item = self._item
        if item is None:
            return []
        text = "".join(self._text)
        item |= {"status": status, "content": [self._part(text)]}
        if item["type"] == "reasoning" and self._options.encrypted:
            item["encrypted_content"] = encode_reasoning(text)
        whole = self._piece("done", self._logprobs, text=text)
        written = [whole, self._part_event("done", text)]
        frames = [*written, self._item_event("done")]
        self.response["output"].append(item)
        self._item, self._text, self._logprobs = None, [], []
        return frames

    def _item_event(self, what: str) -> dict[str, Any]:
        shown = dict(self._item or {})
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": shown}

    def _part_event(self, what: str, text: str) -> dict[str, Any]:
        return {
            "type": f"response.content_part.{what}",
            **self._position(),
            "part": self._part(text),
        }

    def _piece(self, what: str, logprobs: list[LogprobOut], **fields: str) -> dict[str, Any]:
        """A delta of the text, or the whole text."""
        kind = PARTS[self._kind]
        extra: dict[str, Any] = {"logprobs": logprobs} if kind == "output_text" else {}
        return {"type": f"response.{kind}.{what}", **self._position(), **fields, **extra}

    def _part(self, text: str) -> dict[str, Any]:
        kind = PARTS[self._kind]
        part: dict[str, Any] = {"type": kind, "text": text}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _position(self) -> dict[str, Any]:
        item_id = self._item["id"] if self._item else ""
        return {"item_id": item_id, "output_index": self._index, "content_index": 0}

    @property
    def _kind(self) -> str:
        return self._item["type"] if self._item else "message"


class ResponseStream:
    """Named events with sequence numbers."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._sent = 0

    def event(self, event: Event) -> bytes:
        return self._frames(self._builder.add(event))

    def created(self) -> bytes:
        return self._frames([self._builder.state("created")])

    def keep_alive(self, progress: Progress | None) -> bytes:
        """An event, not a comment: some clients time out between events."""
        event = self._builder.state("in_progress")
        return self._frames([event | {"keepwarm": json.loads(progress_json(progress))}])

    def problem(self, problem: Problem) -> bytes:
        return self._frames(self._builder.fail(problem))

    def frames(self, events: Frames) -> list[bytes]:
        """One for each event, numbered."""
        first, self._sent = self._sent, self._sent + len(events)
        return numbered_frames(events, first)

    def _frames(self, events: Frames) -> bytes:
        return b"".join(self.frames(events))


def numbered_frames(events: Frames, first: int = 0) -> list[bytes]:
    numbered = [event | {"sequence_number": n} for n, event in enumerate(events, first)]
    return [frame(json.dumps(event), event["type"]) for event in numbered]


def failed_stream(response: ResponseOut, problem: Problem) -> bytes:
    """The whole stream of a response that fails before it starts."""
    options = AnswerOptions({}, (), encrypted=False, writes=False)
    stream = ResponseStream(ResponseBuilder(response, options, lambda _: None))
    return stream.created() + stream.problem(problem)


def _failure(problem: Problem) -> Failure:
    if problem.overflow is not None:  # by this code Codex knows to shorten the conversation
        return {"code": "context_length_exceeded", "message": problem.overflow.openai}
    code = "invalid_prompt" if problem.status < 500 else "server_error"
    code = "rate_limit_exceeded" if problem.status == 429 else code
    return {"code": code, "message": problem.message}


def usage_of(event: Done, writes: bool) -> ResponseUsage:
    usage = event.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": event.receipt.recomputed if writes else 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _receipt(event: Done, options: AnswerOptions) -> ResponseReceipt:
    fields: ResponseReceipt = receipt_dict(event.receipt)  # type: ignore[assignment]
    if options.ignored_tools:
        fields["ignored_tools"] = list(options.ignored_tools)
    if options.n_dropped:
        fields["dropped_items"] = options.n_dropped
    return fields
