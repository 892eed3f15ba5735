"""The dashboard's endpoints: activity, savings, agents, the forest of blocks, misses.

A key sees its own requests, agents and blocks, and how many others there are. The admin key sees
those of all keys and the totals. No key sees the text of another key's prompts.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Annotated

from fastapi import Depends, Query, Request

from keepwarm import __version__
from keepwarm.config import SECRETS
from keepwarm.engine.stats import MemoryUse
from keepwarm.errors import UnknownRequest
from keepwarm.server.admin.agents import agent_out
from keepwarm.server.dashboard.forest import NamespaceOwners, forest_out
from keepwarm.server.dashboard.state import Dashboard
from keepwarm.server.dashboard.totals import (
    JsonObject,
    condition_out,
    health_out,
    latencies_ms,
    points_out,
    store_totals_out,
    totals_out,
)
from keepwarm.server.http.body import api_router
from keepwarm.server.http.clients import CLIENTS, KEY_VARIABLE, ServerInfo
from keepwarm.server.http.keys import CurrentViewer, Viewer, require_totals
from keepwarm.server.http.request_fields import Config
from keepwarm.server.http.sse import receipt_dict
from keepwarm.server.models.calls import Served
from keepwarm.server.models.models import Models
from keepwarm.telemetry.ledger import RequestRecord
from keepwarm.telemetry.misses import PrefixMiss
from keepwarm.text.detokenize import decode

DAYS_SHOWN = 14
ONE_FOR_ALL = frozenset({"memory", "buffers"})  # the store's tier, and MLX's buffers
FOLDERS = frozenset({"home", "store", "downloads"})  # each machine has its own
TITLES = {
    "claude": "Claude Code",
    "codex": "Codex",
    "opencode": "opencode",
    "qwen": "Qwen Code",
    "aider": "aider",
    "any": "Any OpenAI, Anthropic or Ollama SDK",
}
ABOUT_ANY = "Then start the program in the same shell."

router = api_router(prefix="/v1/dashboard", tags=["Dashboard"])


@router.get("/now")
def show_now(models: Served, viewer: CurrentViewer, state: Dashboard) -> JsonObject:
    """Waiting and running requests, speed, and memory by budget."""
    stats, running = models.stats(), _running(models)
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
        "running": [
            request_out(entry, viewer) for entry in running if viewer.may_see(entry.tenant)
        ],
        "others": Counter(entry.state for entry in running if not viewer.may_see(entry.tenant)),
        "prefilled_tokens": stats.counters["prefilled_tokens"] if viewer.may_see_totals else None,
        "generated_tokens": stats.counters["generated_tokens"] if viewer.may_see_totals else None,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "memory": _memory(models) if viewer.may_see_totals else None,
        "condition": condition_out(stats) if viewer.may_see_totals else None,
        "revision": state.revision(stats),
    }


def _memory(models: Models) -> list[JsonObject]:
    """In use and at most, over all engines, by kind."""
    uses: dict[str, MemoryUse] = {}
    for use in (use for engine in models.engines for use in engine.memory()):
        before = uses.get(use.name)
        if before is None:
            uses[use.name] = use
        elif use.name not in ONE_FOR_ALL:
            most = (before.max_bytes or 0) + (use.max_bytes or 0)
            uses[use.name] = MemoryUse(use.name, before.n_bytes + use.n_bytes, most)
    return [_budget(*use) for use in uses.values()]


def _budget(name: str, n_bytes: int, max_bytes: int | None) -> JsonObject:
    return {"budget": name, "n_bytes": n_bytes, "max_bytes": max_bytes}


def _running(models: Models) -> list[RequestRecord]:
    found = [record for engine in models.engines for record in engine.running()]
    return sorted(found, key=lambda record: record.number)


def _viewer(viewer: Viewer) -> JsonObject:
    return {
        "key_needed": viewer.key_needed,
        "admin": viewer.admin,
        "texts": viewer.may_read_texts,
        "sums": viewer.may_see_totals,
    }


def request_out(entry: RequestRecord, viewer: Viewer, log: str | None = None) -> JsonObject:
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
) -> JsonObject:
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
def cancel_request(number: int, models: Served, viewer: CurrentViewer) -> JsonObject:
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
) -> JsonObject:
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
        "disk": _budget("disk", disk.n_bytes, disk.max_bytes),
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
def show_forest(models: Served, viewer: CurrentViewer) -> JsonObject:
    """The stored blocks, up to 10,000, as runs of consecutive blocks."""
    return forest_out(models.store, viewer)


@router.get("/agents")
def list_agents(models: Served, viewer: CurrentViewer) -> JsonObject:
    """The agents of this key; with the admin key those of all keys."""
    disk_store = models.store.on_disk
    owners = NamespaceOwners(disk_store, viewer)
    found = []
    for agent in disk_store.agents.all():
        tenant = owners.tenant_of(agent.namespace)
        if viewer.may_see(tenant):
            listed = agent_out(disk_store, agent, tenant or "")
            found.append({**listed, "key": viewer.key_label(tenant)})
    return {"object": "list", "data": found}


@router.get("/connect")
def show_connect(
    request: Request,
    models: Served,
    viewer: CurrentViewer,
    model: Annotated[str | None, Query(description="The default if absent.")] = None,
) -> JsonObject:
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
        "clients": _clients(server, key),
    }


def _clients(server: ServerInfo, key_name: str | None) -> list[JsonObject]:
    """`key_name` is None where the server needs no key."""
    key = None if key_name is None else f'"${KEY_VARIABLE}"'
    first = [] if key_name is None else [f"export {KEY_VARIABLE}=…  # the key {key_name}"]
    return [*_launched(server, key, first), _curl(server, key, first)]


def _launched(server: ServerInfo, key: str | None, first: list[str]) -> Iterator[JsonObject]:
    for name, set_up in CLIENTS.items():
        setup = set_up(server)
        notes = [warning.removeprefix("Warning: ") for warning in setup.warnings(server)]
        yield {
            "client": name,
            "title": TITLES.get(name, name),
            "lines": [*first, *setup.shell_lines(setup.command, key)],
            "notes": [*notes, *([] if setup.command else [ABOUT_ANY])],
        }


def _curl(server: ServerInfo, key: str | None, first: list[str]) -> JsonObject:
    messages = [{"role": "user", "content": "Say hello."}]
    body = json.dumps({"model": server.model, "messages": messages, "max_tokens": 32})
    header = [] if key is None else [f'  -H "Authorization: Bearer ${KEY_VARIABLE}" \\']
    return {
        "client": "curl",
        "title": "curl",
        "lines": [
            *first,
            f"curl {server.url}/v1/chat/completions \\",
            "  -H 'Content-Type: application/json' \\",
            *header,
            f"  -d '{body}'",
        ],
        "notes": [],
    }


@router.get("/settings", dependencies=[Depends(require_totals)])
def show_settings(settings: Config) -> JsonObject:
    """The settings in force, without secrets; with more than one key, the admin key is needed."""
    defaults = {
        field.name: field.default for field in fields(settings) if field.name not in FOLDERS
    }
    named = [(field.name, getattr(settings, field.name)) for field in fields(settings)]
    data = [_setting(name, value, defaults.get(name, MISSING)) for name, value in named]
    return {"object": "list", "data": data}


def _setting(name: str, value: object, default: object) -> JsonObject:
    return {
        "name": name,
        "value": ("set" if value else "") if name in SECRETS else _text(value),
        "default": None if default is MISSING else _text(default),
        "changed": default is not MISSING and value != default,
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


@router.get("/misses")
def show_misses(models: Served, viewer: CurrentViewer) -> JsonObject:
    """Recent requests that recomputed tokens of an earlier prompt, what it cost, and where the
    prompts differ: as text for the key that sent them.
    """
    found = [miss for miss in models.ledger.misses() if viewer.may_see(miss.tenant)]
    return {"object": "list", "data": [miss_out(miss, viewer, models) for miss in found]}


def miss_out(miss: PrefixMiss, viewer: Viewer, models: Models) -> JsonObject:
    return {
        "number": miss.number,
        "key": viewer.key_label(miss.tenant),
        "agent": viewer.agent_name(miss.agent, miss.tenant),
        "when": miss.when,
        "prompt_tokens": miss.prompt_tokens,
        "restored": miss.restored,
        "position": miss.position,
        "wasted": miss.wasted,
        "seconds": round(miss.seconds, 3),
        "reason": miss.reason,
        "text": _divergence(miss, models) if viewer.may_read(miss.tenant) else None,
    }


def _divergence(miss: PrefixMiss, models: Models) -> dict[str, str] | None:
    """None while the model that knows its tokens is not loaded."""
    engine = next((one for one in models.engines if one.model.name == miss.model), None)
    if engine is None:
        return None
    parts = {"before": miss.before, "earlier": miss.earlier, "now": miss.now}
    return {name: decode(engine.model.tokenizer, tokens) for name, tokens in parts.items()}
