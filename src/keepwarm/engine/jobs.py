"""Requests inside the engine.

Job               one request, from its arrival to its last event
RunningSequence   one of its answers
PrefillTask       a prompt being prefilled; afterwards its sequences join the batch
KeyRotation       whose key is served next
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count

import mlx.core as mx

from keepwarm.cache.restore.loading import Loading
from keepwarm.cache.restore.restorer import Capture
from keepwarm.engine.admission import Lease
from keepwarm.engine.answer import Answer
from keepwarm.engine.batch import Row
from keepwarm.engine.lane import Lane
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
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
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
MAX_TENANTS = 1024  # that are remembered


class RunningSequence(Row):
    """One answer: its tokens so far, their text, and when it ends."""

    def __init__(
        self,
        job: Job,
        choice: int,
        sampler: Sampler,
        reader: AnswerReader,
        max_tokens: int,
    ) -> None:
        super().__init__(job.tokens, sampler, job.request.sampling.top_logprobs)
        self.job = job
        self.choice = choice
        self.capture = job.capture(self.tokens)
        self.capture.start_at(len(self.tokens))
        self.reason: FinishReason | None = None
        self.n_failures = 0  # failed batches that it was in
        self._reader = reader
        self._max_tokens = max_tokens
        self._infos: list[TokenInfo] = []  # not yet part of an event
        self._said: list[Piece] = []

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of tools so far."""
        return [piece for piece in self._said if isinstance(piece, ToolCall)]

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
        answer, said = message_of(self._said), list(request.messages)
        if request.partial_answer:
            answer = continued_message(said.pop(), answer)
        messages = [*(past.messages if past else ()), *said, answer]
        is_whole = self._reader.stopped is None and not request.partial_answer
        options = (request.tools, request.thinking, request.template_options)
        return KeptTurn(messages, *options, verbatim=is_whole)

    def add_token(self, token: int) -> list[Event]:
        """Append a token; the events that follow from it."""
        self._infos.append(self.append(token))
        pieces = self._reader.add(token)
        self.reason = self._finish_reason(token)
        if self.reason:
            pieces += self._reader.finish()
        events = [self._event(piece) for piece in pieces]
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
        self._said.append(piece)
        if isinstance(piece, ToolCall):
            return ToolCalled(self.choice, piece, self._flush())
        if isinstance(piece, ReasoningText):
            return Delta(self.choice, reasoning=piece.text, tokens=self._flush())
        return Delta(self.choice, text=piece.text, tokens=self._flush())

    def _flush(self) -> tuple[TokenInfo, ...]:
        infos, self._infos = tuple(self._infos), []
        return infos


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
    lease: Lease | None = None
    receipt: Receipt | None = None
    sequences: list[RunningSequence] = field(default_factory=list)
    n_prefilled: int = 0  # tokens of its prompt that the model was fed
    admitted: float | None = None  # when it no longer waits
    restored: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    loading: Loading | None = None  # blocks that are loaded while other requests run
    waits_for: PrefillTask | None = None
    wait_until: int = 0  # tokens that `waits_for` must have prefilled
    n_uncached: int | None = None  # tokens that were not cached at the first look-up
    since: int | None = None  # the store's generation on arrival
    status: JobStatus = JobStatus.WAITING

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
        return restorer.open(tokens, self.request.policy, agent, self.since)

    @property
    def is_later_turn(self) -> bool:
        """Whether it continues a conversation: its prompt holds an earlier answer."""
        said = self.request.messages or ()
        goes_on = self.prepared.spliced > 0 or bool(self.prepared.continued)
        return goes_on or any(one.get("role") == "assistant" for one in said)

    @property
    def n_answers(self) -> int:
        """0 where a prompt is only to be cached, or embedded."""
        is_answered = self.request.sampling.max_tokens != 0 and not self.request.embed
        return self.request.n if is_answered else 0

    @property
    def is_overdue(self) -> bool:
        limit = self.request.timeout_s
        return limit is not None and self.clock() - self.arrived > limit

    @property
    def is_blocked(self) -> bool:
        """Whether it still waits for a prefix that another request is computing."""
        other = self.waits_for
        if other is not None and (other.ended or other.prefill.n_done >= self.wait_until):
            self.waits_for = None
        return self.waits_for is not None

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

    def done(self) -> Done:
        assert self.receipt is not None
        first, last = self.first_token or self.arrived, self.last_token or self.arrived
        n_generated = sum(sequence.n_tokens for sequence in self.sequences)
        usage = Usage(
            prompt_tokens=len(self.tokens),
            cached_tokens=self.receipt.cached_tokens,
            completion_tokens=n_generated,
            reasoning_tokens=sum(sequence.n_reasoning for sequence in self.sequences),
            ttft_ms=round((first - self.arrived) * 1000, 1),
            tokens_per_second=round((n_generated - 1) / (last - first), 1) if last > first else 0.0,
        )
        return Done(usage, self.receipt)

    def _final(self, receipt: Receipt) -> Receipt:
        """With what the answer adds: it may have made a bounded cache drop rows."""
        longest = max((len(sequence.tokens) for sequence in self.sequences), default=0)
        n_tokens = max(longest, receipt.prompt_tokens)
        inexact = self.lane.inexact(receipt.cached_tokens, n_tokens)
        shared, repeated = self.lane.restorer.n_shared(self.tokens), self._repeated_calls()
        return replace(receipt, inexact=inexact, repeated_calls=repeated, shared=shared)

    def _repeated_calls(self) -> tuple[str, ...]:
        """Calls that the model made just before, with the same arguments: it may go on for ever."""
        made = [call for sequence in self.sequences for call in sequence.calls]
        if not made:
            return ()
        past = self.request.history.turn if self.request.history else None
        said = [*(past.messages if past else ()), *(self.request.messages or ())]
        before = calls_of_round(said)
        return tuple(c.id for c in made if signature_of(c.name, c.arguments) in before)

    def end(self, error: KeepwarmError | None = None) -> None:
        """Send the last event; only the first call has an effect."""
        if self.ended:
            return
        self.advance(JobStatus.DONE)
        self.release()
        if error is None and self.receipt is not None:
            self.receipt = self._final(self.receipt)
        self._call_on_end(error)
        self.answer.put(self.done() if error is None else error)
        self.sequences = []  # they refer to the job: the cycle would delay freeing both

    def release(self) -> None:
        """Give back its memory lease and stop loading blocks."""
        if self.loading is not None:
            self.loading.abandon()
        if self.lease is not None:
            self.lease.release()
        self.loading = self.lease = None

    def _call_on_end(self, error: KeepwarmError | None) -> None:
        """If the callback fails, the answer ends all the same."""
        try:
            self.on_end(self, error)
        except Exception:
            LOG.exception("the end of a request could not be recorded")

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
        return len(self.tokens) > len(self.job.tokens)


class KeyRotation:
    """API keys are served in rotation: the one that was served longest ago goes first."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # by tenant, the latest last
        self._numbers = count(1)

    def serve(self, job: Job) -> None:
        tenant = job.request.tenant
        self._last.pop(tenant, None)
        self._last[tenant] = next(self._numbers)
        if len(self._last) > MAX_TENANTS:
            del self._last[next(iter(self._last))]

    def last(self, job: Job) -> int:
        """When its key was last served, as a number; 0 if it never was."""
        return self._last.get(job.request.tenant, 0)

    def order(self, jobs: Iterable[Job]) -> list[Job]:
        """By priority, then by when their keys were last served, then as they were."""
        return sorted(jobs, key=lambda job: (-job.request.priority, self.last(job)))
