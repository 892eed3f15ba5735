"""The README's figure: the first token after `kill -9`, as bars true to the measured seconds."""

from __future__ import annotations

from benchmarks.requests.report.results import Results, Series
from benchmarks.requests.summary import COLUMNS
from benchmarks.requests.workloads import lengths

N_TOKENS = 2048
BARS = {"mlx-lm": "other", "keepwarm": "ours"}  # by target, from the top; the class of its bar
LEFT, WIDTH, TOP, STEP, BAR = 150, 480, 62, 40, 24

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 156" width="720" height="156" role="img">
<title>{title}: {values}</title>
<style>
text {{ font: 15px system-ui, sans-serif; fill: #1f2328; font-variant-numeric: tabular-nums }}
.title {{ font-weight: 600 }} .card {{ fill: #ffffff; stroke: #d1d9e0 }}
.other {{ fill: #9aa4af }} .ours {{ fill: #d9600b }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }} .card {{ fill: #0d1117; stroke: #3d444d }} .other {{ fill: #656c76 }}
.ours {{ fill: #f0883e }}
}}
</style>
<rect class="card" x="0.5" y="0.5" width="719" height="155" rx="8"/>
<text class="title" x="20" y="34">{title}</text>
{bars}
</svg>
"""
ROW = (
    '<text x="{text_x}" y="{text_y}" text-anchor="end">{name}</text>'
    '<rect class="{css}" x="{left}" y="{y}" width="{width:.1f}" height="{height}" rx="2"/>'
    '<text x="{value_x:.1f}" y="{text_y}">{value}</text>'
)


def svg(results: Results) -> str:
    """Two bars on one linear scale, the medians of the run beside them."""
    found = {target: _restarted(results, target) for target in BARS}
    longest = max(series.median for series in found.values())
    rows = [
        _row(n, target, series.median, longest) for n, (target, series) in enumerate(found.items())
    ]
    values = ", ".join(f"{COLUMNS[name]} {series.median:.3g} s" for name, series in found.items())
    title = (
        f"Seconds to the first token of a {N_TOKENS:,}-token prompt, after kill -9 and a restart"
    )
    return SVG.format(title=title, values=values, bars="\n".join(rows))


def _restarted(results: Results, target: str) -> Series:
    wanted = ("lengths", target, lengths.RESTARTED, N_TOKENS)
    (found,) = (series for series in results.series if series.key == wanted)
    return found


def _row(n: int, target: str, seconds: float, longest: float) -> str:
    y, width = TOP + n * STEP, WIDTH * seconds / longest
    return ROW.format(
        name=COLUMNS[target], css=BARS[target], value=f"{seconds:.3g}", left=LEFT, y=y, width=width,
        height=BAR, text_x=LEFT - 12, text_y=y + BAR - 7, value_x=LEFT + width + 8,
    )  # fmt: skip
