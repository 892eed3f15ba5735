"""The cache API: statistics, clear, verify; and prompts without answers: how warm one is
(`lookup`), prefill it (`warm`), share it (`prefill`).

Each of these takes the body of a chat completion, or under `/completions`, `/messages` and
`/responses` the body of that API.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from anyio.to_thread import run_sync
from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.verify import verify_store
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.engine.stats import Stats
from keepwarm.errors import BadField, BadInput, Cancelled, Forbidden
from keepwarm.prefix.policy import Policy
from keepwarm.server.anthropic.request import CountRequest
from keepwarm.server.anthropic.routes import message_request
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.http.keys import CurrentViewer, Viewer, require_totals
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.problems import openai_body, problem_of
from keepwarm.server.http.sse import (
    STREAM_HEADERS,
    ReceiptOut,
    WholeAnswer,
    answer_docs,
    frame,
    receipt_dict,
)
from keepwarm.server.models.calls import Call, Served
from keepwarm.server.models.host import EngineHost, ObservedAnswer
from keepwarm.server.openai.routes import chat_request, completion_requests
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.server.responses.request import InputRequest
from keepwarm.server.responses.routes import Answers, prepare_response
from keepwarm.text import request as engine_request
from keepwarm.text.request import Event, Result

PROGRESS_S = 1.0  # between two events of a check

router = api_router(prefix="/v1/cache", tags=["Cache"])


class ClearBody(JsonInput):
    disk: bool = Field(default=False, description="Also delete all blocks and agents on disk.")


class RequestCountsOut(TypedDict):
    waiting: int
    prefilling: int
    decoding: int


class FiguresOut(TypedDict):
    """Where the prompt tokens of all requests to the store were found."""

    requests: int
    prompt_tokens: int
    reused: dict[str, int]  # tokens by tier
    computed: int  # tokens
    hits: dict[str, int]  # warm requests, by the tier of their larger part
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
    tiers: dict[str, dict[str, int | float | str | None]]
    writes: dict[str, int]
    written_by_day: dict[str, int]
    prompts: FiguresOut
    failed_restores: dict[str, int]  # by reason


class ClearOut(TypedDict):
    object: Literal["cache.clear"]
    removed_blocks: int
    removed_agents: int


@router.get("", dependencies=[Depends(require_totals)])
def show_cache(models: Served, viewer: CurrentViewer) -> CacheOut:
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
        },
        "counters": dict(stats.counters),
        "live": stats.live._asdict(),
        "tiers": {name: _tier(stats, name, viewer) for name in stats.tiers},
        "writes": asdict(stats.writes),
        "written_by_day": models.store.on_disk.wear.by_day(),
        "prompts": stats.counts.figures(),  # type: ignore[typeddict-item]
        "failed_restores": dict(stats.failed_restores),
    }


def _tier(stats: Stats, name: str, viewer: Viewer) -> dict[str, int | float | str | None]:
    """Hits and misses are requests, as everywhere, and not records read; those of shared tiers are
    counted for all of them together.
    """
    hits = stats.counts.hits.get(name.partition(" ")[0], 0)
    misses = stats.counts.requests - hits
    found = asdict(stats.tiers[name]) | {"hits": hits, "misses": misses}
    if not viewer.may_see_addresses:
        found.pop("last_error", None)
    return found


@router.post("/clear")
def clear(body: ClearBody, request: Request, models: Served) -> ClearOut:
    """Clear the memory tiers; with `disk`, also delete everything on disk.

    Needs the admin key if other keys' blocks would be removed.
    """
    if body.disk or request.state.tenant:
        _need_admin(request)
    models.store.flush()
    n_agents, n_blocks = models.store.on_disk.clear() if body.disk else (0, 0)
    for engine in models.engines:
        engine.clear()
    models.store.clear_memory()
    return {"object": "cache.clear", "removed_blocks": n_blocks, "removed_agents": n_agents}


class VerifyBody(JsonInput):
    fix: bool = Field(default=False, description="Quarantine damaged records.")
    stream: bool = Field(default=False, description="Send events: progress, then the result.")


class BadRecordOut(TypedDict):
    record: str
    reason: str
    quarantined: bool


class VerifyOut(TypedDict):
    object: Literal["cache.verify"]
    records: int
    n_bytes: int
    newer: int  # records and agents that only a newer Keepwarm reads
    bad: list[BadRecordOut]


class Verification:
    """One check of every record and agent, as `keepwarm cache verify` does it."""

    def __init__(self, disk_store: AgentStore, fix: bool) -> None:
        self._disk_store = disk_store
        self._fix = fix
        self._bytes = (0, 0)  # done, of all
        self._left = threading.Event()

    def run(self) -> VerifyOut:
        """Takes minutes for a large store; call it in a thread."""
        found = verify_store(self._disk_store, self._fix, self._on_progress).fields()
        return {"object": "cache.verify", **found}  # type: ignore[typeddict-item]

    async def events(self) -> AsyncIterator[bytes]:
        """Progress every second, then the result; a client that leaves ends the check."""
        work = asyncio.create_task(self.wait())
        try:
            while not (await asyncio.wait({work}, timeout=PROGRESS_S))[0]:
                yield frame(self._progress())
            error = work.exception()
            yield frame(openai_body(problem_of(error)) if error else work.result())
        finally:
            work.cancel()

    async def wait(self) -> VerifyOut:
        """The result; a task that is cancelled, as at the stop of the server, ends the check."""
        try:
            return await run_sync(self.run, abandon_on_cancel=True)
        finally:
            self._left.set()

    def _on_progress(self, done: int, total: int) -> None:
        self._bytes = (done, total)
        if self._left.is_set():
            raise Cancelled("The client left while records were being verified.")

    def _progress(self) -> dict[str, Any]:
        done, total = self._bytes
        return {"object": "cache.verify.progress", "n_bytes": done, "total_bytes": total}


@router.post("/verify", responses=answer_docs(VerifyOut))
async def verify(body: VerifyBody, request: Request, models: Served) -> Response:
    """Check every record and agent on disk. Needs the admin key.

    With `stream` an event a second has the bytes checked so far, and the last has the result.
    """
    _need_admin(request)
    check = Verification(models.store.on_disk, body.fix)
    if not body.stream:
        return JSONResponse(await check.wait())
    media_type = "text/event-stream"
    return StreamingResponse(check.events(), headers=STREAM_HEADERS, media_type=media_type)


def _need_admin(request: Request) -> None:
    if not request.state.admin:
        raise Forbidden("This needs the admin key; set KEEPWARM_ADMIN_KEY and send that key.")


class LookupOut(TypedDict):
    """How warm a prompt is: tokens by the tier that holds them."""

    object: Literal["cache.lookup"]
    prompt_tokens: int
    warm: dict[str, int]
    ttft_ms: float
    scrubbed: list[str]


class WarmOut(TypedDict):
    object: Literal["cache.warm"]
    keepwarm: ReceiptOut


class PrefillOut(TypedDict):
    """What was done with a prompt, in tokens."""

    object: Literal["cache.prefill"]
    prompt_tokens: int
    computed: int
    kept: int  # what this machine would restore after a restart: all but the last, at best
    shared: int  # what another machine would
    keepwarm: ReceiptOut


# Prompts, by the API of their body


class PromptTo(NamedTuple):
    """A prompt, and the model that it is for."""

    host: EngineHost
    request: engine_request.Request
    slot: PrepareSlot


async def _of_chat(body: ChatRequest, call: Call) -> PromptTo:
    return PromptTo(*await call.prepare(body.model, lambda: chat_request(body, call)), call.slot)


async def _of_completion(body: CompletionRequest, call: Call) -> PromptTo:
    host = await call.host(body.model)
    requests = await call.slot.build(lambda: completion_requests(body, call, host))
    if len(requests) > 1:
        raise BadField("The body has several prompts; send one at a time.", "prompt")
    return PromptTo(host, requests[0], call.slot)


async def _of_message(body: CountRequest, call: Call) -> PromptTo:
    return PromptTo(*await call.prepare(body.model, lambda: message_request(body, call)), call.slot)


async def _of_response(body: InputRequest, call: Call, answers: Answers) -> PromptTo:
    host, request, _ = await prepare_response(body, call, answers)
    return PromptTo(host, request, call.slot)


# What is done with them


async def look_up(prompt: PromptTo) -> Response:
    """Report how much of a prompt is cached; computes nothing."""
    found = await prompt.slot.run(prompt.host.engine.lookup, prompt.request)
    fields: LookupOut = {
        "object": "cache.lookup",
        "prompt_tokens": found.prompt_tokens,
        "warm": dict(found.warm),
        "ttft_ms": found.first_token_ms,
        "scrubbed": list(prompt.request.scrubbed),
    }
    return JSONResponse(fields)


async def warm(prompt: PromptTo) -> Response:
    """Prefill a prompt and store it, so that its first use is warm."""
    return WholeAnswer(await prompt.host.warm(prompt.request, prompt.slot), _warmed)


def _warmed(result: Result) -> WarmOut:
    return {"object": "cache.warm", "keepwarm": receipt_dict(result.receipt)}


async def prefill(prompt: PromptTo) -> Response:
    """Prefill a prompt and share it, so that its first use on another machine is warm."""
    engine = prompt.host.engine
    request, lane = await prompt.slot.run(lambda _: engine.resolve(prompt.request))
    if not lane.restorer.shares:
        raise BadInput(
            "This server shares nothing; set `remote` to a place that the other machine uses too, "
            "or call /v1/cache/warm."
        )
    if not request.policy.to_disk:
        raise BadInput(
            f"With the policy {request.policy.value} nothing is written, so nothing can be shared; "
            "use read-write or durable."
        )
    durable = replace(prompt.request, policy=Policy.DURABLE)
    answer = await prompt.host.warm(durable, prompt.slot)
    assert answer.prepared is not None
    tokens = answer.prepared.tokens
    restorer = lane.for_prompt(len(tokens)).restorer
    shared = SharedPrompt(answer, restorer, tokens, prompt.slot)
    return WholeAnswer(shared, shared.shape)


class RestorableTokens(NamedTuple):
    """Where tokens can be restored from."""

    kept: int
    shared: int


class SharedPrompt:
    """A prompt without an answer, which ends when the prompt is shared, or cannot be."""

    def __init__(
        self, answer: ObservedAnswer, restorer: Restorer, tokens: list[int], slot: PrepareSlot
    ) -> None:
        self._answer, self._restorer, self._tokens, self._slot = answer, restorer, tokens, slot
        self._places = RestorableTokens(0, 0)

    def cancel(self) -> None:
        self._answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._answer:
            yield event
        # The last token is always computed, so this is the place that will be restored.
        if (tried := self._restorer.share(self._tokens[:-1])) is not None:
            await asyncio.wrap_future(tried)
        self._places = await self._slot.resume(self._look)

    def _look(self) -> RestorableTokens:
        n_shared = self._restorer.n_shared(self._tokens)
        return RestorableTokens(self._restorer.n_on_disk(self._tokens), n_shared or 0)

    def shape(self, result: Result) -> PrefillOut:
        receipt = replace(result.receipt, shared=self._places.shared)
        return {
            "object": "cache.prefill",
            "prompt_tokens": receipt.prompt_tokens,
            "computed": receipt.recomputed,
            "kept": self._places.kept,
            "shared": self._places.shared,
            "keepwarm": receipt_dict(receipt),
        }


PromptOf: TypeAlias = Callable[..., Awaitable[PromptTo]]
Action: TypeAlias = Callable[[PromptTo], Awaitable[Response]]
BODIES: Mapping[str, tuple[PromptOf, str]] = {
    "": (_of_chat, "a chat completion"),
    "/completions": (_of_completion, "a text completion with a single prompt, text or token ids"),
    "/messages": (_of_message, "Anthropic's `/v1/messages`"),
    "/responses": (_of_response, "OpenAI's `/v1/responses`"),
}
ACTIONS: Mapping[str, tuple[Action, type]] = {
    "lookup": (look_up, LookupOut),
    "warm": (warm, WarmOut),
    "prefill": (prefill, PrefillOut),
}


def _add_prompt_routes() -> None:
    """Every action for every body."""
    for verb, (act, model) in ACTIONS.items():
        for path, (prompt_of, body) in BODIES.items():
            router.add_api_route(
                f"/{verb}{path}",
                _endpoint(prompt_of, act),
                methods=["POST"],
                name=f"{verb}{path.replace('/', '_')}",
                description=f"{act.__doc__} Takes the body of {body}.",
                responses={200: {"model": model}},
            )


def _endpoint(prompt_of: PromptOf, act: Action) -> Callable[..., Awaitable[Response]]:
    async def endpoint(prompt: PromptTo = Depends(prompt_of)) -> Response:  # noqa: B008
        return await act(prompt)

    return endpoint


_add_prompt_routes()
