"""The cache over HTTP: what is kept, how warm a prompt is, and how to warm, clear and check it.

A prompt comes as the body of the API that would be asked with it: a chat completion, or under
`/completions`, `/messages` and `/responses` one of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.cache.disk_store import DiskStore
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadField, Forbidden
from keepwarm.server.anthropic.routes import build_request
from keepwarm.server.anthropic.shapes import CountRequest
from keepwarm.server.host import EngineHost
from keepwarm.server.http import scrub
from keepwarm.server.http.body import JsonInput
from keepwarm.server.http.receipts import ReceiptOut, receipt_dict
from keepwarm.server.http.request_fields import Config, Host, request_fields
from keepwarm.server.http.sse import WholeAnswer
from keepwarm.server.http.viewer import require_totals
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest, OpenAIErrorOut
from keepwarm.server.responses.routes import Answers, request_builder
from keepwarm.server.responses.shapes import InputRequest
from keepwarm.store.disk import fsck
from keepwarm.store.disk.upkeep import clear_quarantine
from keepwarm.store.tier import as_store_errors
from keepwarm.text import request as engine_request
from keepwarm.text.request import Result

router = APIRouter(
    prefix="/v1/cache",
    tags=["Cache"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "It cannot be done."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed, or is stopping."},
    },
)


class Clear(JsonInput):
    disk: bool = Field(default=False, description="Delete all blocks and agents on disk too.")


class Verify(JsonInput):
    fix: bool = Field(default=False, description="Set bad records aside.")


class CacheOut(TypedDict):
    """The engine's own snapshot."""

    object: Literal["cache"]
    model: str
    requests: dict[str, int]
    counters: dict[str, Any]
    live: dict[str, int]
    tiers: dict[str, dict[str, int | None]]
    writes: dict[str, int]
    written_by_day: dict[str, int]


class LookupOut(TypedDict):
    """How warm a prompt is: tokens by the place they would come from."""

    object: Literal["cache.lookup"]
    prompt_tokens: int
    warm: dict[str, int]
    first_token_ms: float
    scrubbed: list[str]


class WarmOut(TypedDict):
    object: Literal["cache.warm"]
    keepwarm: ReceiptOut


class ClearOut(TypedDict):
    object: Literal["cache.clear"]
    removed_blocks: int
    removed_agents: int


class BadRecordOut(TypedDict):
    record: str
    wrong: str
    set_aside: bool


class VerifyOut(TypedDict):
    object: Literal["cache.verify"]
    records: int
    n_bytes: int
    bad: list[BadRecordOut]


def _by_chat(body: ChatRequest, request: Request, settings: Config) -> engine_request.Request:
    asked = chat.request_of(
        body, request_fields(request, body.keepwarm, body.prompt_cache_key), settings
    )
    return scrub.scrub_request(asked, scrub.rules_for(settings.scrub, request.headers))


def _by_completion(
    body: CompletionRequest, request: Request, settings: Config
) -> engine_request.Request:
    caller = request_fields(request, body.keepwarm, body.prompt_cache_key)
    asked = completions.requests_of(body, caller, settings)
    if len(asked) > 1:
        raise BadField("There are several prompts; send one of them at a time.", "prompt")
    return asked[0]


def _by_messages(body: CountRequest, request: Request, settings: Config) -> engine_request.Request:
    return build_request(body, request, settings)


def _by_responses(
    body: InputRequest, request: Request, settings: Config, answers: Answers
) -> engine_request.Request:
    return request_builder(body, request, settings)(answers.conversation(body))


ByChat: TypeAlias = Annotated[engine_request.Request, Depends(_by_chat)]
ByCompletion: TypeAlias = Annotated[engine_request.Request, Depends(_by_completion)]
ByMessages: TypeAlias = Annotated[engine_request.Request, Depends(_by_messages)]
ByResponses: TypeAlias = Annotated[engine_request.Request, Depends(_by_responses)]


@router.get("", dependencies=[Depends(require_totals)])
def show_cache(host: Host) -> CacheOut:
    """What is kept, what it has served, what was written.

    Of all keys together; where there are several, it takes the admin key.
    """
    engine = host.engine
    stats = engine.stats()
    return {
        "object": "cache",
        "model": host.name,
        "requests": {
            "waiting": stats.waiting,
            "reading": stats.prefilling,
            "decoding": stats.decoding,
        },
        "counters": dict(stats.counters),
        "live": stats.live._asdict(),
        "tiers": {name: asdict(tier) for name, tier in stats.tiers.items()},
        "writes": asdict(stats.writes),
        "written_by_day": engine.store.on_disk.wear.by_day(),
    }


@router.post("/lookup")
async def look_up(asked: ByChat, host: Host) -> LookupOut:
    """How much of this chat completion's prompt is warm; computes nothing."""
    return await _look_up(host, asked)


@router.post("/lookup/completions")
async def look_up_completion(asked: ByCompletion, host: Host) -> LookupOut:
    """The same for a text completion with one prompt."""
    return await _look_up(host, asked)


@router.post("/lookup/messages")
async def look_up_messages(asked: ByMessages, host: Host) -> LookupOut:
    """The same for a request of Anthropic's."""
    return await _look_up(host, asked)


@router.post("/lookup/responses")
async def look_up_responses(asked: ByResponses, host: Host) -> LookupOut:
    """The same for one of OpenAI's responses."""
    return await _look_up(host, asked)


async def _look_up(host: EngineHost, asked: engine_request.Request) -> LookupOut:
    found = await asyncio.to_thread(host.engine.lookup, asked)
    return {
        "object": "cache.lookup",
        "prompt_tokens": found.prompt_tokens,
        "warm": dict(found.warm),
        "first_token_ms": found.first_token_ms,
        "scrubbed": list(asked.scrubbed),
    }


WARMED: Mapping[int | str, dict[str, Any]] = {200: {"model": WarmOut}}


@router.post("/warm", responses=dict(WARMED))
async def warm(asked: ByChat, host: Host) -> Response:
    """Read this chat completion's prompt and keep it, so that its first use is warm."""
    return await _warm(host, asked)


@router.post("/warm/completions", responses=dict(WARMED))
async def warm_completion(asked: ByCompletion, host: Host) -> Response:
    """The same for a text completion with one prompt."""
    return await _warm(host, asked)


@router.post("/warm/messages", responses=dict(WARMED))
async def warm_messages(asked: ByMessages, host: Host) -> Response:
    """The same for a request of Anthropic's."""
    return await _warm(host, asked)


@router.post("/warm/responses", responses=dict(WARMED))
async def warm_responses(asked: ByResponses, host: Host) -> Response:
    """The same for one of OpenAI's responses."""
    return await _warm(host, asked)


async def _warm(host: EngineHost, asked: engine_request.Request) -> Response:
    return WholeAnswer(await asyncio.to_thread(host.engine.warm, asked), _warmed)


def _warmed(result: Result) -> WarmOut:
    return {"object": "cache.warm", "keepwarm": receipt_dict(result.receipt)}


@router.post("/clear")
async def clear(body: Clear, request: Request, host: Host) -> ClearOut:
    """Free what is kept in memory. With `disk`, delete everything on disk too.

    Needs the admin key where it would touch what belongs to other keys.
    """
    if body.disk or request.state.tenant:
        _need_admin(request)
    return await asyncio.to_thread(_clear, host.engine, body.disk)


def _clear(engine: Engine, disk: bool) -> ClearOut:
    engine.store.flush()
    engine.clear()
    n_agents, n_blocks = _clear_disk(engine.store.on_disk) if disk else (0, 0)
    return {"object": "cache.clear", "removed_blocks": n_blocks, "removed_agents": n_agents}


def _clear_disk(disk_store: DiskStore) -> tuple[int, int]:
    agents = [agent.id for agent in disk_store.agents.all()]
    n_blocks = sum(disk_store.agents.delete(agent_id) for agent_id in agents)
    rest = [stored.key for stored in disk_store.disk.walk()]
    disk_store.disk.delete_all(rest)
    clear_quarantine(disk_store.disk)
    with as_store_errors(disk_store.disk, "clear its index"):
        disk_store.disk.index.database.scrub()
    return len(agents), n_blocks + len(rest)


@router.post("/verify")
async def verify(body: Verify, request: Request, host: Host) -> VerifyOut:
    """Read every record on disk and check it. Needs the admin key."""
    _need_admin(request)
    return await asyncio.to_thread(_verify, host.engine.store.on_disk, body.fix)


def _verify(disk_store: DiskStore, fix: bool) -> VerifyOut:
    """S0-57: the same check as `keepwarm cache verify`."""
    checked = list(fsck.verify(disk_store.disk, fix))
    bad: list[BadRecordOut] = [
        {
            "record": f"{each.key.hex()}.{each.part.value}",
            "wrong": each.wrong,
            "set_aside": each.quarantined,
        }
        for each in checked
        if each.wrong is not None
    ]
    n_bytes = sum(each.n_bytes for each in checked)
    return {"object": "cache.verify", "records": len(checked), "n_bytes": n_bytes, "bad": bad}


def _need_admin(request: Request) -> None:
    if not request.state.admin:
        raise Forbidden("This needs the admin key; set KEEPWARM_ADMIN_KEY and send that key.")
