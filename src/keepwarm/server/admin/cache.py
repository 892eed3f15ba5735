"""The cache API: statistics, clear, verify."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Literal

from anyio.to_thread import run_sync
from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.verify import verify_store
from keepwarm.engine.stats import Stats
from keepwarm.errors import Cancelled, Forbidden
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.http.keys import CurrentViewer, Viewer, require_totals
from keepwarm.server.http.problems import openai_body, problem_of
from keepwarm.server.http.sse import STREAM_HEADERS, answer_docs, frame
from keepwarm.server.models.calls import Served
from keepwarm.store.counts import PromptCounts

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
        "prompts": figures_out(stats.counts),
        "failed_restores": dict(stats.failed_restores),
    }


def figures_out(counts: PromptCounts) -> FiguresOut:
    return counts.figures()  # type: ignore[return-value]


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
                yield frame(json.dumps(self._progress()))
            error = work.exception()
            yield frame(json.dumps(openai_body(problem_of(error)) if error else work.result()))
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
