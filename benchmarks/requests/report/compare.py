"""What got better or worse than a baseline by more than the samples vary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from benchmarks.requests.report.results import Better, Results

Verdict: TypeAlias = Literal["better", "worse", "within the spread"]

MIN_CHANGE = 0.02  # a smaller change is ignored, however little the samples vary
CLASS = ("system", "architecture", "backend", "device", "n_cpus")


class Change(NamedTuple):
    workload: str
    target: str
    what: str
    before: float
    after: float
    verdict: Verdict

    @property
    def factor(self) -> float:
        return self.after / self.before if self.before else float("inf")


def changes(before: Results, after: Results) -> list[Change]:
    """Ratios always; times and bytes only if machine class and model are the same."""
    found = list(_claims(before, after))
    return [*_series(before, after), *found] if comparable(before, after) else found


def comparable(before: Results, after: Results) -> bool:
    same_machine = all(before.machine.get(name) == after.machine.get(name) for name in CLASS)
    return same_machine and before.model == after.model


def _series(before: Results, after: Results) -> Iterator[Change]:
    known = {series.key: series for series in before.series}
    for now in after.series:
        if now.better and (then := known.get(now.key)):
            verdict = judge(then.samples, now.samples, now.better)
            what = now.what if now.x is None else f"{now.what}, {now.x:,.0f}"
            yield Change(now.workload, now.target, what, then.median, now.median, verdict)


def _claims(before: Results, after: Results) -> Iterator[Change]:
    known = {claim.key: claim for claim in before.claims}
    for now in after.claims:
        if then := known.get(now.key):
            better: Better = "higher" if now.at_least else "lower"
            verdict = judge(then.samples, now.samples, better)
            yield Change(now.workload, now.target, now.what, then.value, now.value, verdict)


def judge(then: Sequence[float], now: Sequence[float], better: Better) -> Verdict:
    """Changed if all samples of one run lie beyond all of the other, by more than MIN_CHANGE."""
    if min(now) > max(then) * (1 + MIN_CHANGE):
        return "better" if better == "higher" else "worse"
    if max(now) < min(then) * (1 - MIN_CHANGE):
        return "worse" if better == "higher" else "better"
    return "within the spread"
