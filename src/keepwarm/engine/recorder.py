"""What follows an answer.

Recorder      background file work (agents, pins, expiry), on a thread of its own, in order
RecentTexts   what the engine remembers of texts besides their KV state, and how it forgets them
Auditor       a share of the answers that started from a cache is computed again without one
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from keepwarm.cache.restore.forgetting import Deletions
from keepwarm.cache.restore.restorer import Capture
from keepwarm.cache.store import Store
from keepwarm.engine.answer import Answer
from keepwarm.engine.jobs import Job, RunningSequence
from keepwarm.errors import (
    EngineFailed,
    InsufficientResources,
    KeepwarmError,
    Stopping,
    StoreFailed,
    TimedOut,
)
from keepwarm.prefix.blocks import pack
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.recent import NearestPrompt, RecentPrompts
from keepwarm.prefix.turn import KeptTurn
from keepwarm.store.counts import PromptCounts
from keepwarm.telemetry.ledger import Ledger, RequestRecord
from keepwarm.telemetry.misses import MIN_WASTED, MissCandidate
from keepwarm.text.prepare import Preparer
from keepwarm.text.request import (
    Delta,
    Done,
    Finished,
    Outcome,
    Request,
    Sampling,
    TokenInfo,
    ToolCalled,
    TopLogprob,
)
from keepwarm.text.sandbox.deadline import PrepareDeadline, PrepareStep

AUDIT_PRIORITY = -1_000_000  # after all requests of clients
SCORED_TOP = 20  # tokens that are compared at each place, where blocks are rounded
MAX_NATS = 0.05  # that rounding may cost an answer; on average q4 costs 0.003
LOG = logging.getLogger(__name__)
# Clients send such requests again.
RETRIED = (TimedOut, Stopping, EngineFailed, InsufficientResources)
Post: TypeAlias = Callable[[Callable[[], None]], None]
Work: TypeAlias = Callable[[Job, list[int]], None]


class Recorder:
    def __init__(
        self, store: Store, end: Callable[[Job], None], saves: Sequence[Callable[[], None]]
    ) -> None:
        """`end` ends a durable job once it is on disk; `saves` are called after requests."""
        self._store = store
        self._end = end
        self._unrecorded: dict[str, Job] = {}  # the latest of each agent
        self._noting = threading.Lock()  # of `_unrecorded`, which the engine's thread adds to
        self._warned: dict[str | None, str] = {}  # why the turns of an agent cannot be recorded
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-recorder")
        self._saves = saves
        self._is_saving = False

    def record_sequence(self, sequence: RunningSequence) -> None:
        """After a sequence has ended: record its agent's new turn, pin its breakpoints."""
        job, tokens = sequence.job, list(sequence.tokens)
        if sequence.choice == 0 and self._is_recorded(job):
            with self._noting:
                self._unrecorded[str(job.request.agent)] = job
            called = sequence.reason == "tool_calls"
            advance = partial(self._advance_agent, sequence.capture, called, sequence.turn)
            self._submit(advance, job, tokens)
        if job.request.policy.to_disk and job.request.breakpoints:
            self._submit(self._pin, job, tokens)
        if job.request.policy.to_disk and self._store.settings.share_at_once:
            self._submit(self._share, job, tokens)

    def _is_recorded(self, job: Job) -> bool:
        """Whether the turn is an agent's; of an ephemeral one it is known in memory only.

        One that failed is asked again: a recorded question would be in the conversation twice.
        """
        request = job.request
        if request.agent is None or request.nameless:
            return False
        if request.continues and isinstance(job.error, RETRIED):
            return False
        return request.policy.to_disk or self._store.is_ephemeral(request.agent)

    def has_unrecorded(self, agent_id: str) -> bool:
        """Whether the latest turn of an agent is not in the store yet."""
        return agent_id in self._unrecorded

    def wait_until_recorded(self, agent_id: str, deadline: PrepareDeadline) -> None:
        """Return once the latest turn of an agent is in the store; from any thread."""
        if self.has_unrecorded(agent_id):
            deadline.begin(PrepareStep.HISTORY)
            with suppress(TimeoutError):
                self._submitted().result(deadline.left_s)
            deadline.check()
        if self.has_unrecorded(agent_id):
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
            self._submit(self._pin, job, list(job.tokens))

    def count(self, record: RequestRecord) -> None:
        """Count a request that has been looked up to be answered, however it ended."""
        if record.receipt is None or not record.asks_for_reuse:
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
        self._submitted().result()

    def _submitted(self) -> Future[int]:
        """Done once all that was submitted so far is."""
        try:
            return self._pool.submit(int)
        except RuntimeError as error:
            raise Stopping("The engine is shutting down.") from error

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _submit(self, work: Work, job: Job, tokens: list[int]) -> None:
        """Have it done once all that was put so far is on disk: what others put later may wait."""
        self._pool.submit(self._run, work, job, tokens, self._store.saver.n_put)

    def _run(self, work: Work, job: Job, tokens: list[int], n_put: int) -> None:
        """Once the blocks are on disk; a failure is logged."""
        agent_id = job.request.agent
        try:
            self._store.saver.flush(n_put)
            work(job, tokens)
        except KeepwarmError as error:
            self._warn(agent_id, str(error))
        except Exception:
            LOG.exception("a turn of agent %r could not be recorded", agent_id)
        else:
            self._warned.pop(agent_id, None)
            self._store.forget_expired()

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
            client=job.request.client,
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

    def _share(self, job: Job, tokens: list[int]) -> None:
        job.lane.restorer.share(tokens)

    def _pin(self, job: Job, tokens: list[int]) -> None:
        pins = self._store.on_disk.ttl_pins
        pins.expire()
        for position, ttl_s in job.prepared.breakpoints:
            namespace, tenant = job.lane.restorer.namespace, job.request.tenant
            pins.pin(namespace, tokens, position, ttl_s, tenant)
            job.lane.restorer.share(tokens[:position])

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


class RecentTexts:
    """Recent prompts and answers, and the prompts that running requests may have missed.

    All of them are forgotten when anything is deleted on purpose: they only save time, and
    answers are found again in stored blocks. All but `forget` is for the engine's thread.
    """

    def __init__(
        self, recent: RecentPrompts, ledger: Ledger, preparer: Preparer, post: Post
    ) -> None:
        """`post` has something done on the engine's thread."""
        self._recent = recent
        self._ledger = ledger
        self._preparer = preparer
        self._post = post
        self._nearest: dict[int, NearestPrompt] = {}  # of requests that have not ended

    def add_request(self, job: Job) -> None:
        """Find the most similar earlier prompt, before this one is remembered."""
        if job.request.policy.reads and not job.request.embed:
            whose = (job.request.kv, job.request.tenant)
            self._nearest[job.number] = self._recent.nearest(whose, job.tokens)

    def remember(self, job: Job) -> None:
        """The answers, for the client's next turn, which sends them back as text, to any machine;
        of a prompt that was cut short, how far it was computed."""
        for sequence in job.sequences if job.request.policy.writes else ():
            claim = sequence.capture.claim
            if claim.is_forgotten:
                continue
            n_computed = job.n_processed
            if n_computed >= len(job.tokens):
                n_computed = len(sequence.tokens)
            kept = [*job.cuts, len(job.tokens) - 1, n_computed]
            owner = (job.request.kv, job.request.tenant)
            self._recent.remember(owner, sequence.tokens, kept, n_computed)
            is_recorded = job.request.agent is None or sequence.choice == 0
            is_wanted = claim.is_wanted if is_recorded else None
            told = self._preparer.remember(job.prepared, sequence.tokens, is_wanted)
            job.told += [told] if told else []

    def candidate(self, job: Job) -> MissCandidate | None:
        """A request that ended, if it may have computed known tokens again."""
        nearest = self._nearest.pop(job.number, None)
        if nearest is None or nearest.entry is None or job.receipt is None:
            return None
        if job.n_prefilled < MIN_WASTED:
            return None
        return MissCandidate(
            job.number,
            job.request.tenant,
            job.request.agent,
            job.lane.model.name,
            time.time(),
            pack(job.tokens),
            nearest.entry.packed[: 4 * nearest.entry.n_computed],
            nearest.n_computed,
            job.receipt.cached_tokens,
            len(job.tokens) / job.lane.restorer.rates.prefill_s(0, len(job.tokens)),
        )

    def forget(self, deletions: Deletions) -> None:  # noqa: ARG002
        """From any thread."""
        self._preparer.forget()
        with suppress(Stopping):  # the engine is closed, and asks no more
            self._post(self._clear)

    def _clear(self) -> None:
        self._recent.clear()
        self._nearest.clear()
        self._ledger.forget_texts()


class AuditAnswer(Answer):
    """Collects the tokens of an audit and passes them on at its end."""

    def __init__(self, end: Callable[[list[TokenInfo]], None]) -> None:
        super().__init__(cancel=lambda _: None)  # no client waits for it
        self._end = end
        self._tokens: list[TokenInfo] = []

    def put(self, outcome: Outcome) -> None:
        if isinstance(outcome, Delta | ToolCalled | Finished):
            self._tokens += outcome.tokens
        elif isinstance(outcome, Done):
            self._end(self._tokens)


class AuditResult(NamedTuple):
    is_drift: bool
    nats: float = 0.0  # of divergence, where blocks are rounded


class Auditor:
    """Same prompt, same sampling, nothing reused. If the tokens differ, the cache is wrong, or, on
    devices whose sums depend on how a prompt is sliced, rounding differs. Either is a drift.

    Where blocks are rounded, other tokens are no fault. There the prompt is asked once more with
    what is stored, and once without, and how far the likeliest tokens of the two are apart counts.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        """`share` of the repeatable answers: 0 none, 1 all."""
        self._share = share
        self._random = random.Random(seed)  # noqa: S311, it picks samples

    def wants(self, sequence: RunningSequence) -> bool:
        """Whether to audit it: a sample of the answers with repeatable sampling that reuse any."""
        job, sampling = sequence.job, sequence.job.request.sampling
        is_repeatable = sampling.temperature == 0 or sampling.seed is not None
        is_reused = job.receipt is not None and job.receipt.cached_tokens > 0
        if job.audit or sequence.choice or not (is_repeatable and is_reused):
            return False
        return self._random.random() < self._share

    def audit(
        self,
        sequence: RunningSequence,
        add: Callable[[Job], None],
        report: Callable[[AuditResult], None],
    ) -> None:
        """`add` jobs that ask again, with the lowest priority."""
        job, expected = sequence.job, sequence.tokens[len(sequence.job.tokens) :]

        def compare(cold: Sequence[TokenInfo]) -> None:
            report(AuditResult([info.token for info in cold] != expected))

        def score(warm: Sequence[TokenInfo]) -> None:
            def end(cold: Sequence[TokenInfo]) -> None:
                nats = divergence(cold, warm)
                report(AuditResult(nats > MAX_NATS, nats))

            add(_scored(job, Policy.NO_STORE, end))

        if job.lane.options.at_rest == "exact":
            add(_again(job, job.request.sampling, Policy.NO_STORE, compare))
        else:
            add(_scored(job, Policy.READ_ONLY, score))


def _scored(old: Job, policy: Policy, end: Callable[[list[TokenInfo]], None]) -> Job:
    return _again(old, replace(old.request.sampling, top_logprobs=SCORED_TOP), policy, end)


def _again(
    old: Job, sampling: Sampling, policy: Policy, end: Callable[[list[TokenInfo]], None]
) -> Job:
    request: Request = replace(
        old.request,
        sampling=sampling,
        policy=policy,
        priority=AUDIT_PRIORITY,
        n=1,
        timeout_s=None,
        agent=None,
    )
    prepared = replace(old.prepared, request=request)
    return Job(request, prepared, old.lane, AuditAnswer(end), audit=True, since=old.since)


def divergence(exact: Sequence[TokenInfo], found: Sequence[TokenInfo]) -> float:
    """The mean KL of answers to one prompt in nats, up to the first token that differs: later ones
    follow other texts. Only the likeliest tokens are known, so it is a little too low."""
    pairs = list(zip(exact, found, strict=False))
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1].token, pairs))
    compared = pairs[: n_same + 1]
    return sum(_kl(one.top, other.top) for one, other in compared) / max(1, len(compared))


def _kl(exact: Sequence[TopLogprob], found: Sequence[TopLogprob]) -> float:
    """Tokens that are not among those found are taken for as likely as the last that is."""
    known = dict(found)
    if not known:
        return 0.0
    least = min(known.values())
    nats = [math.exp(p) * (p - known.get(token, least)) for token, p in exact]
    return max(0.0, sum(nats))
