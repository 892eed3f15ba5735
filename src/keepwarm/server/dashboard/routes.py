"""What the dashboard shows: what goes on, what was spared, what is kept, what was computed again.

A key sees its own requests, agents and blocks; of others it is told how many there are. The admin
key sees whose everything is, what all of it sums up to, and the text of nobody's prompts but its
own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from keepwarm.config import Settings
from keepwarm.engine.engine import Engine
from keepwarm.engine.insight.history import Amounts, History, Timeline, minute_name, recording
from keepwarm.engine.insight.journal import JournalEntry
from keepwarm.engine.insight.misses import Miss
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
    HistoryPointOut,
    MissListOut,
    MissOut,
    RequestOut,
    SavingsOut,
    TotalsOut,
    WhatIfOut,
)
from keepwarm.server.host import EngineHost
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.request_fields import Host
from keepwarm.server.http.viewer import CurrentViewer, Viewer, require_totals
from keepwarm.server.openai.shapes import OpenAIErrorOut
from keepwarm.text.detokenize import decode

N_ENDED = 20
N_POINTS = 60
DAYS_SHOWN = 14
TIERS = ("live", "memory", "disk")

router = APIRouter(
    prefix="/v1/dashboard",
    tags=["Dashboard"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "It cannot be shown."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed, or is stopping."},
    },
)


class DashboardState:
    """What is remembered for the dashboard beside the engine, which may be exchanged."""

    def __init__(self, host: EngineHost, settings: Settings) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._answered: tuple[LoggedLookup | None, WhatIf] | None = None
        self.history = History(settings.home / "history.json")

    def record_history(self) -> AbstractContextManager[None]:
        """Inside, the history is kept."""
        return recording(
            self.history, lambda: self._host.engine.stats() if self._host.ready else None
        )

    def what_if(self, lookups: list[LoggedLookup], max_bytes: int | None) -> WhatIf:
        """Played again only if there are new look-ups, for that takes a while."""
        last = lookups[-1] if lookups else None
        with self._lock:
            if self._answered is None or self._answered[0] is not last:
                self._answered = last, what_if(lookups, max_bytes)
            return self._answered[1]


def _state_of(request: Request) -> DashboardState:
    state: DashboardState = request.app.state.dashboard
    return state


Dashboard = Annotated[DashboardState, Depends(_state_of)]


@router.get("/now")
def show_now(host: Host, you: CurrentViewer) -> ActivityOut:
    """Requests that wait or run, the latest that ended, speed, and memory by budget."""
    engine = host.engine
    stats, entries = engine.stats(), engine.requests()
    running = [entry for entry in entries if entry.ended is None]
    ended = [entry for entry in entries if entry.ended is not None and you.may_see(entry.tenant)]
    return {
        "object": "dashboard.now",
        "time": time.time(),
        "model": host.name,
        "you": {
            "key_needed": you.key_needed,
            "admin": you.admin,
            "texts": you.may_read_texts,
            "sums": you.may_see_totals,
        },
        "running": [_request(entry, you) for entry in running if you.may_see(entry.tenant)],
        "ended": [_request(entry, you) for entry in ended[: -N_ENDED - 1 : -1]],
        "others": Counter(entry.state for entry in running if not you.may_see(entry.tenant)),
        "prefilled_tokens": stats.counters["prefilled_tokens"] if you.may_see_totals else None,
        "generated_tokens": stats.counters["generated_tokens"] if you.may_see_totals else None,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "memory": _budgets(engine) if you.may_see_totals else None,
    }


def _budgets(engine: Engine) -> list[BudgetOut]:
    return [
        {"place": use.name, "n_bytes": use.n_bytes, "max_bytes": use.max_bytes}
        for use in engine.memory()
    ]


def _request(entry: JournalEntry, you: Viewer) -> RequestOut:
    usage = entry.usage
    answered = usage is not None and usage.completion_tokens > 0
    return {
        "number": entry.number,
        "key": you.key_label(entry.tenant),
        "agent": you.agent_name(entry.agent),
        "state": entry.state,
        "seconds": entry.seconds,
        "prompt_tokens": entry.prompt_tokens,
        "answer_tokens": entry.answer_tokens,
        "first_token_ms": usage.ttft_ms if usage and answered else None,
        "tokens_per_second": usage.tokens_per_second if usage and answered else None,
        "receipt": None if entry.receipt is None else receipt_dict(entry.receipt),
        "error": entry.error if you.may_read(entry.tenant) else "",  # it may quote the prompt
        "ended": entry.ended,
    }


@router.get("/saved", dependencies=[Depends(require_totals)])
def show_saved(
    host: Host,
    state: Dashboard,
    hours: Annotated[int, Query(ge=1, le=24, description="How far back the points go.")] = 1,
) -> SavingsOut:
    """Where prompt tokens came from over time, what that spared, and what lies on disk.

    Of all keys together; where there are several, it takes the admin key.
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
        "total": _totals(timeline.total),
        "disk": {"place": "disk", "n_bytes": disk.n_bytes, "max_bytes": disk.max_bytes},
        "blocks": disk.blocks,
        "written_by_day": dict(written[-DAYS_SHOWN:]),
        "health": _health(stats),
    }


def _points(timeline: Timeline, hours: int) -> list[HistoryPointOut]:
    """As many points for any time, each of as many minutes as there are hours."""
    last = int(time.time() // 60)
    first = last - N_POINTS * hours + 1
    return [_point(timeline, minute, hours) for minute in range(first, last + 1, hours)]


def _point(timeline: Timeline, minute: int, width: int) -> HistoryPointOut:
    names = [minute_name(60 * each) for each in range(minute, minute + width)]
    found = [timeline.minutes[name] for name in names if name in timeline.minutes]
    n = {name: sum(amounts.get(name, 0) for amounts in found) for name in (*TIERS, "prefilled")}
    return {
        "at": 60 * minute,
        "live": n["live"],
        "memory": n["memory"],
        "disk": n["disk"],
        "computed": n["prefilled"],
    }


def _totals(amounts: Amounts) -> TotalsOut:
    return {
        "reused": {tier: amounts.get(tier, 0) for tier in TIERS},
        "computed": amounts.get("prefilled", 0),
        "saved_s": amounts.get("saved_ms", 0) / 1000,
        "written_bytes": amounts.get("written_bytes", 0),
    }


def _health(stats: Stats) -> dict[str, int]:
    """What went wrong since the start; nothing of it has failed a request."""
    tiers, writes = stats.tiers.values(), stats.writes
    return {
        "set aside as damaged": sum(tier.quarantined for tier in tiers),
        "could not be read": sum(tier.errors for tier in tiers),
        "saves given up": writes.dropped + writes.over_budget,
        "saves that failed": writes.failed + stats.counters["failed_saves"],
        "let go for lack of room": sum(tier.evicted for tier in tiers),
        "audits": stats.counters["audits"],
        "audits that differed": stats.counters["drifts"],
    }


@router.get("/forest")
async def show_forest(host: Host, you: CurrentViewer) -> ForestOut:
    """All blocks that are kept, as runs that follow each other; up to 10,000 blocks."""
    return await asyncio.to_thread(forest_out, host.engine.store, you)


@router.get("/misses")
async def show_misses(host: Host, you: CurrentViewer) -> MissListOut:
    """The latest requests that computed again what an earlier prompt had, and what that cost."""
    found = await asyncio.to_thread(host.engine.misses.latest)
    return {
        "object": "list",
        "data": [_miss(each, you) for each in found if you.may_see(each.tenant)],
    }


def _miss(miss: Miss, you: Viewer) -> MissOut:
    return {
        "number": miss.number,
        "key": you.key_label(miss.tenant),
        "agent": you.agent_name(miss.agent),
        "when": miss.when,
        "prompt_tokens": miss.prompt_tokens,
        "restored": miss.restored,
        "position": miss.position,
        "again": miss.wasted,
        "seconds": round(miss.seconds, 3),
        "reason": miss.reason,
        "text": you.may_read(miss.tenant),
    }


@router.get("/misses/{number}")
async def show_divergence(number: int, host: Host, you: CurrentViewer) -> DivergenceOut:
    """Where one of them parts from the earlier prompt, as text; only the caller's own."""
    found = await asyncio.to_thread(host.engine.misses.latest)
    own = [miss for miss in found if miss.number == number and you.may_read(miss.tenant)]
    if not own:
        raise UnknownRequest(f"No miss {number} is remembered whose text is yours to read.")
    return await asyncio.to_thread(_divergence, host.engine, own[0])


def _divergence(engine: Engine, miss: Miss) -> DivergenceOut:
    tokenizer = engine.model.tokenizer
    return {
        "object": "dashboard.place",
        "before": decode(tokenizer, miss.before),
        "earlier": decode(tokenizer, miss.earlier),
        "now": decode(tokenizer, miss.now),
    }


@router.get("/what-if", dependencies=[Depends(require_totals)])
async def show_what_if(host: Host, state: Dashboard) -> WhatIfOut:
    """What another disk budget would have spared, from the look-ups of all keys since the start.

    Where there are several keys, it takes the admin key.
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
        "looks": found.n_lookups,
        "since": found.since,
        "asked_tokens": found.asked_tokens,
        "max_bytes": max_bytes,
        "outcomes": outcomes,
    }
