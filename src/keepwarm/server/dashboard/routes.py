"""The dashboard's endpoints: activity, savings, the forest of blocks, misses, what-if.

A key sees its own requests, agents and blocks, and how many others there are. The admin key sees
those of all keys and the totals. No key sees the text of another key's prompts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Annotated

from fastapi import Depends, Query, Request

from keepwarm.cache.counts import TIERS, PromptCounts
from keepwarm.config import Settings
from keepwarm.engine.engine import Engine
from keepwarm.engine.insight.history import Amounts, History, Timeline, minute_name, recording
from keepwarm.engine.insight.journal import JournalEntry
from keepwarm.engine.insight.misses import PrefixMiss
from keepwarm.engine.insight.stats import Stats
from keepwarm.engine.insight.whatif import LoggedLookup, WhatIf, what_if
from keepwarm.errors import UnknownRequest
from keepwarm.server.dashboard.forest import forest_out
from keepwarm.server.dashboard.shapes import (
    ActivityOut,
    BudgetOut,
    BudgetOutcomeOut,
    DivergenceOut,
    ForestOut,
    HealthCountsOut,
    HistoryPointOut,
    MissListOut,
    MissOut,
    RequestOut,
    SavingsOut,
    TotalsOut,
    ViewerOut,
    WhatIfOut,
)
from keepwarm.server.host import EngineHost
from keepwarm.server.http.body import api_router
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.request_fields import Host
from keepwarm.server.http.viewer import CurrentViewer, Viewer, require_totals
from keepwarm.server.openai.shapes import OpenAIErrorOut
from keepwarm.text.detokenize import decode

N_ENDED = 20
N_POINTS = 60
DAYS_SHOWN = 14

router = api_router(
    prefix="/v1/dashboard",
    tags=["Dashboard"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request is invalid."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is stopping."},
    },
)


class DashboardState:
    """The dashboard's own state; it outlives the engine, which may be replaced."""

    def __init__(self, host: EngineHost, settings: Settings) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._last_what_if: tuple[LoggedLookup | None, WhatIf] | None = None
        self.history = History(settings.home / "history.json")

    def record_history(self) -> AbstractContextManager[None]:
        """Inside, a thread records the history."""
        return recording(
            self.history, lambda: self._host.engine.stats() if self._host.ready else None
        )

    def what_if(self, lookups: list[LoggedLookup], max_bytes: int | None) -> WhatIf:
        """Cached until there are new lookups: replaying them takes a while."""
        last = lookups[-1] if lookups else None
        with self._lock:
            if self._last_what_if is None or self._last_what_if[0] is not last:
                self._last_what_if = last, what_if(lookups, max_bytes)
            return self._last_what_if[1]


def _state_of(request: Request) -> DashboardState:
    state: DashboardState = request.app.state.dashboard
    return state


Dashboard = Annotated[DashboardState, Depends(_state_of)]


@router.get("/now")
def show_now(host: Host, viewer: CurrentViewer) -> ActivityOut:
    """Waiting, running and recent requests, speed, and memory by budget."""
    engine = host.engine
    stats, entries = engine.stats(), engine.requests()
    running = [entry for entry in entries if entry.ended is None]
    ended = [entry for entry in entries if entry.ended is not None and viewer.may_see(entry.tenant)]
    return {
        "object": "dashboard.now",
        "time": time.time(),
        "model": host.name,
        "viewer": _viewer(viewer),
        "you": _viewer(viewer),
        "running": [_request(entry, viewer) for entry in running if viewer.may_see(entry.tenant)],
        "ended": [_request(entry, viewer) for entry in ended[: -N_ENDED - 1 : -1]],
        "others": Counter(entry.state for entry in running if not viewer.may_see(entry.tenant)),
        "prefilled_tokens": stats.counters["prefilled_tokens"] if viewer.may_see_totals else None,
        "generated_tokens": stats.counters["generated_tokens"] if viewer.may_see_totals else None,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "memory": _budgets(engine) if viewer.may_see_totals else None,
    }


def _viewer(viewer: Viewer) -> ViewerOut:
    return {
        "key_needed": viewer.key_needed,
        "admin": viewer.admin,
        "texts": viewer.may_read_texts,
        "sums": viewer.may_see_totals,
    }


def _budgets(engine: Engine) -> list[BudgetOut]:
    return [_budget(use.name, use.n_bytes, use.max_bytes) for use in engine.memory()]


def _budget(name: str, n_bytes: int, max_bytes: int | None) -> BudgetOut:
    return {"budget": name, "place": name, "n_bytes": n_bytes, "max_bytes": max_bytes}


def _request(entry: JournalEntry, viewer: Viewer) -> RequestOut:
    usage = entry.usage if entry.usage and entry.usage.completion_tokens else None
    ttft_ms = usage.ttft_ms if usage else None
    return {
        "number": entry.number,
        "request_id": entry.request_id,
        "key": viewer.key_label(entry.tenant),
        "agent": viewer.agent_name(entry.agent),
        "state": entry.state,
        "seconds": entry.seconds,
        "prompt_tokens": entry.prompt_tokens,
        "answer_tokens": entry.answer_tokens,
        "ttft_ms": ttft_ms,
        "first_token_ms": ttft_ms,
        "tokens_per_second": usage.tokens_per_second if usage else None,
        "receipt": None if entry.receipt is None else receipt_dict(entry.receipt),
        "error": entry.error if viewer.may_read(entry.tenant) else "",  # it may quote the prompt
        "ended": entry.ended,
    }


@router.get("/saved", dependencies=[Depends(require_totals)])
def show_saved(
    host: Host,
    state: Dashboard,
    hours: Annotated[int, Query(ge=1, le=24, description="Length of the history in hours.")] = 1,
) -> SavingsOut:
    """Prompt tokens by source over time, time saved, and disk use.

    Counted over all keys; with more than one key, the admin key is needed.
    """
    stats = host.engine.stats()
    state.history.observe(stats)
    timeline, disk = state.history.timeline, stats.tiers["disk"]
    written = sorted(host.engine.store.on_disk.wear.by_day().items())
    return {
        "object": "dashboard.saved",
        "hours": hours,
        "points": _points(timeline, hours),
        "today": _totals(state.history.today()),
        "total": _store_totals(timeline.total, stats.counts),
        "disk": _budget("disk", disk.n_bytes, disk.max_bytes),
        "blocks": disk.blocks,
        "written_by_day": dict(written[-DAYS_SHOWN:]),
        "health": _health(stats),
        "hit_rate": stats.counts.hit_rate,
        "hit_rate_from_turn_2": stats.counts.hit_rate_from_turn_2,
    }


def _points(timeline: Timeline, hours: int) -> list[HistoryPointOut]:
    """Always 60 points; each covers as many minutes as there are hours."""
    last = int(time.time() // 60)
    first = last - N_POINTS * hours + 1
    return [_point(timeline, minute, hours) for minute in range(first, last + 1, hours)]


def _point(timeline: Timeline, minute: int, width: int) -> HistoryPointOut:
    names = [minute_name(60 * each) for each in range(minute, minute + width)]
    found = [timeline.minutes[name] for name in names if name in timeline.minutes]
    n = {name: sum(amounts.get(name, 0) for amounts in found) for name in (*TIERS, "prompt")}
    return {
        "at": 60 * minute,
        "live": n["live"],
        "memory": n["memory"],
        "disk": n["disk"],
        "computed": _computed(n),
    }


def _computed(amounts: Amounts) -> int:
    """Prompt tokens that were reused from nowhere."""
    return max(0, amounts.get("prompt", 0) - sum(amounts.get(tier, 0) for tier in TIERS))


def _totals(amounts: Amounts) -> TotalsOut:
    return {
        "reused": {tier: amounts.get(tier, 0) for tier in TIERS},
        "computed": _computed(amounts),
        "saved_s": amounts.get("saved_ms", 0) / 1000,
        "written_bytes": amounts.get("written_bytes", 0),
    }


def _store_totals(amounts: Amounts, counts: PromptCounts) -> TotalsOut:
    """Tokens as the store has counted them; the rest as this server has."""
    tokens = {**counts.reused, "prompt": counts.prompt_tokens}
    return _totals({**amounts, **dict.fromkeys(TIERS, 0), **tokens})


def _health(stats: Stats) -> HealthCountsOut:
    """Faults since the start; none of them has failed a request."""
    tiers, writes = stats.tiers.values(), stats.writes
    quarantined = sum(tier.quarantined for tier in tiers)
    read_errors = sum(tier.errors for tier in tiers)
    dropped_saves = writes.dropped + writes.over_budget
    failed_saves = writes.failed + stats.counters["failed_saves"]
    evicted = sum(tier.evicted for tier in tiers)
    return {
        "quarantined": quarantined,
        "read_errors": read_errors,
        "dropped_saves": dropped_saves,
        "failed_saves": failed_saves,
        "failed_restores": sum(stats.failed_restores.values()),
        "evicted": evicted,
        "audits": stats.counters["audits"],
        "drifts": stats.counters["drifts"],
        "set aside as damaged": quarantined,
        "could not be read": read_errors,
        "saves given up": dropped_saves,
        "saves that failed": failed_saves,
        "let go for lack of room": evicted,
        "audits that differed": stats.counters["drifts"],
    }


@router.get("/forest")
async def show_forest(host: Host, viewer: CurrentViewer) -> ForestOut:
    """The stored blocks, up to 10,000, as runs of consecutive blocks."""
    return await asyncio.to_thread(forest_out, host.engine.store, viewer)


@router.get("/misses")
async def show_misses(host: Host, viewer: CurrentViewer) -> MissListOut:
    """Recent requests that recomputed tokens of an earlier prompt, and the cost."""
    found = await asyncio.to_thread(host.engine.misses.latest)
    return {
        "object": "list",
        "data": [_miss(each, viewer) for each in found if viewer.may_see(each.tenant)],
    }


def _miss(miss: PrefixMiss, viewer: Viewer) -> MissOut:
    return {
        "number": miss.number,
        "key": viewer.key_label(miss.tenant),
        "agent": viewer.agent_name(miss.agent),
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
async def show_divergence(number: int, host: Host, viewer: CurrentViewer) -> DivergenceOut:
    """Show as text where one of the caller's prompts diverges from the earlier one."""
    found = await asyncio.to_thread(host.engine.misses.latest)
    own = [miss for miss in found if miss.number == number and viewer.may_read(miss.tenant)]
    if not own:
        raise UnknownRequest(f"There is no miss {number} whose text this key may read.")
    return await asyncio.to_thread(_divergence, host.engine, own[0])


def _divergence(engine: Engine, miss: PrefixMiss) -> DivergenceOut:
    tokenizer = engine.model.tokenizer
    return {
        "object": "dashboard.place",
        "before": decode(tokenizer, miss.before),
        "earlier": decode(tokenizer, miss.earlier),
        "now": decode(tokenizer, miss.now),
    }


@router.get("/what-if", dependencies=[Depends(require_totals)])
async def show_what_if(host: Host, state: Dashboard) -> WhatIfOut:
    """What other disk budgets would have saved, by replaying all lookups since the start.

    Counted over all keys; with more than one key, the admin key is needed.
    """
    return await asyncio.to_thread(_what_if, host.engine, state)


def _what_if(engine: Engine, state: DashboardState) -> WhatIfOut:
    stats = engine.stats()
    max_bytes = stats.tiers["disk"].max_bytes
    found = state.what_if(engine.lookup_log.all(), max_bytes)
    now = next((o.n_tokens for o in found.outcomes if o.max_bytes == max_bytes), 0)
    outcomes: list[BudgetOutcomeOut] = [
        {
            "max_bytes": outcome.max_bytes,
            "found_tokens": outcome.n_tokens,
            "more_tokens": outcome.n_tokens - now,
            "more_seconds": round((outcome.n_tokens - now) / stats.prefill_tokens_per_s, 1),
        }
        for outcome in found.outcomes
    ]
    return {
        "object": "dashboard.what_if",
        "lookups": found.n_lookups,
        "looks": found.n_lookups,
        "since": found.since,
        "asked_tokens": found.asked_tokens,
        "max_bytes": max_bytes,
        "outcomes": outcomes,
    }
