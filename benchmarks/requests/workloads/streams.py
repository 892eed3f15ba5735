"""Concurrent requests: a late one, a long prompt, many streams, and a mix."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial

from benchmarks.requests.client import Message, TimedReply
from benchmarks.requests.prompts import with_answer
from benchmarks.requests.report.results import Note, Record, percentile
from benchmarks.requests.run import WorkloadRun, ask_together, in_thread
from benchmarks.requests.targets import error_line
from keepwarm.errors import KeepwarmError

ENDLESS = 4096  # tokens; the stream is cancelled before


class BackgroundStream:
    """An answer that runs until it is told to stop, and when each of its pieces came."""

    def __init__(self, run: WorkloadRun) -> None:
        self.times: list[float] = []
        self._n_before = run.sizes.pieces_before
        self._running, self._stopped = threading.Event(), threading.Event()
        ask = partial(run.ask, run.fresh(64), ENDLESS, policy="no-store", on_text=self._on_text)
        self.reply = in_thread(ask)
        self.reply.add_done_callback(lambda _: self._running.set())

    def _on_text(self, _: float) -> bool:
        self.times.append(time.perf_counter())
        if len(self.times) > self._n_before:
            self._running.set()
        return not self._stopped.is_set()

    def wait_until_running(self) -> None:
        self._running.wait()
        if self.reply.done():
            raise KeepwarmError(f"A stream ended early: {self.reply.exception()}.")

    def stop(self) -> None:
        self._stopped.set()


@contextmanager
def background_streams(run: WorkloadRun, n_streams: int = 1) -> Iterator[list[BackgroundStream]]:
    """Keep streams running for the duration of the block; an error does not wait for their end."""
    streams = [BackgroundStream(run) for _ in range(n_streams)]
    try:
        for stream in streams:
            stream.wait_until_running()
        yield streams
    finally:
        for stream in streams:
            stream.stop()
    wait([stream.reply for stream in streams])


def late(run: WorkloadRun) -> Iterator[Record]:
    """A short request arrives while another decodes."""
    alone, beside_another = [], []
    for _ in run.samples("late arrival"):
        alone.append(run.ask(run.fresh(run.sizes.late)).ttft_s)
        with background_streams(run):
            beside_another.append(run.ask(run.fresh(run.sizes.late)).ttft_s)
    how = f"cold prompt of {run.sizes.late} tokens"
    solo = run.series("TTFT, alone", "s", alone, how=how)
    joined = run.series("TTFT, beside a stream", "s", beside_another, how=how)
    yield from (solo, joined)
    yield run.ratio("beside a stream ÷ alone", joined, solo, 1.5, at_least=False)


def prefill(run: WorkloadRun) -> Iterator[Record]:
    """A long prompt is prefilled while another request decodes."""
    alone, beside_another, gaps_alone, gaps_beside = [], [], [], []
    for _ in run.samples("long prompt"):
        alone.append(run.ask(run.fresh(run.sizes.long)).ttft_s)
        with background_streams(run) as (stream,):
            n_alone = len(stream.times)
            beside_another.append(run.ask(run.fresh(run.sizes.long), 1).ttft_s)
        gaps = stream.reply.result().gaps
        gaps_alone.append(percentile(gaps[: n_alone - 1], 0.5))
        gaps_beside.append(percentile(gaps[n_alone - 1 :], 0.95))
    how = f"cold prompt of {run.sizes.long:,} tokens"
    solo = run.series("TTFT, alone", "s", alone, how=how)
    joined = run.series("TTFT, beside a stream", "s", beside_another, how=how)
    gap = run.series("gap between tokens, alone", "s", gaps_alone, how="median of a stream")
    wide = run.series("gap between tokens, during prefill", "s", gaps_beside, how="p95 of a stream")
    yield from (solo, joined, gap, wide)
    yield run.ratio("prefill beside a stream ÷ alone", joined, solo, 1.7, at_least=False)
    yield run.ratio("p95 gap during prefill ÷ median gap alone", wide, gap, 8, at_least=False)


def streams(run: WorkloadRun) -> Iterator[Record]:
    """Tokens per second of all streams, while all of them run."""
    found = {}
    for n_streams in run.sizes.streams:
        rates = []
        for _ in run.samples(f"{n_streams} streams"):
            prompts = [run.fresh(64) for _ in range(n_streams)]
            asks = [partial(run.ask, messages, run.sizes.stream) for messages in prompts]
            rates.append(tokens_per_second(ask_together(asks)))
        how = "all streams together, while all of them run"
        found[n_streams] = run.series(
            "throughput", "tokens/s", rates, x=n_streams, how=how, better="higher"
        )
        yield found[n_streams]
    if 4 in found and 1 in found:
        yield run.ratio("four streams ÷ one", found[4], found[1], 1.8)


def tokens_per_second(replies: Sequence[TimedReply]) -> float:
    """While all streams run; over the whole time if they never overlap."""
    start = max(reply.times[0] for reply in replies)
    end = min(reply.times[-1] for reply in replies)
    if end <= start:
        start, end = 0.0, max(reply.total_s for reply in replies)
    return sum(_tokens_between(reply, start, end) for reply in replies) / (end - start)


def _tokens_between(reply: TimedReply, start: float, end: float) -> float:
    """A piece of text may be more than one token."""
    n_pieces = sum(start < moment <= end for moment in reply.times)
    return n_pieces * reply.completion_tokens / len(reply.times)


def persistence(run: WorkloadRun) -> Iterator[Record]:
    """What saving blocks costs decoding."""
    if not run.target.is_ours:
        yield Note(run.workload, run.target.name, "has no setting for this")
        return
    kept, unkept = [], []
    for _ in run.samples("on and off"):
        messages = run.fresh(64)
        kept.append(run.ask(messages, run.sizes.persisted).token_s)
        unkept.append(run.ask(messages, run.sizes.persisted, policy="no-store").token_s)
    on = run.series(
        "time per token, persistence on", "s", kept, how="decode only, first token excluded"
    )
    off = run.series("time per token, persistence off", "s", unkept, how="policy no-store")
    yield from (on, off)
    yield run.ratio("speed with persistence ÷ without", off, on, 0.97)


def stress(run: WorkloadRun) -> Iterator[Record]:
    """New, repeated, follow-up and forked prompts at once, some cancelled."""
    draw = random.Random(0)  # noqa: S311
    known = [run.fresh(n) for n in run.sizes.lengths]
    n_all = run.sizes.stress_requests
    todo = enumerate([_mixed(run, draw, known) for _ in range(n_all)], 1)
    replies: list[TimedReply] = []
    errors: list[str] = []

    def work() -> None:
        for number, ask in todo:
            run.show_status(f"request {number} of {n_all}")
            try:
                replies.append(ask())
            except KeepwarmError as error:
                errors.append(error_line(error))

    ask_together([work] * run.sizes.clients)
    how = f"{run.sizes.clients} clients at once, about a fifth of the requests cancelled"
    firsts = [reply.ttft_s for reply in replies]
    if firsts:
        yield run.series("TTFT", "s", firsts, how=how)
        yield run.series("TTFT, p99", "s", [percentile(firsts, 0.99)], how=how)
    yield run.claim("failed requests", [len(errors)], 0, at_least=False)
    yield from (Note(run.workload, run.target.name, text) for text in dict.fromkeys(errors))


def _mixed(
    run: WorkloadRun, draw: random.Random, known: Sequence[Sequence[Message]]
) -> Callable[[], TimedReply]:
    messages = list(draw.choice(known))
    kind = draw.choice(("new", "repeat", "follow-up", "fork", "cancelled"))
    if kind == "new":
        messages = run.fresh(draw.choice(run.sizes.lengths))
    if kind == "follow-up":
        messages = with_answer(messages, run.text(8), run.text(16))
    if kind == "fork":
        messages = [messages[0], *run.fresh(64)[1:]]
    if kind == "cancelled":
        cancel_after = draw.randint(0, 3)
        times = iter(range(cancel_after))
        return partial(run.ask, messages, 64, on_text=lambda _: next(times, None) is not None)
    return partial(run.ask, messages, draw.choice((1, run.sizes.answer, 32)))
