"""The rows of the README's table, from any results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.requests.report.results import Claim, Results, Series
from benchmarks.requests.report.tables import Grid, format_value
from benchmarks.requests.workloads import agents, chat, lengths


class Line(NamedTuple):
    """A row, named by the sizes of a full run, and its place in the results."""

    label: str
    workload: str
    what: str
    x: float | None = None  # or the largest below it that was measured


AT_ONCE = f"{agents.PREFILLS}, all at once"
LINES = (
    Line("Time to first token, cold 2,048-token prompt (s)", "lengths", lengths.COLD, 2048),
    Line("The same prompt again (s)", "lengths", lengths.AGAIN, 2048),
    Line("Process start to first answer, after `kill -9` (s)", "lengths", lengths.READY),
    Line("Then that prompt, files in the page cache (s)", "lengths", lengths.RESTARTED, 2048),
    Line("The same, with the page cache dropped (s)", "lengths", lengths.DROPPED, 2048),
    Line("Time to first token, turn 2 of a 644-token chat (s)", "chat", chat.SECOND),
    Line("Time to first token, another agent, same system prompt (s)", "chat", chat.OTHER),
    Line("Ten agents at once: times the shared prompt is prefilled", "agents", AT_ONCE),
    Line("Four streams at once: tokens per second", "streams", "throughput", 4),
)
WORKLOADS = tuple(dict.fromkeys(line.workload for line in LINES))
COLUMNS = {"keepwarm": "Keepwarm", "mlx-lm": "mlx_lm.server"}  # by target


def summary(results: Results) -> Grid:
    """The rows that were measured."""
    return Grid("Measured", ("", *COLUMNS.values()), list(_rows(results)))


def _rows(results: Results) -> Iterator[tuple[str, ...]]:
    for line in LINES:
        of_all = [_find(results, line, name) for name in COLUMNS]
        if any(of_all):
            yield line.label, *(format_value(found) if found else "" for found in of_all)


def _find(results: Results, line: Line, target: str) -> Series | Claim | None:
    wanted = line.workload, target, line.what
    measured: list[Series | Claim] = [*results.series, *results.claims]
    found = [one for one in measured if one.key[:3] == wanted and _fits(line, one)]
    return max(found, key=lambda one: one.key[3] or 0, default=None)


def _fits(line: Line, found: Series | Claim) -> bool:
    x = found.key[3]
    return x is None if line.x is None else x is not None and x <= line.x
