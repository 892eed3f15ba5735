"""Admitting requests: reserve memory, wait for a shared prefix, restore, start to prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from keepwarm.cache.restore.loading import Fault
from keepwarm.cache.restore.restorer import Capture
from keepwarm.engine.admission import Admission, kv_bytes
from keepwarm.engine.jobs import Job, JobStatus, PrefillTask, RunningSequence
from keepwarm.engine.lane import MIN_SHARED_TOKENS, Lane, WarmPrefix
from keepwarm.engine.prefill import Clock, Prefill, Stopwatch
from keepwarm.engine.sampling import PromptScores, Sampler
from keepwarm.errors import InsufficientResources
from keepwarm.prefix.blocks import common_tokens, pack
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.parsing import AnswerReader
from keepwarm.text.request import Miss, MissCause, Receipt, Started

FAULTS: Mapping[Fault, MissCause] = {
    "missing": "evicted",
    "damaged": "damaged",
    "unreadable": "unreadable",
    "newer": "unreadable",
    "layout": "refused layout",
    "error": "failed",
}
LEASE_TOKENS = 1024  # answer tokens that memory is reserved for at a time
MAX_PREFILLS = 4  # prompts that are prefilled in rotation
MAX_EXTRA_PREFILLS = 4  # more that need only one slice, or have a higher priority
MAX_ROWS = 64  # sequences in all batches together
MAX_OWN_PREFILLS, MAX_OWN_ROWS = 6, 48  # of one API key


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
        """Prefills and rows of the job's API key; without keys none is anyone's own."""
        tenant = job.request.tenant
        held = (self.prefilling, self.rows) if tenant else ((), ())
        n_prefills, n_rows = (
            sum(one.job.request.tenant == tenant for one in running) for running in held
        )
        return n_prefills, n_rows


class Intake:
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
            job.lease = self._admission.reserve(n_bytes, batch, n_rows=max(1, job.n_answers))
        return job.lease is not None

    def has_slot(self, job: Job, slots: BatchSlots) -> bool:
        """Some are left to other keys, some to jobs that are urgent or need only one slice."""
        n_prefills, n_rows = slots.of_key(job)
        if n_prefills >= MAX_OWN_PREFILLS or n_rows >= MAX_OWN_ROWS:
            return False
        if len(slots.prefilling) < MAX_PREFILLS and n_prefills < MAX_PREFILLS - 1:
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

    def extend_lease(self, sequence: RunningSequence) -> None:
        """Reserve memory for the next tokens of a long answer; raises if there is none."""
        job = sequence.job
        if job.lease is None or sequence.n_tokens % LEASE_TOKENS:
            return
        n_tokens = len(sequence.tokens) + min(sequence.n_left, LEASE_TOKENS)
        if not job.lease.grow(kv_bytes(job.lane.restorer.layout, n_tokens)):
            raise InsufficientResources(
                f"The answer is {sequence.n_tokens:,} tokens long and the other requests leave no "
                "memory for more; what was generated is kept: send it back to continue it when "
                "fewer requests run, lower max_tokens, or raise the memory budget."
            )

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
        job.admitted, watch = self._clock(), Stopwatch(self._clock)
        loading, job.loading = job.loading, None
        copied = None if loading else _copied(job, tasks)
        warm = copied or job.lane.restore(job.tokens, job.request.policy, loading)
        load_s = max(watch.seconds(), loading.seconds if loading else 0.0)
        job.restored = self._clock()
        job.receipt = _receipt(job, warm, load_s)
        job.sequences = [_sequence(job, choice) for choice in range(job.n_answers)]
        job.answer.put(Started(job.receipt))
        job.on_start(job)
        job.advance(JobStatus.PREFILLING)
        task = _task(job, job.tokens, warm, job.sequences, self._clock)
        if job.request.score_prompt:
            task.prefill.scores = PromptScores(job.tokens[0], job.request.sampling.top_logprobs)
        return task

    def restart(self, sequence: RunningSequence) -> PrefillTask:
        """Restore a sequence whose batch failed, from its blocks."""
        job = sequence.job
        warm = job.lane.restore(sequence.tokens, job.request.policy)
        return _task(job, sequence.tokens, warm, [sequence], self._clock)


def _task(
    job: Job,
    tokens: list[int],
    warm: WarmPrefix,
    sequences: list[RunningSequence],
    clock: Clock,
) -> PrefillTask:
    lane, tokens, n_exact = job.lane, list(tokens), job.lane.n_exact
    exact_lane = lane.exact_lane if warm.n_tokens < n_exact else None
    n_kept, exact = (0 if exact_lane else warm.n_kept), None
    capture, points = _opened(job, lane, tokens, warm.n_tokens, n_kept)
    if exact_lane is not None:
        first = tokens[: n_exact + 1]
        exact, before = _opened(job, exact_lane, first, warm.n_tokens, warm.n_kept)
        points = before | {n_exact} | {point for point in points if point > n_exact}
    prefill = Prefill(
        lane.model.backbone if job.request.embed else lane.model.module,
        tokens,
        warm.caches,
        warm.n_tokens,
        points=points,
        whole_blocks=lane.restorer.needs.whole_blocks,
        clock=clock,
    )
    return PrefillTask(job, tokens, prefill, capture, list(sequences), exact=exact)


def _opened(
    job: Job, lane: Lane, tokens: list[int], n_known: int, n_kept: int
) -> tuple[Capture, frozenset[int]]:
    """A capture that skips the first `n_kept` tokens, and where slices must end for it."""
    restorer, policy = lane.restorer, job.request.policy
    points = restorer.points(tokens, job.cuts, n_known) if policy.writes else frozenset()
    capture = job.capture(tokens, lane)
    capture.start_at(n_kept)
    capture.expect(points)
    return capture, points if restorer.needs.checkpoints else frozenset()


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
    return job.lane.copy_of(prefill.caches, n_excess, tokens, job.request.policy)


def _receipt(job: Job, warm: WarmPrefix, load_s: float) -> Receipt:
    n_known, n_tokens, rates = warm.n_tokens, len(job.tokens), job.lane.restorer.rates
    spared_s = rates.prefill_s(0, n_tokens) - rates.prefill_s(n_known, n_tokens)
    saved_ms = 1000 * (spared_s - load_s)
    return Receipt(
        prompt_tokens=n_tokens,
        reused=warm.reused,
        recomputed=n_tokens - n_known,
        saved_ms=round(max(0.0, saved_ms), 1) if n_known and rates.measured else 0.0,
        inexact=job.lane.inexact(n_known, n_tokens),
        spliced=job.prepared.spliced,
        scrubbed=job.request.scrubbed,
        reordered=job.prepared.reordered,
        unread=job.request.unread,
        ignored_fields=job.request.ignored_fields,
        miss=_miss(job, warm) if job.request.explain else None,
        continued=job.prepared.continued,
        scored=n_tokens if job.request.score_prompt else None,
    )


def _miss(job: Job, warm: WarmPrefix) -> Miss | None:
    """Why not more was reused: what the restore met with, else what earlier prompts tell."""
    lane, n_known = job.lane, warm.n_tokens
    why: MissCause | None = FAULTS.get(warm.fault) if warm.fault else None
    reads, restorer = job.request.policy.reads, lane.restorer
    n_stored = lane.n_stored(job.tokens) if reads else 0
    if why is None and n_stored > n_known:
        why = "not worth loading"
    n_held = restorer.n_held(job.tokens) if reads and restorer.needs.points else n_stored
    is_states_alone = not lane.restorer.needs.delta
    return job.prepared.explain(n_known, why, held=n_held, only_at_cuts=is_states_alone)


def _sequence(job: Job, choice: int) -> RunningSequence:
    prepared = job.prepared
    sampler = Sampler(
        prepared.sampling,
        prepared.n_vocab,
        job.tokens,
        prepared.new_matcher(),
        prepared.stop_tokens,
        choice=choice,
    )
    reader = AnswerReader(
        prepared.markup,
        stop=job.request.sampling.stop,
        segment=prepared.first_segment,
        calls=prepared.call_reader(),
    )
    return RunningSequence(job, choice, sampler, reader, prepared.max_new_tokens)
