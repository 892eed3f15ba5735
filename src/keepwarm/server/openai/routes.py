"""OpenAI's endpoints: chat completions, text completions, embeddings, models."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from keepwarm.server.http.body import Fields, api_router
from keepwarm.server.http.problems import CLAUDE_HEADER
from keepwarm.server.http.sse import EventStream, WholeAnswer, answer_docs, new_id, receipt_dict
from keepwarm.server.models.calls import ApiCall, Call, Served
from keepwarm.server.models.embedding import Embeddings, WholeEmbeddings, embed, shortened
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import ListedModel, plain
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.chat import ChatStream, call_style_of
from keepwarm.server.openai.common import CompletionMeta, system_fingerprint
from keepwarm.server.openai.completions import (
    CombinedAnswer,
    TextStream,
    prompts_of,
    required_fill_in,
)
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest, EmbeddingRequest
from keepwarm.text import request as engine_request
from keepwarm.text.detokenize import decode
from keepwarm.text.request import Vector

router = api_router(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions", responses=answer_docs(Fields))
async def create_chat_completion(body: ChatRequest, call: Call) -> Response:
    """Answer a conversation, as one object or as a stream of chunks."""
    host, request = await call.prepare(body.model, partial(chat_request, body, call))
    meta, style = _meta(host, "chatcmpl-"), call_style_of(body)
    pieces = host.pieces if body.logprobs else None
    answer = await host.submit(request, call.slot)
    if body.stream:
        return EventStream(answer, ChatStream(meta, request.n, body.wants_usage, pieces, style))
    return WholeAnswer(answer, lambda result: chat.completion(meta, result, pieces, style))


def chat_request(body: ChatRequest, call: ApiCall) -> engine_request.Request:
    return chat.request_of(body, call.fields(body, body.prompt_cache_key), call.settings)


@router.post("/completions", responses=answer_docs(Fields))
async def create_completion(body: CompletionRequest, call: Call) -> Response:
    """Continue one or more texts, as one object or as a stream of chunks."""
    host = await call.host(body.model)
    requests = await call.slot.build(lambda: completion_requests(body, call, host))
    n = requests[0].n
    texts = await call.slot.build(lambda: _echoed(host, body))
    echoed = [text for text in texts for _ in range(n)]
    meta = _meta(host, "cmpl-")
    pieces = None if body.logprobs is None else host.pieces
    answers = await host.submit_all(requests, call.slot)
    answer = answers[0] if len(answers) == 1 else CombinedAnswer(answers, n)
    if body.stream:
        return EventStream(answer, TextStream(meta, echoed, body.wants_usage, pieces, n))
    return WholeAnswer(answer, lambda result: completions.completion(meta, result, echoed, pieces))


def completion_requests(
    body: CompletionRequest, call: ApiCall, host: EngineHost
) -> list[engine_request.Request]:
    """One for each prompt."""
    fill_in = partial(required_fill_in, host.engine.model.tokenizer, call.settings)
    return completions.requests_of(body, call.fields(body, body.prompt_cache_key), fill_in)


@router.post("/embeddings", responses={200: {"model": Fields}})
async def create_embeddings(body: EmbeddingRequest, call: Call) -> Response:
    """A vector for each text or list of tokens, of length 1."""
    host = await call.host(body.model, to_embed=True)
    inputs = prompts_of(body.input, "input")
    answer = await embed(host, inputs, call.fields(body), call.slot, prompt_name=body.prompt_name)
    return WholeEmbeddings(answer, partial(embedding_list, body, host.name))


def _echoed(host: EngineHost, body: CompletionRequest) -> list[str]:
    """The text that each answer begins with: its prompt if `echo` is set."""
    prompts = prompts_of(body.prompt)
    if not body.echo:
        return [""] * len(prompts)
    return [p if isinstance(p, str) else _text_of(host, p) for p in prompts]


def _text_of(host: EngineHost, tokens: Sequence[int]) -> str:
    """Without ids that no tokenizer takes: the engine refuses them."""
    possible = [token for token in tokens if 0 <= token < 1 << 31]
    return decode(host.engine.model.tokenizer, possible)


def _meta(host: EngineHost, prefix: str) -> CompletionMeta:
    now, fingerprint = int(time.time()), system_fingerprint(host.engine)
    return CompletionMeta(new_id(prefix), now, host.name, fingerprint)


def embedding_list(body: EmbeddingRequest, model: str, found: Embeddings) -> Fields:
    as_text = body.encoding_format == "base64"
    vectors = [shortened(vector, body.dimensions) for vector in found.vectors]
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if as_text else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens},
        "keepwarm": receipt_dict(found.receipt, model=model),
    }


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# Models


@router.get("/models")
async def list_models(request: Request, models: Served) -> Fields:
    """The models that requests may name, the default first; for Anthropic's clients in its form."""
    found = [_model(each) for each in await run_in_threadpool(list, models.listed())]
    return list_for(request, found)


@router.get("/models/{name:path}")
async def show_model(name: str, request: Request, models: Served) -> Fields:
    """One model, by its name."""
    found = {each.name: each for each in await run_in_threadpool(list, models.listed())}
    model = found.get(name) or found.get(plain(name))
    if model is None:
        raise models.unknown(name)
    return _claude(_model(model)) if CLAUDE_HEADER in request.headers else _model(model)


def _model(model: ListedModel) -> Fields:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "keepwarm",
        "context_length": model.n_context,
        "shares_batches": model.shares_batches,
        "sampling": model.sampling._asdict(),
        "loaded": model.is_loaded,
    }


def list_for(request: Request, models: Sequence[Fields]) -> Fields:
    """All of them at once, also for clients that ask for pages: a server has few."""
    if CLAUDE_HEADER not in request.headers:
        return {"object": "list", "data": list(models)}
    data = [_claude(model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _claude(model: Fields) -> Fields:
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model["context_length"],
        "max_tokens": model["context_length"],
    }
