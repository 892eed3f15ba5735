"""Which request runs when. Decoding goes first; prompts are prefilled in slices between its steps.

Everything here belongs to the engine's thread. One step:

    schedule   start the first waiting job that fits (look up, restore), choose a prompt
    run        a slice of that prompt, whose sequences join the batch after its last slice; then a
               token for every sequence in a batch
    finish     end the jobs that are computed, and keep what they computed
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from keepwarm import kv
from keepwarm.cache.restore.restorer import Capture
from keepwarm.engine.admission import Admission, kv_bytes
from keepwarm.engine.batch import Batch
from keepwarm.engine.drafts import BatchSize, DraftGate
from keepwarm.engine.jobs import Job, JobStatus, PrefillTask, RunningSequence, make_receipt
from keepwarm.engine.lane import MIN_SHARED_TOKENS, Lane, WarmPrefix
from keepwarm.engine.padding import RowSharing
from keepwarm.engine.prefill import Clock, SliceSizer, Stopwatch
from keepwarm.engine.sampling import PromptScores
from keepwarm.errors import (
    CacheMismatch,
    EngineFailed,
    InsufficientResources,
    KeepwarmError,
    Stopping,
)
from keepwarm.prefix.blocks import BLOCK_TOKENS, common_tokens, pack
from keepwarm.prefix.policy import Policy
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.request import Progress, Started

LOG = logging.getLogger(__name__)
OnKept: TypeAlias = Callable[[RunningSequence], None]

LEASE_TOKENS = 1024  # answer tokens that memory is reserved for at a time
MAX_PREFILLS = 4  # prompts that are prefilled in rotation
MAX_EXTRA_PREFILLS = 4  # more: urgent ones, those of one slice, a key's first
MAX_ROWS = 64  # sequences in all batches together
MAX_OWN_PREFILLS, MAX_OWN_ROWS = 6, 48  # of one API key
MAX_CALLERS = 1024  # that are remembered
MAX_DRAFTED_ROWS = 16  # looking up drafts for more takes longer than they could spare
PER_ANSWER_S = 2  # seconds for prompts of a key, for each of another key's answers beside them
NEXT_REQUEST_S = 1.0  # after an answer: a client's next request should not meet a long slice
MAX_FAILURES = 2  # failed batches before a sequence is taken to be the cause


class Schedule(NamedTuple):
    """What one step does."""

    started: Job | None  # its known prefix is restored
    prefill: PrefillTask | None
    slice_tokens: int  # of `prefill`
    n_rows: int  # that decode
    trial: RowSharing | None  # of which a pass is run instead of a slice

    @property
    def is_decode_alone(self) -> bool:
        return all(work is None for work in (self.started, self.prefill, self.trial))

    @property
    def is_idle(self) -> bool:
        return not self.n_rows and self.is_decode_alone


class EndedRow(NamedTuple):
    """A sequence that has left its batch, and its caches."""

    row: RunningSequence
    caches: kv.Caches


class FedStep(NamedTuple):
    """What a batch was fed in a step that did not run ahead."""

    width: int  # tokens a row
    n_accepted: int  # drafted ones of all rows
    ended: list[RunningSequence]  # sequences that end in their drafts
    n_again: int = 0  # tokens that were computed again


class StepResult(NamedTuple):
    """What was computed to its end."""

    prompts: list[PrefillTask]  # without an answer
    rows: list[EndedRow]


class KeyRotation:
    """API keys are served in rotation: the one that was served longest ago goes first."""

    def __init__(self, now: Clock | None = None) -> None:
        """`now`: what is noted of each; else a number."""
        self._last: dict[str, float] = {}  # by caller, the latest last
        self._now = now or count(1).__next__

    def serve(self, job: Job) -> None:
        self._last.pop(job.caller, None)
        self._last[job.caller] = self._now()
        if len(self._last) > MAX_CALLERS:
            del self._last[next(iter(self._last))]

    def last(self, job: Job) -> float:
        """When its key was last served; 0 if it never was."""
        return self._last.get(job.caller, 0)

    def last_of_others(self, job: Job) -> float:
        """When another key was last served."""
        found = reversed(self._last.items())
        return next((when for caller, when in found if caller != job.caller), -math.inf)

    def order(self, jobs: Iterable[Job]) -> list[Job]:
        """By priority, then by when their keys were last served, then as they were."""
        return sorted(jobs, key=lambda job: (-job.request.priority, self.last(job)))


class BatchSlots(NamedTuple):
    """What runs, which bounds what may be started."""

    prefilling: Sequence[PrefillTask]
    rows: Sequence[RunningSequence]
    slice_tokens: Callable[[Lane, int, int], int]  # of the next slice: context, rest

    @property
    def full(self) -> bool:
        most = MAX_PREFILLS + MAX_EXTRA_PREFILLS
        return len(self.prefilling) >= most or len(self.rows) >= MAX_ROWS

    def of_key(self, job: Job) -> tuple[int, int]:
        """Prefills of the job's API key, and its rows with those that these will be; without keys
        none is anyone's own.
        """
        tasks = [task for task in self.prefilling if task.job.caller == job.caller != ""]
        rows = [row for row in self.rows if row.job.caller == job.caller != ""]
        return len(tasks), len(rows) + sum(len(task.sequences) for task in tasks)


class Intake:
    """Admits jobs: reserves memory, has them wait for a prefix that another job computes, restores
    what is known, and opens the task that prefills the rest."""

    def __init__(
        self,
        admission: Admission,
        ledger: Ledger,
        publish: Callable[[PrefillTask], None],
        clock: Clock,
    ) -> None:
        """`publish` lets other requests find what a task has prefilled so far."""
        self._admission = admission
        self._ledger = ledger
        self._publish = publish
        self._clock = clock

    def reserve(self, job: Job) -> bool:
        """Reserve memory; False while other requests need it. Raises if it could never fit."""
        lane = job.lane
        if job.lease is None:
            n_tokens = len(job.tokens) + min(job.prepared.max_new_tokens, LEASE_TOKENS)
            n_bytes = max(
                kv_bytes(lane.restorer.layout, n_tokens),
                kv_bytes(lane.exact_lane.restorer.layout, lane.n_exact) if lane.exact_lane else 0,
            )
            batch = lane.options if lane.can_batch else None
            n_rows = max(1, job.n_answers)
            job.lease = self._admission.reserve(n_bytes, batch, n_rows, job.caller)
        return job.lease is not None

    def has_slot(self, job: Job, slots: BatchSlots) -> bool:
        """Some are left to other keys, some to jobs that are urgent or need only one slice."""
        n_prefills, n_rows = slots.of_key(job)
        has_rows = not n_rows or n_rows + max(1, job.n_answers) <= MAX_OWN_ROWS
        if n_prefills >= MAX_OWN_PREFILLS or not has_rows:
            return False
        n_left = MAX_PREFILLS + MAX_EXTRA_PREFILLS - len(slots.prefilling)
        is_first = job.caller and not n_prefills and n_left > 1
        if is_first or (len(slots.prefilling) < MAX_PREFILLS and n_prefills < MAX_PREFILLS - 1):
            return True
        if job.request.priority > max(task.job.request.priority for task in slots.prefilling):
            return True
        n_uncached = self.n_uncached(job)
        n_warm = len(job.tokens) - n_uncached
        return n_uncached <= slots.slice_tokens(job.lane, n_warm, n_uncached)

    def n_uncached(self, job: Job) -> int:
        """Prompt tokens that are not cached, as of the first call: a look-up takes time."""
        if job.n_uncached is None:
            n_warm = job.lane.n_warm(job.tokens) if job.request.policy.reads else 0
            job.n_uncached = len(job.tokens) - n_warm
        return job.n_uncached

    def extend_lease(self, sequence: RunningSequence) -> bool:
        """Reserve memory for the next tokens of a long answer; raises if there is none. Whether the
        job must go on in another batch.
        """
        job = sequence.job
        if job.lease is None or sequence.n_tokens % LEASE_TOKENS:
            return False
        batch, n_tokens = job.lease.batch, len(sequence.tokens)
        n_tokens += min(sequence.n_left, LEASE_TOKENS)
        if not job.lease.grow(kv_bytes(job.lane.restorer.layout, n_tokens)):
            raise InsufficientResources(
                f"The answer is {sequence.n_tokens:,} tokens long and the other requests leave no "
                "memory for more; what was generated is kept: send it back to continue it when "
                "fewer requests run, lower max_tokens, or raise the memory budget."
            )
        return job.lease.batch != batch

    def waits_for_prefix(self, job: Job, tasks: Iterable[PrefillTask]) -> bool:
        """Have a job wait if a task is prefilling what its prompt begins with; whether it does."""
        if not job.request.policy.reads:
            return False
        others = [task for task in tasks if _can_share(task, job)]
        if not others:
            return False
        packed, n_known = pack(job.tokens), job.lane.n_warm(job.tokens)
        for task in others:
            n_shared = min(common_tokens(task.packed, packed), len(job.tokens) - 1)
            if not job.lane.is_worth_waiting(len(job.tokens), n_known, n_shared):
                continue
            if n_shared > task.prefill.n_done:
                self._wait_for(job, task, n_shared)
            else:
                self._publish(task)
        if job.waits_for is not None:
            job.release()  # while it waits it needs no memory
            job.advance(JobStatus.WAITING)
        return job.waits_for is not None

    def _wait_for(self, job: Job, task: PrefillTask, n_tokens: int) -> None:
        if job.waits_for is None:
            self._ledger.count(waited_for_prefix=1)
        if job.waits_for is None or n_tokens > job.wait_until:
            job.waits_for, job.wait_until, job.n_uncached = task, n_tokens, None
            task.prefill.add_point(n_tokens)

    def is_loading(self, job: Job, tasks: Iterable[PrefillTask]) -> bool:
        """Begin a long restore in the background; whether it is still under way."""
        if not job.request.policy.reads:
            return False
        if job.loading is None and _neighbour(job, tasks) is not None:
            return False
        if job.loading is None:
            job.loading = job.lane.begin_loading(job.tokens, job.request.policy)
            job.advance(JobStatus.WAITING if job.loading is None else JobStatus.RESTORING)
        return job.loading is not None and job.loading.in_background and not job.loading.advance()

    def start(self, job: Job, tasks: Iterable[PrefillTask]) -> PrefillTask:
        """Restore the known prefix and send the receipt; the task prefills the rest."""
        watch = Stopwatch(self._clock)
        loading, job.loading = job.loading, None
        copied = None if loading else _copied(job, tasks)
        warm = copied or job.lane.restore(job.tokens, job.request.policy, loading)
        load_s = max(watch.seconds(), loading.seconds if loading else 0.0)
        job.restored = self._clock()
        job.lane.restorer.failures.add(warm.fault)
        job.times = job.lane.prefill_times(job.tokens, warm.n_tokens)
        job.receipt = make_receipt(job, warm, load_s)
        job.sequences = [RunningSequence(job, choice) for choice in range(job.n_answers)]
        job.answer.put(Started(job.receipt))
        job.on_start(job)
        job.advance(JobStatus.PREFILLING)
        task = PrefillTask.open(job, job.tokens, warm, job.sequences, self._clock)
        if job.request.score_prompt:
            task.prefill.scores = PromptScores(job.tokens[0], job.request.sampling.top_logprobs)
        return task

    def restart(self, sequence: RunningSequence) -> PrefillTask:
        """Restore a sequence whose batch failed, from its blocks."""
        job = sequence.job
        warm = job.lane.restore(sequence.tokens, job.request.policy)
        job.n_again = max(job.n_again, warm.n_tokens)
        job.n_lossy_again = max(job.n_lossy_again, warm.n_lossy)
        job.times = job.lane.prefill_times(sequence.tokens, warm.n_tokens)
        return PrefillTask.open(job, sequence.tokens, warm, [sequence], self._clock)


def _can_share(task: PrefillTask, job: Job) -> bool:
    leads = task.job.request.policy.can_prefill_for_others and not task.capture.claim.is_forgotten
    return leads and task.lane.shares_blocks_with(job.lane)


class Neighbour(NamedTuple):
    """A prompt that is being prefilled, and how many of its tokens another begins with."""

    task: PrefillTask
    n_shared: int


def _neighbour(job: Job, tasks: Iterable[PrefillTask]) -> Neighbour | None:
    """One whose caches hold as much of a job's prompt as is known anywhere."""
    others = [task for task in tasks if _can_share(task, job)] if job.request.policy.reads else []
    if not others:
        return None
    packed, limit = pack(job.tokens), len(job.tokens) - 1
    found = [
        Neighbour(task, min(common_tokens(task.packed, packed), task.prefill.n_done, limit))
        for task in others
    ]
    usable = [
        one
        for one in found
        if (job.lane.can_trim or one.n_shared == one.task.prefill.n_done)
        and one.n_shared >= job.lane.n_exact
    ]
    best = max(usable, key=lambda one: one.n_shared, default=None)
    if best is None or best.n_shared < max(MIN_SHARED_TOKENS, job.lane.n_warm(job.tokens)):
        return None
    return best


def _copied(job: Job, tasks: Iterable[PrefillTask]) -> WarmPrefix | None:
    """A copy of what a neighbour holds: nothing need be loaded."""
    found = _neighbour(job, tasks)
    if found is None:
        return None
    prefill, tokens = found.task.prefill, job.tokens[: found.n_shared]
    n_excess = prefill.n_done - found.n_shared
    policy, n_lossy = job.request.policy, found.task.job.n_lossy
    return job.lane.copy_of(prefill.caches, n_excess, tokens, policy, n_lossy)


class Keeper:
    """Keeps what was computed, in blocks and as live caches: during prefill and decode, and at the
    end of both. A save that fails is counted and logged; the answer goes on.
    """

    def __init__(self, ledger: Ledger, on_kept: OnKept) -> None:
        """`on_kept` is called with every finished sequence, after its blocks can be found."""
        self._ledger = ledger
        self._on_kept = on_kept

    def keep_restored(self, task: PrefillTask) -> None:
        """Keep the place where a prompt was restored from memory."""
        receipt = task.job.receipt
        if receipt is not None and "memory" in receipt.reused:
            with self._saving():
                task.current_capture.keep_restored(task.prefill.caches, task.prefill.n_done)

    def keep_slice(self, task: PrefillTask, checkpoint: bool) -> None:
        """Keep the blocks that a slice completed, and a checkpoint if asked."""
        prefill = task.prefill
        self._capture(task.current_capture, prefill.caches, prefill.n_done, checkpoint)
        if checkpoint:
            task.states = None
        elif task.lane.restorer.needs.state and prefill.n_done % BLOCK_TOKENS == 0:
            with self._saving():
                task.states = _copy_states(prefill.caches, task.lane.make_caches())

    def publish_partial_block(self, task: PrefillTask) -> None:
        """Let other requests find all that a task has prefilled, its open block included."""
        prefill = task.prefill
        if not task.lane.restorer.needs.checkpoints:  # else checkpoints are kept at its points
            self._capture(
                task.current_capture, prefill.caches, prefill.n_done, True, temporary=True
            )

    def keep_prefix(self, task: PrefillTask) -> None:
        """Keep all that a task has prefilled."""
        self._capture(task.current_capture, task.prefill.caches, task.prefill.n_done, True)

    def keep_whole_blocks(self, task: PrefillTask) -> None:
        """After a failed slice: keep the states at the last block with which a slice ended; the
        rest may be wrong."""
        if task.states is not None:
            n_whole = task.prefill.n_done // BLOCK_TOKENS * BLOCK_TOKENS
            self._capture(task.current_capture, task.states, n_whole, checkpoint=True)

    def keep_running(self, batch: Batch[RunningSequence], row: RunningSequence) -> None:
        """Keep the blocks of a long answer at intervals: a crash must not lose all of it."""
        window = row.job.lane.restorer.needs.window
        interval = max(1, min(window, BLOCK_TOKENS) // 2) if window else BLOCK_TOKENS
        if row.n_tokens and len(row.tokens) // interval > row.n_kept // interval:
            row.n_kept = len(row.tokens)
            with self._saving():
                row.capture.capture(batch.peek(row), len(row.tokens))

    def keep_answer(self, row: RunningSequence, caches: kv.Caches) -> None:
        """Keep a finished sequence, in blocks and as a live cache, and call `on_kept`."""
        self._capture(row.capture, caches, len(row.tokens), checkpoint=True)
        if row.job.request.policy.writes:
            self._keep_live(row.job, row.capture, row.tokens, caches)
        self.keep_turn(row)

    def keep_turn(self, row: RunningSequence) -> None:
        """Call `on_kept`; alone where a sequence is finished, but its caches may be wrong."""
        with self._saving():
            self._on_kept(row)

    def keep_prompt(self, task: PrefillTask) -> None:
        """Keep a prompt that is cached without an answer."""
        self.keep_prefix(task)
        if task.job.request.policy.writes:
            self._keep_live(task.job, task.capture, list(task.tokens), task.prefill.caches)

    def _keep_live(self, job: Job, capture: Capture, tokens: list[int], caches: kv.Caches) -> None:
        namespace, owner = job.lane.restorer.namespace, job.request.agent or ""
        with self._saving(), capture.claim.unless_forgotten() as is_wanted:
            if is_wanted:
                job.lane.live.put(namespace, tokens, caches, owner, job.n_lossy)

    def _capture(
        self,
        capture: Capture,
        caches: kv.Caches,
        n_tokens: int,
        checkpoint: bool,
        temporary: bool = False,
    ) -> None:
        with self._saving():
            capture.capture(caches, n_tokens, checkpoint, temporary)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self._ledger.count(failed_saves=1)
            LOG.exception("computed state could not be kept")
        finally:
            self._ledger.count(keeping_ms=1000 * (time.perf_counter() - began))


def _copy_states(caches: kv.Caches, empty: kv.Caches) -> kv.Caches:
    """The state layers in arrays of their own; every other layer is the empty one."""
    return [_copy_state(cache, other) for cache, other in zip(caches, empty, strict=True)]


def _copy_state(cache: Any, empty: Any) -> Any:
    kind = kv.kind_of(cache)
    if kind is kv.Kind.COMPOSITE:
        return type(cache)(*_copy_states(cache.caches, empty.caches))
    return kv.copy_caches([cache])[0] if kind is kv.Kind.STATE else empty


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
        others_ran: Callable[[], bool] = bool,  # between this step and the one before
        examine: Callable[[], str] = str,  # after an error: why no other job can be computed
    ) -> None:
        """`end_durably` ends a job, by `end`, once all that was kept of it is on disk."""
        self.slice_sizer = slice_sizer
        self.ledger = ledger
        self.prefilling: deque[PrefillTask] = deque()
        self._batches: dict[Hashable, Batch[RunningSequence]] = {}
        self._moving: set[Job] = set()  # to other batches
        self._untried: RowSharing | None = None  # of rows that could have been fed drafts
        self._is_undisturbed = False  # nothing but one batch ran since the step before
        self._open: dict[Job, None] = {}  # jobs not computed yet; other threads read it
        self._starts, self._slices, self._ends = KeyRotation(), KeyRotation(), KeyRotation(clock)
        self._end_durably = end_durably
        self._keeper = Keeper(ledger, on_kept)
        self._clock = clock
        self._owed_s = 0.0  # of decoding, before a prompt goes on beside another key's answers
        self._others_wait = others_wait
        self._others_ran = others_ran
        self._examine = examine
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

    @property
    def has_work(self) -> bool:
        """Whether there is something to do in a step."""
        return self._is_busy or bool(self._open) or self._untried is not None

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
        self.finish(self.run(schedule))
        return not schedule.is_idle

    def schedule(self) -> Schedule:
        """End overdue jobs, start one, and choose what is computed."""
        self._assert_thread()
        for job in self.jobs:
            if job.is_overdue:
                self.abort(job, job.timeout_error())
        for job in self.waiting:
            job.send_heartbeat()
        started = self._start_one()
        trial = self._trial()
        task = self._next_task() if trial is None else None
        n_tokens = 0
        if task is not None:
            n_done = task.prefill.n_done
            others_ended_s = self._clock() - self._ends.last_of_others(task.job)
            n_tokens = self._slice_tokens(
                *(task.lane, n_done, len(task.tokens) - n_done),
                is_awaited=others_ended_s < NEXT_REQUEST_S,
            )
        return Schedule(started, task, n_tokens, len(self.rows), trial)

    def run(self, schedule: Schedule) -> StepResult:
        """Run the model: a slice of a prompt, then a token for every sequence."""
        result, waited_s = StepResult([], []), 0.0
        if schedule.trial is not None:
            schedule.trial.step()
        elif schedule.prefill is not None:
            self._prefill(schedule.prefill, schedule.slice_tokens, result)
            waited_s = schedule.prefill.prefill.waited_s
        watch = Stopwatch(self._clock)
        runs_alone = schedule.is_decode_alone and len(self._batches) == 1
        self._is_undisturbed = runs_alone and not self._others_ran()
        if self._decode(result):
            step_s = watch.seconds() + waited_s
            self._owed_s -= step_s
            self.slice_sizer.record_step(step_s)
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
            for row in task.sequences:
                if row.n_tokens:  # it is computed again
                    self._keeper.keep_turn(row)
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
        is_full, wait_for_own = False, set[str]()
        for job in self._starts.order(self.waiting):
            if job.is_blocked or (job.lease is None and (is_full or job.caller in wait_for_own)):
                continue  # overtaking a job that lacks memory would starve it
            try:
                if not self._intake.has_slot(job, slots):
                    continue
                if not self._intake.reserve(job):
                    is_full = not self._has_own_memory(job) or is_full
                    wait_for_own.add(job.caller)
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

    def _has_own_memory(self, job: Job) -> bool:
        """Whether its API key has some: then no other key need wait until it has more."""
        return any(other.lease and other.caller == job.caller != "" for other in self.jobs)

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
            if self.slice_sizer.is_first(prefill.n_done - n_before):
                prefill.forget_time()
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
            try:
                task.send_results(logits)
            except Exception as error:
                self._fail(task.job, error)
                return
            if task.sequences:
                self._start_decoding(task, logits)
            else:
                result.prompts.append(task)

    def _trial(self) -> RowSharing | None:
        """Of a prompt whose rows would share a batch before it was tried whether they may; or, when
        nobody waits, of rows that could have been fed drafts.
        """
        for task in self.prefilling:
            lease = task.job.lease
            is_beside = lease is not None and lease.batch in self._batches
            shares = is_beside or len(task.sequences) > 1
            if shares and not task.lane.sharing.is_decided:
                return task.lane.sharing
        if self._untried is not None and self._untried.is_decided:
            self._untried = None
        return None if self._open else self._untried

    def _slice_tokens(self, lane: Lane, context: int, rest: int, is_awaited: bool = False) -> int:
        costs, waited_for = lane.restorer.rates.slices, bool(self._batches) or self._others_wait()
        return self.slice_sizer.slice_tokens(costs, context, waited_for or is_awaited, rest)

    def _next_task(self) -> PrefillTask | None:
        """The highest priority, that of waiting jobs included. Of equal ones keys are served in
        rotation, and the prompts of a key; of these a last token, which takes a step, goes first.

        None also while another key's answers have not had their share of the time.
        """
        self.prefilling.rotate(-1)
        may_go_on = [t for t in self.prefilling if self._owed_s <= 0 or not self._is_beside(t)]
        task = max(may_go_on, key=self._rank, default=None)
        if task is not None:
            self._slices.serve(task.job)
        return task

    def _is_beside(self, task: PrefillTask) -> bool:
        """Whether there are answers of another key that are no less urgent."""
        own, jobs = task.job, (row.job for row in self.rows)
        return any(
            job.caller != own.caller and job.request.priority >= own.request.priority
            for job in jobs
        )

    def _rank(self, task: PrefillTask) -> tuple[int, float, bool]:
        waiters = [job.request.priority for job in self.jobs if job.waits_for is task]
        priority = max([task.job.request.priority, *waiters])
        return priority, -self._slices.last(task.job), task.is_at_last_token

    def _count_slice(self, task: PrefillTask, context: int, seconds: float) -> None:
        n_tokens = task.prefill.n_done - context
        # A prompt that is beside nobody is of the key that has the answers: its time is theirs.
        self._owed_s = seconds / PER_ANSWER_S if self._is_beside(task) else self._owed_s - seconds
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
        lane, lease = sequence.job.lane, sequence.job.lease
        # A sequence whose batch failed decodes alone: if it is the cause, no other one fails.
        shares_batch = lane.can_batch and not sequence.n_failures
        key = lease.batch if lease is not None and shares_batch else sequence
        batch = self._batches.setdefault(key, _new_batch(lane))
        try:
            batch.join(sequence, caches, token)
        except Exception as error:
            if isinstance(error, CacheMismatch) and lane.restorer.layout.fits(caches):
                # A state that grows is still short. Nothing was changed.
                self._batches[sequence] = _new_batch(lane)
                self._batches[sequence].join(sequence, caches, token)
                return
            self._rebuild(key, batch)  # only some layers may hold the new row
            raise

    # decode

    def _decode(self, result: StepResult) -> bool:
        """A token for every sequence; whether there was one."""
        while self._moving:
            self._move(self._moving.pop())
        batches = list(self._batches.items())
        for key, batch in batches:
            try:
                result.rows.extend(self._decode_batch(key, batch))
            except Exception as error:
                LOG.warning("a batch of %d sequences failed", len(batch.rows), exc_info=error)
                self._recover(key, batch, error)
        return bool(batches)

    def _move(self, job: Job) -> None:
        """Its rows to the batch that its lease names, but those that have none with others."""
        for key, batch in list(self._batches.items()):
            for row in [row for row in batch.rows if row.job is job and key is not row]:
                try:
                    token = batch.token_of(row)
                    ((_, caches),) = self._leave(key, batch, [row])
                    self._join(row, caches, token)
                except Exception as error:
                    self._recover(key, batch, error)
                    self._fail(job, error)
                    return

    def _decode_batch(self, key: Hashable, batch: Batch[RunningSequence]) -> list[EndedRow]:
        """A token for every sequence of a batch; those that end leave it."""
        gate, size = self._gate_of(batch), _size(batch)
        runs_ahead = batch.runs_ahead and not (gate and any(self._drafts(gate, batch).values()))
        if runs_ahead:
            batch.feed()
        waiting = Stopwatch(self._clock)
        emitted = batch.emit()
        watch, batch.waited_s = Stopwatch(self._clock), waiting.seconds()
        for row in batch.rows:
            row.count_step()
        finished = [row for row, token in emitted if not self._add_token(row, token)]
        is_kept = any(row.job.request.policy.writes for row in finished)
        fed: FedStep | None = None
        if not runs_ahead and (is_kept or len(finished) < len(batch.rows)):
            # else nobody needs the last tokens in the caches
            fed = self._feed(gate, batch, finished)
            finished += fed.ended
        ended = self._leave(key, batch, finished)
        try:
            self._sample(batch)
        except Exception as error:
            LOG.warning("a batch of %d sequences failed", len(batch.rows), exc_info=error)
            self._recover(key, batch, error)
            return ended
        if gate is not None and (runs_ahead or fed is not None):
            if fed is None or (batch.can_run_ahead and fed.width == 1):
                gate.saw_end_ahead(size, self._clock(), runs_ahead and self._is_undisturbed)
            else:
                gate.saw_step(size, fed.width, fed.n_accepted, watch.seconds(), fed.n_again)
        return ended

    def _gate_of(self, batch: Batch[RunningSequence]) -> DraftGate | None:
        """None if the rows get no drafts, or not yet."""
        lane = batch.rows[0].job.lane
        if lane.gate is None:
            return None
        can_draft = batch.can_draft and len(batch.rows) <= MAX_DRAFTED_ROWS
        trials = lane.model.trials  # until all is measured, steps do not cost what they will
        if can_draft and lane.sharing.allowed and (trials is None or trials.is_measured):
            return lane.gate
        if can_draft:
            self._untried = lane.sharing
        lane.gate.costs.missed_step()
        return None

    def _drafts(
        self,
        gate: DraftGate,
        batch: Batch[RunningSequence],
        finished: Collection[RunningSequence] | None = None,
    ) -> dict[RunningSequence, Sequence[int]]:
        """What the rows are fed behind their next tokens, where that pays.

        Before the tokens of a step are known (`finished` is None): what they would be, if they are
        as proposed.
        """
        size, watch = _size(batch), Stopwatch(self._clock)
        if not gate.may_search(size):
            return {}
        proposals = [None if row in (finished or ()) else row.propose() for row in batch.rows]
        gate.searched(size, watch.seconds(), batch.waited_s if finished is None else 0.0)
        width = gate.width(proposals, size)
        return {
            row: proposal.tokens[: min(width - 1, row.n_left - 1)]
            for row, proposal in zip(batch.rows, proposals, strict=True)
            if proposal is not None and width > 1
        }

    def _feed(
        self,
        gate: DraftGate | None,
        batch: Batch[RunningSequence],
        finished: list[RunningSequence],
    ) -> FedStep:
        """A step of a batch, with drafts where they pay."""
        if gate is None:
            return FedStep(batch.feed(), 0, [])
        drafts = self._drafts(gate, batch, finished)
        try:
            return self._accept(batch, batch.feed(drafts))
        except Exception:
            gate.is_open = gate.is_open and not drafts
            raise

    def _accept(self, batch: Batch[RunningSequence], width: int) -> FedStep:
        """Add the drafted tokens that are right."""
        ended, n_all = [], 0
        while accepted := batch.accept():
            for row, token in accepted:
                if not self._add_token(row, token):
                    batch.end_draft(row)
                    ended.append(row)
        for row, (n_drafted, n_accepted) in batch.settle().items():
            row.count_draft(n_drafted, n_accepted)
            n_all += n_accepted
            self.ledger.count(drafted_tokens=n_drafted, accepted_tokens=n_accepted)
        return FedStep(width, n_all, ended, batch.n_again)

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
            if not (row.reason or row.job.ended) and self._intake.extend_lease(row):
                self._moving.add(row.job)
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
        if error is None and not job.audit:
            self._ends.serve(job)
        job.end(error)

    def _end_computed(self, job: Job) -> None:
        """End a job if all is computed; a durable one ends only when it is on disk."""
        if not job.is_finished or job.is_computed:
            return
        if job.request.policy is Policy.DURABLE:
            self._open.pop(job, None)
            job.release()
            job.advance(JobStatus.SAVING)
            self._end_durably(job)
        else:
            self.end(job)

    def _fail(self, job: Job, error: Exception) -> None:
        """End one job with an error; the others continue."""
        if not job.ended:
            self.end(job, self._as_keepwarm_error(error))
        for task in self._tasks_of(job):
            self._end_prefill(task)

    def _as_keepwarm_error(self, error: Exception) -> KeepwarmError:
        if isinstance(error, KeepwarmError):
            return error
        LOG.error("a request failed", exc_info=error)
        if lost := self._examine():
            return Stopping(lost)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return EngineFailed(
            f"The engine failed on this request ({reason}); other requests continue. Retry."
        )

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
            if row.reason and row.job.error is None:
                self._keeper.keep_turn(row)
            if row.job.ended or row.reason:
                continue
            try:
                self.prefilling.append(self._intake.restart(row))
                row.job.advance(JobStatus.PREFILLING)
            except Exception as error:
                self._fail(row.job, error)


def _size(batch: Batch[RunningSequence]) -> BatchSize:
    return BatchSize(len(batch.rows), max(len(row.tokens) for row in batch.rows))


def _new_batch(lane: Lane) -> Batch[RunningSequence]:
    return Batch(lane.model.module, own_ends=lane.sharing.own_ends)
