"""Who runs when. Decoding goes first; prompts are read in slices between its steps.

Everything here belongs to the engine's thread. One turn:

    start     what waits and fits: look up, restore
    decode    a token for everybody
    read      a slice of one prompt; when it is whole, its sequences join the batch
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable

import mlx.core as mx

from keepwarm import kv
from keepwarm.cache.policy import Policy
from keepwarm.engine.admission import Admission
from keepwarm.engine.batch import Batch
from keepwarm.engine.insight.counters import Counters
from keepwarm.engine.intake import Intake
from keepwarm.engine.jobs import Job, Reading, Sequence
from keepwarm.engine.keeper import Keeper, OnKept
from keepwarm.engine.lane import Lanes
from keepwarm.engine.prefill import Pace, Stopwatch
from keepwarm.errors import EngineFailed, KeepwarmError
from keepwarm.text.request import Progress

LOG = logging.getLogger(__name__)

MAX_READINGS = 4  # prompts that share the time for reading
MAX_BESIDE = 4  # more of them that take next to no time, or are more urgent
MAX_ROWS = 64  # sequences in all batches together
MAX_FAILURES = 2  # batches that may die under a sequence before it is held to be the cause


class Scheduler:
    def __init__(
        self,
        lanes: Lanes,
        admission: Admission,
        pace: Pace,
        on_kept: OnKept,
        end_durably: Callable[[Job], None],
    ) -> None:
        """`end_durably` ends a job, by `end`, when all that was kept of it is on disk."""
        self.pace = pace
        self.counters = Counters()
        self.waiting: list[Job] = []
        self.reading: deque[Reading] = deque()
        self._batches: dict[Hashable, Batch[Sequence]] = {}
        self._open: dict[Job, None] = {}  # all that are not computed yet; other threads look at it
        self._just_read = False
        self._end_durably = end_durably
        self._keeper = Keeper(self.counters, on_kept)
        self._intake = Intake(lanes, admission, self.counters, publish=self._keeper.place)

    @property
    def rows(self) -> list[Sequence]:
        return [row for batch in list(self._batches.values()) for row in batch.rows]

    @property
    def jobs(self) -> list[Job]:
        """Everybody who still waits for something, each once."""
        return list(self._open)

    @property
    def _is_busy(self) -> bool:
        """Whether somebody would have to wait if this thread did."""
        return bool(self._batches or self.reading)

    def add(self, job: Job) -> None:
        self.counters.requests += not job.audit
        self._open[job] = None
        self.waiting.append(job)
        self.waiting.sort(key=lambda job: (-job.request.priority, job.arrived))

    def step(self) -> bool:
        """One turn; False when there was nothing to do."""
        for job in [job for job in self.jobs if job.is_overdue]:
            self.drop(job, job.overdue())
        for job in self.waiting:
            job.reassure()
        started = self._start()
        decoded = self._decode()
        read = self._read()
        return started or decoded or read

    def drop(self, job: Job, error: KeepwarmError) -> None:
        """End a job wherever it is; the blocks it finished are kept."""
        if not job.ended:
            self.counters.cancelled += 1
            self._close(job, error)
        self.waiting = [other for other in self.waiting if other is not job]
        for reading in [reading for reading in self.reading if reading.job is job]:
            self._keeper.interrupted(reading)
            self._end_reading(reading)
        self._leave_all(job)

    def fail_all(self, error: Exception) -> None:
        """The scheduler itself failed: nobody's state can be trusted any more."""
        self.waiting, self.reading, self._batches = [], deque(), {}
        for job in self.jobs:
            self._fail(job, error)

    # start

    def _start(self) -> bool:
        """Let in the first that may: at most one a turn, for a restore takes time."""
        if len(self.reading) >= MAX_READINGS + MAX_BESIDE or len(self.rows) >= MAX_ROWS:
            return False
        full = False
        for job in list(self.waiting):
            if job.is_blocked or (full and job.lease is None):
                continue  # nobody may overtake whom there is no memory for: it would wait for ever
            try:
                if len(self.reading) >= MAX_READINGS and not self._goes_beside(job):
                    continue
                if not self._intake.reserve(job):
                    full = True
                    continue
                if not self._may_open(job):
                    continue
                self.waiting.remove(job)
                self.reading.append(self._intake.open(job))
            except Exception as error:
                self.waiting = [other for other in self.waiting if other is not job]
                self._fail(job, error)
            return True
        return False

    def _goes_beside(self, job: Job) -> bool:
        """Whether it need not wait for those that read: one slice is enough, or it goes first."""
        if job.request.priority > max(other.job.request.priority for other in self.reading):
            return True
        return self._intake.n_unread(job) <= self.pace.slice_tokens(decoding=bool(self._batches))

    def _may_open(self, job: Job) -> bool:
        """Whether it has what it needs of others: a prefix that is being read, blocks on their way.

        While its blocks come somebody may have begun to read the same: then it waits for that.
        """
        if self._is_busy and job.loading is not None and not job.loading.is_done:
            return False
        if self._intake.waits(job, self.reading):
            return False
        return not (self._is_busy and self._intake.is_loading(job))

    # read

    def _read(self) -> bool:
        """One slice of the prompt whose turn it is."""
        self._just_read = bool(self.reading)
        if not self.reading:
            return False
        reading = self._next_reading()
        n_before, watch = reading.prefill.n_done, Stopwatch()
        try:
            logits = reading.prefill.feed(self.pace.slice_tokens(decoding=bool(self._batches)))
            self._keeper.slice_done(reading, reading.prefill.at_cut)
        except Exception as error:
            self._keeper.failed(reading)
            self._end_reading(reading)
            self._fail(reading.job, error)
            return True
        self._count(reading, reading.prefill.n_done - n_before, watch.seconds())
        if logits is not None:
            self._end_reading(reading)
            self._go_on(reading, logits)
        return True

    def _next_reading(self) -> Reading:
        """The most urgent, counting whoever waits for it; among equals they take turns."""
        self.reading.rotate(-1)
        return max(self.reading, key=self._urgency)

    def _urgency(self, reading: Reading) -> int:
        waiters = [job.request.priority for job in self.waiting if job.waits_for is reading]
        return max([reading.job.request.priority, *waiters])

    def _count(self, reading: Reading, n_tokens: int, seconds: float) -> None:
        self.pace.saw_slice(n_tokens, seconds)
        if reading.is_rebuild:
            self.counters.rebuilt_tokens += n_tokens
            return
        if reading.job.audit:
            self.counters.audited_tokens += n_tokens
            return
        self.counters.prefilled_tokens += n_tokens
        reading.lane.saw_prefill(n_tokens, seconds)
        reading.job.answer.put(Progress(reading.prefill.n_done, len(reading.tokens)))

    def _end_reading(self, reading: Reading) -> None:
        reading.ended = True
        self.reading.remove(reading)

    def _go_on(self, reading: Reading, logits: mx.array) -> None:
        """The prompt is read: its sequences join the batch; without any, that was all."""
        if not reading.sequences:
            self._keeper.warmed(reading)
            self._finish(reading.job)
            return
        self._keeper.place(reading)
        caches = reading.prefill.caches
        try:
            copies = [kv.copy_caches(caches) for _ in reading.sequences[1:]]
            for sequence, own in zip(reading.sequences, [caches, *copies], strict=True):
                self._join(sequence, own, sequence.choose_first(logits))
        except Exception as error:
            self._fail(reading.job, error)
        if reading.job.lease is not None:
            reading.job.lease.joined()

    def _join(self, sequence: Sequence, caches: kv.Caches, token: mx.array) -> None:
        lane = sequence.job.home
        # Whoever lost a batch goes on alone: were it the cause, no neighbour would die again.
        together = lane.can_batch and not sequence.n_failures
        key: Hashable = lane.options if together else sequence
        batch: Batch[Sequence] = self._batches.setdefault(key, Batch(lane.model.module))
        try:
            batch.join(sequence, caches, token)
        except Exception:
            self._rebuild(key, batch)  # some layers may have the newcomer and some not
            raise

    # decode

    def _decode(self) -> bool:
        watch, batches = Stopwatch(), list(self._batches.items())
        for key, batch in batches:
            try:
                self._decode_batch(key, batch)
            except Exception as error:
                LOG.warning("a batch of %d died", len(batch.rows), exc_info=error)
                self._survive(key, batch, error)
        if batches and not self._just_read:
            self.pace.saw_step(watch.seconds())
        return bool(batches)

    def _decode_batch(self, key: Hashable, batch: Batch[Sequence]) -> None:
        ahead = batch.runs_ahead
        if ahead:
            batch.feed()
        finished = [row for row, token in batch.give() if not self._take(row, token)]
        if not ahead:
            batch.feed()
        self._leave(key, batch, finished)
        if not batch.rows:
            return
        failed = batch.choose()
        for row in batch.rows:
            self._keeper.answer_grows(batch, row)
        for row, error in failed.items():
            self._fail(row.job, error)

    def _take(self, row: Sequence, token: int) -> bool:
        """Tell a sequence its token; whether it goes on."""
        self.counters.generated_tokens += 1
        try:
            row.job.take(row, token)
            if not (row.reason or row.job.ended):
                self._intake.make_room(row)
        except Exception as error:
            self._fail(row.job, error)
        return not (row.reason or row.job.ended)

    def _leave(self, key: Hashable, batch: Batch[Sequence], rows: list[Sequence]) -> None:
        """Sequences go; what they computed is kept, and their job ends with the last of them."""
        if not rows:
            return
        try:
            left = batch.leave(rows)
        except Exception:
            self._end_finished(rows)
            raise
        for row, caches in zip(rows, left, strict=True):
            if row.job.request.policy is not Policy.DURABLE:
                self._end_finished([row])  # before keeping, which nobody needs to wait for
            self._keeper.answered(row, caches)
        self._end_finished(rows)
        if not batch.rows:
            self._batches.pop(key, None)

    def _leave_all(self, job: Job) -> None:
        """Take a job's sequences out of whatever batch they are in."""
        for key, batch in list(self._batches.items()):
            try:
                self._leave(key, batch, [row for row in batch.rows if row.job is job])
            except Exception as error:
                self._survive(key, batch, error)

    # ends

    def end(self, job: Job) -> None:
        """All of an answer was given."""
        if not job.ended:
            self.counters.finished += 1
            self._close(job)

    def _end_finished(self, rows: list[Sequence]) -> None:
        for job in {row.job for row in rows if row.job.is_finished}:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """Nothing is left to be computed, and what must be on disk first was kept."""
        self._open.pop(job, None)
        if job.request.policy is Policy.DURABLE and not job.ended:
            self._end_durably(job)
        else:
            self.end(job)

    def _close(self, job: Job, error: KeepwarmError | None = None) -> None:
        self._open.pop(job, None)
        job.end(error)

    def _fail(self, job: Job, error: Exception) -> None:
        """One request ends with an error, and no other."""
        if not job.ended:
            self.counters.failed += 1
            self._close(job, _ours(error))
        for reading in [reading for reading in self.reading if reading.job is job]:
            self._end_reading(reading)

    def _survive(self, key: Hashable, batch: Batch[Sequence], error: Exception) -> None:
        """A batch died. Its sequences go on from their blocks; a repeated cause ends one."""
        for row in batch.rows:
            row.n_failures += 1
            if row.n_failures > MAX_FAILURES and not row.reason:
                self._fail(row.job, error)
        self._rebuild(key, batch)

    def _rebuild(self, key: Hashable, batch: Batch[Sequence]) -> None:
        """Read every sequence of a batch again, alone first: whose fault it was then shows."""
        self.counters.rebuilt_batches += 1
        self._batches.pop(key, None)
        rows = batch.disband()
        self._end_finished(rows)
        mx.clear_cache()
        for row in rows:
            if row.job.ended or row.reason:
                continue
            try:
                self.reading.append(self._intake.reopen(row))
            except Exception as error:
                self._fail(row.job, error)


def _ours(error: Exception) -> KeepwarmError:
    if isinstance(error, KeepwarmError):
        return error
    LOG.error("a request failed", exc_info=error)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return EngineFailed(f"This request failed in the engine ({reason}); others go on. Ask again.")
