"""OpenAI's endpoints: chat completions, text completions, embeddings, models."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from keepwarm.config import Settings
from keepwarm.server.embedding import embed
from keepwarm.server.host import EngineHost
from keepwarm.server.http import scrub
from keepwarm.server.http.body import api_router
from keepwarm.server.http.request_fields import Config, InTurn, Served, request_fields
from keepwarm.server.http.sse import EventStream, WholeAnswer, answer_docs, new_id
from keepwarm.server.models.listing import ListedModel
from keepwarm.server.models.names import plain
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.calls import call_style_of
from keepwarm.server.openai.chat import ChatStream
from keepwarm.server.openai.chunks import CompletionMeta, system_fingerprint
from keepwarm.server.openai.completions import TextStream, prompts_of, required_fill_in
from keepwarm.server.openai.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    WholeEmbeddings,
    embedding_list,
)
from keepwarm.server.openai.model_list import MAX_LISTED, Page, list_for, model_for
from keepwarm.server.openai.multi_prompt import CombinedAnswer
from keepwarm.server.openai.shapes import (
    ChatCompletion,
    ChatRequest,
    ClaudeModelList,
    ClaudeModelOut,
    CompletionRequest,
    ModelList,
    ModelOut,
    OpenAIErrorOut,
    TextCompletion,
)
from keepwarm.server.openai.tokens import Pieces
from keepwarm.text import request as engine_request
from keepwarm.text.detokenize import decode

router = api_router(
    prefix="/v1",
    tags=["OpenAI"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request is invalid or refused."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is shutting down."},
    },
)


@router.post("/chat/completions", responses=answer_docs(ChatCompletion))
async def create_chat_completion(
    body: ChatRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> Response:
    """Answer a conversation, as one object or as a stream of chunks."""
    host = await models.use(body.model, turn)
    asked = await turn.build(lambda: build_request(body, request, settings))
    answer = await host.submit(asked, turn)
    meta = replace(_meta(host, "chatcmpl-"), calls=call_style_of(body))
    pieces = _pieces(host) if body.logprobs else None
    if body.stream:
        return EventStream(answer, ChatStream(meta, asked.n, body.wants_usage, pieces))
    return WholeAnswer(answer, lambda result: chat.completion(meta, result, pieces))


@router.post("/completions", responses=answer_docs(TextCompletion))
async def create_completion(
    body: CompletionRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> Response:
    """Continue one or more texts, as one object or as a stream of chunks."""
    host = await models.use(body.model, turn)
    fields = request_fields(request, body.keepwarm, body.prompt_cache_key, body)
    fill_in = partial(required_fill_in, host.engine.model.tokenizer, settings)
    requests = await turn.build(lambda: completions.requests_of(body, fields, fill_in))
    n = requests[0].n
    texts = await turn.build(lambda: _echoed(host, body))
    echoed = [text for text in texts for _ in range(n)]
    answers = await host.submit_all(requests, turn)
    answer = answers[0] if len(answers) == 1 else CombinedAnswer(answers, n)
    meta = _meta(host, "cmpl-")
    pieces = None if body.logprobs is None else _pieces(host)
    if body.stream:
        return EventStream(answer, TextStream(meta, echoed, body.wants_usage, pieces, n))
    return WholeAnswer(answer, lambda result: completions.completion(meta, result, echoed, pieces))


@router.post("/embeddings", responses={200: {"model": EmbeddingList}})
async def create_embeddings(
    body: EmbeddingRequest, request: Request, models: Served, turn: InTurn
) -> Response:
    """A vector for each text or list of tokens, of length 1."""
    host = await models.use(body.model, turn)
    fields = request_fields(request, body.keepwarm, None, body)
    inputs = prompts_of(body.input, "input")
    answer = await embed(host, inputs, fields, turn, prompt_name=body.prompt_name)
    return WholeEmbeddings(answer, partial(embedding_list, body, host.name))


@router.get("/models")
async def list_models(
    request: Request,
    models: Served,
    limit: Annotated[int | None, Query(ge=1, le=MAX_LISTED)] = None,
    after_id: str | None = None,
    before_id: str | None = None,
) -> ModelList | ClaudeModelList:
    """The models that requests may name, the default first.

    For Anthropic's clients in its form, in pages if they ask for them.
    """
    found = [_model(each) for each in await asyncio.to_thread(list, models.listed())]
    return list_for(request, found, Page(limit, after_id, before_id))


@router.get("/models/{name:path}")
async def show_model(name: str, request: Request, models: Served) -> ModelOut | ClaudeModelOut:
    """One model, by its name."""
    found = {each.name: each for each in await asyncio.to_thread(list, models.listed())}
    model = found.get(name) or found.get(plain(name))
    if model is None:
        raise models.unknown(name)
    return model_for(request, _model(model))


def build_request(
    body: ChatRequest, request: Request, settings: Settings
) -> engine_request.Request:
    """The request for the engine, scrubbed."""
    fields = request_fields(request, body.keepwarm, body.prompt_cache_key, body)
    rules = scrub.rules_for(settings.scrub, request.headers)
    return scrub.scrub_request(chat.request_of(body, fields, settings), rules)


def _echoed(host: EngineHost, body: CompletionRequest) -> list[str]:
    """The text that each answer begins with: its prompt if `echo` is set."""
    prompts = prompts_of(body.prompt)
    if not body.echo:
        return [""] * len(prompts)
    tokenizer = host.engine.model.tokenizer
    return [p if isinstance(p, str) else decode(tokenizer, p) for p in prompts]


def _meta(host: EngineHost, prefix: str) -> CompletionMeta:
    now, fingerprint = int(time.time()), system_fingerprint(host.engine)
    return CompletionMeta(new_id(prefix), now, host.name, fingerprint)


def _pieces(host: EngineHost) -> Pieces:
    return Pieces(host.engine.model.tokenizer)


def _model(model: ListedModel) -> ModelOut:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "keepwarm",
        "context_length": model.n_context,
        "shares_batches": model.shares_batches,
        "sampling": model.sampling._asdict(),  # type: ignore[typeddict-item]
        "loaded": model.is_loaded,
    }
