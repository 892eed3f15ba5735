"""What follows an answer and touches files: on a thread of its own, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepwarm.engine.jobs import Job, Sequence
from keepwarm.engine.store import Store

LOG = logging.getLogger(__name__)


class Chores:
    def __init__(self, store: Store, end: Callable[[Job], None]) -> None:
        """`end` says the last word to whoever wanted the answer to be on disk first."""
        self._store = store
        self._end = end
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-chores")

    def after(self, sequence: Sequence) -> None:
        """A sequence is over: note whose it was, hold what was marked."""
        job = sequence.job
        if not job.request.policy.to_disk:
            return
        tokens = list(sequence.tokens)
        if job.request.agent and sequence.choice == 0:
            self._pool.submit(self._do, self._advance, job, tokens)
        if job.request.marks:
            self._pool.submit(self._do, self._hold, job, tokens)

    def after_reading(self, job: Job) -> None:
        """A prompt was read for its own sake: hold what was marked."""
        if job.request.policy.to_disk and job.request.marks:
            self._pool.submit(self._do, self._hold, job, list(job.tokens))

    def end_durably(self, job: Job) -> None:
        """Say the last word when all that was kept so far is on disk."""
        self._pool.submit(self._end_durably, job)

    def settle(self) -> None:
        """Return once all that was to be done so far is."""
        self._pool.submit(_nothing).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _do(self, note: Callable[[Job, list[int]], None], job: Job, tokens: list[int]) -> None:
        """Once the blocks are on disk; what fails is told, and costs nobody an answer."""
        try:
            self._store.flush()
            note(job, tokens)
        except Exception:
            LOG.exception("what agent %r has said could not be noted", job.request.agent)

    def _advance(self, job: Job, tokens: list[int]) -> None:
        agents = self._store.shelf.agents
        agents.advance(str(job.request.agent), job.home.manager.namespace, tokens)

    def _hold(self, job: Job, tokens: list[int]) -> None:
        marks = self._store.shelf.marks
        marks.sweep()
        for place, ttl_s in job.prepared.marks:
            marks.hold(job.home.manager.namespace, tokens, place, ttl_s)

    def _end_durably(self, job: Job) -> None:
        try:
            self._store.flush()
        finally:
            self._end(job)


def _nothing() -> None:
    return
