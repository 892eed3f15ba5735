"""The dashboard's own state; it outlives the engine, which may be replaced."""

from __future__ import annotations

import asyncio
import secrets
import time
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from keepwarm.config import Settings
from keepwarm.engine.stats import Stats
from keepwarm.server.http.logs import RecentLines
from keepwarm.server.models.models import Models
from keepwarm.telemetry.history import History

SAVE_EVERY_S = 60.0


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
        ended = [stats.counters[name] for name in ("requests", "finished", "cancelled", "failed")]
        seen = repr((agents, counted, ended, stats.writes)).encode()
        return blake2b(seen, key=self._secret, digest_size=8).hexdigest()

    async def save_regularly(self) -> None:
        """Runs as long as the server."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await asyncio.to_thread(self.history.save)


def _changed_ns(directory: Path) -> int:
    """Another number when a file was published there, or removed."""
    return directory.stat().st_mtime_ns if directory.is_dir() else 0


def _state_of(request: Request) -> DashboardState:
    state: DashboardState = request.app.state.dashboard
    return state


Dashboard = Annotated[DashboardState, Depends(_state_of)]
