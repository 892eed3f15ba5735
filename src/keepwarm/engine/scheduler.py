"""Which request runs when. Decoding goes first; prompts are prefilled in slices between its steps.

Everything here belongs to the engine's thread. One step:

    schedule   start the first waiting job that fits (look up, restore), choose a prompt
    run        a slice of that prompt, whose sequences join the batch after its last slice; then a
               token for every sequence in a batch
    finish     end the jobs that are computed, and keep what they computed
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from threading import get_ident
from typing import NamedTuple

import mlx.core as mx

from keepwarm import kv
from keepwarm.engine.admission import Admission
from keepwarm.engine.batch import Batch
from keepwarm.engine.intake import BatchSlots, Intake
from keepwarm.engine.jobs import Job, JobStatus, KeyRotation, PrefillTask, RunningSequence
from keepwarm.engine.keeper import Keeper, OnKept
from keepwarm.engine.lane import Lane
from keepwarm.engine.prefill import Clock, SliceSizer, Stopwatch
from keepwarm.errors import CacheMismatch, EngineFailed, KeepwarmError
from keepwarm.prefix.policy import Policy
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.request import Progress

LOG = logging.getLogger(__name__)

MAX_FAILURES = 2  # failed batches before a sequence is taken to be the cause


class Schedule(NamedTuple):
    """What one step does."""

    n_expired: int  # jobs that took too long, and ended
    started: Job | None  # its known prefix is restored
    prefill: PrefillTask | None
    slice_tokens: int  # of `prefill`; 0: a pass of its padding trial instead
    n_rows: int  # that decode

    @property
    def is_idle(self) -> bool:
        return self.started is None and self.prefill is None and not self.n_rows

    def __str__(self) -> str:
        """Numbers only: a job has its prompt."""
        parts = [f"start {self.started.number}"] if self.started else []
        if self.prefill is not None:
            what = f"{self.slice_tokens} tokens" if self.slice_tokens else "a padding trial"
            parts.append(f"prefill {what} of {self.prefill.job.number}")
        return ", ".join([*parts, f"decode {self.n_rows} rows"])


class EndedRow(NamedTuple):
    """A sequence that has left its batch, and its caches."""

    row: RunningSequence
    caches: kv.Caches


class StepResult(NamedTuple):
    """What was computed to its end."""

    prompts: list[PrefillTask]  # without an answer
    rows: list[EndedRow]


class Scheduler:
    def __init__(
        self,
        admission: Admission,
        slice_sizer: SliceSizer,
        on_kept: OnKept,
        end_durably: Callable[[Job], None],
        ledger: Ledger,
        *,
        clock: Clock = time.perf_counter,
        others_wait: Callable[[], bool] = bool,  # for this step to end; never
    ) -> None:
        """`end_durably` ends a job, by `end`, once all that was kept of it is on disk."""
        self.slice_sizer = slice_sizer
        self.ledger = ledger
        self.prefilling: deque[PrefillTask] = deque()
        self._batches: dict[Hashable, Batch[RunningSequence]] = {}
        self._open: dict[Job, None] = {}  # jobs not computed yet; other threads read it
        self._starts, self._slices = KeyRotation(), KeyRotation()
        self._end_durably = end_durably
        self._keeper = Keeper(ledger, on_kept)
        self._clock = clock
        self._others_wait = others_wait
        self._thread: int | None = None  # the first that calls
        publish = self._keeper.publish_partial_block
        self._intake = Intake(admission, ledger, publish, clock)

    @property
    def rows(self) -> list[RunningSequence]:
        return [row for batch in list(self._batches.values()) for row in batch.rows]

    @property
    def jobs(self) -> list[Job]:
        """All jobs that are not computed yet."""
        return list(self._open)

    @property
    def waiting(self) -> list[Job]:
        """Jobs that wait or are being restored, in the order of their priorities and arrivals."""
        found = [job for job in self.jobs if job.is_waiting]
        return sorted(found, key=lambda job: (-job.request.priority, job.arrived))

    @property
    def _is_busy(self) -> bool:
        """Whether other requests would wait if this thread waited for a file."""
        return bool(self._batches or self.prefilling)

    def _assert_thread(self) -> None:
        self._thread = self._thread or get_ident()
        assert self._thread == get_ident(), "only the engine's thread may call this"

    def add(self, job: Job) -> None:
        self._assert_thread()
        self.ledger.count(requests=not job.audit)
        self._open[job] = None

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        schedule = self.schedule()
        LOG.debug("%s", schedule)
        self.finish(self.run(schedule))
        return not schedule.is_idle

    def schedule(self) -> Schedule:
        """End overdue jobs, start one, and choose what is computed."""
        self._assert_thread()
        expired = [job for job in self.jobs if job.is_overdue]
        for job in expired:
            self.abort(job, job.timeout_error())
        for job in self.waiting:
            job.send_heartbeat()
        started = self._start_one()
        trial = self._trial()
        task = trial or self._next_task()
        n_tokens = 0
        if task is not None and trial is None:
            n_done = task.prefill.n_done
            n_tokens = self._slice_tokens(task.lane, n_done, len(task.tokens) - n_done)
        return Schedule(len(expired), started, task, n_tokens, len(self.rows))

    def run(self, schedule: Schedule) -> StepResult:
        """Run the model: a slice of a prompt, then a token for every sequence."""
        result, waited_s = StepResult([], []), 0.0
        if schedule.prefill is not None and schedule.slice_tokens:
            self._prefill(schedule.prefill, schedule.slice_tokens, result)
            waited_s = schedule.prefill.prefill.waited_s
        elif schedule.prefill is not None:
            schedule.prefill.lane.sharing.step()
        watch = Stopwatch(self._clock)
        if self._decode(result):
            self.slice_sizer.record_step(watch.seconds() + waited_s)
        return result

    def finish(self, result: StepResult) -> None:
        """End the jobs that are computed; keep their prompts and answers."""
        for task in result.prompts:
            self._keeper.keep_prompt(task)
            self._end_computed(task.job)
        for row, caches in result.rows:
            if row.job.request.policy is not Policy.DURABLE:
                self._end_computed(row.job)  # the client need not wait for the save
            self._keeper.keep_answer(row, caches)
        for row, _ in result.rows:
            self._end_computed(row.job)

    def abort(self, job: Job, error: KeepwarmError) -> None:
        """End a job in whatever state it is; the blocks it finished are kept."""
        self.end(job, error)
        for task in self._tasks_of(job):
            self._keeper.keep_prefix(task)
            self._end_prefill(task)
        self._leave_all(job)

    def fail_all(self, error: Exception) -> None:
        """The scheduler itself failed: no job's state can be trusted."""
        self.prefilling, self._batches = deque(), {}
        for job in self.jobs:
            self._fail(job, error)

    # start

    def _start_one(self) -> Job | None:
        """Start the first job that may: at most one a step, because a restore takes time."""
        slots = BatchSlots(self.prefilling, self.rows, self._slice_tokens)
        if slots.full:
            return None
        is_full = False
        for job in self._starts.order(self.waiting):
            if job.is_blocked or (is_full and job.lease is None):
                continue  # overtaking a job that lacks memory would starve it
            try:
                if not self._intake.has_slot(job, slots):
                    continue
                if not self._intake.reserve(job):
                    is_full = True
                    continue
                if not self._is_ready(job):
                    continue
                self._starts.serve(job)
                job.advance(JobStatus.RESTORING)
                task = self._intake.start(job, self.prefilling)
                self._keeper.keep_restored(task)
                self.prefilling.append(task)
            except Exception as error:
                self._fail(job, error)
            return job
        return None

    def _is_ready(self, job: Job) -> bool:
        """Whether it waits neither for another job's prefix nor for its own blocks.

        While its blocks load another job may begin to prefill the same prefix: then it waits.
        """
        if self._is_busy and job.loading is not None and not job.loading.advance():
            return False
        if self._intake.waits_for_prefix(job, self.prefilling):
            return False
        return not (self._is_busy and self._intake.is_loading(job, self.prefilling))

    # prefill

    def _prefill(self, task: PrefillTask, n_tokens: int, result: StepResult) -> None:
        """One slice of a prompt."""
        prefill = task.prefill
        n_before, watch = prefill.n_done, Stopwatch(self._clock)
        try:
            logits = prefill.feed(n_tokens)
            self._keeper.keep_slice(task, prefill.is_at_point)
            if task.quantize():
                self._keeper.keep_slice(task, checkpoint=True)
        except Exception as error:
            self._keeper.keep_whole_blocks(task)
            self._end_prefill(task)
            self._fail(task.job, error)
            return
        self._count_slice(task, n_before, watch.seconds() - prefill.waited_s)
        if logits is not None:
            self._end_prefill(task)
            task.job.prefilled = task.job.prefilled or self._clock()
            task.send_results(logits)
            if task.sequences:
                self._start_decoding(task, logits)
            else:
                result.prompts.append(task)

    def _trial(self) -> PrefillTask | None:
        """A prompt whose rows would share a batch before it was tried whether they may."""
        for task in self.prefilling:
            shares = task.lane.options in self._batches or len(task.sequences) > 1
            if shares and not task.lane.sharing.is_decided:
                return task
        return None

    def _slice_tokens(self, lane: Lane, context: int, rest: int) -> int:
        costs, waited_for = lane.restorer.rates.slices, bool(self._batches) or self._others_wait()
        return self.slice_sizer.slice_tokens(costs, context, waited_for, rest)

    def _next_task(self) -> PrefillTask | None:
        """The highest priority, that of waiting jobs included. Of equal ones keys are served in
        rotation, and the prompts of a key; but a last token, which takes only a step, goes first.
        """
        if not self.prefilling:
            return None
        self.prefilling.rotate(-1)
        task = max(self.prefilling, key=self._rank)
        self._slices.serve(task.job)
        return task

    def _rank(self, task: PrefillTask) -> tuple[int, bool, int]:
        waiters = [job.request.priority for job in self.jobs if job.waits_for is task]
        priority = max([task.job.request.priority, *waiters])
        return priority, task.is_at_last_token, -self._slices.last(task.job)

    def _count_slice(self, task: PrefillTask, context: int, seconds: float) -> None:
        n_tokens = task.prefill.n_done - context
        self.slice_sizer.record_slice(n_tokens, seconds)
        rates = task.lane.restorer.rates
        if self.slice_sizer.is_typical(rates.slices, n_tokens, context):
            rates.saw_slice(n_tokens, context, seconds)
        if task.is_rebuild:
            self.ledger.count(rebuilt_tokens=n_tokens)
            return
        if task.job.audit:
            self.ledger.count(audited_tokens=n_tokens)
            return
        self.ledger.count(prefilled_tokens=n_tokens)
        task.job.n_prefilled += n_tokens
        task.job.answer.put(Progress(task.prefill.n_done, len(task.tokens)))

    def _tasks_of(self, job: Job) -> list[PrefillTask]:
        return [task for task in self.prefilling if task.job is job]

    def _end_prefill(self, task: PrefillTask) -> None:
        task.ended = True
        self.prefilling.remove(task)

    def _start_decoding(self, task: PrefillTask, logits: mx.array) -> None:
        """The sequences join the batch."""
        self._keeper.publish_partial_block(task)
        task.job.advance(JobStatus.DECODING)
        caches = task.prefill.caches
        try:
            copies = [kv.copy_caches(caches) for _ in task.sequences[1:]]
            for sequence, own in zip(task.sequences, [caches, *copies], strict=True):
                self._join(sequence, own, sequence.sample_first(logits))
        except Exception as error:
            self._fail(task.job, error)
        if task.job.lease is not None:
            task.job.lease.end_joining()

    def _join(self, sequence: RunningSequence, caches: kv.Caches, token: mx.array) -> None:
        lane = sequence.job.lane
        # A sequence whose batch failed decodes alone: if it is the cause, no other one fails.
        shares_batch = lane.can_batch and not sequence.n_failures
        key: Hashable = lane.options if shares_batch else sequence
        batch: Batch[RunningSequence] = self._batches.setdefault(key, Batch(lane.model.module))
        try:
            batch.join(sequence, caches, token)
        except Exception as error:
            if isinstance(error, CacheMismatch) and lane.restorer.layout.fits(caches):
                # A state that grows is still short. Nothing was changed.
                self._batches[sequence] = Batch(lane.model.module)
                self._batches[sequence].join(sequence, caches, token)
                return
            self._rebuild(key, batch)  # only some layers may hold the new row
            raise

    # decode

    def _decode(self, result: StepResult) -> bool:
        """A token for every sequence; whether there was one."""
        batches = list(self._batches.items())
        for key, batch in batches:
            try:
                result.rows.extend(self._decode_batch(key, batch))
            except Exception as error:
                LOG.warning("a batch of %d sequences failed", len(batch.rows), exc_info=error)
                self._recover(key, batch, error)
        return bool(batches)

    def _decode_batch(self, key: Hashable, batch: Batch[RunningSequence]) -> list[EndedRow]:
        """A token for every sequence of a batch; those that end leave it."""
        runs_ahead = batch.runs_ahead
        if runs_ahead:
            batch.feed()
        finished = [row for row, token in batch.emit() if not self._add_token(row, token)]
        is_kept = any(row.job.request.policy.writes for row in finished)
        if not runs_ahead and (is_kept or len(finished) < len(batch.rows)):
            batch.feed()  # else nobody needs the last tokens in the caches
        ended = self._leave(key, batch, finished)
        try:
            self._sample(batch)
        except Exception as error:
            LOG.warning("a batch of %d sequences failed", len(batch.rows), exc_info=error)
            self._recover(key, batch, error)
        return ended

    def _sample(self, batch: Batch[RunningSequence]) -> None:
        failed = batch.sample() if batch.rows else {}
        for row in batch.rows:
            self._keeper.keep_running(batch, row)
        for row, error in failed.items():
            self._fail(row.job, error)

    def _add_token(self, row: RunningSequence, token: int) -> bool:
        """Append a token to a sequence; whether the sequence goes on."""
        self.ledger.count(generated_tokens=1)
        try:
            row.job.add_token(row, token)
            if not (row.reason or row.job.ended):
                self._intake.extend_lease(row)
        except Exception as error:
            self._fail(row.job, error)
        return not (row.reason or row.job.ended)

    def _leave(
        self, key: Hashable, batch: Batch[RunningSequence], rows: list[RunningSequence]
    ) -> list[EndedRow]:
        """Remove sequences from their batch."""
        ended = [EndedRow(*pair) for pair in zip(rows, batch.leave(rows), strict=True)]
        if not batch.rows:
            self._batches.pop(key, None)
        return ended

    def _leave_all(self, job: Job) -> None:
        """Remove a job's sequences from all batches, and keep what they computed."""
        for key, batch in list(self._batches.items()):
            try:
                ended = self._leave(key, batch, [row for row in batch.rows if row.job is job])
            except Exception as error:
                self._recover(key, batch, error)
            else:
                self.finish(StepResult([], ended))

    # end

    def end(self, job: Job, error: KeepwarmError | None = None) -> None:
        """Send a job's last event. Every job ends here; a second call has no effect."""
        self._assert_thread()
        self._open.pop(job, None)
        job.end(error)

    def _end_computed(self, job: Job) -> None:
        """End a job if all is computed; a durable one ends only when it is on disk."""
        if not job.is_finished or job.is_computed:
            return
        if job.request.policy is Policy.DURABLE:
            self._open.pop(job, None)
            job.advance(JobStatus.SAVING)
            self._end_durably(job)
        else:
            self.end(job)

    def _fail(self, job: Job, error: Exception) -> None:
        """End one job with an error; the others continue."""
        if not job.ended:
            self.end(job, _as_keepwarm_error(error))
        for task in self._tasks_of(job):
            self._end_prefill(task)

    def _recover(self, key: Hashable, batch: Batch[RunningSequence], error: Exception) -> None:
        """Rebuild a failed batch; a sequence that was in too many failed batches ends."""
        for row in batch.rows:
            row.n_failures += 1
            if row.n_failures > MAX_FAILURES and not row.reason:
                self._fail(row.job, error)
        self._rebuild(key, batch)

    def _rebuild(self, key: Hashable, batch: Batch[RunningSequence]) -> None:
        """Restore every sequence of a failed batch from its blocks."""
        self.ledger.count(rebuilt_batches=1)
        self._batches.pop(key, None)
        rows = batch.disband()
        for row in rows:
            self._end_computed(row.job)
        mx.clear_cache()
        for row in rows:
            if row.job.ended or row.reason:
                continue
            try:
                self.prefilling.append(self._intake.restart(row))
                row.job.advance(JobStatus.PREFILLING)
            except Exception as error:
                self._fail(row.job, error)


def _as_keepwarm_error(error: Exception) -> KeepwarmError:
    if isinstance(error, KeepwarmError):
        return error
    LOG.error("a request failed", exc_info=error)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return EngineFailed(
        f"The engine failed on this request ({reason}); other requests continue. Retry."
    )
