"""OpenAI's responses: answers in OpenAI's format, as one object, as events, or compacted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.server.http.body import Fields
from keepwarm.server.http.problems import Problem
from keepwarm.server.http.sse import frame, new_id, progress_fields, receipt_dict
from keepwarm.server.http.tools import custom_input
from keepwarm.server.openai.logprobs import chat_logprobs
from keepwarm.server.responses.request import (
    Item,
    QualifiedName,
    ResponsesRequest,
    Status,
    UnreadItem,
    encode_reasoning,
)
from keepwarm.text.detokenize import Pieces
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

Frames: TypeAlias = list[Fields]  # events
RESPONSE = "resp_"
FIRST_INPUT = 0x8000  # numbers of input items, behind those of all output items
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{4}")


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an output item: it names the response, which is stored by its id."""
    return f"{prefix}{response_id.removeprefix(RESPONSE)}{index:04x}"


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """Input items of a response, each with an id by which it can be referred to."""
    ids = [item_id("in_", response_id, FIRST_INPUT + i) for i in range(len(items))]
    return [
        item if item.id else item.model_copy(update={"id": named})
        for item, named in zip(items, ids, strict=True)
    ]


def listed_item(item: Item) -> Fields:
    """An input item as OpenAI lists it, in whichever short form it was sent."""
    fields = item.model_dump(exclude_none=True)
    if isinstance(item, UnreadItem):
        return fields
    fields = {"type": "message", "status": "completed", **fields}
    if fields["type"] == "message":
        fields["content"] = _listed_parts(fields.get("content", ""), fields["role"])
    return fields


def _listed_parts(content: str | list[Fields], role: str) -> list[Fields]:
    kind: Fields = {"type": "input_text"}
    if role == "assistant":
        kind = {"type": "output_text", "annotations": []}
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part | kind if part["type"] in ("text", kind["type"]) else part for part in parts]


def response_of_item(item_id: str) -> str | None:
    """The id of the response that an item is in; None if no response of this server has it."""
    found = _ITEM_ID.fullmatch(item_id)
    return RESPONSE + found[1] if found else None


ONLY_AT_OPENAI = (
    *("conversation", "prompt", "prompt_cache_retention", "access_programs", "image"),
    *("moderation", "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage"),
)


class AnswerOptions(NamedTuple):
    """The parts of a request that its answer depends on."""

    names: Mapping[str, QualifiedName] = {}
    ignored_tools: Sequence[str] = ()
    encrypted: bool = False  # include reasoning for the client to send back
    writes: bool = False  # whether the policy stores what is computed
    n_dropped: int = 0  # items dropped by truncation
    pieces: Pieces | None = None  # if the client asked for logprobs


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


# Output items


class ItemShape(NamedTuple):
    """How a kind of output item is written: as an item, and as events."""

    prefix: str  # of ids
    event: str  # of its text
    field: str  # of the text: in the item, or in its one part
    part: str = ""  # type of the part; a call has none


SHAPES = {
    "message": ItemShape("msg_", "response.output_text", "text", "output_text"),
    "reasoning": ItemShape("rs_", "response.reasoning_text", "text", "reasoning_text"),
    "function_call": ItemShape("fc_", "response.function_call_arguments", "arguments"),
    "custom_tool_call": ItemShape("ctc_", "response.custom_tool_call_input", "input"),
}


class OpenItem:
    """An output item while it is written, and its events."""

    def __init__(self, item: Fields, index: int) -> None:
        self.item = item
        self.kind: str = item["type"]
        self.shape = SHAPES[self.kind]
        self._index = index
        self._text: list[str] = []
        self.logprobs: list[Fields] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def begin(self) -> Frames:
        return [self._item_event("added"), *self._part_events("added")]

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> Fields:
        self._text.append(text)
        self.logprobs += logprobs
        return self._text_event("delta", logprobs, delta=text)

    def end(self, status: Status) -> Frames:
        written = {self.shape.field: self.text}
        named = {"name": self.item["name"]} if self.kind == "function_call" else {}
        whole = self._text_event("done", self.logprobs, **named, **written)
        self.item |= {"status": status}
        self.item |= {"content": [self._part()]} if self.shape.part else written
        return [whole, *self._part_events("done"), self._item_event("done")]

    def _item_event(self, what: str) -> Fields:
        shown = dict(self.item)
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": shown}

    def _part_events(self, what: str) -> Frames:
        if not self.shape.part:
            return []
        kind = f"response.content_part.{what}"
        return [{"type": kind, **self._position(), "part": self._part()}]

    def _text_event(self, what: str, logprobs: Sequence[Fields], **fields: str) -> Fields:
        event = {"type": f"{self.shape.event}.{what}", **self._position(), **fields}
        return event | {"logprobs": list(logprobs)} if self.kind == "message" else event

    def _part(self) -> Fields:
        part: Fields = {"type": self.shape.part, "text": self.text}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": list(self.logprobs)}
        return part

    def _position(self) -> Fields:
        position = {"item_id": self.item["id"], "output_index": self._index}
        return position | {"content_index": 0} if self.shape.part else position


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
        self._open: OpenItem | None = None
        self._begun: set[str] = set()  # ids of calls
        self._is_created = False
        self._cut = False  # the answer reached its length limit

    def create(self) -> Frames:
        """The event that clients expect before all others, if it was not sent yet."""
        if self._is_created:
            return []
        self._is_created = True
        return [self.state("created")]

    def add(self, event: Event) -> Frames:
        match event:
            case Started():
                self.response["status"] = "in_progress"
                return [*self.create(), self.state("in_progress")]
            case Delta():
                thought = self._write("reasoning", event.reasoning)
                return thought + self._write("message", event.text, event.tokens)
            case ToolCallDelta() | ToolCalled():
                return self._call(event)
            case Finished():
                return self._finish(event)
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
        shown = {**self.response, "output": list(self.response["output"])}
        return {"type": f"response.{name}", "response": shown}

    def _finish(self, event: Finished) -> Frames:
        self._cut = event.reason == "length"
        if self._open and self._open.kind == "message":
            self._open.logprobs += self._logprobs(event.tokens)
        return self._close("incomplete" if self._cut or self._in_call else "completed")

    def _done(self, event: Done) -> Fields:
        status: Status = "incomplete" if self._cut else "completed"
        if self._cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["status"] = status
        self.response["completed_at"] = int(time.time())
        self.response["usage"] = usage_of(event, self._options.writes)
        self.response["keepwarm"] = receipt_dict(
            event.receipt,
            ignored_tools=list(self._options.ignored_tools),
            dropped_items=self._options.n_dropped,
        )
        self._on_done(self.response)
        return self.state(status)

    # Text

    def _write(self, kind: str, text: str, tokens: Sequence[TokenInfo] = ()) -> Frames:
        if not text:
            return []
        begun: Frames = []
        if self._open is None or self._open.kind != kind:
            # Text behind a call that is open is the call itself, which was malformed.
            begun = self._close("incomplete" if self._in_call else "completed")
            fields: Fields = {"role": "assistant"} if kind == "message" else {"summary": []}
            begun += self._begin(kind, fields | {"content": []})
        return [*begun, *self._add(text, self._logprobs(tokens))]

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> list[Fields]:
        pieces = self._options.pieces
        return [] if pieces is None else chat_logprobs(pieces, tokens)

    # Calls. The input of a custom tool is known at its end.

    @property
    def _in_call(self) -> bool:
        return self._open is not None and not self._open.shape.part

    def _call(self, event: ToolCallDelta | ToolCalled) -> Frames:
        """A part of a call, or a whole one."""
        if isinstance(event, ToolCalled):
            return self._whole_call(event.call)
        if self._name(event.name).custom:
            return []
        begun = [] if self._is_open(event.id) else self._begin_call(event.id, event.name)
        return begun + self._add(event.arguments)

    def _whole_call(self, call: ToolCall) -> Frames:
        if self._is_open(call.id):
            return self._close("completed")
        if call.id in self._begun:
            return []
        text = custom_input(call.arguments) if self._name(call.name).custom else call.arguments
        return [
            *self._begin_call(call.id, call.name),
            *self._add(text),
            *self._close("completed"),
        ]

    def _begin_call(self, call_id: str, name: str) -> Frames:
        closed = self._close("completed")  # another begins only behind a whole one
        self._begun.add(call_id)
        called = self._name(name)
        kind = "custom_tool_call" if called.custom else "function_call"
        fields = {"call_id": call_id, "name": called.name, SHAPES[kind].field: ""}
        if called.namespace:
            fields["namespace"] = called.namespace
        return closed + self._begin(kind, fields)

    def _is_open(self, call_id: str) -> bool:
        return self._open is not None and self._open.item.get("call_id") == call_id

    def _name(self, name: str) -> QualifiedName:
        return self._options.names.get(name, QualifiedName(name))

    # The open item

    def _begin(self, kind: str, fields: Fields) -> Frames:
        index = len(self.response["output"])
        own_id = item_id(SHAPES[kind].prefix, self.response["id"], index)
        item = {"type": kind, "id": own_id, "status": "in_progress", **fields}
        self._open = OpenItem(item, index)
        return self._open.begin()

    def _add(self, text: str, logprobs: Sequence[Fields] = ()) -> Frames:
        return [self._open.add(text, logprobs)] if self._open else []

    def _close(self, status: Status) -> Frames:
        """End the open item, if any; a call that is not completed was cut off or malformed."""
        ended, self._open = self._open, None
        if ended is None:
            return []
        if ended.kind == "reasoning" and self._options.encrypted:
            ended.item["encrypted_content"] = encode_reasoning(ended.text)
        if status == "incomplete":
            self._begun.discard(ended.item.get("call_id", ""))
        self.response["output"].append(ended.item)
        return ended.end(status)


class ResponseStream:
    """Named events with sequence numbers."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._sent = 0

    def event(self, event: Event) -> bytes:
        return self._frames(self._builder.add(event))

    def keep_alive(self, progress: Progress | None) -> bytes:
        """An event, not a comment: some clients time out between events."""
        event = self._builder.state("in_progress")
        return self._frames([event | {"keepwarm": progress_fields(progress)}])

    def problem(self, problem: Problem) -> bytes:
        return self._frames([*self._builder.create(), *self._builder.fail(problem)])

    def _frames(self, events: Frames) -> bytes:
        first, self._sent = self._sent, self._sent + len(events)
        return _numbered(events, first)


def _numbered(events: Frames, first: int) -> bytes:
    return b"".join(numbered_frame(event, n) for n, event in enumerate(events, first))


def numbered_frame(event: Fields, number: int) -> bytes:
    return frame(event | {"sequence_number": number}, event["type"])


def failed_stream(response: Fields, problem: Problem) -> bytes:
    """The whole stream of a response that fails before it starts."""
    stream = ResponseStream(ResponseBuilder(response, AnswerOptions(), lambda _: None))
    return stream.problem(problem)


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


# Stored responses as events

ENDS = ("completed", "incomplete", "failed")


def replay(response: Fields, after: int) -> bytes:
    """The events behind this number, every text in one piece; at least the last.

    While it ran there were more of them, at most one for each letter, so a client may have a number
    beyond these: the last has one beyond all.
    """
    *events, last = _replayed(response)
    n_letters = sum(len(event.get("delta", "")) for event in events)
    number = max(after + 1, len(events) + n_letters)
    return _numbered(events[after + 1 :], after + 1) + numbered_frame(last, number)


def _replayed(response: Fields) -> Frames:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    events: Frames = [
        {"type": f"response.{n}", "response": begun} for n in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    last = response["status"] if response["status"] in ENDS else "incomplete"
    return [*events, {"type": f"response.{last}", "response": dict(response)}]


def _item_events(index: int, item: Fields) -> Frames:
    shape = SHAPES[item["type"]]
    empty: Fields = {"content": []} if shape.part else {shape.field: ""}
    written = item["content"][0] if shape.part else item
    opened = OpenItem({**item, **empty, "status": "in_progress"}, index)
    return [
        *opened.begin(),
        opened.add(written[shape.field], written.get("logprobs", ())),
        *opened.end(item["status"]),
    ]


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
