"""Time to first token by prompt length: cold, repeated, followed up, after a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from benchmarks.requests.client import Message
from benchmarks.requests.prompts import user, with_answer
from benchmarks.requests.report.results import Note, Record, Series
from benchmarks.requests.run import WorkloadRun

COLD, AGAIN, FOLLOWING = "cold", "identical prompt again", "follow-up"
RESTARTED, DROPPED = "after a restart", "after a restart, page cache dropped"
READY = f"ready {RESTARTED}"
HOW = {
    COLD: "a cold prompt, from request to first text",
    AGAIN: "the identical prompt, right after its answer",
    FOLLOWING: "the prompt, its answer and 16 new tokens, right after",
    RESTARTED: "identical prompt to a restarted process; files may be in the page cache",
    DROPPED: "identical prompt to a restarted process; the store's pages were dropped",
}
Prompts: TypeAlias = Sequence[Sequence[Sequence[Message]]]  # by sample, by length


def run(run: WorkloadRun) -> Iterator[Record]:
    lengths = run.sizes.lengths
    prompts = [[run.fresh(n) for n in lengths] for _ in range(run.sizes.samples)]
    found = list(_warm(run, prompts))
    if run.target.restart_method:
        found += _restarted(run, prompts, RESTARTED)
        if run.target.store is not None and run.drops_pages:
            found += _restarted(run, prompts, DROPPED)
        elif run.target.store is not None:
            why = "page cache dropped: skipped, this system cannot drop it"
            yield Note(run.workload, run.target.name, why)
    else:
        yield Note(run.workload, run.target.name, "cannot be restarted by the bench")
    yield from found
    yield from _claims(run, [series for series in found if series.unit == "s"])


def _warm(run: WorkloadRun, prompts: Prompts) -> Iterator[Series]:
    for index, n_tokens in enumerate(run.sizes.lengths):
        seconds: dict[str, list[float]] = {COLD: [], AGAIN: [], FOLLOWING: []}
        cached: list[int] = []
        for number in run.samples(f"{n_tokens:,} tokens"):
            messages = prompts[number][index]
            cold, again = run.ask(messages), run.ask(messages)
            following = run.ask(with_answer(messages, again.text, run.text(16)))
            for what, reply in ((COLD, cold), (AGAIN, again), (FOLLOWING, following)):
                seconds[what].append(reply.ttft_s)
            cached.append(again.cached_tokens)
        for what, samples in seconds.items():
            yield run.series(what, "s", samples, x=n_tokens, how=HOW[what])
        yield _cached(run, AGAIN, cached, n_tokens)


def _restarted(run: WorkloadRun, prompts: Prompts, what: str) -> list[Series]:
    """Each restart serves one prompt of every length, once."""
    starts: list[float] = []
    firsts: list[list[float]] = [[] for _ in run.sizes.lengths]
    cached: list[list[int]] = [[] for _ in run.sizes.lengths]
    for number in run.samples(what):
        starts.append(run.restart(cold_files=what == DROPPED))
        run.show_status(f"{what}, {number + 1} of {run.sizes.samples}")
        run.ask([user(run.text(1))], 1, policy="no-store")
        for index, messages in enumerate(prompts[number]):
            reply = run.ask(messages)
            firsts[index].append(reply.ttft_s)
            cached[index].append(reply.cached_tokens)
    how = HOW[what]
    lengths = run.sizes.lengths
    series = [run.series(what, "s", firsts[i], x=n, how=how) for i, n in enumerate(lengths)]
    series += [_cached(run, what, cached[i], n) for i, n in enumerate(lengths)]
    ready = "from process start to its first answer to another prompt"
    return [*series, run.series(f"ready {what}", "s", starts, how=ready)]


def _cached(run: WorkloadRun, what: str, cached: Sequence[int], n_tokens: int) -> Series:
    name, how = f"cached, {what}", HOW[what]
    return run.series(name, "tokens", cached, x=n_tokens, how=how, better="higher")


def _claims(run: WorkloadRun, found: Sequence[Series]) -> Iterator[Record]:
    by_key = {(series.what, series.x): series for series in found}
    for n_tokens in run.sizes.lengths:
        cold = by_key[COLD, n_tokens]
        for what in (AGAIN, RESTARTED, DROPPED):
            if warm := by_key.get((what, n_tokens)):
                name = f"cold ÷ {what}, {n_tokens:,} tokens"
                yield run.ratio(name, cold, warm, _wanted(what, n_tokens))


def _wanted(what: str, n_tokens: int) -> float | None:
    if what == RESTARTED and n_tokens >= 2048:
        return 60
    return 2 if what == AGAIN and n_tokens > 512 else None
