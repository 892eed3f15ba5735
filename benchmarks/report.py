"""Results as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from benchmarks.measure import Cost, Density, Peak, Record, Skipped, Speed

DERIVED = {
    Speed: ("median", "spread", "gb_per_second"),
    Peak: ("ratio", "holds"),
    Density: ("ratio",),
    Cost: ("median",),
    Skipped: (),
}
GROUPS = {"speeds": Speed, "peaks": Peak, "densities": Density, "costs": Cost, "skipped": Skipped}
# Each operation and its references.
RIVALS = {
    "slice": ("copy, fresh",),
    "save": ("write", "mlx-lm save"),
    "restore": ("copy, fresh", "mlx-lm load"),
    "merge": ("copy, fresh",),
}
# Store operations, their references, and the ratio wanted; 1.3 times as long is 0.77 of the speed.
STORE_RIVALS = (
    ("restore, cold", "read, cold", 0.8),
    ("restore, cold", "read in as many threads, cold", 0),
    ("restore, warm", "mx.load, warm", 1 / 1.3),
    ("restore, warm", "read, warm", 0),
    ("put", "write", 0.6),
)


@dataclass(frozen=True)
class Report:
    command: str
    date: str
    machine: Mapping[str, Any]
    records: Sequence[Record]

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def as_json(self) -> dict[str, Any]:
        head = {"command": self.command, "date": self.date, "machine": dict(self.machine)}
        return head | {name: [_plain(r) for r in self.of(kind)] for name, kind in GROUPS.items()}


def _plain(record: Record) -> dict[str, Any]:
    derived = {name: getattr(record, name) for name in DERIVED[type(record)]}
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in derived.items()}
    return asdict(record) | rounded


def write_json(report: Report, file: Path) -> None:
    file.write_text(json.dumps(report.as_json(), indent=1) + "\n")


def show(report: Report, console: Console) -> None:
    console.print(Group(*_parts(report)))


def _parts(report: Report) -> Iterator[RenderableType]:
    machine = report.machine
    yield (
        f"{machine['backend']} on {machine['n_cpus']} cores {machine['device']}, "
        f"load {machine['load'][0]}; medians, ± the spread of the samples"
    )
    for skip in dict.fromkeys(report.of(Skipped)):
        yield f"Skipped: {skip.case}: {skip.why}."
    store = [speed for speed in report.of(Speed) if speed.case.startswith("store")]
    batch = [speed for speed in report.of(Speed) if "batch" in speed.case]
    single = [speed for speed in report.of(Speed) if speed not in (*store, *batch)]
    if single:
        yield _single_table(single)
    if single or store:
        yield _peak_table(report.of(Peak))
    if store:
        yield _store_table(store)
    if report.of(Cost):
        yield _cost_table(report.of(Cost))
    if batch:
        yield _batch_table(batch)
        yield _density_table(report.of(Density))


def _single_table(speeds: Iterable[Speed]) -> Table:
    title = "GB/s of live bytes; in brackets the ratio to the references in the heading"
    heads = [f"{what} (÷ {', ÷ '.join(rivals)})" for what, rivals in RIVALS.items()]
    table = _table(title, "cache", "tokens", "MB", "copy, fresh", "copy, touched", "write", *heads)
    cases: dict[tuple[str, int], dict[str, Speed]] = {}
    for speed in speeds:
        cases.setdefault((speed.case, speed.n_tokens), {})[speed.what] = speed
    for (case, n_tokens), found in sorted(cases.items()):
        if "slice" in found:
            size = f"{found['slice'].n_bytes / 1e6:,.0f}"
            plain = [_rate(found[what]) for what in ("copy, fresh", "copy, touched", "write")]
            ours = [_compared(found, what) for what in RIVALS]
            table.add_row(case, f"{n_tokens:,}", size, *plain, *ours)
    return table


def _rate(speed: Speed) -> str:
    return f"{speed.gb_per_second:.2f} ±{speed.spread:.0%}"


def _compared(found: Mapping[str, Speed], what: str) -> str:
    ours = found[what]
    ratios = [
        f"{ours.gb_per_second / found[rival].gb_per_second:.2f}" if rival in found else "?"
        for rival in RIVALS[what]
    ]
    return f"{_rate(ours)} ({', '.join(ratios)})"


def _peak_table(peaks: Iterable[Peak]) -> Table:
    table = _table(
        "Peak memory above the start", "cache", "tokens", "what", "of live bytes", "≤ 1.1"
    )
    for peak in peaks:
        verdict = "yes" if peak.holds else "NO"
        ratio = f"{peak.ratio:.2f} + 2 blocks"
        table.add_row(peak.case, f"{peak.n_tokens:,}", peak.what, ratio, verdict)
    return table


def _store_table(speeds: Sequence[Speed]) -> Table:
    title = "GB/s of live bytes, and of the reference"
    table = _table(title, "cache", "tokens", "what", "GB/s", "reference", "GB/s", "ratio", "goal")
    found = {(speed.case, speed.n_tokens, speed.what): speed for speed in speeds}
    for case, n_tokens in dict.fromkeys((s.case, s.n_tokens) for s in speeds):
        for what, rival, wanted in STORE_RIVALS:
            ours, theirs = (found.get((case, n_tokens, name)) for name in (what, rival))
            if ours and theirs:
                ratio = f"{ours.gb_per_second / theirs.gb_per_second:.2f}"
                row = (case, f"{n_tokens:,}", what, _rate(ours), rival, _rate(theirs))
                table.add_row(*row, ratio, f"≥ {wanted:.2f}" if wanted else "")
    return table


def _cost_table(costs: Sequence[Cost]) -> Table:
    counts = sorted({cost.n_blocks for cost in costs})
    heads = [f"{n:,} blocks" for n in counts]
    table = _table("Milliseconds by the number of blocks, medians", "what", *heads)
    for what in dict.fromkeys(cost.what for cost in costs):
        unit = 1 if "bytes" in what else 1e3
        found = {cost.n_blocks: cost.median * unit for cost in costs if cost.what == what}
        table.add_row(what, *(f"{found[n]:,.1f}" for n in counts))
    return table


def _batch_table(speeds: Sequence[Speed]) -> Table:
    copy = next(speed for speed in speeds if speed.what == "copy, fresh")
    title = f"{copy.case}, {copy.n_tokens:,} tokens each"
    table = _table(title, "what", "ms", "GB/s", "÷ copy, fresh")
    for speed in speeds:
        ratio = f"{speed.gb_per_second / copy.gb_per_second:.2f}"
        table.add_row(speed.what, f"{speed.median * 1e3:,.0f}", _rate(speed), ratio)
    return table


def _density_table(densities: Iterable[Density]) -> Table:
    table = _table("Memory per live token", "layers", "B", "lengths", "when", "of live bytes")
    for density in densities:
        low, high = min(density.lengths), max(density.lengths)
        lengths = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        n_rows = str(len(density.lengths))
        table.add_row(density.case, n_rows, lengths, density.when, f"{density.ratio:.2f}")
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(*heads, title=title, title_justify="left", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
