"""The dashboard's endpoints: activity, savings, agents, the forest of blocks, misses.

A key sees its own requests, agents and blocks, and how many others there are. The admin key sees
those of all keys and the totals. No key sees the text of another key's prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated

from fastapi import Depends, Query, Request

from keepwarm import __version__
from keepwarm.errors import UnknownRequest
from keepwarm.server.clients import ServerInfo
from keepwarm.server.dashboard.agents import agents_out
from keepwarm.server.dashboard.connect import clients_out
from keepwarm.server.dashboard.forest import forest_out
from keepwarm.server.dashboard.settings import settings_out
from keepwarm.server.dashboard.shapes import (
    ActivityOut,
    CancelledRequestOut,
    ConnectOut,
    DivergenceOut,
    ForestOut,
    ListedAgentsOut,
    MissListOut,
    MissOut,
    RequestListOut,
    RequestOut,
    SavingsOut,
    SettingListOut,
    ViewerOut,
)
from keepwarm.server.dashboard.state import Dashboard
from keepwarm.server.dashboard.totals import (
    budget_out,
    condition_out,
    health_out,
    latencies_ms,
    points_out,
    store_totals_out,
    totals_out,
)
from keepwarm.server.http.body import api_router
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.request_fields import Config, Served
from keepwarm.server.http.viewer import CurrentViewer, Viewer, require_totals
from keepwarm.server.models.models import Models
from keepwarm.server.models.together import memory_of
from keepwarm.telemetry.ledger import RequestRecord
from keepwarm.telemetry.misses import PrefixMiss
from keepwarm.text.detokenize import decode

N_ENDED = 20
DAYS_SHOWN = 14

router = api_router(prefix="/v1/dashboard", tags=["Dashboard"])


@router.get("/now")
def show_now(models: Served, viewer: CurrentViewer, state: Dashboard) -> ActivityOut:
    """Waiting, running and recent requests, speed, and memory by budget."""
    stats, running = models.stats(), _running(models)
    ended = [record for record in models.ledger.records() if viewer.may_see(record.tenant)]
    return {
        "object": "dashboard.now",
        "time": time.time(),
        "model": models.first.name,
        "models": [
            {"name": name, "loaded": slot.host.loaded is not None}
            for slot in list(models.slots.all)
            for name in slot.names
        ],
        "viewer": _viewer(viewer),
        "you": _viewer(viewer),
        "running": [
            request_out(entry, viewer) for entry in running if viewer.may_see(entry.tenant)
        ],
        "ended": [request_out(entry, viewer) for entry in ended[: -N_ENDED - 1 : -1]],
        "others": Counter(entry.state for entry in running if not viewer.may_see(entry.tenant)),
        "prefilled_tokens": stats.counters["prefilled_tokens"] if viewer.may_see_totals else None,
        "generated_tokens": stats.counters["generated_tokens"] if viewer.may_see_totals else None,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "memory": [budget_out(*use) for use in memory_of(models.engines)]
        if viewer.may_see_totals
        else None,
        "condition": condition_out(stats) if viewer.may_see_totals else None,
        "revision": state.revision(stats),
    }


def _running(models: Models) -> list[RequestRecord]:
    found = [record for engine in models.engines for record in engine.running()]
    return sorted(found, key=lambda record: record.number)


def _viewer(viewer: Viewer) -> ViewerOut:
    return {
        "key_needed": viewer.key_needed,
        "admin": viewer.admin,
        "texts": viewer.may_read_texts,
        "sums": viewer.may_see_totals,
    }


def request_out(entry: RequestRecord, viewer: Viewer, log: str | None = None) -> RequestOut:
    usage = entry.usage if entry.usage and entry.usage.completion_tokens else None
    return {
        "number": entry.number,
        "request_id": entry.request_id,
        "key": viewer.key_label(entry.tenant),
        "agent": viewer.agent_name(entry.agent, entry.tenant),
        "state": entry.state,
        "seconds": entry.seconds,
        "prompt_tokens": entry.prompt_tokens,
        "answer_tokens": entry.answer_tokens,
        "ttft_ms": entry.ttft_ms,
        "first_token_ms": entry.ttft_ms,
        "tokens_per_second": usage.tokens_per_second if usage else None,
        "prefilled": entry.computed_tokens,
        "processed": entry.processed_tokens,
        "phases_ms": dict(entry.phases_ms),
        "receipt": None if entry.receipt is None else receipt_dict(entry.receipt),
        "error": entry.error if viewer.may_read(entry.tenant) else "",  # it may quote the prompt
        "ended": entry.ended,
        "log": log,
    }


@router.get("/requests")
def list_requests(
    models: Served,
    viewer: CurrentViewer,
    state: Dashboard,
    limit: Annotated[int, Query(ge=1, le=500, description="Number of requests.")] = 100,
) -> RequestListOut:
    """Recent requests, newest first, each with its line in the log."""
    lines = state.lines.by_request()
    records = [*models.ledger.records(), *_running(models)]
    seen = [entry for entry in records if viewer.may_see(entry.tenant)]
    data = [
        request_out(entry, viewer, lines.get((entry.tenant, entry.request_id)))
        for entry in seen[: -limit - 1 : -1]
    ]
    return {"object": "list", "data": data}


@router.post("/requests/{number}/cancel")
def cancel_request(number: int, models: Served, viewer: CurrentViewer) -> CancelledRequestOut:
    """Cancel a waiting or running request; what it has computed is kept."""
    records = [*models.ledger.records(), *_running(models)]
    entries = [entry for entry in records if entry.number == number]
    if not any(viewer.may_see(entry.tenant) for entry in entries):
        raise UnknownRequest(
            f"There is no request {number} of this key; it may have ended long ago."
        )
    cancelled = any(engine.cancel(number) for engine in models.engines)
    return {"object": "dashboard.request", "number": number, "cancelled": cancelled}


@router.get("/saved", dependencies=[Depends(require_totals)])
def show_saved(
    models: Served,
    state: Dashboard,
    hours: Annotated[int, Query(ge=1, le=24, description="Length of the history in hours.")] = 1,
) -> SavingsOut:
    """Prompt tokens by source over time, time saved, and disk use.

    Counted over all keys; with more than one key, the admin key is needed.
    """
    stats = models.stats()
    timeline, disk = state.history.timeline, stats.tiers["disk"]
    p50, p95 = latencies_ms(timeline, hours)
    written = sorted(models.store.on_disk.wear.by_day().items())
    return {
        "object": "dashboard.saved",
        "hours": hours,
        "points": points_out(timeline, hours),
        "today": totals_out(state.history.today()),
        "total": store_totals_out(timeline.total, stats.counts),
        "disk": budget_out("disk", disk.n_bytes, disk.max_bytes),
        "blocks": disk.blocks,
        "written_by_day": dict(written[-DAYS_SHOWN:]),
        "health": health_out(stats),
        "version": __version__,
        "started": state.started,
        "ttft_p50_ms": p50,
        "ttft_p95_ms": p95,
        "hit_rate": stats.counts.hit_rate,
        "hit_rate_from_turn_2": stats.counts.hit_rate_from_turn_2,
    }


@router.get("/forest")
async def show_forest(models: Served, viewer: CurrentViewer) -> ForestOut:
    """The stored blocks, up to 10,000, as runs of consecutive blocks."""
    return await asyncio.to_thread(forest_out, models.store, viewer)


@router.get("/agents")
async def list_agents(models: Served, viewer: CurrentViewer) -> ListedAgentsOut:
    """The agents of this key; with the admin key those of all keys."""
    data = await asyncio.to_thread(agents_out, models.store, viewer)
    return {"object": "list", "data": data}


@router.get("/connect")
def show_connect(
    request: Request,
    models: Served,
    viewer: CurrentViewer,
    model: Annotated[str | None, Query(description="The default if absent.")] = None,
) -> ConnectOut:
    """For each client the lines that point it at this server and one of its models."""
    url, listed = str(request.base_url).rstrip("/"), {each.name: each for each in models.listed()}
    name = models.first.name if model is None else model
    if name not in listed:
        raise models.unknown(name)
    key = request.state.key_name if viewer.key_needed else None
    server = ServerInfo(url, name, listed[name].n_context or models.engine.model.n_context)
    return {
        "object": "dashboard.connect",
        "url": url,
        "model": name,
        "models": list(listed),
        "key": key,
        "clients": clients_out(server, key),
    }


@router.get("/settings", dependencies=[Depends(require_totals)])
def show_settings(settings: Config) -> SettingListOut:
    """The settings in force, without secrets; with more than one key, the admin key is needed."""
    return {"object": "list", "data": settings_out(settings)}


@router.get("/misses")
async def show_misses(models: Served, viewer: CurrentViewer) -> MissListOut:
    """Recent requests that recomputed tokens of an earlier prompt, and the cost."""
    found = await asyncio.to_thread(models.ledger.misses)
    return {
        "object": "list",
        "data": [miss_out(each, viewer) for each in found if viewer.may_see(each.tenant)],
    }


def miss_out(miss: PrefixMiss, viewer: Viewer) -> MissOut:
    return {
        "number": miss.number,
        "key": viewer.key_label(miss.tenant),
        "agent": viewer.agent_name(miss.agent, miss.tenant),
        "when": miss.when,
        "prompt_tokens": miss.prompt_tokens,
        "restored": miss.restored,
        "position": miss.position,
        "wasted": miss.wasted,
        "again": miss.wasted,
        "seconds": round(miss.seconds, 3),
        "reason": miss.reason,
        "has_text": viewer.may_read(miss.tenant),
        "text": viewer.may_read(miss.tenant),
    }


@router.get("/misses/{number}")
async def show_divergence(number: int, models: Served, viewer: CurrentViewer) -> DivergenceOut:
    """Show as text where one of the caller's prompts diverges from the earlier one."""
    found = await asyncio.to_thread(models.ledger.misses)
    own = [each for each in found if each.number == number and viewer.may_read(each.tenant)]
    text = await asyncio.to_thread(divergence_out, models, own[0]) if own else None
    if text is None:
        raise UnknownRequest(f"There is no miss {number} whose text this key may read.")
    return text


def divergence_out(models: Models, miss: PrefixMiss) -> DivergenceOut | None:
    """None while the model that knows its tokens is not loaded."""
    engine = next((one for one in models.engines if one.model.name == miss.model), None)
    if engine is None:
        return None
    tokenizer = engine.model.tokenizer
    return {
        "object": "dashboard.place",
        "before": decode(tokenizer, miss.before),
        "earlier": decode(tokenizer, miss.earlier),
        "now": decode(tokenizer, miss.now),
    }
