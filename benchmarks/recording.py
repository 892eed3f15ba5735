"""Records `benchmarks.demo` as an animated picture: python -m benchmarks.recording [FILE]

The demo runs as it is; each line appears when it was printed, faster by `SPEED`. Colours follow
the scheme of the reader.
"""

from __future__ import annotations

import html
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
COMMAND = "python -m benchmarks.demo"
SPEED = 6
PAUSE_S = 8.0  # at the end, before it begins again
COLUMNS = 80
WIDTH_EM, LINE_EM = 0.602, 1.3  # of a character of the font
SIZE, MARGIN = 14, 16
STYLE = """
svg { background: #fff; color: #1d1c1a; }
text { font: %(size)dpx ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1d1c1a;
  white-space: pre; opacity: 0; animation: %(seconds).1fs linear infinite; }
.on { fill: #a63a0c; } .head { font-weight: bold; } .off { fill: #615d57; }
@media (prefers-color-scheme: dark) {
  svg { background: #201f1c; }
  text { fill: #efece6; } .on { fill: #ff9a66; } .off { fill: #aaa59c; }
}
@media (prefers-reduced-motion: reduce) { text { animation: none; opacity: 1; } }
"""


class Line(NamedTuple):
    at_s: float  # when it was printed
    text: str


def record(command: Sequence[str]) -> Iterator[Line]:
    """Every line that a command prints, as it comes."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout or ():
            yield Line(time.monotonic() - began, text.rstrip("\n"))
    if process.returncode:
        raise SystemExit(process.returncode)


def drawn(lines: Sequence[Line], speed: float) -> str:
    """The lines as an SVG picture that plays them over and over."""
    seconds = lines[-1].at_s / speed + PAUSE_S
    height = round(2 * MARGIN + len(lines) * SIZE * LINE_EM)
    width = round(2 * MARGIN + COLUMNS * SIZE * WIDTH_EM)
    rows = "\n".join(_row(number, line) for number, line in enumerate(lines))
    style = STYLE % {"size": SIZE, "seconds": seconds}
    shares = (line.at_s / speed / seconds for line in lines)
    frames = "\n".join(_frames(number, share) for number, share in enumerate(shares))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="A recording of {COMMAND}">\n<style>{style}{frames}\n</style>\n'
        f"{rows}\n</svg>\n"
    )


def _row(number: int, line: Line) -> str:
    y = MARGIN + (number + 0.8) * SIZE * LINE_EM
    kind = _kind(line.text)
    return (
        f'<text class="{kind}" style="animation-name:l{number}" x="{MARGIN}" y="{y:.0f}" '
        f'xml:space="preserve">{html.escape(line.text)}</text>'
    )


def _frames(number: int, share: float) -> str:
    """Hidden until then, which is this share of the whole."""
    hidden, seen = f"{100 * share:.2f}%", f"{100 * share + 0.01:.2f}%"
    return f"@keyframes l{number} {{ 0%, {hidden} {{opacity: 0}} {seen}, 100% {{opacity: 1}} }}"


def _kind(text: str) -> str:
    if " on  " in text[:18]:
        return "on"
    if " off " in text[:18]:
        return "off"
    return "head" if text.startswith(("$", "A server", "The process")) else ""


def main(file: Path) -> None:
    lines = [Line(0.0, f"$ {COMMAND}")]
    for line in record([sys.executable, *COMMAND.split()[1:]]):
        print(line.text, flush=True)
        lines.append(line)
    file.write_text(drawn(lines, SPEED), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
