"""The dashboard: its page, and what it shows: activity, savings, agents, blocks, misses.

A key sees its own requests, agents and blocks, and how many others there are. The admin key sees
those of all keys and the totals. No key sees the text of another key's prompts.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import MISSING, fields, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool

from keepwarm import __version__
from keepwarm.agents.agent import Agent, Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.forest import BlockRun, build_forest
from keepwarm.config import SECRETS, Settings
from keepwarm.device.memory import most_weights
from keepwarm.engine.stats import MemoryUse, Stats
from keepwarm.errors import BadInput, UnknownRequest
from keepwarm.models import hub
from keepwarm.models.choices import ModelChoice, ModelMemory, all_choices
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.prefix.fingerprint import tenant_of
from keepwarm.server.admin.agents import agent_out
from keepwarm.server.http.body import LateRoute, api_router
from keepwarm.server.http.clients import CLIENTS, KEY_VARIABLE, ServerInfo
from keepwarm.server.http.keys import (
    CurrentViewer,
    Viewer,
    require_totals,
    tenant_agent_id,
)
from keepwarm.server.http.logs import RecentLines
from keepwarm.server.http.request_fields import Config
from keepwarm.server.http.sse import receipt_dict
from keepwarm.server.models.calls import Served
from keepwarm.server.models.models import ListedModel, Models
from keepwarm.server.ollama.models import ModelFacts
from keepwarm.store.counts import ALL_TIERS, TIERS, PromptCounts
from keepwarm.store.tier import SharedStats, StoredBlock
from keepwarm.telemetry.ledger import (
    OUTCOMES,
    Amounts,
    History,
    RequestRecord,
    Timeline,
    minute_name,
    percentile_ms,
)
from keepwarm.telemetry.misses import PrefixMiss
from keepwarm.text.detokenize import decode

JsonObject: TypeAlias = dict[str, Any]
SAVE_EVERY_S = 60.0
DAYS_SHOWN = 14
ID_DIGITS = 16
NAMESPACE_DIGITS = 8
N_POINTS = 60
AMOUNTS = (*ALL_TIERS, "prefilled", "generated", *OUTCOMES.values())
# What turns the status red, and what amber; a count of each, in words for one and for several.
RED = {
    "quarantined": ("damaged record was", "damaged records were", "quarantined; check the disk"),
    "failed_saves": ("save", "saves", "failed; check the disk and its free space"),
    "drifts": ("audit", "audits", "differed from a cold run; see the log"),
}
AMBER = {
    "read_errors": ("record", "records", "could not be read"),
    "bad_shared": ("record of a shared tier was", "records of shared tiers were", "damaged"),
    "disk_full": ("save was", "saves were", "dropped: the store is full; raise disk_bytes"),
    "daily_budget": ("save was", "saves were", "dropped; raise disk_writes_per_day"),
    "queue_full": ("save was", "saves were", "dropped: the disk is slower than the model"),
    "failed_restores": ("restore", "restores", "failed; the tokens were computed"),
}
ONE_FOR_ALL = frozenset({"memory", "buffers"})  # the store's tier, and MLX's buffers
FOLDERS = frozenset({"home", "store", "downloads"})  # each machine has its own
ADDRESSES = frozenset({"remote", "kv_events"})
TITLES = {
    "claude": "Claude Code",
    "codex": "Codex",
    "opencode": "opencode",
    "qwen": "Qwen Code",
    "aider": "aider",
    "any": "Any OpenAI, Anthropic or Ollama SDK",
}
ABOUT_ANY = "Then start the program in the same shell."


class DashboardState:
    def __init__(self, models: Models, settings: Settings, lines: RecentLines) -> None:
        self._models = models
        self._secret = secrets.token_bytes(16)
        self.started = time.time()
        self.lines = lines
        self.history = History(settings.home / "history.json", models.ledger)

    def revision(self, stats: Stats) -> str:
        """Another one whenever requests, blocks or agents may have changed.

        It is hashed with a secret, so that a key learns nothing of other keys from it.
        """
        agents = _changed_ns(self._models.store.on_disk.disk.root / "agents")
        counted = [(t.puts, t.evicted, t.quarantined, t.blocks) for t in stats.tiers.values()]
        ended = [stats.counters[name] for name in ("requests", *OUTCOMES.values())]
        seen = repr((agents, counted, ended, stats.writes)).encode()
        return blake2b(seen, key=self._secret, digest_size=8).hexdigest()

    async def save_regularly(self) -> None:
        """Runs as long as the server."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await run_in_threadpool(self.history.save)


def _changed_ns(directory: Path) -> int:
    """Another number when a file was published there, or removed."""
    return directory.stat().st_mtime_ns if directory.is_dir() else 0


def _state_of(request: Request) -> DashboardState:
    state: DashboardState = request.app.state.dashboard
    return state


Dashboard = Annotated[DashboardState, Depends(_state_of)]


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
        "accepted_tokens": stats.counters["accepted_tokens"] if viewer.may_see_totals else None,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "memory": _memory(models) if viewer.may_see_totals else None,
        "condition": condition_out(stats, viewer) if viewer.may_see_totals else None,
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
        "keys": viewer.key_needed or viewer.admin or not viewer.may_see_addresses,
        "admin": viewer.admin,
        "texts": viewer.may_read_texts,
        "sums": viewer.may_see_totals,
    }


class Titles:
    """Titles of agents, each read once; they quote prompts, so only those the viewer may read."""

    def __init__(self, models: Models, viewer: Viewer) -> None:
        self._agents = models.store.on_disk.agents
        self._ledger = models.ledger
        self._viewer = viewer
        self.of = cache(self._of)

    def _of(self, agent: str | None, tenant: str) -> str:
        if agent is None or not self._viewer.may_read(tenant):
            return ""
        version = self._agents.version(agent)
        if version is None:
            return self._read(agent)
        return self._ledger.title_of(agent, version, lambda: self._read(agent))

    def _read(self, agent: str) -> str:
        try:
            return self._agents.show(agent).title
        except BadInput:  # its first turn has not ended, or it was deleted
            return ""


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
        "status": entry.status,
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
    titles = Titles(models, viewer)
    data = [
        request_out(entry, viewer, lines.get((entry.tenant, entry.request_id)))
        | {"title": titles.of(entry.agent, entry.tenant)}
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
    since_start: Annotated[bool, Query(description="No latencies from before the start.")] = False,
) -> JsonObject:
    """Prompt tokens by source over time, time saved, and disk use.

    Counted over all keys; with more than one key, the admin key is needed.
    """
    stats = models.stats()
    timeline, disk = state.history.timeline, stats.tiers["disk"]
    p50, p95 = latencies_ms(timeline, hours, state.started if since_start else 0.0)
    written = sorted(models.store.on_disk.wear.by_day().items())
    return {
        "object": "dashboard.saved",
        "hours": hours,
        "points": points_out(timeline, hours),
        "today": totals_out(state.history.today()),
        "total": store_totals_out(timeline.total, stats.counts),
        "disk": _budget("disk", disk.n_bytes, disk.max_bytes),
        "blocks": disk.blocks,
        "lossy_bytes": models.store.on_disk.lossy_bytes(),
        "written_by_day": dict(written[-DAYS_SHOWN:]),
        "health": health_out(stats),
        "version": __version__,
        "started": state.started,
        "ttft_p50_ms": p50,
        "ttft_p95_ms": p95,
        "hit_rate": stats.counts.hit_rate,
        "hit_rate_from_turn_2": stats.counts.hit_rate_from_turn_2,
    }


# Sums over all keys


def points_out(timeline: Timeline, hours: int) -> list[JsonObject]:
    """Always 60 points; each covers as many minutes as there are hours."""
    last = int(time.time() // 60)
    first = last - N_POINTS * hours + 1
    return [_point(timeline, minute, hours) for minute in range(first, last + 1, hours)]


def latencies_ms(timeline: Timeline, hours: int, since: float) -> tuple[float | None, float | None]:
    """Median and 95th percentile of the time to the first token in the last hours, since then."""
    last = int(time.time() // 60)
    first = max(last - N_POINTS * hours + 1, int(since // 60))
    n = _sum(timeline, range(first, last + 1))
    return percentile_ms(n, 0.5), percentile_ms(n, 0.95)


def _sum(timeline: Timeline, minutes: range) -> Amounts:
    n: dict[str, int] = {}
    for minute in minutes:
        for name, amount in timeline.minutes.get(minute_name(60 * minute), {}).items():
            n[name] = n.get(name, 0) + amount
    return n


def _point(timeline: Timeline, minute: int, width: int) -> JsonObject:
    n = _sum(timeline, range(minute, minute + width))
    return {
        "at": 60 * minute,
        **{name: n.get(name, 0) for name in AMOUNTS},
        "computed": _computed(n),
        "ttft_p50_ms": percentile_ms(n, 0.5),
        "ttft_p95_ms": percentile_ms(n, 0.95),
    }


def _computed(amounts: Amounts) -> int:
    """Prompt tokens that were reused from nowhere."""
    return max(0, amounts.get("prompt", 0) - sum(amounts.get(tier, 0) for tier in ALL_TIERS))


def totals_out(amounts: Amounts) -> JsonObject:
    return {
        "reused": {t: n for t in ALL_TIERS if (n := amounts.get(t, 0)) or t in TIERS},
        "computed": _computed(amounts),
        "saved_s": _saved_s(amounts),
    }


def _saved_s(amounts: Amounts) -> float | None:
    """Where it is known of no request that reused anything: None."""
    saved_ms = amounts.get("saved_ms", 0)
    return None if amounts.get("unknown_savings") and not saved_ms else saved_ms / 1000


def store_totals_out(amounts: Amounts, counts: PromptCounts) -> JsonObject:
    """Tokens as the store has counted them; the rest as this server has."""
    tokens = {**counts.reused, "prompt": counts.prompt_tokens}
    return totals_out({**amounts, **dict.fromkeys(TIERS, 0), **tokens})


def health_out(stats: Stats) -> dict[str, int]:
    """Faults since the start; none of them has failed a request."""
    tiers, writes = stats.tiers.values(), stats.writes
    shared = [tier for tier in tiers if isinstance(tier, SharedStats)]  # its state tells of errors
    own = [tier for tier in tiers if not isinstance(tier, SharedStats)]
    return {
        "quarantined": sum(tier.quarantined for tier in own),
        "read_errors": sum(tier.errors for tier in own),
        "bad_shared": sum(tier.quarantined for tier in shared),
        "dropped_saves": sum(writes.lost.values()) - writes.failed,
        "failed_saves": writes.failed + stats.counters["failed_saves"],
        "failed_restores": sum(stats.failed_restores.values()),
        "evicted": sum(tier.evicted for tier in tiers),
        "audits": stats.counters["audits"],
        "drifts": stats.counters["drifts"],
    }


def condition_out(stats: Stats, viewer: Viewer) -> JsonObject:
    """Whether the server is well, and if not, why."""
    counts = health_out(stats) | stats.writes.lost
    red, amber = (_reasons(counts, kinds) for kinds in (RED, AMBER))
    for name, tier in stats.tiers.items():
        if isinstance(tier, SharedStats) and tier.state in ("open", "refused"):
            why = f": {tier.last_error}" if viewer.may_see_addresses else "."
            amber.append(f"The tier {name} is not used ({tier.state}){why}")
    return {"level": "red" if red else "amber" if amber else "green", "reasons": [*red, *amber]}


def _reasons(counts: dict[str, int], kinds: dict[str, tuple[str, str, str]]) -> list[str]:
    return [
        f"{n:,} {one if n == 1 else many} {what}."
        for name, (one, many, what) in kinds.items()
        if (n := counts[name])
    ]


# Blocks, agents, clients, settings, misses


class NamespaceOwners:
    """Finds the tenant of a namespace, which is part of its salt."""

    def __init__(self, disk_store: AgentStore, viewer: Viewer) -> None:
        self._viewer = viewer
        self._disk_store = disk_store
        self.tenant_of = cache(self._tenant_of)
        self.hidden: set[BlockKey] = set()

    def visible(self, blocks: Iterable[StoredBlock]) -> Iterator[StoredBlock]:
        """Yield the viewer's blocks; count the others in `hidden`."""
        for block in blocks:
            if self._viewer.may_see(self.tenant_of(block.namespace)):
                yield block
            else:
                self.hidden.add(block.key)

    def sees(self, agent: Agent) -> bool:
        return self._viewer.may_see(self.tenant_of(agent.namespace))

    def _tenant_of(self, name: Namespace) -> str | None:
        try:
            return tenant_of(self._disk_store.identity_of(name).salt)
        except BadInput:
            return None


def forest_out(models: Models, viewer: Viewer) -> JsonObject:
    """Reads the index of every tier; call it in a thread."""
    store = models.store
    owners = NamespaceOwners(store.on_disk, viewer)
    heads = _running_heads(models, viewer)
    agents = _with_heads((a for a in store.on_disk.agents.all() if owners.sees(a)), heads)
    visible = {name: owners.visible(blocks) for name, blocks in store.blocks().items()}
    planned = [head.prompt for head in heads.values() if head.is_stored]
    forest = build_forest(visible, agents, planned)
    positions = {agent.id: position for position, agent in enumerate(agents)}
    rows = {run.key: row for row, run in enumerate(forest.runs)}
    named = [
        {
            "id": viewer.agent_name(a.id, owners.tenant_of(a.namespace)) or "",
            "title": a.title if viewer.may_read(owners.tenant_of(a.namespace)) else "",
            "model": a.head.model,
            "key": viewer.key_label(owners.tenant_of(a.namespace)),
        }
        for a in agents
    ]
    return {
        "object": "dashboard.forest",
        "agents": named,
        "runs": [_run(run, rows, positions) for run in forest.runs],
        "requests": [
            {"number": number, "agent": positions[head.name]} for number, head in heads.items()
        ],
        "blocks": forest.n_blocks,
        "omitted_blocks": forest.left_out,
        "other_blocks": len(owners.hidden),
    }


class RunningHead(NamedTuple):
    """Where a running request ends."""

    name: str  # of its agent, or its number if it has none, or none of its own
    prompt: Branch
    is_stored: bool


def _running_heads(models: Models, viewer: Viewer) -> dict[int, RunningHead]:
    """By number of request."""
    prompts: dict[int, Branch] = {}
    for engine in models.engines:
        prompts |= engine.prompts(viewer.may_see)
    heads: dict[int, RunningHead] = {}
    agents: set[str | None] = {None}
    for entry in _running(models):
        if entry.number in prompts:
            own = f"#{entry.number}" if entry.agent in agents else str(entry.agent)
            heads[entry.number] = RunningHead(own, prompts[entry.number], entry.is_stored)
            agents.add(entry.agent)
    return heads


def _with_heads(agents: Iterable[Agent], heads: dict[int, RunningHead]) -> list[Agent]:
    """An agent with a running request ends where the prompt does; its own end is a side."""
    found = {agent.id: agent for agent in agents}
    for name, head, _ in heads.values():
        known = found.get(name)
        sides = known.branches if known else ()
        found[name] = replace(known or Agent(name, head), head=head, sides=sides)
    return list(found.values())


def _run(run: BlockRun, rows: dict[BlockKey, int], positions: dict[str, int]) -> JsonObject:
    return {
        "id": run.key.hex()[:ID_DIGITS],
        "parent": None if run.parent is None else rows[run.parent],
        "namespace": run.namespace.hex()[:NAMESPACE_DIGITS],
        "first_block": run.number,
        "blocks": run.n_blocks,
        "tokens": run.n_tokens,
        "bytes": run.n_bytes,
        "oldest": run.oldest,
        "used": run.used,
        "memory": "memory" in run.tiers,
        "disk": "disk" in run.tiers,
        "pinned": run.pinned,
        "agents": [positions[agent] for agent in run.agents],
        "ends": [positions[agent] for agent in run.ends],
    }


@router.get("/forest")
def show_forest(models: Served, viewer: CurrentViewer) -> JsonObject:
    """The stored blocks, up to 10,000, as runs of consecutive blocks, and those that running
    requests will have: in no tier yet.
    """
    return forest_out(models, viewer)


@router.get("/agents")
def list_agents(models: Served, viewer: CurrentViewer) -> JsonObject:
    """The agents of this key; with the admin key those of all keys."""
    disk_store = models.store.on_disk
    owners = NamespaceOwners(disk_store, viewer)
    found, serves = [], cache(models.serves)
    for agent in disk_store.agents.all("" if viewer.admin else tenant_agent_id(viewer.tenant, "")):
        tenant = owners.tenant_of(agent.namespace)
        if viewer.may_see(tenant):
            listed = agent_out(models.store, agent, tenant or "", viewer.may_read(tenant))
            is_served = serves(listed["model"])
            found.append({**listed, "key": viewer.key_label(tenant), "is_served": is_served})
    return {"object": "list", "data": found}


@router.get("/models")
def show_models(
    request: Request, models: Served, viewer: CurrentViewer, settings: Config
) -> JsonObject:
    """The models of this server with what they take, and those that fit into its memory."""
    machine, pulls = ModelMemory.here(), request.app.state.pulls
    weights = sum(slot.n_bytes for slot in list(models.slots.all))
    limit = settings.weights_bytes or most_weights()
    return {
        "object": "dashboard.models",
        "data": [_model(models, listed) for listed in models.all_listed()],
        "weights": _budget("weights", weights, limit) if viewer.may_see_totals else None,
        "pulling": pulls.so_far(),
        "machine_bytes": machine.n_bytes,
        "on_cpu": machine.on_cpu,
        "fitting": [_choice(models, each, machine) for each in machine.fitting()],
        "n_choices": len(all_choices()),
    }


def _model(models: Models, listed: ListedModel) -> JsonObject:
    slot = models.known(listed.name)
    until = models.slots.kept_until(slot) if slot else math.inf
    return {
        "name": listed.name,
        "loaded": listed.is_loaded,
        "loading": slot.host.progress if slot and slot.host.is_loading else None,
        "offered": slot is None or slot.is_offered,
        "pinned": slot is not None and slot.pinned,
        "n_bytes": slot.n_bytes if slot else 0,
        "file_bytes": ModelFacts.of(models, listed).size,
        "n_context": listed.n_context,
        "idle_s": None if math.isinf(until) else max(0.0, until - time.monotonic()),
    }


def _choice(models: Models, choice: ModelChoice, machine: ModelMemory) -> JsonObject:
    return {
        "id": choice.id,
        "licence": choice.licence,
        "weights_bytes": choice.weights_bytes,
        "n_tokens": choice.n_tokens(machine.n_bytes),
        "n_context": choice.n_context,
        "here": hub.cached(choice.id) is not None,
        "may_load": models.may_load(choice.id),
    }


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
            "notes": notes,
            "then": "" if setup.command else ABOUT_ANY,
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
        "then": "",
    }


@router.get("/settings", dependencies=[Depends(require_totals)])
def show_settings(settings: Config, viewer: CurrentViewer) -> JsonObject:
    """The active settings, without secrets; keys that share a cache see no addresses either."""
    defaults = {
        field.name: field.default for field in fields(settings) if field.name not in FOLDERS
    }
    named = [(field.name, getattr(settings, field.name)) for field in fields(settings)]
    hidden = SECRETS if viewer.may_see_addresses else SECRETS | ADDRESSES
    data = [
        _setting(name, value, defaults.get(name, MISSING), name in hidden) for name, value in named
    ]
    return {"object": "list", "data": data}


def _setting(name: str, value: object, default: object, is_hidden: bool) -> JsonObject:
    return {
        "name": name,
        "value": ("set" if value else "") if is_hidden else _text(value),
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
    titles = Titles(models, viewer)
    data = [
        miss_out(miss, viewer, models)
        | {"title": titles.of(miss.agent, miss.tenant), "stored": miss.agent}
        for miss in found
    ]
    return {"object": "list", "data": data}


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


# The pages: the dashboard and the API's documentation. Their files hold no data, and need no key.

PATH = "/dashboard"
DOCS_PATH = "/docs"
SCHEMA_PATH = "/openapi.json"
METHODS = ["GET", "HEAD"]  # Claude Code probes the server with HEAD /
FILES = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from other origins, no inline scripts or styles, no framing.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_router() -> APIRouter:
    """A route for both pages, the API's schema and every file; `/` leads browsers there."""
    router = APIRouter(include_in_schema=False, route_class=LateRoute)
    router.add_api_route("/", _root, methods=METHODS)
    router.add_api_route(PATH, _serve(FILES / "index.html"), methods=METHODS)
    router.add_api_route(DOCS_PATH, _serve(FILES / "docs.html"), methods=METHODS)
    router.add_api_route(SCHEMA_PATH, _schema)
    for file in sorted(FILES.iterdir()):
        router.add_api_route(f"{PATH}/{file.name}", _serve(file), methods=METHODS)
    return router


async def _root(request: Request) -> Response:
    """Browsers see the dashboard; Ollama's clients look whether there is a server."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(PATH)
    return PlainTextResponse("Ollama is running")


async def _schema(request: Request) -> Response:
    """Made when it is first asked for, which takes a quarter of a second."""
    return JSONResponse(await run_in_threadpool(request.app.openapi))


def _serve(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """Compressed once; a browser that has it is told so."""
    plain = file.read_bytes()
    compressed = gzip.compress(plain, mtime=0)
    tag = f'W/"{blake2b(plain, digest_size=8).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag, "Vary": "Accept-Encoding"}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(plain, headers=headers, media_type=TYPES[file.suffix])
        encoded = {**headers, "Content-Encoding": "gzip"}
        return Response(compressed, headers=encoded, media_type=TYPES[file.suffix])

    return answer
