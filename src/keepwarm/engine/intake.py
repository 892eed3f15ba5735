"""Letting requests in: memory first, then whether somebody computes the same, then the restore."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keepwarm.engine.admission import Admission
from keepwarm.engine.insight.counters import Counters
from keepwarm.engine.jobs import Job, Reading, Sequence
from keepwarm.engine.lane import MIN_SHARED, Lane, Lanes, Warm, options_for
from keepwarm.engine.prefill import Prefill, Stopwatch
from keepwarm.engine.sampling import Chooser
from keepwarm.errors import InsufficientResources
from keepwarm.prefix.blocks import common_tokens, pack
from keepwarm.text.parsing import AnswerReader
from keepwarm.text.request import Receipt, Started

ANSWER_ROOM = 1024  # answer tokens that memory is set aside for at first


class Intake:
    def __init__(
        self,
        lanes: Lanes,
        admission: Admission,
        counters: Counters,
        *,
        publish: Callable[[Reading], None],
    ) -> None:
        """`publish` makes findable what a reading has so far."""
        self._lanes = lanes
        self._admission = admission
        self._counters = counters
        self._publish = publish

    def reserve(self, job: Job) -> bool:
        """Memory for it, or False while others need it; raises if it could never run."""
        lane = self._lane(job)
        if job.lease is None:
            room = min(job.prepared.max_new_tokens, ANSWER_ROOM)
            n_bytes = Admission.needs(len(job.tokens), room, lane.manager.layout)
            batch = lane.options if lane.can_batch else None
            job.lease = self._admission.reserve(n_bytes, batch, n_rows=max(1, job.n_answers))
        return job.lease is not None

    def n_unread(self, job: Job) -> int:
        """Tokens that nobody knows yet, as of when it was first asked: a look takes time."""
        if job.n_unread is None:
            n_warm = self._lane(job).n_warm(job.tokens) if job.request.policy.reads else 0
            job.n_unread = len(job.tokens) - n_warm
        return job.n_unread

    def make_room(self, sequence: Sequence) -> None:
        """Set more memory aside for an answer that has used its own; raises if there is none."""
        job = sequence.job
        if job.lease is None or sequence.n_tokens % ANSWER_ROOM:
            return
        n_more = min(sequence.n_left, ANSWER_ROOM)
        n_bytes = Admission.needs(len(sequence.tokens), n_more, job.home.manager.layout)
        if not job.lease.grow(n_bytes):
            raise InsufficientResources(
                f"The answer is {sequence.n_tokens:,} tokens long and there is no memory for more "
                "beside the other requests; it is kept so far: send it back to have it continued "
                "when less runs, lower max_tokens, or raise the memory budget."
            )

    def waits(self, job: Job, readings: Iterable[Reading]) -> bool:
        """Find out whether somebody is computing what this prompt begins with."""
        if not job.request.policy.reads:
            return False
        others = [reading for reading in readings if _leads(reading, job)]
        if not others:
            return False
        packed, known = pack(job.tokens), job.home.n_warm(job.tokens)
        for reading in others:
            shared = min(common_tokens(reading.packed, packed), len(job.tokens) - 1)
            if shared < known + MIN_SHARED:
                continue
            if shared > reading.prefill.n_done:
                self._wait(job, reading, shared)
            else:
                self._publish(reading)
        if job.waits_for is not None:
            job.let_go()  # whoever waits needs no memory yet
        return job.waits_for is not None

    def _wait(self, job: Job, reading: Reading, n_tokens: int) -> None:
        if job.waits_for is None:
            self._counters.waited_for_prefix += 1
        if job.waits_for is None or n_tokens > job.wait_until:
            job.waits_for, job.wait_until, job.n_unread = reading, n_tokens, None
            reading.prefill.cut_at(n_tokens)

    def _lane(self, job: Job) -> Lane:
        options = options_for(job.request.kv, len(job.tokens))
        job.lane = job.lane or self._lanes.of(options, job.request.tenant)
        return job.lane

    def is_loading(self, job: Job) -> bool:
        """Have a long restore go on beside the others; whether it does so still."""
        lane = job.home
        if not lane.loads_beside or not job.request.policy.reads:
            return False
        if job.loading is None:
            job.loading = lane.begin(job.tokens, job.request.policy)
        return job.loading is not None and job.loading.in_background and not job.loading.is_done

    def open(self, job: Job) -> Reading:
        """Restore what is known of the prompt and say so; what is left is to be read."""
        lane, watch = job.home, Stopwatch()
        loading, job.loading = job.loading, None
        warm = lane.warm(job.tokens, job.request.policy, loading)
        load_s = max(watch.seconds(), loading.seconds if loading else 0.0)
        job.receipt = _receipt(job, lane, warm.reused, load_s)
        if not job.audit:
            self._counters.prompt_tokens += len(job.tokens)
            self._counters.saved_ms += job.receipt.saved_ms
            self._counters.add_reused(warm.reused)
        job.sequences = [_sequence(job, choice) for choice in range(job.n_answers)]
        job.answer.put(Started(job.receipt))
        return self._reading(job, job.tokens, warm, job.sequences)

    def reopen(self, sequence: Sequence) -> Reading:
        """Bring back a sequence whose batch died, from the blocks that it left."""
        job = sequence.job
        warm = job.home.warm(sequence.tokens, job.request.policy)
        return self._reading(job, sequence.tokens, warm, [sequence])

    def _reading(
        self, job: Job, tokens: list[int], warm: Warm, sequences: list[Sequence]
    ) -> Reading:
        lane = job.home
        tokens = list(tokens)
        capture = lane.manager.open(tokens, job.request.policy)
        capture.start_at(warm.n_kept)
        capture.expect([*job.cuts, len(tokens) - 1])
        prefill = Prefill(
            lane.model.module,
            tokens,
            warm.caches,
            warm.n_tokens,
            cuts=job.cuts,
            exact_places=lane.exact_places,
        )
        return Reading(job, lane, tokens, prefill, capture, list(sequences))


def _leads(reading: Reading, job: Job) -> bool:
    return reading.lane is job.lane and reading.job.request.policy.leads


def _receipt(job: Job, lane: Lane, reused: dict[str, int], seconds: float) -> Receipt:
    n_known = sum(reused.values())
    spared_ms = 1000 * (n_known / lane.manager.rates.prefill_tokens_per_s - seconds)
    return Receipt(
        prompt_tokens=len(job.tokens),
        reused=reused,
        recomputed=len(job.tokens) - n_known,
        saved_ms=round(max(0.0, spared_ms), 1) if n_known and lane.manager.rates.measured else 0.0,
        exact=lane.exact,
        spliced=job.prepared.spliced,
        scrubbed=job.request.scrubbed,
        miss=job.prepared.explain(n_known) if job.request.explain else None,
    )


def _sequence(job: Job, choice: int) -> Sequence:
    prepared = job.prepared
    chooser = Chooser(
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
    return Sequence(job, choice, chooser, reader, prepared.max_new_tokens)
