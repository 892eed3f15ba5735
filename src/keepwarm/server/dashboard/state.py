"""The dashboard's own state; it outlives the engine, which may be replaced."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from keepwarm.config import Settings
from keepwarm.engine.insight.history import History, recording
from keepwarm.engine.insight.stats import Stats
from keepwarm.engine.insight.whatif import LoggedLookup, WhatIf, what_if
from keepwarm.server.models.models import Models
from keepwarm.server.request_log import RecentLines
from keepwarm.text.request import Usage


class DashboardState:
    def __init__(self, models: Models, settings: Settings, lines: RecentLines) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._last_what_if: tuple[LoggedLookup | None, WhatIf] | None = None
        self._secret = secrets.token_bytes(16)
        self.started = time.time()
        self.lines = lines
        self.history = History(settings.home / "history.json")
        models.on_answer(self._on_answer)

    def _on_answer(self, usage: Usage) -> None:
        if usage.completion_tokens:
            self.history.add_latency(usage.ttft_ms)

    def revision(self, stats: Stats) -> str:
        """Another one whenever requests, blocks or agents may have changed.

        It is hashed with a secret, so that a key learns nothing of other keys from it.
        """
        agents = _changed_ns(self._models.store.on_disk.disk.root / "agents")
        counted = [(t.puts, t.evicted, t.quarantined, t.blocks) for t in stats.tiers.values()]
        ended = [stats.counters[name] for name in ("requests", "finished", "cancelled", "failed")]
        seen = repr((agents, counted, ended, stats.writes)).encode()
        return blake2b(seen, key=self._secret, digest_size=8).hexdigest()

    def record_history(self) -> AbstractContextManager[None]:
        """Inside, a thread records the history."""
        return recording(self.history, lambda: self._models.stats() if self._models.ready else None)

    def what_if(self, lookups: list[LoggedLookup], max_bytes: int | None) -> WhatIf:
        """Cached until there are new lookups: replaying them takes a while."""
        last = lookups[-1] if lookups else None
        with self._lock:
            if self._last_what_if is None or self._last_what_if[0] is not last:
                self._last_what_if = last, what_if(lookups, max_bytes)
            return self._last_what_if[1]


def _changed_ns(directory: Path) -> int:
    """Another number when a file was published there, or removed."""
    return directory.stat().st_mtime_ns if directory.is_dir() else 0


def _state_of(request: Request) -> DashboardState:
    state: DashboardState = request.app.state.dashboard
    return state


Dashboard = Annotated[DashboardState, Depends(_state_of)]
