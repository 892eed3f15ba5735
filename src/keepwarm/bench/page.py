"""One HTML page with tables and plots, all inside: it needs no other file and no network."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from keepwarm.bench import lengths, tables
from keepwarm.bench.results import Results, Series
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1.5rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; margin-bottom: .3rem; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; border-bottom: 1px solid #8884; }
figure { display: inline-block; margin: 0 1rem 1rem 0; background: #fff; color: #000; }
figcaption { padding: 0 .8rem .5rem; max-width: 26rem; }
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
        f"<p>{escape(tables.heading(results))}</p>{drawn}{written}"
        f'<script type="application/json" id="results">{raw}</script></body></html>\n'
    )


def plots(results: Results) -> Iterator[str]:
    """Those for which something was measured."""
    first = results.of("lengths", *lengths.HOW)
    if first:
        caption = "First-token time against prompt length: " + _conditions(first)
        yield _figure(caption, first, "prompt tokens", "seconds", log=True)
    recomputed = results.of("pipeline", "recomputed", "new")
    if recomputed:
        caption = "Prompt tokens computed in every turn of a conversation"
        yield _figure(caption, recomputed, "turn", "tokens")
    throughput = results.of("streams", "throughput")
    if throughput:
        yield _figure("Throughput against concurrency", throughput, "streams", "tokens a second")
    held = [series for series in results.series if series.unit == "bytes"]
    if held:
        yield _bars("Bytes by tier, medians", held)


def _conditions(found: Sequence[Series]) -> str:
    return "; ".join(dict.fromkeys(f"{s.what}: {s.how}" for s in found if s.how))


def _figure(
    caption: str, found: Sequence[Series], across: str, up: str, *, log: bool = False
) -> str:
    """A line for each target and thing; whiskers reach from the lowest to the highest sample."""
    figure, axes = _empty()
    for target, what in dict.fromkeys((s.target, s.what) for s in found):
        line = [s for s in found if (s.target, s.what) == (target, what)]
        _line(axes, f"{target}, {what}", line)
    axes.set(xlabel=across, ylabel=up)
    axes.set_xticks(sorted({s.x for s in found if s.x is not None}))
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)
    return _embedded(figure, caption)


def _line(axes: Axes, label: str, line: Sequence[Series]) -> None:
    line = sorted(line, key=lambda series: series.x or 0)
    middle = [series.median for series in line]
    low = [series.median - min(series.samples) for series in line]
    high = [max(series.samples) - series.median for series in line]
    across = [series.x or 0 for series in line]
    axes.errorbar(across, middle, [low, high], marker="o", markersize=3, capsize=2, label=label)


def _bars(caption: str, found: Sequence[Series]) -> str:
    figure, axes = _empty()
    names = [f"{series.target}, {series.workload}: {series.what}" for series in found]
    axes.barh(names, [series.median / 1e6 for series in found])
    axes.set(xlabel="MB")
    axes.tick_params(axis="y", labelsize=6)
    return _embedded(figure, caption)


def _empty() -> tuple[Figure, Axes]:
    try:
        from matplotlib import figure, rc_context
    except ImportError as error:
        raise BadInput("Plots need matplotlib: pip install 'keepwarm[bench]'.") from error
    with rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        made = figure.Figure(figsize=(5.6, 3.8), layout="constrained")
        return made, made.subplots()


def _embedded(figure: Figure, caption: str) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": caption}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return (
        f'<figure role="img" aria-label="{escape(caption)}">{svg[svg.index("<svg") :]}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
