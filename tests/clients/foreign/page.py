"""The results as a page: how many tests of each file pass, and why the others do not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.foreign.suites import SUITES, Reason, Suite

HERE = Path(__file__).parent
PLUGINS = HERE / "plugins"
RESULTS = HERE.parents[2] / "docs" / "results" / "foreign-tests.json"
INTRO = HERE / "page.md"


def page(results: Mapping[str, Any]) -> str:
    parts = [_section(SUITES[name], results[name]) for name in SUITES if name in results]
    return "\n".join([INTRO.read_text(), *parts])


class Failure(NamedTuple):
    test: str  # as `file.py::name`
    parameters: str
    said: str  # the line that failed, and its error

    @property
    def full(self) -> str:
        return f"{self.test}[{self.parameters}]"


def reason_of(suite: Suite, failure: Failure) -> Reason | None:
    """The reason that its assertion gives; None if that is not known."""
    return next((each for each in suite.reasons if _fits(each, failure)), None)


def _fits(reason: Reason, failure: Failure) -> bool:
    is_said = re.search(reason.said, failure.said)
    return bool(is_said and re.search(reason.tests, failure.full))


def failures(tests: Mapping[str, Any]) -> Iterator[Failure]:
    for test, outcome in tests.items():
        yield from (Failure(test, *each) for each in outcome["failed"].items())


def changes_of(suite: Suite) -> str:
    """What a plugin changes, as it says itself."""
    described = ast.get_docstring(ast.parse((PLUGINS / f"{suite.plugin}.py").read_text())) or ""
    listed = described.partition("What it changes:\n\n")[2]
    return re.sub(r"\n +", " ", listed)


def _section(suite: Suite, found: Mapping[str, Any]) -> str:
    tests = found["tests"]
    n_passed = sum(each["passed"] for each in tests.values())
    n_failed = sum(len(each["failed"]) for each in tests.values())
    return "\n".join(
        [
            f"## {suite.title}\n",
            f"At commit `{found['commit']}`: {n_passed} of {n_passed + n_failed} pass.\n",
            *_table(("file", "pass", "of"), _files(tests)),
            "\nWhat the plugin changes, and nothing else:\n",
            changes_of(suite),
            "\nThose that do not pass:\n",
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
    for failure in failures(tests):
        reason = reason_of(suite, failure)
        counts = grouped.setdefault(reason.why if reason else "not known", {})
        counts[failure.test] = counts.get(failure.test, 0) + 1
    for why in sorted(grouped):
        names = [
            f"`{test.partition('::')[2]}`" + (f" ({n})" if n > 1 else "")
            for test, n in grouped[why].items()
        ]
        yield why, ", ".join(names)


def _table(heads: tuple[str, ...], rows: Any) -> list[str]:
    lines = [heads, ("---",) * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
