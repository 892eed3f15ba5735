"""Which request runs when. Decoding goes first; prompts are prefilled in slices between its steps.

Everything here belongs to the engine's thread. One turn:

    start     the first waiting job that fits: look up, restore
    decode    a token for every sequence
    prefill   a slice of one prompt; after its last slice its sequences join the batch
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable

import mlx.core as mx

from keepwarm import kv
from keepwarm.engine.admission import Admission
from keepwarm.engine.batch import Batch
from keepwarm.engine.intake import Intake, Places
from keepwarm.engine.jobs import Job, KeyTurns, PrefillTask, RunningSequence
from keepwarm.engine.keeper import Keeper, OnKept
from keepwarm.engine.lane import Lane
from keepwarm.engine.prefill import Clock, Prefill, SliceSizer, Stopwatch
from keepwarm.errors import CacheMismatch, EngineFailed, KeepwarmError
from keepwarm.prefix.policy import Policy
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.request import Progress

LOG = logging.getLogger(__name__)

MAX_FAILURES = 2  # failed batches before a sequence is taken to be the cause


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
        self.waiting: list[Job] = []
        self.prefilling: deque[PrefillTask] = deque()
        self._batches: dict[Hashable, Batch[RunningSequence]] = {}
        self._open: dict[Job, None] = {}  # jobs not computed yet; other threads read it
        self._starts, self._slices = KeyTurns(), KeyTurns()
        self._end_durably = end_durably
        self._keeper = Keeper(ledger, on_kept)
        self._clock = clock
        self._others_wait = others_wait
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
    def _is_busy(self) -> bool:
        """Whether other requests would wait if this thread waited for a file."""
        return bool(self._batches or self.prefilling)

    def add(self, job: Job) -> None:
        self.ledger.count(requests=not job.audit)
        self._open[job] = None
        self.waiting.append(job)
        self.waiting.sort(key=lambda job: (-job.request.priority, job.arrived))

    def step(self) -> bool:
        """One turn; False if there was nothing to do."""
        for job in [job for job in self.jobs if job.is_overdue]:
            self.abort(job, job.timeout_error())
        for job in self.waiting:
            job.send_heartbeat()
        started = self._start_one()
        watch, decoded = Stopwatch(self._clock), self._decode()
        step_s = watch.seconds()
        tried = self._try_padding()
        prefilled = None if tried else self._prefill()
        if decoded:
            self.slice_sizer.record_step(step_s + (prefilled.waited_s if prefilled else 0.0))
        return started or decoded or tried or prefilled is not None

    def abort(self, job: Job, error: KeepwarmError) -> None:
        """End a job in whatever state it is; the blocks it finished are kept."""
        if not job.ended:
            self._close(job, error)
        self._remove_waiting(job)
        for task in self._tasks_of(job):
            self._keeper.keep_prefix(task)
            self._end_prefill(task)
        self._leave_all(job)

    def fail_all(self, error: Exception) -> None:
        """The scheduler itself failed: no job's state can be trusted."""
        self.waiting, self.prefilling, self._batches = [], deque(), {}
        for job in self.jobs:
            self._fail(job, error)

    # start

    def _start_one(self) -> bool:
        """Start the first job that may: at most one a turn, because a restore takes time."""
        places = Places(self.prefilling, self.rows, self._slice_tokens)
        if places.are_taken:
            return False
        is_full = False
        for job in self._starts.order(self.waiting):
            if job.is_blocked or (is_full and job.lease is None):
                continue  # overtaking a job that lacks memory would starve it
            try:
                if not self._intake.has_place(job, places):
                    continue
                if not self._intake.reserve(job):
                    is_full = True
                    continue
                if not self._is_ready(job):
                    continue
                self.waiting.remove(job)
                self._starts.take(job)
                task = self._intake.start(job, self.prefilling)
                self._keeper.keep_restored(task)
                self.prefilling.append(task)
            except Exception as error:
                self._remove_waiting(job)
                self._fail(job, error)
            return True
        return False

    def _is_ready(self, job: Job) -> bool:
        """Whether it waits neither for another job's prefix nor for its own blocks.

        While its blocks load another job may begin to prefill the same prefix: then it waits.
        """
        if self._is_busy and job.loading is not None and not job.loading.advance():
            return False
        if self._intake.waits_for_prefix(job, self.prefilling):
            return False
        return not (self._is_busy and self._intake.is_loading(job, self.prefilling))

    def _remove_waiting(self, job: Job) -> None:
        self.waiting = [other for other in self.waiting if other is not job]

    # prefill

    def _prefill(self) -> Prefill | None:
        """One slice of one prompt; None if there is none."""
        if not self.prefilling:
            return None
        task = self._next_task()
        prefill = task.prefill
        n_before, watch = prefill.n_done, Stopwatch(self._clock)
        try:
            rest = len(task.tokens) - n_before
            logits = prefill.feed(self._slice_tokens(task.lane, n_before, rest))
            self._keeper.keep_slice(task, prefill.is_at_point)
            if task.quantize():
                self._keeper.keep_slice(task, checkpoint=True)
        except Exception as error:
            self._keeper.keep_whole_blocks(task)
            self._end_prefill(task)
            self._fail(task.job, error)
            return prefill
        self._count_slice(task, n_before, watch.seconds() - prefill.waited_s)
        if logits is not None:
            self._end_prefill(task)
            self._start_decoding(task, logits)
        return prefill

    def _try_padding(self) -> bool:
        """Before rows first share a batch: one pass of the trial that says whether they may."""
        for task in self.prefilling:
            shares = task.lane.options in self._batches or len(task.sequences) > 1
            if shares and not task.lane.sharing.is_decided:
                task.lane.sharing.step()
                return True
        return False

    def _slice_tokens(self, lane: Lane, context: int, rest: int) -> int:
        costs, waited_for = lane.restorer.rates.slices, bool(self._batches) or self._others_wait()
        return self.slice_sizer.slice_tokens(costs, context, waited_for, rest)

    def _next_task(self) -> PrefillTask:
        """The highest priority, that of waiting jobs included. Of equal ones the keys take turns,
        and the prompts of a key; but a last token, which takes only a step, goes first."""
        self.prefilling.rotate(-1)
        task = max(self.prefilling, key=self._claim)
        self._slices.take(task.job)
        return task

    def _claim(self, task: PrefillTask) -> tuple[int, bool, int]:
        return self._priority(task), task.is_at_last_token, -self._slices.last(task.job)

    def _priority(self, task: PrefillTask) -> int:
        waiters = [job.request.priority for job in self.waiting if job.waits_for is task]
        return max([task.job.request.priority, *waiters])

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
        """The sequences join the batch; a job without any is finished."""
        task.job.prefilled = task.job.prefilled or self._clock()
        task.send_results(logits)
        if not task.sequences:
            self._keeper.keep_prompt(task)
            self._finish(task.job)
            return
        self._keeper.publish_partial_block(task)
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

    def _decode(self) -> bool:
        batches = list(self._batches.items())
        for key, batch in batches:
            try:
                self._decode_batch(key, batch)
            except Exception as error:
                LOG.warning("a batch of %d sequences failed", len(batch.rows), exc_info=error)
                self._recover(key, batch, error)
        return bool(batches)

    def _decode_batch(self, key: Hashable, batch: Batch[RunningSequence]) -> None:
        runs_ahead = batch.runs_ahead
        if runs_ahead:
            batch.feed()
        finished = [row for row, token in batch.emit() if not self._add_token(row, token)]
        is_kept = any(row.job.request.policy.writes for row in finished)
        if not runs_ahead and (is_kept or len(finished) < len(batch.rows)):
            batch.feed()  # else nobody needs the last tokens in the caches
        self._leave(key, batch, finished)
        if not batch.rows:
            return
        failed = batch.sample()
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
    ) -> None:
        """Remove sequences and keep what they computed; a job ends with its last sequence."""
        if not rows:
            return
        try:
            left = batch.leave(rows)
        except Exception:
            self._end_finished(rows)
            raise
        for row, caches in zip(rows, left, strict=True):
            if row.job.request.policy is not Policy.DURABLE:
                self._end_finished([row])  # the client need not wait for the save
            self._keeper.keep_answer(row, caches)
        self._end_finished(rows)
        if not batch.rows:
            self._batches.pop(key, None)

    def _leave_all(self, job: Job) -> None:
        """Remove a job's sequences from all batches."""
        for key, batch in list(self._batches.items()):
            try:
                self._leave(key, batch, [row for row in batch.rows if row.job is job])
            except Exception as error:
                self._recover(key, batch, error)

    # end

    def end(self, job: Job) -> None:
        """The whole answer was sent."""
        if not job.ended:
            self._close(job)

    def _end_finished(self, rows: list[RunningSequence]) -> None:
        for job in {row.job for row in rows if row.job.is_finished}:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """All is computed; a durable job ends only when it is on disk."""
        self._open.pop(job, None)
        if job.request.policy is Policy.DURABLE and not job.ended:
            self._end_durably(job)
        else:
            self.end(job)

    def _close(self, job: Job, error: KeepwarmError | None = None) -> None:
        self._open.pop(job, None)
        job.end(error)

    def _fail(self, job: Job, error: Exception) -> None:
        """End one job with an error; the others continue."""
        if not job.ended:
            self._close(job, _as_keepwarm_error(error))
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
        self._end_finished(rows)
        mx.clear_cache()
        for row in rows:
            if row.job.ended or row.reason:
                continue
            try:
                self.prefilling.append(self._intake.restart(row))
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
