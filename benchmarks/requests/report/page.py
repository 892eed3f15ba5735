"""One self-contained HTML page with tables and plots."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from benchmarks.requests.report import tables
from benchmarks.requests.report.results import Results, Series
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
STYLES = (("-", "o"), ("--", "^"), (":", "s"), ("-.", "D"), ("-", "v"))  # line and point
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1.5rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; margin-bottom: .3rem; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; border-bottom: 1px solid #8884; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; background: #fff; color: #000; max-width: 34rem; }
figcaption { padding: 0 .8rem .5rem; }
svg { max-width: 100%; height: auto; }
"""


def html(results: Results) -> str:
    title = f"Keepwarm, measured on {results.model}"
    drawn = "".join(plots(results))
    written = "".join(grid.html() for grid in tables.grids(results))
    raw = json.dumps(results.as_json(), ensure_ascii=False).replace("</", "<\\/")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{escape(tables.heading(results))}</p>"
        f'<div class="plots">{drawn}</div>{written}'
        f'<script type="application/json" id="results">{raw}</script></body></html>\n'
    )


def plots(results: Results) -> Iterator[str]:
    """A plot for each workload that was measured."""
    lengths = results.of("lengths")
    first = [series for series in lengths if series.unit == "s" and series.x is not None]
    if first:
        caption = "Time to first token by prompt length; the table gives the conditions"
        yield _line_plot(caption, first, "prompt tokens", "seconds", log=True)
    recomputed = results.of("pipeline", "recomputed", "new")
    if recomputed:
        caption = "Prompt tokens prefilled in each turn of a conversation"
        yield _line_plot(caption, recomputed, "turn", "tokens")
    throughput = results.of("streams", "throughput")
    if throughput:
        yield _line_plot(
            "Throughput against concurrency", throughput, "streams", "tokens per second"
        )
    held = [series for series in results.series if series.unit == "bytes"]
    if held:
        yield _bar_plot("Bytes by tier, medians", held)


def _line_plot(
    caption: str, found: Sequence[Series], across: str, up: str, *, log: bool = False
) -> str:
    """A colour per target, a line style per measurement; whiskers from lowest to highest sample."""
    figure, axes = _new_figure()
    targets, things = (
        list(dict.fromkeys(names)) for names in zip(*map(_line_key, found), strict=True)
    )
    for kind in dict.fromkeys(map(_line_key, found)):
        line = [series for series in found if _line_key(series) == kind]
        style = STYLES[things.index(kind[1]) % len(STYLES)]
        _line(axes, line, f"C{targets.index(kind[0])}", style)
    axes.set(xlabel=across, ylabel=up)
    axes.set_xticks(sorted({s.x for s in found if s.x is not None}))
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return _as_html(figure, caption)


def _line_key(series: Series) -> tuple[str, str]:
    return series.target, series.what


def _line(axes: Axes, found: Sequence[Series], colour: str, style: tuple[str, str]) -> None:
    line = sorted(found, key=lambda series: series.x or 0)
    middle = [series.median for series in line]
    low = [series.median - min(series.samples) for series in line]
    high = [max(series.samples) - series.median for series in line]
    across = [series.x or 0 for series in line]
    axes.errorbar(
        across,
        middle,
        [low, high],
        color=colour,
        linestyle=style[0],
        marker=style[1],
        markersize=3,
        capsize=2,
        label=", ".join(_line_key(line[0])),
    )


def _bar_plot(caption: str, found: Sequence[Series]) -> str:
    figure, axes = _new_figure()
    names = [f"{series.target}, {series.workload}: {series.what}" for series in found]
    axes.barh(names, [series.median / MIB for series in found])
    axes.set(xlabel="MiB")
    axes.tick_params(axis="y", labelsize=6)
    return _as_html(figure, caption)


def _new_figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib import figure, rc_context
    except ImportError as error:
        raise BadInput("Plots need matplotlib: pip install matplotlib.") from error
    with rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        made = figure.Figure(figsize=(5.6, 4.4), layout="constrained")
        return made, made.subplots()


def _as_html(figure: Figure, caption: str) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": caption}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return (
        f'<figure role="img" aria-label="{escape(caption)}">{svg[svg.index("<svg") :]}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
