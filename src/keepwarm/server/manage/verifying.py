"""Checking the records of a server, and telling the client how far that is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.verify import verify_store
from keepwarm.errors import Cancelled
from keepwarm.server.http.body import JsonInput
from keepwarm.server.http.problems import openai_body, problem_of
from keepwarm.server.http.sse import frame

PROGRESS_S = 1.0  # between two events


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
        work = asyncio.create_task(asyncio.to_thread(self.run))
        try:
            while not (await asyncio.wait({work}, timeout=PROGRESS_S))[0]:
                yield frame(json.dumps(self._progress()))
            error = work.exception()
            yield frame(json.dumps(openai_body(problem_of(error)) if error else work.result()))
        finally:
            self._left.set()

    def _on_progress(self, done: int, total: int) -> None:
        self._bytes = (done, total)
        if self._left.is_set():
            raise Cancelled("The client left while records were being verified.")

    def _progress(self) -> dict[str, Any]:
        done, total = self._bytes
        return {"object": "cache.verify.progress", "n_bytes": done, "total_bytes": total}
