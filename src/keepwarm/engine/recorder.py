"""Background file work after an answer (agents, pins, expiry), on a thread of its own, in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from keepwarm.cache.restore.restorer import Capture
from keepwarm.cache.store import Store
from keepwarm.engine.jobs import Job, RunningSequence
from keepwarm.errors import KeepwarmError, StoreFailed
from keepwarm.prefix.turn import KeptTurn
from keepwarm.store.counts import PromptCounts
from keepwarm.telemetry.ledger import RequestRecord
from keepwarm.text.request import Request

EXPIRY_INTERVAL_S = 60.0
GRACE_S = 600.0  # an agent's running request counts as a use only when it has ended
CONFIRM_S = 600.0  # an agent is deleted if it is still expired then: the clock may have jumped
LOG = logging.getLogger(__name__)


class Recorder:
    def __init__(
        self, store: Store, end: Callable[[Job], None], saves: Sequence[Callable[[], None]]
    ) -> None:
        """`end` ends a durable job once it is on disk; `saves` are called after requests."""
        self._store = store
        self._end = end
        self._next_expiry = 0.0  # by the monotonic clock
        self._expired_since: dict[str, float] = {}  # by the same clock
        self._unrecorded: dict[str, Job] = {}  # the latest of each agent
        self._noting = threading.Lock()  # of `_unrecorded`, which the engine's thread adds to
        self._warned: dict[str | None, str] = {}  # why the turns of an agent cannot be recorded
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-recorder")
        self._saves = saves
        self._is_saving = False

    def record_sequence(self, sequence: RunningSequence) -> None:
        """After a sequence has ended: record its agent's new turn, pin its breakpoints."""
        job, tokens = sequence.job, list(sequence.tokens)
        if sequence.choice == 0 and self._is_recorded(job.request):
            with self._noting:
                self._unrecorded[str(job.request.agent)] = job
            called = sequence.reason == "tool_calls"
            advance = partial(self._advance_agent, sequence.capture, called, sequence.turn)
            self._pool.submit(self._run, advance, job, tokens)
        if job.request.policy.to_disk and job.request.breakpoints:
            self._pool.submit(self._run, self._pin, job, tokens)

    def _is_recorded(self, request: Request) -> bool:
        """Whether the turn is an agent's; of an ephemeral one it is known in memory only."""
        if request.agent is None or request.nameless:
            return False
        return request.policy.to_disk or self._store.is_ephemeral(request.agent)

    def wait_until_recorded(self, agent_id: str) -> None:
        """Return once the latest turn of an agent is in the store; from any thread."""
        if agent_id in self._unrecorded:
            self.wait_until_done()
        if agent_id in self._unrecorded:
            raise StoreFailed(
                f"The latest turn of agent {agent_id!r} could not be recorded; look at the "
                "store's disk, and send the whole conversation."
            )

    def touch(self, job: Job) -> None:
        """Note a use of the blocks behind a live cache. Hashing a long prompt takes milliseconds,
        so not on the engine's thread. What was read from blocks is noted by the restore."""
        assert job.receipt is not None
        if n_live := job.receipt.reused.get("live"):
            self._pool.submit(job.lane.restorer.touch, job.tokens[:n_live])

    def record_prompt(self, job: Job) -> None:
        """After a prompt was cached without an answer: pin its breakpoints."""
        if job.request.policy.to_disk and job.request.breakpoints:
            self._pool.submit(self._run, self._pin, job, list(job.tokens))

    def count(self, record: RequestRecord) -> None:
        """Count a request that has been looked up, however it ended."""
        if record.receipt is None:
            return
        n_prompt, is_later = record.processed_tokens, record.is_later_turn
        self._store.counts.add(
            PromptCounts.of_request(n_prompt, record.reused, is_later_turn=is_later)
        )
        if not self._is_saving:  # once for requests that end together
            self._is_saving = True
            with suppress(RuntimeError):  # it is closed; the store saves them when it closes
                self._pool.submit(self._save)

    def _save(self) -> None:
        self._is_saving = False
        for save in self._saves:
            save()

    def end_durably(self, job: Job) -> None:
        """End a job when its blocks are on disk; the receipt says whether all of them are."""
        self._pool.submit(self._end_durably, job)

    def wait_until_done(self) -> None:
        """Return once all that was submitted so far is done."""
        self._pool.submit(_nothing).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _run(self, work: Callable[[Job, list[int]], None], job: Job, tokens: list[int]) -> None:
        """Once the blocks are on disk; a failure is logged."""
        agent_id = job.request.agent
        try:
            self._store.saver.flush()
            work(job, tokens)
        except KeepwarmError as error:
            self._warn(agent_id, str(error))
        except Exception:
            LOG.exception("a turn of agent %r could not be recorded", agent_id)
        else:
            self._warned.pop(agent_id, None)
            self._forget_expired()

    def _warn(self, agent_id: str | None, why: str) -> None:
        """Once for as long as the reason stays the same, not at every turn."""
        if self._warned.get(agent_id) != why:
            self._warned[agent_id] = why
            LOG.warning("turns of agent %r cannot be recorded: %s", agent_id, why)

    def _advance_agent(
        self,
        capture: Capture,
        called: bool,
        turn: KeptTurn | None,
        job: Job,
        tokens: list[int],
    ) -> None:
        """Unless the agent was deleted while the request ran."""

        def is_wanted() -> bool:
            job.lane.restorer.catch_up()
            return not capture.claim.is_of_deleted_agent

        agent_id = str(job.request.agent)
        agent = self._store.on_disk.agents.advance(
            agent_id,
            job.lane.restorer.namespace,
            tokens,
            len(job.tokens),
            model=job.lane.model.name,
            called=called,
            continues=job.request.continues,
            messages=turn,
            is_wanted=is_wanted,
        )
        if agent is not None and agent.pinned:
            job.lane.restorer.share(tokens)
        with self._noting:
            if self._unrecorded.get(agent_id) is job:
                del self._unrecorded[agent_id]

    def _pin(self, job: Job, tokens: list[int]) -> None:
        pins = self._store.on_disk.ttl_pins
        pins.expire()
        for position, ttl_s in job.prepared.breakpoints:
            pins.pin(job.lane.restorer.namespace, tokens, position, ttl_s)
            job.lane.restorer.share(tokens[:position])

    def _forget_expired(self) -> None:
        """Forget the agents that were not used for their retention time."""
        if time.monotonic() < self._next_expiry:
            return
        self._next_expiry = time.monotonic() + EXPIRY_INTERVAL_S
        try:
            for agent_id in self._long_expired():
                self._store.forget(agent_id)
        except Exception:
            LOG.exception("agents past their retention could not be forgotten")

    def _long_expired(self) -> list[str]:
        now, expired = time.monotonic(), self._store.on_disk.agents.expired(GRACE_S)
        self._expired_since = {each: self._expired_since.get(each, now) for each in expired}
        return [each for each, since in self._expired_since.items() if now - since >= CONFIRM_S]

    def _end_durably(self, job: Job) -> None:
        is_durable = False
        try:
            self._store.flush()
            is_durable = all(job.lane.restorer.is_on_disk(tokens) for tokens in _kept_tokens(job))
        except Exception:
            LOG.exception("whether an answer is on disk could not be checked")
        finally:
            if job.receipt is not None:
                job.receipt = replace(job.receipt, durable=is_durable)
            self._end(job)


def _kept_tokens(job: Job) -> list[list[int]]:
    """Prompt and answer of each sequence, or the prompt alone."""
    return [sequence.tokens for sequence in job.sequences] or [job.tokens]


def _nothing() -> None:
    return
