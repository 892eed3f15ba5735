"""OpenAI's responses: answers in OpenAI's format, as one object, as events, or compacted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.server.http.problems import Problem
from keepwarm.server.http.sse import frame, new_id, progress_json, receipt_dict
from keepwarm.server.openai.chat import custom_input
from keepwarm.server.openai.logprobs import Pieces, chat_logprobs
from keepwarm.server.responses.request import OfferedTools, QualifiedName, encode_reasoning
from keepwarm.server.responses.shapes import (
    ENCRYPTED_REASONING,
    Item,
    ResponsesRequest,
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
    ToolCall,
    ToolCallDelta,
    ToolCalled,
)
from keepwarm.text.sampling_rules import DrawRules

Fields: TypeAlias = dict[str, Any]  # of a JSON object
Frames: TypeAlias = list[Fields]  # events
RESPONSE = "resp_"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{4}")


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an output item: it names the response, which is stored by its id."""
    return f"{prefix}{response_id.removeprefix(RESPONSE)}{index:04x}"


def response_of_item(item_id: str) -> str | None:
    """The id of the response that an item is in; None if no response of this server has it."""
    found = _ITEM_ID.fullmatch(item_id)
    return RESPONSE + found[1] if found else None


ONLY_AT_OPENAI = (
    *("conversation", "prompt", "prompt_cache_retention", "access_programs", "image"),
    *("moderation", "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage"),
)
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
    request: Request,
    n_dropped: int = 0,
    pieces: Pieces | None = None,
) -> AnswerOptions:
    encrypted, writes = ENCRYPTED_REASONING in (body.include or ()), request.policy.writes
    return AnswerOptions(offered.names, offered.ignored, encrypted, writes, n_dropped, pieces)


def initial_response(
    body: ResponsesRequest, model: str, request: Request, defaults: DrawRules
) -> Fields:
    """The response before generation: status and the options that hold."""
    rules = defaults.of(request.sampling)
    sent = body.model_dump(
        include={"tools", "tool_choice", "reasoning", "text"}, exclude_none=True, by_alias=True
    )
    return {
        "id": new_id(RESPONSE),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "background": bool(body.background),
        "instructions": body.instructions,
        "frequency_penalty": request.sampling.frequency_penalty,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.tool_choice.parallel,
        "presence_penalty": request.sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | sent.get("reasoning", {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": rules.temperature,
        "text": {"format": {"type": "text"}} | sent.get("text", {}),
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": [_shown_tool(tool) for tool in sent.get("tools", [])],
        "top_logprobs": request.sampling.top_logprobs or 0,
        "top_p": rules.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        **dict.fromkeys(ONLY_AT_OPENAI),
    }


def _shown_tool(tool: Fields) -> Fields:
    """A tool as it was sent; a function with all of its fields."""
    optional = ("description", "parameters", "strict") if tool["type"] == "function" else ()
    return dict.fromkeys(optional) | tool


# Calls of tools


class CallShape(NamedTuple):
    """How a kind of call is written: as an item, and as events."""

    item: str
    prefix: str  # of ids
    field: str  # what it is called with
    event: str


FUNCTION_CALL = CallShape("function_call", "fc_", "arguments", "response.function_call_arguments")
CUSTOM_CALL = CallShape("custom_tool_call", "ctc_", "input", "response.custom_tool_call_input")


class CallItems:
    """Adds calls to the output of a response; at most one is open."""

    def __init__(self, names: Mapping[str, QualifiedName], response: Fields) -> None:
        self._names = names
        self._response_id: str = response["id"]
        self._output: list[Fields] = response["output"]
        self._open: _OpenCall | None = None
        self._begun: set[str] = set()  # ids

    def add(self, event: ToolCallDelta | ToolCalled) -> Frames:
        """A part of a call, or a whole one. The input of a custom tool is known at its end."""
        if isinstance(event, ToolCalled):
            return self._call(event.call)
        if self._name(event.name).custom:
            return []
        begun = [] if self._is_open(event.id) else self._begin(event.id, event.name)
        return begun + self._write(event.arguments)

    def _call(self, call: ToolCall) -> Frames:
        if self._is_open(call.id):
            return self.close("completed")
        if call.id in self._begun:
            return []
        custom = self._name(call.name).custom
        text = custom_input(call.arguments) if custom else call.arguments
        return self._begin(call.id, call.name) + self._write(text) + self.close("completed")

    def close(self, status: Status = "incomplete") -> Frames:
        """End the open call, if any; unless it is completed it was cut off or malformed."""
        if self._open is None:
            return []
        frames = self._open.end(status)
        self._output.append(self._open.item)
        if status == "incomplete":
            self._begun.discard(self._open.item["call_id"])
        self._open = None
        return frames

    def _begin(self, call_id: str, name: str) -> Frames:
        before = self.close("completed")  # another begins only behind a whole one
        self._begun.add(call_id)
        self._open = _OpenCall(self._response_id, call_id, self._name(name), len(self._output))
        return [*before, self._open.item_event("added")]

    def _write(self, text: str) -> Frames:
        return [self._open.add(text)] if self._open else []

    def _is_open(self, call_id: str) -> bool:
        return self._open is not None and self._open.item["call_id"] == call_id

    def _name(self, name: str) -> QualifiedName:
        return self._names.get(name, QualifiedName(name))


class _OpenCall:
    def __init__(self, response_id: str, call_id: str, name: QualifiedName, index: int) -> None:
        self._shape = CUSTOM_CALL if name.custom else FUNCTION_CALL
        self._index = index
        self._text: list[str] = []
        self.item: Fields = {
            "type": self._shape.item,
            "id": item_id(self._shape.prefix, response_id, index),
            "call_id": call_id,
            "name": name.name,
            self._shape.field: "",
            "status": "in_progress",
        }
        if name.namespace:
            self.item["namespace"] = name.namespace

    def add(self, text: str) -> Fields:
        self._text.append(text)
        return {"type": f"{self._shape.event}.delta", **self._position(), "delta": text}

    def end(self, status: Status) -> Frames:
        text = "".join(self._text)
        self.item |= {self._shape.field: text, "status": status}
        named = {"name": self.item["name"]} if self._shape is FUNCTION_CALL else {}
        whole = {**self._position(), **named, self._shape.field: text}
        return [{"type": f"{self._shape.event}.done", **whole}, self.item_event("done")]

    def item_event(self, what: str) -> Fields:
        shown = dict(self.item)
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": shown}

    def _position(self) -> Fields:
        return {"item_id": self.item["id"], "output_index": self._index}


# Answers


class ResponseBuilder:
    """Builds a response, and returns the stream events for each engine event."""

    def __init__(
        self, response: Fields, options: AnswerOptions, on_done: Callable[[Fields], None]
    ) -> None:
        """`on_done` is called with the complete response."""
        self.response = response
        self._options = options
        self._on_done = on_done
        self._item: Fields | None = None  # the open item
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Fields] = []  # of the open item; empty for reasoning
        self._calls = CallItems(options.names, response)
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

    def add_whole(self, event: Event) -> None:
        """The same without a stream: a call that fails is text, as a whole."""
        if not isinstance(event, ToolCallDelta):
            self.add(event)

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

    def state(self, name: str) -> Fields:
        """An event with the response as it is now."""
        return {"type": f"response.{name}", "response": dict(self.response)}

    def _done(self, event: Done) -> Fields:
        status: Status = "incomplete" if self._cut else "completed"
        if self._cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["status"] = status
        self.response["completed_at"] = int(time.time())
        self.response["usage"] = usage_of(event, self._options.writes)
        self.response["keepwarm"] = _receipt(event, self._options)
        self._on_done(self.response)
        return self.state(status)

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self.response["id"], self._index)

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _write(self, kind: str, text: str, tokens: Sequence[TokenInfo] = ()) -> Frames:
        if not text:
            return []
        opened = [] if self._item and self._item["type"] == kind else self._open(kind)
        self._text.append(text)
        return [*opened, self._piece("delta", self._add_logprobs(tokens), delta=text)]

    def _add_logprobs(self, tokens: Sequence[TokenInfo]) -> list[Fields]:
        """Logprobs of new tokens of a message, also added to those of the whole message."""
        if self._options.pieces is None or self._item is None or self._kind != "message":
            return []
        new = chat_logprobs(self._options.pieces, tokens)
        self._logprobs += new
        return new

    def _open(self, kind: str) -> Frames:
        closed = self._close()
        if kind == "message":
            fields = {"id": self._new_id("msg_"), "role": "assistant", "content": []}
        else:
            fields = {"id": self._new_id("rs_"), "summary": [], "content": []}
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

    def _item_event(self, what: str) -> Fields:
        shown = dict(self._item or {})
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": shown}

    def _part_event(self, what: str, text: str) -> Fields:
        return {
            "type": f"response.content_part.{what}",
            **self._position(),
            "part": self._part(text),
        }

    def _piece(self, what: str, logprobs: list[Fields], **fields: str) -> Fields:
        """A delta of the text, or the whole text."""
        kind = PARTS[self._kind]
        extra: Fields = {"logprobs": logprobs} if kind == "output_text" else {}
        return {"type": f"response.{kind}.{what}", **self._position(), **fields, **extra}

    def _part(self, text: str) -> Fields:
        kind = PARTS[self._kind]
        part: Fields = {"type": kind, "text": text}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _position(self) -> Fields:
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


def failed_stream(response: Fields, problem: Problem) -> bytes:
    """The whole stream of a response that fails before it starts."""
    options = AnswerOptions({}, (), encrypted=False, writes=False)
    stream = ResponseStream(ResponseBuilder(response, options, lambda _: None))
    return stream.created() + stream.problem(problem)


def _failure(problem: Problem) -> Fields:
    if problem.overflow is not None:  # by this code Codex knows to shorten the conversation
        return {"code": "context_length_exceeded", "message": problem.overflow.openai}
    code = "invalid_prompt" if problem.status < 500 else "server_error"
    code = "rate_limit_exceeded" if problem.status == 429 else code
    return {"code": code, "message": problem.message}


def usage_of(event: Done, writes: bool) -> Fields:
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


def _receipt(event: Done, options: AnswerOptions) -> Fields:
    fields: Fields = {**receipt_dict(event.receipt)}
    if options.ignored_tools:
        fields["ignored_tools"] = list(options.ignored_tools)
    if options.n_dropped:
        fields["dropped_items"] = options.n_dropped
    return fields


# Stored responses as events

CALLS = {shape.item: shape for shape in (FUNCTION_CALL, CUSTOM_CALL)}
LAST = {"completed": "completed", "incomplete": "incomplete", "failed": "failed"}


def replayed(response: Fields) -> Frames:
    """Its events, every text in one piece."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    events: Frames = [
        {"type": f"response.{n}", "response": begun} for n in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    last = LAST.get(response["status"], "incomplete")
    return [*events, {"type": f"response.{last}", "response": dict(response)}]


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[Fields]:
    shape = CALLS.get(item["type"])
    empty: Fields = {shape.field: ""} if shape else {"content": []}
    position = {"output_index": index}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", **position, "item": begun}
    if shape:
        at = {"item_id": item["id"], **position}
        yield {"type": f"{shape.event}.delta", **at, "delta": item[shape.field]}
        named = {"name": item["name"]} if shape is FUNCTION_CALL else {}
        yield {"type": f"{shape.event}.done", **at, **named, shape.field: item[shape.field]}
    else:
        yield from _part_events(item, position)
    yield {"type": "response.output_item.done", **position, "item": dict(item)}


def _part_events(item: Mapping[str, Any], position: Mapping[str, int]) -> Iterator[Fields]:
    for number, part in enumerate(item.get("content") or ()):
        at = {"item_id": item["id"], **position, "content_index": number}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        kind, text = f"response.{part['type']}", part["text"]
        yield {"type": f"{kind}.delta", **at, "delta": text, **logprobs}
        yield {"type": f"{kind}.done", **at, "text": text, **logprobs}
        yield {"type": "response.content_part.done", **at, "part": dict(part)}


# Compaction


def compacted(items: Sequence[Item], result: Result, writes: bool) -> Fields:
    """The items that replace these; raises if the model wrote no summary."""
    summary = result.choices[0].text.strip()
    if not summary:
        raise BadInput("The model wrote no summary, so nothing was compacted; try again.")
    kept = [_message_item(item) for item in items if item.role == "user"]
    item = {
        "type": "compaction",
        "id": new_id("cmp_"),
        "encrypted_content": encode_reasoning(summary),
    }
    return {
        "id": new_id("resp_"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*kept, item],
        "usage": usage_of(Done(result.usage, result.receipt), writes),
        "keepwarm": receipt_dict(result.receipt),
    }


def _message_item(item: Item) -> Fields:
    """A message as an output item, which has an id, a status and parts."""
    fields = item.model_dump(exclude_none=True)
    content = fields.get("content") or ""
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    made = {"type": "message", "id": item.id or new_id("msg_"), "status": "completed"}
    return {**made, **fields, "content": content}
