"""Ollama's endpoints: answers, one object or lines of JSON, and the models that there are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from keepwarm import __version__
from keepwarm.errors import BadField, Forbidden
from keepwarm.server.http.body import Fields, LateRoute, api_router
from keepwarm.server.http.problems import OllamaErrorOut, Problem, ollama_body
from keepwarm.server.http.request_fields import Config
from keepwarm.server.http.sse import STREAM_HEADERS, LineStream, WholeAnswer, line, receipt_dict
from keepwarm.server.http.synonyms import thinking_of
from keepwarm.server.models.calls import ApiCall, Call, Served
from keepwarm.server.models.embedding import Embeddings, WholeEmbeddings, embed, shortened
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from keepwarm.server.models.truncation import submit_shortened
from keepwarm.server.ollama import models as catalog
from keepwarm.server.ollama import request as requests
from keepwarm.server.ollama.request import (
    BaseOllamaRequest,
    NamedOllamaRequest,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOldEmbedRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from keepwarm.server.openai.completions import required_fill_in
from keepwarm.server.openai.logprobs import chat_logprobs
from keepwarm.text import request as engine_request
from keepwarm.text.detokenize import Pieces
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


UNLOADS = "keep_alive 0 unloads the model for all"
KEY_KEEP_S = 3600.0  # memory is of all: so long at most a key keeps a model behind a request
API_VERSION = "0.13.0"  # clients refuse versions that lack what they need

ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Fields,
        "description": "One object, or lines of JSON.",
        "content": {
            LineStream.media_type: {"schema": {"type": "string", "description": "JSON lines."}}
        },
    }
}


class JsonRoute(LateRoute):
    """Takes every body for JSON, as Ollama does: curl calls it a form.

    That a web page can send such a body without asking first is harmless: its origin is checked.
    """

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "headers": list(scope["headers"])}
        MutableHeaders(scope=scope)["content-type"] = "application/json"
        await super().handle(scope, receive, send)


router = api_router(prefix="/api", tags=["Ollama"], errors=OllamaErrorOut, route_class=JsonRoute)


# Answers


@router.post("/chat", responses=ANSWER)
async def chat(body: OllamaChatRequest, call: Call) -> Response:
    """Answer a conversation; without messages, load the model, or unload it."""

    def make(_: EngineHost, some: Sequence[OllamaMessage]) -> engine_request.Request:
        return requests.chat_request(body, some, call.fields(body), call.settings)

    can_drop = body.truncate is not False
    return await _answer(body, call, chat_part, body.messages, make, can_drop=can_drop)


@router.post("/generate", responses=ANSWER)
async def generate(body: OllamaGenerateRequest, call: Call) -> Response:
    """Answer a prompt; without one, load the model, or unload it."""

    def make(host: EngineHost, _: Sequence[OllamaMessage]) -> engine_request.Request:
        fill_in = partial(required_fill_in, host.engine.model.tokenizer, call.settings)
        return requests.generate_request(body, call.fields(body), call.settings, fill_in)

    asked = [OllamaMessage(role="user", content=body.prompt)] if body.prompt else []
    return await _answer(body, call, generate_part, asked, make, can_drop=False)


async def _answer(
    body: BaseOllamaRequest,
    call: ApiCall,
    part: Part,
    asked: Sequence[OllamaMessage],
    make: Callable[[EngineHost, Sequence[OllamaMessage]], engine_request.Request],
    *,
    can_drop: bool,
) -> Response:
    """The answer to what is asked, or to the newer part of it that fits if some can be dropped."""
    arrival: engine_request.Arrival = call.request.state.arrival
    began = time.perf_counter()
    host = await _host_to_ask(body, call, wants_answer=bool(asked))
    if host is None or not asked:
        return JSONResponse(unanswered(body.model, part, "unload" if host is None else "load"))
    load_s = time.perf_counter() - began

    def build(some: Sequence[OllamaMessage]) -> engine_request.Request:
        return call.scrubbed(make(host, some))

    request = await call.slot.build(lambda: build(asked))
    droppable = asked if can_drop else ()
    pieces = host.pieces if body.logprobs else None
    answer, n_dropped = await submit_shortened(host, call.slot, request, build, droppable)
    meta = AnswerMeta(host.name, part, arrival.began, load_s, n_dropped, pieces)
    if body.stream is False:
        return WholeAnswer(answer, partial(whole, meta))
    return LineStream(answer, AnswerLines(meta))


@router.post("/embed", responses={200: {"model": Fields}})
async def create_vectors(body: OllamaEmbedRequest, call: Call) -> Response:
    """A vector for each text, of length 1; texts that are too long are shortened."""
    began = time.perf_counter()
    host = await _host(body, call, to_embed=True)
    meta = AnswerMeta(host.name, generate_part, began, time.perf_counter() - began)
    texts = [body.input] if isinstance(body.input, str) else body.input
    truncate = body.truncate is not False
    answer = await embed(host, texts, call.fields(body), call.slot, truncate=truncate)
    return WholeEmbeddings(answer, partial(embedded, meta, body.dimensions))


@router.post("/embeddings", responses={200: {"model": Fields}})
async def create_vector(body: OllamaOldEmbedRequest, call: Call) -> Response:
    """The vector of one text, for clients that do not know `/api/embed`."""
    host = await _host(body, call, to_embed=True)
    answer = await embed(host, [body.prompt], call.fields(body), call.slot, truncate=True)
    return WholeEmbeddings(answer, lambda found: {"embedding": found.vectors[0].tolist()})


async def _host(body: NamedOllamaRequest, call: ApiCall, *, to_embed: bool = False) -> EngineHost:
    """The model, loaded, and kept so as the request says."""
    seconds = requests.keep_alive_s(body)
    if seconds == 0:
        _require_admin(call.request, UNLOADS)
    host = await call.host(body.model, to_embed=to_embed)
    if seconds is not None:
        call.models.keep(host, seconds if _may_manage(call.request) else min(seconds, KEY_KEEP_S))
    return host


async def _host_to_ask(
    body: BaseOllamaRequest, call: ApiCall, *, wants_answer: bool
) -> EngineHost | None:
    """The same for an answer, or none; None if the model is only to be unloaded."""
    if not wants_answer and requests.keep_alive_s(body) == 0:
        _require_admin(call.request, UNLOADS)
        await _unload(call.models, body.model)
        return None
    host = await _host(body, call)
    if body.think and thinking_of(body).switch and not host.engine.preparer.markup.has_reasoning:
        raise BadField(f"{host.name!r} does not support thinking; omit think.", "think")
    return host


async def _unload(models: Models, name: str) -> None:
    slot = models.known(name)
    if slot is None:
        raise models.unknown(name)
    models.keep(slot.host, 0.0)
    await run_in_threadpool(models.slots.unload_unused)


def _may_manage(request: Request) -> bool:
    return request.state.admin or not request.app.state.keys.in_use


def _require_admin(request: Request, what: str) -> None:
    if not _may_manage(request):
        raise Forbidden(f"{what}, and there are API keys; send the admin key.")


# Models


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> Fields:
    """The version of Ollama whose API this is, and Keepwarm's."""
    return {"version": API_VERSION, "keepwarm": __version__}


@router.head("/tags", include_in_schema=False)
@router.get("/tags")
async def tags(models: Served) -> Fields:
    """The models that requests may name."""
    return {"models": await run_in_threadpool(catalog.listed_models, models)}


@router.get("/ps")
async def loaded(models: Served) -> Fields:
    """The models that are loaded, and until when."""
    return {"models": await run_in_threadpool(catalog.loaded_models, models)}


@router.post("/show")
async def show(body: OllamaShowRequest, models: Served, settings: Config) -> Fields:
    """One model: its template, architecture, context length and what it can do."""
    return await run_in_threadpool(catalog.show, models, settings, _named(body))


@router.post("/pull", responses=ANSWER)
async def pull(body: OllamaPullRequest, request: Request, models: Served) -> Response:
    """Download a model that requests may name; needs the admin key where there are keys."""
    _require_admin(request, "A download takes disk space of all")
    name = await run_in_threadpool(catalog.checked_name, models, _named(body))
    pulls: catalog.Pulls = request.app.state.pulls
    pulling = pulls.start(name)
    if body.stream is False:
        await asyncio.wrap_future(pulling)
        return JSONResponse({"status": "success"})
    media_type = LineStream.media_type
    return StreamingResponse(
        catalog.progress(pulls, pulling), headers=STREAM_HEADERS, media_type=media_type
    )


def _named(body: OllamaShowRequest) -> str:
    name = body.model or body.name
    if not name:
        raise BadField("model is required but missing.", "model")
    return name
