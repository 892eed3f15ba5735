"""What follows an answer and touches files: on a thread of its own, one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from keepwarm.cache.store import Store
from keepwarm.engine.jobs import Job, Sequence

EXPIRY_S = 60.0  # how often agents are looked at that may be past their retention
GRACE_S = 600.0  # an answer under way may be an agent's next use, and is noted when it has ended
LOG = logging.getLogger(__name__)


class Chores:
    def __init__(self, store: Store, end: Callable[[Job], None]) -> None:
        """`end` says the last word to whoever wanted the answer to be on disk first."""
        self._store = store
        self._end = end
        self._next_expiry = 0.0  # by the monotonic clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-chores")

    def after(self, sequence: Sequence) -> None:
        """A sequence is over: note whose it was, hold what was marked."""
        job = sequence.job
        if not job.request.policy.to_disk:
            return
        tokens = list(sequence.tokens)
        if job.request.agent and sequence.choice == 0:
            self._pool.submit(self._do, self._advance, job, tokens)
        if job.request.breakpoints:
            self._pool.submit(self._do, self._hold, job, tokens)

    def after_reading(self, job: Job) -> None:
        """A prompt was read for its own sake: hold what was marked."""
        if job.request.policy.to_disk and job.request.breakpoints:
            self._pool.submit(self._do, self._hold, job, list(job.tokens))

    def end_durably(self, job: Job) -> None:
        """Say the last word when all that was kept so far is on disk, and whether that is all."""
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
        else:
            self._expire()

    def _advance(self, job: Job, tokens: list[int]) -> None:
        agents = self._store.on_disk.agents
        agents.advance(str(job.request.agent), job.home.manager.namespace, tokens)

    def _hold(self, job: Job, tokens: list[int]) -> None:
        pins = self._store.on_disk.ttl_pins
        pins.expire()
        for place, ttl_s in job.prepared.breakpoints:
            pins.pin(job.home.manager.namespace, tokens, place, ttl_s)

    def _expire(self) -> None:
        """Forget the agents that nobody has used for as long as they were to be kept."""
        if time.monotonic() < self._next_expiry:
            return
        self._next_expiry = time.monotonic() + EXPIRY_S
        try:
            for agent_id in self._store.on_disk.agents.expired(GRACE_S):
                self._store.forget(agent_id)
        except Exception:
            LOG.exception("agents past their retention could not be forgotten")

    def _end_durably(self, job: Job) -> None:
        is_safe = False
        try:
            self._store.flush()
            is_safe = all(job.home.manager.is_on_disk(tokens) for tokens in _kept_of(job))
        except Exception:
            LOG.exception("whether an answer is on disk could not be found out")
        finally:
            if job.receipt is not None:
                job.receipt = replace(job.receipt, durable=is_safe)
            self._end(job)


def _kept_of(job: Job) -> list[list[int]]:
    """All that is to be found again: its answers, each behind the prompt, or the prompt alone."""
    return [sequence.tokens for sequence in job.sequences] or [job.tokens]


def _nothing() -> None:
    return
