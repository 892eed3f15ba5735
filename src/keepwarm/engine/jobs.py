"""Requests inside the engine.

Job               one request, from its arrival to its last event
RunningSequence   one of its answers
PrefillTask       a prompt being prefilled; afterwards its sequences join the batch
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Self

import mlx.core as mx

from keepwarm.cache.restore.loading import Fault, Loading
from keepwarm.cache.restore.rates import PrefillTimes
from keepwarm.cache.restore.restorer import Capture
from keepwarm.engine.admission import Lease
from keepwarm.engine.answer import Answer
from keepwarm.engine.batch import Row
from keepwarm.engine.drafts import DRAFT_COUNTS, Proposal, RowDrafts
from keepwarm.engine.lane import Lane, WarmPrefix
from keepwarm.engine.prefill import Clock, Prefill
from keepwarm.engine.sampling import Sampler
from keepwarm.errors import KeepwarmError, TimedOut
from keepwarm.kv import Caches
from keepwarm.prefix.blocks import pack
from keepwarm.prefix.turn import KeptTurn
from keepwarm.text.parsing import AnswerReader, Piece, ReasoningText, continued_message, message_of
from keepwarm.text.partial_calls import CallPiece
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import (
    Arrival,
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
    Miss,
    MissCause,
    Progress,
    Receipt,
    Request,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    ToolCalled,
    Usage,
)
from keepwarm.text.tools import calls_of_round, signature_of

LOG = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
FAULTS: Mapping[Fault, MissCause] = {
    "missing": "evicted",
    "damaged": "damaged",
    "unreadable": "unreadable",
    "newer": "unreadable",
    "layout": "refused layout",
    "error": "failed",
}


class RunningSequence(Row):
    """One answer: its tokens so far, their text, and when it ends."""

    def __init__(self, job: Job, choice: int) -> None:
        prepared = job.prepared
        sampler = Sampler(
            *(prepared.sampling, prepared.n_vocab, job.tokens),
            *(prepared.new_matcher(), prepared.stop_tokens),
            choice=choice,
        )
        super().__init__(job.tokens, sampler, job.request.sampling.top_logprobs)
        self.job = job
        self.choice = choice
        self.capture = job.capture(self.tokens)
        self.capture.start_at(len(self.tokens))
        self.reason: FinishReason | None = None
        self.n_failures = 0  # failed batches that it was in
        self.n_kept = len(self.tokens)  # when its blocks were last kept
        self._reader = AnswerReader(
            prepared.markup,
            stop=job.request.sampling.stop,
            segment=prepared.first_segment,
            calls=prepared.call_reader(),
        )
        self._max_tokens = prepared.max_new_tokens
        self._infos: list[TokenInfo] = []  # not yet part of an event
        self._pieces: list[Piece] = []
        self._drafts = _drafts_of(job)

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of tools so far."""
        return [piece for piece in self._pieces if isinstance(piece, ToolCall)]

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - len(self.job.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that the answer may still get."""
        return self._max_tokens - self.n_tokens

    @property
    def n_reasoning(self) -> int:
        return self._reader.n_reasoning

    @property
    def turn(self) -> KeptTurn | None:
        """The conversation with this answer; None where its earlier messages are not known."""
        request = self.job.request
        past = request.history.turn if request.history else None
        if request.messages is None or (request.history and request.history.tokens and not past):
            return None
        answer, sent = message_of(self._pieces), list(request.messages)
        if request.partial_answer:
            answer = continued_message(sent.pop(), answer)
        messages = [*(past.messages if past else ()), *sent, answer]
        is_whole = self._reader.stopped is None and not request.partial_answer
        options = (request.tools, request.thinking, request.template_options)
        return KeptTurn(messages, *options, verbatim=is_whole)

    def propose(self) -> Proposal | None:
        """Tokens that may come next."""
        return None if self._drafts is None else self._drafts.propose(self.sampler.fitted)

    def count_step(self) -> None:
        if self._drafts is not None:
            self._drafts.counts["steps"] += 1

    def count_draft(self, n_drafted: int, n_accepted: int) -> None:
        if self._drafts is not None:
            self._drafts.counts.update(drafted=n_drafted, accepted=n_accepted)

    @property
    def draft_counts(self) -> Counter[str] | None:
        return None if self._drafts is None else self._drafts.counts

    def add_token(self, token: int) -> list[Event]:
        """Append a token; the events that follow from it."""
        self._infos.append(self.append(token))
        if self._drafts is not None:
            self._drafts.saw(token)
        was_answering = self._reader.is_answering
        pieces = self._reader.add(token)
        self.reason = self._finish_reason(token)
        if self.reason:
            pieces += self._reader.finish()
        events = [self._event(piece) for piece in pieces]
        if self._infos and self._reader.is_answering and not was_answering:
            events.append(Delta(self.choice, tokens=self._flush()))  # of a delimiter
        if self.reason:
            if self.calls and self.reason == "stop":
                self.reason = "tool_calls"
            events.append(Finished(self.choice, self.reason, self._reader.stopped, self._flush()))
        return events

    def _finish_reason(self, token: int) -> FinishReason | None:
        is_end = token in self.job.prepared.stop_tokens or self.sampler.is_finished
        if is_end or self._reader.done:
            return "stop"
        return "length" if self.n_tokens >= self._max_tokens else None

    def _event(self, piece: Piece) -> Event:
        if isinstance(piece, CallPiece):  # the tokens go with the whole call, or its text
            return ToolCallDelta(self.choice, *piece)
        self._pieces.append(piece)
        if isinstance(piece, ToolCall):
            return ToolCalled(self.choice, piece, self._flush())
        if isinstance(piece, ReasoningText):
            return Delta(self.choice, reasoning=piece.text, tokens=self._flush())
        return Delta(self.choice, text=piece.text, tokens=self._flush())

    def _flush(self) -> tuple[TokenInfo, ...]:
        infos, self._infos = tuple(self._infos), []
        return infos


def _drafts_of(job: Job) -> RowDrafts | None:
    gate, request = job.lane.gate, job.request
    if gate is None or not job.lane.can_batch or not request.speculation:
        return None
    owner = (request.kv, request.tenant) if request.policy.reads else None
    return gate.drafts_for(job.tokens, job.prepared.rewritten, owner)


class JobStatus(Enum):
    """How far a job is."""

    WAITING = auto()  # for a slot, for memory, or for a prefix that another job computes
    RESTORING = auto()  # its known prefix is looked up and loaded
    PREFILLING = auto()
    DECODING = auto()
    SAVING = auto()  # all is computed, and the client waits until it is on disk
    DONE = auto()  # its last event was sent


NEXT_STATUSES: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.WAITING: frozenset({JobStatus.RESTORING, JobStatus.DONE}),
    # NOTE: back to waiting when, while it loads, another job begins to compute the same prefix.
    JobStatus.RESTORING: frozenset({JobStatus.WAITING, JobStatus.PREFILLING, JobStatus.DONE}),
    JobStatus.PREFILLING: frozenset({JobStatus.DECODING, JobStatus.SAVING, JobStatus.DONE}),
    # NOTE: back to prefilling when its batch failed and is rebuilt.
    JobStatus.DECODING: frozenset({JobStatus.PREFILLING, JobStatus.SAVING, JobStatus.DONE}),
    JobStatus.SAVING: frozenset({JobStatus.DONE}),
    JobStatus.DONE: frozenset(),
}


@dataclass(eq=False)
class Job:
    """One request from its arrival to its last event."""

    request: Request
    prepared: PreparedRequest
    lane: Lane
    answer: Answer
    audit: bool = False  # not a client's request: a check of an earlier answer
    number: int = 0
    cuts: Sequence[int] = ()  # where checkpoints of its prompt are kept
    on_start: Callable[[Job], None] = lambda _: None  # its known prefix was found
    on_end: Callable[[Job, KeepwarmError | None], None] = lambda *_: None
    clock: Clock = time.perf_counter
    arrival: Arrival | None = None  # None: when the engine got it
    lease: Lease | None = None
    error: KeepwarmError | None = None  # it ended with
    receipt: Receipt | None = None
    sequences: list[RunningSequence] = field(default_factory=list)
    n_prefilled: int = 0  # tokens of its prompt that the model was fed
    n_again: int = 0  # tokens that were restored after its batch failed
    n_lossy_again: int = 0  # of these, rounded ones
    admitted: float | None = None  # when it last began to be restored
    restored: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    loading: Loading | None = None  # blocks that are loaded while other requests run
    waits_for: PrefillTask | None = None
    wait_until: int = 0  # tokens that `waits_for` must have prefilled
    n_uncached: int | None = None  # tokens that were not cached at the first look-up
    since: int | None = None  # the store's generation on arrival
    times: PrefillTimes = field(default_factory=PrefillTimes)  # what its prompt took, or takes now
    status: JobStatus = JobStatus.WAITING
    told: list[Future[None]] = field(default_factory=list)  # its end waits for these

    def __post_init__(self) -> None:
        self.arrived = self._last_heartbeat = self.clock()

    @property
    def tokens(self) -> list[int]:
        return self.prepared.tokens

    def advance(self, status: JobStatus) -> None:
        """Go on to a status, or stay in it."""
        if status is not self.status:
            assert status in NEXT_STATUSES[self.status], f"{self.status} → {status}"
            self.status = status
            if status is JobStatus.RESTORING:
                self.admitted = self.clock()

    @property
    def is_waiting(self) -> bool:
        """Whether none of its tokens is in a batch or about to be fed."""
        return self.status in (JobStatus.WAITING, JobStatus.RESTORING)

    @property
    def is_computed(self) -> bool:
        return self.status in (JobStatus.SAVING, JobStatus.DONE)

    @property
    def ended(self) -> bool:
        return self.status is JobStatus.DONE

    def capture(self, tokens: list[int], lane: Lane | None = None) -> Capture:
        """Saves what is computed of these tokens, in its own lane or another."""
        restorer, agent = (lane or self.lane).restorer, self.request.agent or ""
        return restorer.open(tokens, self.request.policy, agent, self.since, self.times)

    @property
    def is_later_turn(self) -> bool:
        """Whether it continues a conversation: its prompt holds an earlier answer."""
        sent = self.request.messages or ()
        goes_on = self.prepared.prompt.spliced > 0 or bool(self.prepared.continued)
        return goes_on or any(one.get("role") == "assistant" for one in sent)

    @property
    def n_answers(self) -> int:
        """0 where a prompt is only to be cached, or embedded."""
        is_answered = self.request.sampling.max_tokens != 0 and not self.request.embed
        return self.request.n if is_answered else 0

    @property
    def is_overdue(self) -> bool:
        limit = self.request.timeout_s
        return limit is not None and self.seconds > limit

    @property
    def caller(self) -> str:
        """Whose places and time it takes."""
        return self.request.caller or self.request.tenant

    @property
    def is_blocked(self) -> bool:
        """Whether it still waits for a prefix that another request is computing."""
        other = self.waits_for
        if other is not None and (other.ended or other.prefill.n_done >= self.wait_until):
            self.waits_for = None
        return self.waits_for is not None

    @property
    def n_processed(self) -> int:
        """Tokens of its prompt that are in its cache: reused or computed."""
        return self.n_prefilled + (self.receipt.cached_tokens if self.receipt else 0)

    @property
    def is_finished(self) -> bool:
        return all(sequence.reason for sequence in self.sequences)

    def add_token(self, sequence: RunningSequence, token: int) -> None:
        """Append a token to one of its sequences and send the events."""
        if self.ended:
            sequence.append(token)  # no client reads it, but it goes into the cache
            return
        self.last_token = self.clock()
        self.first_token = self.first_token or self.last_token
        for event in sequence.add_token(token):
            self.answer.put(event)

    @property
    def seconds(self) -> float:
        """Since its first byte came."""
        return self.clock() - self._began

    @property
    def n_lossy(self) -> int:
        """Tokens of its caches that were rounded at rest."""
        at_first = (self.receipt.lossy_tokens if self.receipt else None) or 0
        return max(at_first, self.n_lossy_again)

    @property
    def ttft_ms(self) -> float | None:
        """From its first byte to the first of its answer; None before that."""
        return None if self.first_token is None else _ms(self.first_token - self._began)

    @property
    def phases_ms(self) -> dict[str, float]:
        """How long each part took, in order; together they are the time to the first token."""
        ends = {
            "reading": self.arrival.read if self.arrival else self.arrived,
            "preparing": self.arrived,
            "waiting": self.admitted,
            "restoring": self.restored,
            "prefilling": self.prefilled,
            "first_step": self.first_token,
        }
        phases, begin = {}, self._began
        for name, end in ends.items():
            if end is None:
                break
            phases[name], begin = _ms(end - begin), end
        return phases

    @property
    def _began(self) -> float:
        return self.arrival.began if self.arrival else self.arrived

    def done(self) -> Done:
        assert self.receipt is not None
        first, last = self.first_token or self.arrived, self.last_token or self.arrived
        n_generated = sum(sequence.n_tokens for sequence in self.sequences)
        usage = Usage(
            prompt_tokens=len(self.tokens),
            cached_tokens=self.receipt.cached_tokens,
            completion_tokens=n_generated,
            reasoning_tokens=sum(sequence.n_reasoning for sequence in self.sequences),
            ttft_ms=self.ttft_ms or 0.0,
            tokens_per_second=round((n_generated - 1) / (last - first), 1) if last > first else 0.0,
        )
        return Done(usage, self.receipt)

    def _final(self, receipt: Receipt) -> Receipt:
        """With what the answer adds: it may have made a bounded cache drop rows."""
        longest = max((len(sequence.tokens) for sequence in self.sequences), default=0)
        n_tokens = max(longest, receipt.prompt_tokens)
        inexact = self.lane.inexact(max(receipt.cached_tokens, self.n_again), n_tokens)
        shared, repeated = self.lane.restorer.n_shared(self.tokens), self._repeated_calls()
        phases = self.phases_ms if self.request.explain else None
        return replace(
            receipt,
            inexact=inexact,
            lossy_tokens=self.n_lossy or None,
            repeated_calls=repeated,
            shared=shared,
            phases_ms=phases,
            speculation=self._speculation(),
        )

    def _speculation(self) -> dict[str, int] | None:
        """What drafts did; None if there could be none."""
        counts = [one.draft_counts for one in self.sequences if one.draft_counts is not None]
        if not counts:
            return None
        return {name: sum(each[name] for each in counts) for name in DRAFT_COUNTS}

    def _repeated_calls(self) -> tuple[str, ...]:
        """Calls that the model made just before, with the same arguments: it may go on for ever."""
        made = [call for sequence in self.sequences for call in sequence.calls]
        if not made:
            return ()
        past = self.request.history.turn if self.request.history else None
        sent = [*(past.messages if past else ()), *(self.request.messages or ())]
        before = calls_of_round(sent)
        return tuple(c.id for c in made if signature_of(c.name, c.arguments) in before)

    def end(self, error: KeepwarmError | None = None) -> None:
        """Send the last event; only the first call has an effect."""
        if self.ended:
            return
        self.error = error
        self.advance(JobStatus.DONE)
        self.release()
        self._complete(error)
        _put_when_told(self.answer, self.done() if error is None else error, self.told)
        self.sequences = []  # they refer to the job: the cycle would delay freeing both

    def release(self) -> None:
        """Give back its memory lease and stop loading blocks."""
        if self.loading is not None:
            self.loading.abandon()
        if self.lease is not None:
            self.lease.release()
        self.loading = self.lease = None

    def _complete(self, error: KeepwarmError | None) -> None:
        """The receipt and the callback; if one fails, the answer ends all the same."""
        for step in (self._finish_receipt, partial(self.on_end, self)):
            try:
                step(error)
            except Exception:
                LOG.exception("the end of a request could not be recorded")

    def _finish_receipt(self, error: KeepwarmError | None) -> None:
        if error is None and self.receipt is not None:
            self.receipt = self._final(self.receipt)

    def send_heartbeat(self) -> None:
        """Send progress every HEARTBEAT_S while the request waits."""
        now = self.clock()
        if now - self._last_heartbeat > HEARTBEAT_S:
            self._last_heartbeat = now
            self.answer.put(Progress(0, len(self.tokens)))

    def timeout_error(self) -> TimedOut:
        return TimedOut(
            f"The answer was not finished within {self.request.timeout_s:g} seconds; "
            "the part of the prompt that was prefilled is cached, so a retry is faster."
        )


def _put_when_told(
    answer: Answer,
    last: Done | KeepwarmError,
    told: list[Future[None]],
    _: Future[None] | None = None,
) -> None:
    """Once other machines know the answers, or cannot in time."""
    if told:
        told.pop().add_done_callback(partial(_put_when_told, answer, last, told))
    else:
        answer.put(last)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def make_receipt(job: Job, warm: WarmPrefix, load_s: float) -> Receipt:
    n_known, n_tokens = warm.n_tokens, len(job.tokens)
    took_s = job.times.seconds(0, n_known)
    return Receipt(
        prompt_tokens=n_tokens,
        reused=warm.reused,
        recomputed=n_tokens - n_known,
        saved_ms=None if took_s is None else _ms(max(0.0, took_s - load_s)),
        inexact=job.lane.inexact(n_known, n_tokens),
        lossy_tokens=warm.n_lossy or None,
        spliced=job.prepared.prompt.spliced,
        scrubbed=job.request.scrubbed,
        reordered=job.prepared.prompt.reordered,
        unread=job.request.unread,
        ignored_fields=job.request.ignored_fields,
        miss=_miss(job, warm) if job.request.explain else None,
        continued=job.prepared.continued,
        scored=n_tokens if job.request.score_prompt else None,
    )


def _miss(job: Job, warm: WarmPrefix) -> Miss | None:
    """Why not more was reused: what the restore met with, else what is stored and what earlier
    prompts tell."""
    if not job.request.policy.reads:
        return job.prepared.explain(warm.n_tokens)
    if warm.n_tokens >= len(job.tokens) - 1:
        return None
    why: MissCause | None = FAULTS.get(warm.fault) if warm.fault else None
    if why is None and job.lane.n_stored(job.tokens) > warm.n_tokens:
        why = "not worth loading"
    stored = job.lane.restorer.stored_prefix(job.tokens)
    return job.prepared.explain(warm.n_tokens, why, stored)


@dataclass(eq=False)
class PrefillTask:
    """A prompt, or a sequence whose batch failed, that is being prefilled."""

    job: Job
    tokens: Sequence[int]
    prefill: Prefill
    capture: Capture
    sequences: list[RunningSequence]  # that decode from its end
    states: Caches | None = None  # at its last whole block, if no checkpoint was kept since
    exact: Capture | None = None  # saves what comes before `quantized_kv_start`, in the exact lane
    ended: bool = False

    @classmethod
    def open(
        cls,
        job: Job,
        tokens: list[int],
        warm: WarmPrefix,
        sequences: list[RunningSequence],
        clock: Clock,
    ) -> Self:
        """Prefills what follows a known prefix; the sequences decode from its end."""
        lane, tokens, n_exact = job.lane, list(tokens), job.lane.n_exact
        exact_lane = lane.exact_lane if warm.n_tokens < n_exact else None
        n_kept, exact = (0 if exact_lane else warm.n_kept), None
        capture, points = _open_capture(job, lane, tokens, warm.n_tokens, n_kept)
        if exact_lane is not None:
            first = tokens[: n_exact + 1]
            exact, before = _open_capture(job, exact_lane, first, warm.n_tokens, warm.n_kept)
            points = before | {n_exact} | {point for point in points if point > n_exact}
        prefill = Prefill(
            lane.model.backbone if job.request.embed else lane.model.module,
            tokens,
            warm.caches,
            warm.n_tokens,
            points=points,
            whole_blocks=lane.restorer.needs.whole_blocks,
            times=job.times,
            clock=clock,
        )
        return cls(job, tokens, prefill, capture, list(sequences), exact=exact)

    def __post_init__(self) -> None:
        self.packed = pack(self.tokens)

    @property
    def lane(self) -> Lane:
        return self.job.lane

    @property
    def current_capture(self) -> Capture:
        """Saves what is being computed now."""
        return self.capture if self.exact is None else self.exact

    def quantize(self) -> bool:
        """At `quantized_kv_start`: from here on rows are computed from quantised ones."""
        if self.exact is None or self.prefill.n_done != self.lane.n_exact:
            return False
        self.prefill.caches = self.lane.quantized(self.prefill.caches)
        self.exact = self.states = None
        return True

    @property
    def is_at_last_token(self) -> bool:
        return self.prefill.n_done == len(self.tokens) - 1

    def send_results(self, last: mx.array) -> None:
        """What the prompt alone gives; `last` is what the model made of its last token."""
        for event in self.prefill.results(last, self.job.prepared):
            self.job.answer.put(event)

    @property
    def is_rebuild(self) -> bool:
        failed = any(sequence.n_failures for sequence in self.sequences)
        return failed or len(self.tokens) > len(self.job.tokens)


def _open_capture(
    job: Job, lane: Lane, tokens: list[int], n_known: int, n_kept: int
) -> tuple[Capture, frozenset[int]]:
    """A capture that skips the first `n_kept` tokens, and where slices must end for it."""
    restorer, policy = lane.restorer, job.request.policy
    points = restorer.points(tokens, job.cuts, n_known) if policy.writes else frozenset()
    capture = job.capture(tokens, lane)
    capture.start_at(n_kept)
    capture.expect(points)
    return capture, points if restorer.needs.checkpoints else frozenset()
