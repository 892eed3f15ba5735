"""Requests inside the engine: a job is one of them, a sequence one of its answers.

A reading is a prompt on its way into caches; its sequences join the batch when it is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from keepwarm.cache.restore.loading import Loading
from keepwarm.cache.restore.manager import Capture
from keepwarm.engine.admission import Lease
from keepwarm.engine.answer import Answer
from keepwarm.engine.batch import Row
from keepwarm.engine.lane import Lane
from keepwarm.engine.prefill import Prefill
from keepwarm.engine.sampling import Chooser
from keepwarm.errors import KeepwarmError, TimedOut
from keepwarm.kv import Caches
from keepwarm.prefix.blocks import pack
from keepwarm.text.parsing import AnswerReader, Piece, ReasoningText
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
    ToolCalled,
    Usage,
)

LOG = logging.getLogger(__name__)

PATIENCE_S = 1.0


class Sequence(Row):
    """One answer: the tokens it has so far, the text they make, and when it ends."""

    def __init__(
        self,
        job: Job,
        choice: int,
        chooser: Chooser,
        reader: AnswerReader,
        room: int,
    ) -> None:
        super().__init__(job.tokens, chooser, job.request.sampling.top_logprobs)
        self.job = job
        self.choice = choice
        self.capture = job.home.manager.open(self.tokens, job.request.policy)
        self.capture.start_at(len(self.tokens))
        self.reason: FinishReason | None = None
        self.n_failures = 0  # batches that died under it
        self._reader = reader
        self._room = room
        self._infos: list[TokenInfo] = []  # not yet part of an event
        self._called = False

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) - len(self.job.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that it may still have."""
        return self._room - self.n_tokens

    @property
    def n_reasoning(self) -> int:
        return self._reader.n_reasoning

    def take(self, token: int) -> list[Event]:
        """The token was given out: what that means to whoever waits for the answer."""
        self._infos.append(self.fed(token))
        pieces = self._reader.add(token)
        self.reason = self._why_finished(token)
        if self.reason:
            pieces += self._reader.finish()
        events = [self._event(piece) for piece in pieces]
        if self.reason:
            if self._called and self.reason == "stop":
                self.reason = "tool_calls"
            events.append(Finished(self.choice, self.reason, self._reader.stopped, self._flush()))
        return events

    def _why_finished(self, token: int) -> FinishReason | None:
        is_end = token in self.job.prepared.stop_tokens or self.chooser.finished
        if is_end or self._reader.done:
            return "stop"
        return "length" if self.n_tokens >= self._room else None

    def _event(self, piece: Piece) -> Event:
        if isinstance(piece, ToolCall):
            self._called = True
            return ToolCalled(self.choice, piece, self._flush())
        if isinstance(piece, ReasoningText):
            return Delta(self.choice, reasoning=piece.text, tokens=self._flush())
        return Delta(self.choice, text=piece.text, tokens=self._flush())

    def _flush(self) -> tuple[TokenInfo, ...]:
        infos, self._infos = tuple(self._infos), []
        return infos


@dataclass(eq=False)
class Job:
    """One request from its arrival to its last event."""

    request: Request
    prepared: PreparedRequest
    answer: Answer
    audit: bool = False  # asked by nobody: a check of an earlier answer
    number: int = 0
    cuts: Items[int] = ()  # where its prompt is to be kept, if not everywhere
    on_end: Callable[[Job, KeepwarmError | None], None] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    lane: Lane | None = None  # from when it is let in
    lease: Lease | None = None
    receipt: Receipt | None = None
    sequences: list[Sequence] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    loading: Loading | None = None  # blocks that come while others go on
    waits_for: Reading | None = None
    wait_until: int = 0  # tokens that the other must have read
    n_unread: int | None = None  # tokens that were not known, once somebody has looked
    ended: bool = False
    _spoke: float = field(default_factory=time.perf_counter)

    @property
    def tokens(self) -> list[int]:
        return self.prepared.tokens

    @property
    def n_answers(self) -> int:
        """None for a prompt that is read for its own sake."""
        return self.request.n if self.request.sampling.max_tokens != 0 else 0

    @property
    def home(self) -> Lane:
        """The lane that it runs in."""
        assert self.lane is not None, "the job was not let in"
        return self.lane

    @property
    def is_overdue(self) -> bool:
        limit = self.request.timeout_s
        return limit is not None and time.perf_counter() - self.arrived > limit

    @property
    def is_blocked(self) -> bool:
        """Whether it still waits for what somebody else is computing."""
        other = self.waits_for
        if other is not None and (other.ended or other.prefill.n_done >= self.wait_until):
            self.waits_for = None
        return self.waits_for is not None

    @property
    def is_finished(self) -> bool:
        return all(sequence.reason for sequence in self.sequences)

    def take(self, sequence: Sequence, token: int) -> None:
        """Pass on what a token of one of its sequences means."""
        if self.ended:
            sequence.fed(token)  # nobody reads it, but it goes into the cache
            return
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        for event in sequence.take(token):
            self.answer.put(event)

    def done(self) -> Done:
        assert self.receipt is not None
        first, last = self.first_token or self.arrived, self.last_token or self.arrived
        made = sum(sequence.n_tokens for sequence in self.sequences)
        usage = Usage(
            prompt_tokens=len(self.tokens),
            cached_tokens=self.receipt.cached_tokens,
            completion_tokens=made,
            reasoning_tokens=sum(sequence.n_reasoning for sequence in self.sequences),
            ttft_ms=round((first - self.arrived) * 1000, 1),
            tokens_per_second=round((made - 1) / (last - first), 1) if last > first else 0.0,
        )
        return Done(usage, self.receipt)

    def end(self, error: KeepwarmError | None = None) -> None:
        """Say the last word, once."""
        if self.ended:
            return
        self.ended = True
        self.let_go()
        self._tell_end(error)
        self.answer.put(self.done() if error is None else error)
        self.sequences = []  # they know their job: both would stay until garbage is collected

    def let_go(self) -> None:
        """Give back memory that was set aside, and what is being loaded into it."""
        if self.loading is not None:
            self.loading.abandon()
        if self.lease is not None:
            self.lease.release()
        self.loading = self.lease = None

    def _tell_end(self, error: KeepwarmError | None) -> None:
        """Whoever keeps books may fail; the answer ends all the same."""
        try:
            if self.on_end is not None:
                self.on_end(self, error)
        except Exception:
            LOG.exception("the end of a request could not be noted")

    def reassure(self) -> None:
        """Tell whoever waits, now and then, that it is not forgotten."""
        now = time.perf_counter()
        if now - self._spoke > PATIENCE_S:
            self._spoke = now
            self.answer.put(Progress(0, len(self.tokens)))

    def overdue(self) -> TimedOut:
        return TimedOut(
            f"The answer was not finished within {self.request.timeout_s:g} seconds; "
            "what was read of the prompt is kept, so asking again is quicker."
        )


@dataclass(eq=False)
class Reading:
    """A prompt, or a sequence that lost its batch, on its way into caches."""

    job: Job
    lane: Lane
    tokens: Items[int]
    prefill: Prefill
    capture: Capture
    sequences: list[Sequence]  # that go on from its end
    states: Caches | None = None  # after its last whole block, where no place was kept since
    ended: bool = False

    def __post_init__(self) -> None:
        self.packed = pack(self.tokens)

    @property
    def is_rebuild(self) -> bool:
        return len(self.tokens) > len(self.job.tokens)
