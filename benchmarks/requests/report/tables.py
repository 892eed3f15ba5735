"""Results as tables for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from rich.table import Table

from benchmarks.requests.report.compare import Change
from benchmarks.requests.report.results import Claim, Results, Series

YES, NO = "yes", "no"


class Grid(NamedTuple):
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        table = Table(*self.heads, title=self.title, title_justify="left", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.heads, ["---", *("--:" for _ in self.heads[1:])], *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{body}\n"

    def html(self) -> str:
        heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in self.heads)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><caption>{escape(self.title)}</caption>"
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        )


def grids(results: Results) -> Iterator[Grid]:
    if results.claims:
        yield claims(results)
    for workload in results.workloads:
        if found := results.of(workload):
            yield _measured(workload, found, list(results.targets))
    if results.notes:
        rows = [(note.workload, note.target, note.text) for note in results.notes]
        yield Grid("Skipped or failed", ("workload", "target", "reason"), rows)


def claims(results: Results) -> Grid:
    """One row per ratio; goals apply to Keepwarm only."""
    names = list(results.targets)
    lines: dict[tuple[str, str], dict[str, Claim]] = {}
    for claim in results.claims:
        lines.setdefault((claim.workload, claim.what), {})[claim.target] = claim
    rows = []
    for (workload, what), found in lines.items():
        cells = [_format_claim(found[name]) if name in found else "" for name in names]
        bound = next((claim.bound for claim in found.values() if claim.bound), "")
        rows.append((workload, what, bound, *cells))
    return Grid("Ratios within this run ± spread", ("workload", "ratio", "goal", *names), rows)


def _format_claim(claim: Claim) -> str:
    verdict = "" if claim.holds is None else f" {YES if claim.holds else NO}"
    return f"{format_value(claim)}{verdict}"


def _measured(workload: str, found: Sequence[Series], names: Sequence[str]) -> Grid:
    """One row per measurement and x: medians with the spread of the samples."""
    lines: dict[tuple[str, float | None], dict[str, Series]] = {}
    for series in found:
        lines.setdefault((series.what, series.x), {})[series.target] = series
    rows = []
    for (what, x), by_target in lines.items():
        some = next(iter(by_target.values()))
        cells = [format_value(by_target[name]) if name in by_target else "" for name in names]
        rows.append((what, "" if x is None else f"{x:,.0f}", some.unit, *cells, some.how))
    return Grid(
        f"{workload}: medians ± spread", ("measurement", "at", "unit", *names, "conditions"), rows
    )


def format_value(found: Series | Claim) -> str:
    """The median or ratio, with the spread if there is more than one sample."""
    one = _number(found.median if isinstance(found, Series) else found.value)
    return one if len(found.samples) < 2 else f"{one} ±{found.spread:.0%}"


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.1f}"


def comparison(found: Sequence[Change]) -> Grid:
    """The changes beyond the spread; the title counts the rest."""
    changed = [change for change in found if change.verdict != "within the spread"]
    rows = [
        (
            change.workload,
            change.target,
            change.what,
            _number(change.before),
            _number(change.after),
            f"{change.factor:.2f}",
            change.verdict,
        )
        for change in changed
    ]
    title = f"Against the baseline: {len(changed)} of {len(found)} beyond the spread"
    heads = ("workload", "target", "measurement", "before", "now", "factor", "verdict")
    return Grid(title, heads, rows)


def heading(results: Results) -> str:
    machine = results.machine
    kinds = ", ".join(f"{name}: {about}" for name, about in results.targets.items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{results.model}, {results.samples} samples each, {results.date}; {machine['system']}, "
        f"{machine['backend']} on {machine['n_cpus']} cores {machine['device']}, BLAS "
        f"{machine['blas'] or 'default'}, load {machine['load'][0]}; {versions}. "
        f"Targets: {kinds}. Command: {results.command}"
    )


def markdown(results: Results) -> str:
    body = "\n".join(grid.markdown() for grid in grids(results))
    return f"# Results of python -m benchmarks.requests\n\n{heading(results)}\n\n{body}"
