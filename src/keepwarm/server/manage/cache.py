"""The cache API: statistics, lookup, warm, clear, verify.

Lookup and warm take the body of a chat completion, or under `/completions`, `/messages` and
`/responses` the body of that API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.engine.stats import Stats
from keepwarm.errors import BadField, Forbidden
from keepwarm.server.anthropic.routes import build_request
from keepwarm.server.anthropic.shapes import CountRequest
from keepwarm.server.deprecation import renamed_to
from keepwarm.server.host import EngineHost
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.http.receipts import ReceiptOut, receipt_dict
from keepwarm.server.http.request_fields import Config, InTurn, Served, request_fields
from keepwarm.server.http.sse import STREAM_HEADERS, WholeAnswer, answer_docs
from keepwarm.server.http.turns import Turn
from keepwarm.server.http.viewer import require_totals
from keepwarm.server.manage.verifying import Verification, VerifyBody, VerifyOut
from keepwarm.server.models.models import Models
from keepwarm.server.openai import completions
from keepwarm.server.openai.routes import build_request as chat_request
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest, OpenAIErrorOut
from keepwarm.server.responses.routes import Answers, request_builder
from keepwarm.server.responses.shapes import InputRequest
from keepwarm.store.counts import PromptCounts
from keepwarm.text import request as engine_request
from keepwarm.text.request import Result

router = api_router(
    prefix="/v1/cache",
    tags=["Cache"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request is invalid."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is stopping."},
    },
)


class ClearBody(JsonInput):
    disk: bool = Field(default=False, description="Also delete all blocks and agents on disk.")


class RequestCountsOut(TypedDict):
    waiting: int
    prefilling: int
    decoding: int
    reading: Annotated[int, renamed_to("prefilling")]


class FiguresOut(TypedDict):
    """Where the prompt tokens of all requests to the store were found."""

    requests: int
    prompt_tokens: int
    reused: dict[str, int]  # tokens by tier
    computed: int  # tokens
    hits: dict[str, int]  # requests that reused tokens of a tier
    misses: dict[str, int]  # and that did not
    hit_rate: float | None  # tokens reused ÷ prompt tokens
    hit_rate_from_turn_2: float | None


class CacheOut(TypedDict):
    """The engine's snapshot."""

    object: Literal["cache"]
    model: str
    requests: RequestCountsOut
    counters: dict[str, Any]
    live: dict[str, int]
    tiers: dict[str, dict[str, int | None]]
    writes: dict[str, int]
    written_by_day: dict[str, int]
    prompts: FiguresOut
    failed_restores: dict[str, int]  # by reason


class LookupOut(TypedDict):
    """How warm a prompt is: tokens by the tier that holds them."""

    object: Literal["cache.lookup"]
    prompt_tokens: int
    warm: dict[str, int]
    ttft_ms: float
    first_token_ms: Annotated[float, renamed_to("ttft_ms")]
    scrubbed: list[str]


class WarmOut(TypedDict):
    object: Literal["cache.warm"]
    keepwarm: ReceiptOut


class ClearOut(TypedDict):
    object: Literal["cache.clear"]
    removed_blocks: int
    removed_agents: int


class PromptTo(NamedTuple):
    """A prompt, and the model that it is for."""

    host: EngineHost
    request: engine_request.Request


async def _by_chat(
    body: ChatRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> PromptTo:
    host = await models.use(body.model, turn)
    return PromptTo(host, await turn.build(lambda: chat_request(body, request, settings)))


async def _by_completion(
    body: CompletionRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> PromptTo:
    host = await models.use(body.model, turn)
    caller = request_fields(request, body.keepwarm, body.prompt_cache_key)
    fill_in = partial(completions.required_fill_in, host.engine.model.tokenizer, settings)
    asked = await turn.build(lambda: completions.requests_of(body, caller, fill_in))
    if len(asked) > 1:
        raise BadField("The body has several prompts; send one at a time.", "prompt")
    return PromptTo(host, asked[0])


async def _by_messages(
    body: CountRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> PromptTo:
    host = await models.use(body.model, turn)
    return PromptTo(host, await turn.build(lambda: build_request(body, request, settings)))


async def _by_responses(
    body: InputRequest,
    request: Request,
    models: Served,
    settings: Config,
    *,
    answers: Answers,
    turn: InTurn,
) -> PromptTo:
    host = await models.use(body.model, turn)
    items, build = await answers.conversation(body), request_builder(body, request, settings)
    return PromptTo(host, await turn.build(lambda: build(items)))


ByChat: TypeAlias = Annotated[PromptTo, Depends(_by_chat)]
ByCompletion: TypeAlias = Annotated[PromptTo, Depends(_by_completion)]
ByMessages: TypeAlias = Annotated[PromptTo, Depends(_by_messages)]
ByResponses: TypeAlias = Annotated[PromptTo, Depends(_by_responses)]


@router.get("", dependencies=[Depends(require_totals)])
def show_cache(models: Served) -> CacheOut:
    """Blocks stored, requests served, bytes written.

    Counted over all keys; with more than one key, the admin key is needed.
    """
    stats = models.stats()
    return {
        "object": "cache",
        "model": models.first.name,
        "requests": {
            "waiting": stats.waiting,
            "prefilling": stats.prefilling,
            "decoding": stats.decoding,
            "reading": stats.prefilling,
        },
        "counters": dict(stats.counters),
        "live": stats.live._asdict(),
        "tiers": {name: _tier(stats, name) for name in stats.tiers},
        "writes": asdict(stats.writes),
        "written_by_day": models.store.on_disk.wear.by_day(),
        "prompts": figures_out(stats.counts),
        "failed_restores": dict(stats.failed_restores),
    }


def figures_out(counts: PromptCounts) -> FiguresOut:
    return counts.figures()  # type: ignore[return-value]


def _tier(stats: Stats, name: str) -> dict[str, int | None]:
    """Hits and misses are requests, as everywhere, and not records read; those of shared tiers are
    counted for all of them together.
    """
    hits = stats.counts.hits.get(name.partition(" ")[0], 0)
    misses = stats.counts.requests - hits
    return asdict(stats.tiers[name]) | {"hits": hits, "misses": misses}


@router.post("/lookup")
async def look_up(asked: ByChat, turn: InTurn) -> LookupOut:
    """Report how much of a chat completion's prompt is cached; computes nothing."""
    return await _look_up(asked, turn)


@router.post("/lookup/completions")
async def look_up_completion(asked: ByCompletion, turn: InTurn) -> LookupOut:
    """The same for a text completion with a single prompt."""
    return await _look_up(asked, turn)


@router.post("/lookup/messages")
async def look_up_messages(asked: ByMessages, turn: InTurn) -> LookupOut:
    """The same for the body of Anthropic's `/v1/messages`."""
    return await _look_up(asked, turn)


@router.post("/lookup/responses")
async def look_up_responses(asked: ByResponses, turn: InTurn) -> LookupOut:
    """The same for the body of OpenAI's `/v1/responses`."""
    return await _look_up(asked, turn)


async def _look_up(asked: PromptTo, turn: Turn) -> LookupOut:
    found = await turn.run(asked.host.engine.lookup, asked.request)
    return {
        "object": "cache.lookup",
        "prompt_tokens": found.prompt_tokens,
        "warm": dict(found.warm),
        "ttft_ms": found.first_token_ms,
        "first_token_ms": found.first_token_ms,
        "scrubbed": list(asked.request.scrubbed),
    }


WARMED: Mapping[int | str, dict[str, Any]] = {200: {"model": WarmOut}}


@router.post("/warm", responses=dict(WARMED))
async def warm(asked: ByChat, turn: InTurn) -> Response:
    """Prefill a chat completion's prompt and store it, so that its first use is warm."""
    return await _warm(asked, turn)


@router.post("/warm/completions", responses=dict(WARMED))
async def warm_completion(asked: ByCompletion, turn: InTurn) -> Response:
    """The same for a text completion with a single prompt."""
    return await _warm(asked, turn)


@router.post("/warm/messages", responses=dict(WARMED))
async def warm_messages(asked: ByMessages, turn: InTurn) -> Response:
    """The same for the body of Anthropic's `/v1/messages`."""
    return await _warm(asked, turn)


@router.post("/warm/responses", responses=dict(WARMED))
async def warm_responses(asked: ByResponses, turn: InTurn) -> Response:
    """The same for the body of OpenAI's `/v1/responses`."""
    return await _warm(asked, turn)


async def _warm(asked: PromptTo, turn: Turn) -> Response:
    return WholeAnswer(await asked.host.warm(asked.request, turn), _warmed)


def _warmed(result: Result) -> WarmOut:
    return {"object": "cache.warm", "keepwarm": receipt_dict(result.receipt)}


@router.post("/clear")
async def clear(body: ClearBody, request: Request, models: Served) -> ClearOut:
    """Clear the memory tiers; with `disk`, also delete everything on disk.

    Needs the admin key if other keys' blocks would be removed.
    """
    if body.disk or request.state.tenant:
        _need_admin(request)
    return await asyncio.to_thread(_clear, models, body.disk)


def _clear(models: Models, disk: bool) -> ClearOut:
    models.store.flush()
    n_agents, n_blocks = models.store.on_disk.clear() if disk else (0, 0)
    for engine in models.engines:
        engine.clear()
    models.store.clear_memory()
    return {"object": "cache.clear", "removed_blocks": n_blocks, "removed_agents": n_agents}


@router.post("/verify", responses=answer_docs(VerifyOut))
async def verify(body: VerifyBody, request: Request, models: Served) -> Response:
    """Check every record and agent on disk. Needs the admin key.

    With `stream` an event a second has the bytes checked so far, and the last has the result.
    """
    _need_admin(request)
    check = Verification(models.store.on_disk, body.fix)
    if not body.stream:
        return JSONResponse(await asyncio.to_thread(check.run))
    media_type = "text/event-stream"
    return StreamingResponse(check.events(), headers=STREAM_HEADERS, media_type=media_type)


def _need_admin(request: Request) -> None:
    if not request.state.admin:
        raise Forbidden("This needs the admin key; set KEEPWARM_ADMIN_KEY and send that key.")
