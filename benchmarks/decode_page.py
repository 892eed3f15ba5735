"""Results of `benchmarks.decode` as the tables of docs/results/decode.md.

`python -m benchmarks.decode_page` writes them; a test compares them with the JSON beside the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
JSON, PAGE = RESULTS / "decode.json", RESULTS / "decode.md"
MEASURED = re.compile(
    r"(?<=<!-- measured, from docs/results/decode.json -->\n).*?(?=<!-- end -->)", re.DOTALL
)


def page(text: str, found: Mapping[str, Any]) -> str:
    """The page with its tables replaced."""
    return MEASURED.sub(lambda _: tables(found), text)


def tables(found: Mapping[str, Any]) -> str:
    return "\n".join(_parts(found)) + "\n"


def _parts(found: Mapping[str, Any]) -> Iterator[str]:
    for shape in _shapes(found):
        steps = {n: of for n, of in found[f"{shape}: steps"].items() if "tokens/s" in of}
        pipelined = {n: of["pipelined"] for n, of in steps.items() if "pipelined" in of}
        yield from _steps(f"{shape}: pipelined steps, as the engine runs them", pipelined)
        yield from _steps(f"{shape}: one step after the other", steps)
        unmasked = _measured(found, f"{shape}: steps without a mask")
        yield from _steps(f"{shape}: one step after the other, without a mask", unmasked)
        yield from _by_way(f"{shape}: one row, ms", _measured(found, f"{shape}: profile"))
        drafts = _measured(found, f"{shape}: drafts")
        yield from _by_way(f"{shape}: one row, several tokens in a step, ms", drafts)
        yield from _agreement(shape, _measured(found, f"{shape}: agreement"))


def _measured(found: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Nothing if there was no such stage, no time for it, or it failed."""
    result = found.get(stage)
    return result if isinstance(result, dict) and "error" not in result else {}


def _shapes(found: Mapping[str, Any]) -> list[str]:
    return [name.removesuffix(": steps") for name in found if name.endswith(": steps")]


def _steps(title: str, steps: Mapping[str, Any]) -> Iterator[str]:
    """Tokens per second, and how many times today's."""
    if not steps:
        return
    measured = {n: steps[n] for n in sorted(steps, key=int)}
    ways = dict.fromkeys(way for rates in measured.values() for way in rates["tokens/s"])
    rows = ([way, *(_rate(rates, way) for rates in measured.values())] for way in ways)
    yield from _table(f"{title}, tokens/s (times today) by rows", ["rows", *measured], rows)


def _rate(rates: Mapping[str, Any], way: str) -> str:
    if way not in rates["tokens/s"]:
        return ""
    rate = f"{rates['tokens/s'][way]:,}"
    return rate if way == "today" else f"{rate} ({rates['times today'][way]})"


def _by_way(title: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What was measured of each way, one column each."""
    if not found:
        return
    names = next(iter(found.values()))
    rows = ([name, *(_text(of_way[name]) for of_way in found.values())] for name in names)
    yield from _table(title, ["", *found], rows)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _agreement(shape: str, found: Mapping[str, Any]) -> Iterator[str]:
    if not found:
        return
    kinds = [*next(iter(found.values()))]
    rows = ([way, *(_difference(of[kind]) for kind in kinds)] for way, of in found.items())
    title = f"{shape}: equal argmax, and the largest difference of logits by their deviation"
    yield from _table(title, ["four rows, eight steps", *kinds], rows)


def _difference(found: Mapping[str, Any]) -> str:
    return f"{found['argmax equal']}, {found['max difference / std']}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield _line(head)
    yield "|---|" + "--:|" * (len(head) - 1)
    for row in rows:
        yield _line(row)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(), json.loads(JSON.read_text())))


if __name__ == "__main__":
    main()
