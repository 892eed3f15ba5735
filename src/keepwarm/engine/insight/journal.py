"""Recent requests, running and ended: numbers and names, no prompts and no answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from keepwarm.engine.jobs import Job
from keepwarm.engine.scheduler import Scheduler
from keepwarm.errors import Cancelled, KeepwarmError
from keepwarm.text.request import Receipt, Usage

RequestState = Literal["waiting", "reading", "answering", "done", "cancelled", "failed"]


@dataclass(frozen=True)
class JournalEntry:
    number: int
    seconds: float  # from its arrival until now or its end
    tenant: str
    agent: str | None
    state: RequestState
    prompt_tokens: int
    answer_tokens: int
    receipt: Receipt | None  # None while it waits
    prefilled: int = 0  # tokens of the prompt that are in its cache
    ttft_ms: float | None = None
    usage: Usage | None = None
    error: str = ""
    ended: float | None = None  # seconds since the epoch
    request_id: str = ""


def entries_of(jobs: Iterable[Job], scheduler: Scheduler) -> list[JournalEntry]:
    """Jobs that wait or run; the scheduler knows how far their prompts are."""
    done = {task.job: task.prefill.n_done for task in list(scheduler.prefilling)}
    for row in scheduler.rows:  # read later: a prompt that goes on to decode is in one of them
        done.setdefault(row.job, len(row.job.tokens))
    return [entry_of(job, prefilled=done.get(job)) for job in jobs]


def entry_of(
    job: Job, error: KeepwarmError | None = None, prefilled: int | None = None
) -> JournalEntry:
    """The state of a job, or how it ended."""
    usage = job.done().usage if job.ended and job.receipt and error is None else None
    return JournalEntry(
        number=job.number,
        seconds=round(time.perf_counter() - job.arrived, 3),
        tenant=job.request.tenant,
        agent=job.request.agent,
        state=_state(job, error),
        prompt_tokens=len(job.tokens),
        answer_tokens=sum(sequence.n_tokens for sequence in job.sequences),
        receipt=job.receipt,
        prefilled=_prefilled(job) if prefilled is None else min(prefilled, len(job.tokens)),
        ttft_ms=_ttft_ms(job),
        usage=usage,
        error="" if error is None else str(error),
        ended=time.time() if job.ended else None,
        request_id=job.request.request_id,
    )


def _prefilled(job: Job) -> int:
    """Of a job that does not run now: all once there was a token, else what it found."""
    if job.first_token is not None:
        return len(job.tokens)
    return 0 if job.receipt is None else job.receipt.cached_tokens


def _ttft_ms(job: Job) -> float | None:
    return None if job.first_token is None else round(1000 * (job.first_token - job.arrived), 1)


def _state(job: Job, error: KeepwarmError | None) -> RequestState:
    if isinstance(error, Cancelled):
        return "cancelled"
    if job.ended:
        return "done" if error is None else "failed"
    if job.receipt is None:
        return "waiting"
    return "reading" if job.first_token is None else "answering"


class Journal:
    """The last requests that ended. Written by the engine's thread, read by any."""

    def __init__(self, n_entries: int = 500) -> None:
        self._lock = threading.Lock()
        self._entries: deque[JournalEntry] = deque(maxlen=n_entries)

    def add(self, entry: JournalEntry) -> None:
        with self._lock:
            self._entries.append(entry)

    def entries(self) -> list[JournalEntry]:
        """Oldest first."""
        with self._lock:
            return list(self._entries)
