"""Ollama's endpoints: answers, and the models that there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from keepwarm import __version__
from keepwarm.errors import BadField, Forbidden
from keepwarm.server.embedding import embed
from keepwarm.server.host import EngineHost
from keepwarm.server.http import scrub
from keepwarm.server.http.body import api_router
from keepwarm.server.http.request_fields import Config, InTurn, Served, request_fields
from keepwarm.server.http.sse import STREAM_HEADERS, LineStream, WholeAnswer
from keepwarm.server.http.turns import Turn
from keepwarm.server.models.models import Models
from keepwarm.server.ollama import catalog
from keepwarm.server.ollama import request as requests
from keepwarm.server.ollama.events import (
    AnswerLines,
    AnswerMeta,
    Part,
    chat_part,
    embedded,
    embedded_one,
    generate_part,
    unanswered,
    whole,
)
from keepwarm.server.ollama.pulls import Pulls, checked_name, progress
from keepwarm.server.ollama.shapes import (
    BaseOllamaRequest,
    NamedOllamaRequest,
    OllamaChatOut,
    OllamaChatRequest,
    OllamaEmbedOut,
    OllamaEmbedRequest,
    OllamaErrorOut,
    OllamaGenerateOut,
    OllamaGenerateRequest,
    OllamaLoadedModels,
    OllamaMessage,
    OllamaModels,
    OllamaOldEmbedOut,
    OllamaOldEmbedRequest,
    OllamaPullRequest,
    OllamaShowOut,
    OllamaShowRequest,
    OllamaStatus,
    OllamaVersion,
)
from keepwarm.server.openai.completions import required_fill_in
from keepwarm.server.openai.embeddings import WholeEmbeddings
from keepwarm.server.openai.tokens import Pieces
from keepwarm.server.truncation import submit_shortened
from keepwarm.text import request as engine_request

UNLOADS = "keep_alive 0 unloads the model for all"
API_VERSION = "0.13.0"  # clients refuse versions that lack what they need

router = api_router(
    prefix="/api",
    tags=["Ollama"],
    responses={
        "4XX": {"model": OllamaErrorOut, "description": "The request is invalid or refused."},
        "5XX": {"model": OllamaErrorOut, "description": "The server failed or is shutting down."},
    },
)


def _docs(model: type) -> dict[int | str, dict[str, Any]]:
    """The 200 response of an endpoint that streams, for the OpenAPI document."""
    lines = {LineStream.media_type: {"schema": {"type": "string", "description": "JSON lines."}}}
    return {200: {"model": model, "description": "One object, or lines of JSON.", "content": lines}}


# Answers


@router.post("/chat", responses=_docs(OllamaChatOut))
async def chat(
    body: OllamaChatRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> Response:
    """Answer a conversation; without messages, load the model, or unload it."""
    began = time.perf_counter()
    host = await _host_to_ask(body, request, models, turn, wants_answer=bool(body.messages))
    if host is None or not body.messages:
        return _unanswered(body, chat_part, host)
    load_s = time.perf_counter() - began
    fields = request_fields(request, body.keepwarm, body=body)
    rules = scrub.rules_for(settings.scrub, request.headers)

    def build(some: Sequence[OllamaMessage]) -> engine_request.Request:
        return scrub.scrub_request(requests.chat_request(body, some, fields, settings), rules)

    asked = await turn.build(lambda: build(body.messages))
    droppable = () if body.truncate is False else body.messages
    answer, n_dropped = await submit_shortened(host, turn, asked, build, droppable)
    meta = AnswerMeta(host.name, chat_part, began, load_s, n_dropped, _pieces(host, body))
    return _sent(body, answer, meta)


@router.post("/generate", responses=_docs(OllamaGenerateOut))
async def generate(
    body: OllamaGenerateRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> Response:
    """Answer a prompt; without one, load the model, or unload it."""
    began = time.perf_counter()
    host = await _host_to_ask(body, request, models, turn, wants_answer=bool(body.prompt))
    if host is None or not body.prompt:
        return _unanswered(body, generate_part, host)
    load_s = time.perf_counter() - began
    fields = request_fields(request, body.keepwarm, body=body)
    fill_in = partial(required_fill_in, host.engine.model.tokenizer, settings)
    make = partial(requests.generate_request, body, fields, settings, fill_in)
    rules = scrub.rules_for(settings.scrub, request.headers)
    asked = await turn.build(lambda: scrub.scrub_request(make(), rules))
    answer = await host.submit(asked, turn)
    meta = AnswerMeta(host.name, generate_part, began, load_s, 0, _pieces(host, body))
    return _sent(body, answer, meta)


@router.post("/embed", responses={200: {"model": OllamaEmbedOut}})
async def create_vectors(
    body: OllamaEmbedRequest, request: Request, models: Served, turn: InTurn
) -> Response:
    """A vector for each text, of length 1; texts that are too long are shortened."""
    began = time.perf_counter()
    host = await _host(body, request, models, turn)
    meta = AnswerMeta(host.name, generate_part, began, time.perf_counter() - began)
    texts = [body.input] if isinstance(body.input, str) else body.input
    fields = request_fields(request, body.keepwarm, body=body)
    answer = await embed(host, texts, fields, turn, truncate=body.truncate is not False)
    return WholeEmbeddings(answer, partial(embedded, meta, body.dimensions))


@router.post("/embeddings", responses={200: {"model": OllamaOldEmbedOut}})
async def create_vector(
    body: OllamaOldEmbedRequest, request: Request, models: Served, turn: InTurn
) -> Response:
    """The vector of one text, for clients that do not know `/api/embed`."""
    host = await _host(body, request, models, turn)
    fields = request_fields(request, body.keepwarm, body=body)
    return WholeEmbeddings(
        await embed(host, [body.prompt], fields, turn, truncate=True), embedded_one
    )


async def _host(
    body: NamedOllamaRequest, request: Request, models: Models, turn: Turn
) -> EngineHost:
    """The model, loaded, and kept so as the request says."""
    seconds = requests.keep_alive_s(body)
    if seconds == 0:
        _require_admin(request, UNLOADS)
    host = await models.use(body.model, turn)
    if seconds is not None:
        models.keep(host, seconds)
    return host


async def _host_to_ask(
    body: BaseOllamaRequest, request: Request, models: Models, turn: Turn, *, wants_answer: bool
) -> EngineHost | None:
    """The same for an answer, or none; None if the model is only to be unloaded."""
    if not wants_answer and requests.keep_alive_s(body) == 0:
        _require_admin(request, UNLOADS)
        await _unload(models, body.model)
        return None
    host = await _host(body, request, models, turn)
    if body.think and not host.engine.preparer.markup.has_reasoning:
        raise BadField(f"{host.name!r} does not support thinking; omit think.", "think")
    return host


async def _unload(models: Models, name: str) -> None:
    slot = models.known(name)
    if slot is None:
        raise models.unknown(name)
    models.keep(slot.host, 0.0)
    await asyncio.to_thread(models.slots.unload_unused)


def _require_admin(request: Request, what: str) -> None:
    if request.app.state.keys.in_use and not request.state.admin:
        raise Forbidden(f"{what}, and there are API keys; send the admin key.")


def _unanswered(body: BaseOllamaRequest, part: Part, host: EngineHost | None) -> Response:
    reason = "unload" if host is None else "load"
    return JSONResponse(unanswered(body.model, part, reason))


def _pieces(host: EngineHost, body: BaseOllamaRequest) -> Pieces | None:
    return Pieces(host.engine.model.tokenizer) if body.logprobs else None


def _sent(body: BaseOllamaRequest, answer: Any, meta: AnswerMeta) -> Response:
    if body.stream is False:
        return WholeAnswer(answer, partial(whole, meta))
    return LineStream(answer, AnswerLines(meta))


# Models


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> OllamaVersion:
    """The version of Ollama whose API this is, and Keepwarm's."""
    return {"version": API_VERSION, "keepwarm": __version__}


@router.head("/tags", include_in_schema=False)
@router.get("/tags")
async def tags(models: Served) -> OllamaModels:
    """The models that requests may name."""
    return {"models": await asyncio.to_thread(catalog.listed_models, models)}


@router.get("/ps")
async def loaded(models: Served) -> OllamaLoadedModels:
    """The models that are loaded, and until when."""
    return {"models": await asyncio.to_thread(catalog.loaded_models, models)}


@router.post("/show")
async def show(body: OllamaShowRequest, models: Served, settings: Config) -> OllamaShowOut:
    """One model: its template, architecture, context length and what it can do."""
    return await asyncio.to_thread(catalog.show, models, settings, _named(body))


@router.post("/pull", responses=_docs(OllamaStatus))
async def pull(body: OllamaPullRequest, request: Request, models: Served) -> Response:
    """Download a model that requests may name; needs the admin key where there are keys."""
    _require_admin(request, "A download takes disk space of all")
    name = await asyncio.to_thread(checked_name, models, _named(body))
    pulls: Pulls = request.app.state.pulls
    pulling = pulls.start(name)
    if body.stream is False:
        await asyncio.wrap_future(pulling)
        return JSONResponse({"status": "success"})
    media_type = LineStream.media_type
    return StreamingResponse(progress(name, pulling), headers=STREAM_HEADERS, media_type=media_type)


def _named(body: OllamaShowRequest) -> str:
    name = body.model or body.name
    if not name:
        raise BadField("model is required but missing.", "model")
    return name
