"""The findings as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from benchmarks.zoo.trials import Findings

REUSES = ("again", "next turn", "fork", "rewind", "restart", "restart, next turn")


def page(findings: Sequence[Findings], version: str, machine: str, exact: float) -> str:
    head = files(__package__).joinpath("page.md").read_text()
    counts = summary(findings)
    head = head.format(version=version, machine=machine, exact=exact, summary=counts)
    return head + "".join(map(_row, findings))


def summary(findings: Sequence[Findings]) -> str:
    ran = [one for one in findings if not one.failure]
    wrong = [one.name for one in ran if one.wrong]
    counts = [
        f"{len(findings)} types, {len(ran)} run here",
        f"{sum(one.verdict == 'exact' for one in ran)} exact",
        f"{sum('drifts' in one.verdict for one in ran)} as mlx-lm, which drifts",
        f"{len(wrong)} wrong" + (f" ({', '.join(wrong)})" if wrong else ""),
        f"{sum(bool(one.batched) for one in ran)} batched",
        f"{sum(one.quantised == 'yes' for one in ran)} with 8 bits",
    ]
    return "; ".join(counts) + "."


def _row(one: Findings) -> str:
    if one.failure:
        cells = [one.name, one.verdict, *[""] * 9]
    else:
        reused = [_share(*one.reused[t]) if t in one.reused else "" for t in REUSES]
        batched = "yes" if one.batched else "alone"
        cells = [one.name, one.verdict, one.caches, *reused, batched, one.quantised]
    return f"| {' | '.join(cells)} |\n"


def _share(n_reused: int, n_known: int) -> str:
    return "all" if n_reused == n_known else f"{n_reused} of {n_known}"
