"""The results as a page: how many tests of each file pass, and why the others do not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.clients.foreign.suites import SUITES, Suite

HERE = Path(__file__).parent
RESULTS = HERE.parents[2] / "docs" / "results" / "foreign-tests.json"
INTRO = HERE / "page.md"


def page(results: Mapping[str, Any]) -> str:
    parts = [_section(SUITES[name], results[name]) for name in SUITES if name in results]
    return "\n".join([INTRO.read_text(), *parts])


def reason_of(suite: Suite, test: str) -> str | None:
    """Why a test, as `file.py::name[parameters]`, does not pass; None if that is not known."""
    known = (why for pattern, why in suite.reasons.items() if re.search(pattern, test))
    return next(known, None)


def failures(tests: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A test, and its name with the parameters by which it failed."""
    for test, outcome in tests.items():
        yield from ((test, f"{test}[{parameters}]") for parameters in outcome["failed"])


def _section(suite: Suite, found: Mapping[str, Any]) -> str:
    tests = found["tests"]
    n_passed = sum(each["passed"] for each in tests.values())
    n_failed = sum(len(each["failed"]) for each in tests.values())
    return "\n".join(
        [
            f"## {suite.title}\n",
            f"At commit `{found['commit']}`: {n_passed} of {n_passed + n_failed} pass.\n",
            *_table(("file", "pass", "of"), _files(tests)),
            "\nThose that do not:\n",
            *_table(("why", "tests"), _reasons(suite, tests)),
            "\nNot run:\n",
            *_table(("files", "why"), suite.left_out.items()),
            "",
        ]
    )


def _files(tests: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for file in dict.fromkeys(test.partition("::")[0] for test in tests):
        own = [each for test, each in tests.items() if test.startswith(f"{file}::")]
        n_passed = sum(each["passed"] for each in own)
        yield f"`{file}`", str(n_passed), str(n_passed + sum(len(each["failed"]) for each in own))


def _reasons(suite: Suite, tests: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    grouped: dict[str, dict[str, int]] = {}
    for test, full in failures(tests):
        counts = grouped.setdefault(reason_of(suite, full) or "not known", {})
        counts[test] = counts.get(test, 0) + 1
    for why in sorted(grouped):
        names = [
            f"`{test.partition('::')[2]}`" + (f" ({n})" if n > 1 else "")
            for test, n in grouped[why].items()
        ]
        yield why, ", ".join(names)


def _table(heads: tuple[str, ...], rows: Any) -> list[str]:
    lines = [heads, ("---",) * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
