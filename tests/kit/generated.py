"""Pages that are made from the code and from what was measured: the public API, the command line's
help, the table of settings, the results of `keepwarm bench` and the README's share of them.

python -m tests.kit.generated     writes them; the suite holds them to the code
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import typer.main
from typer.testing import CliRunner

from keepwarm.bench.report import tables
from keepwarm.bench.report.results import Claim, Results, Series
from keepwarm.bench.workloads import agents, chat, lengths
from keepwarm.cli.main import app
from keepwarm.config import Settings
from tests.kit.api_page import api_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = DOCS / "api.md"
COMMAND_LINE = DOCS / "cli.md"
TUNING = DOCS / "tuning.md"
README = ROOT / "README.md"
BASELINE = DOCS / "results" / "baseline.json"
RESULTS = DOCS / "results" / "bench.md"
BETWEEN = re.compile(r"(?<=<!-- settings, from the code -->\n).*?(?=<!-- end -->)", re.DOTALL)

HELP_INTRO = """\
# The command line

Made from the program by `python -m tests.kit.generated`; the suite compares it.

Answers go to standard output, notes to standard error. Every error is one sentence and exit code 2;
`keepwarm cache verify` leaves with 1 when it finds something bad. Defaults that are not shown are
[settings](tuning.md#settings).

"""

# What the code does not say beside the setting.
PLAIN = {
    "home": "all data of Keepwarm; only as `KEEPWARM_HOME`",
    "model": "the default model ([names](models.md#names))",
    "max_tokens": "token limit of an answer of `run` and `chat`",
    "temperature": "default sampling temperature; 0 is greedy",
    "port": "0 picks a free port",
    "max_body_bytes": "largest request body",
    "request_timeout_s": "time limit of a request; 0 is no limit",
}
MEASURED = re.compile(
    r"(?<=<!-- measured, from docs/results/baseline.json -->\n).*?(?=<!-- end -->)", re.DOTALL
)
Key: TypeAlias = tuple[str, str, str, float | None]  # workload, target, what, x


class Line(NamedTuple):
    """A row of the README's table, and where it is in the results."""

    words: str
    workload: str
    what: str
    x: float | None = None


AT_ONCE = f"{agents.PREFILLS}, all at once"
LINES = (
    Line("2,048 tokens nobody has seen: first token, s", "lengths", lengths.COLD, 2048),
    Line("the same 2,048 tokens again, s", "lengths", lengths.AGAIN, 2048),
    Line("again after `kill -9` and a restart, s", "lengths", lengths.RESTARTED, 2048),
    Line("and with the store's files out of the page cache, s", "lengths", lengths.DROPPED, 2048),
    Line("turn 2 of a chat of 644 tokens: first token, s", "chat", chat.SECOND),
    Line("another agent with the same system prompt: first token, s", "chat", chat.OTHER),
    Line("ten agents at once: prefills of what they share", "agents", AT_ONCE),
    Line("four streams at once: tokens/s", "streams", "throughput", 4),
)
COLUMNS = {"keepwarm": "Keepwarm", "mlx-lm": "mlx_lm.server"}  # by target
PLACES = {"home": "~/.cache/keepwarm", "store": "~/.cache/keepwarm/store"}  # on Linux
MIB, GIB = 1 << 20, 1 << 30


def command_line() -> str:
    return HELP_INTRO + "\n".join(_help(path) for path in _commands())


def _commands() -> Iterator[list[str]]:
    """Every command by the words that name it, groups before what is in them."""
    yield []
    for name, command in typer.main.get_command(app).commands.items():
        yield [name]
        yield from ([name, inner] for inner in getattr(command, "commands", {}))


def _help(path: list[str]) -> str:
    shown = CliRunner().invoke(app, [*path, "--help"], prog_name="keepwarm", terminal_width=88)
    assert shown.exit_code == 0, shown.output
    title = " ".join(["keepwarm", *path])
    return f"{'#' * min(len(path) + 2, 3)} `{title}`\n\n```text\n{shown.output.rstrip()}\n```\n"


def settings_table() -> str:
    rows = "".join(map(_row, fields(Settings)))
    return f"| setting | default | what |\n|---|---|---|\n{rows}"


def _row(setting: Field[Any]) -> str:
    return f"| `{setting.name}` | {_default(setting)} | {_words(setting.name)} |\n"


def _words(name: str) -> str:
    """What the code says beside a setting."""
    said = re.search(rf"^    {name}: [^#\n]+#(.+)$", inspect.getsource(Settings), re.MULTILINE)
    return said[1].strip() if said and name not in PLAIN else PLAIN[name]


def _default(setting: Field[Any]) -> str:
    value = PLACES.get(setting.name, setting.default)
    if setting.name.endswith("_bytes"):
        unit, name = (GIB, "GiB") if value >= GIB else (MIB, "MiB")
        return f"`{value}`, {value // unit} {name}"
    return f"`{value}`".lower() if value != "" else "none"


def tuning(page: str) -> str:
    """The page with the table as it must be."""
    return BETWEEN.sub(lambda _: settings_table(), page)


def measured_table(results: Results) -> str:
    """Those rows for which something was measured, and under what conditions."""
    found = {record.key: record for record in (*results.series, *results.claims)}
    rows = [_measured(line, found) for line in LINES]
    heads = f"| | {' | '.join(COLUMNS.values())} |\n|---|{'--:|' * len(COLUMNS)}\n"
    return f"{heads}{''.join(rows)}\n{_conditions(results)}\n"


def _measured(line: Line, found: Mapping[Key, Series | Claim]) -> str:
    of_all = [found.get((line.workload, name, line.what, line.x)) for name in COLUMNS]
    cells = [tables.format_value(one) if one else "" for one in of_all]
    return f"| {line.words} | {' | '.join(cells)} |\n" if any(of_all) else ""


def _conditions(results: Results) -> str:
    machine = results.machine
    return (
        f"{results.model}, {machine['system']}, {machine['backend']} on {machine['n_cpus']} cores "
        f"of {machine['architecture']}, {results.date}; medians of {results.samples} samples, ± is "
        "how far apart the highest and the lowest are. Made by "
        f"`{results.command}`: [all results](docs/results/bench.md), "
        "[what the words mean](docs/benchmarks.md)."
    )


def readme(page: str) -> str:
    """The page with the table as it must be."""
    return MEASURED.sub(lambda _: measured_table(Results.read(BASELINE)), page)


if __name__ == "__main__":
    API.write_text(api_page())
    COMMAND_LINE.write_text(command_line())
    TUNING.write_text(tuning(TUNING.read_text()))
    RESULTS.write_text(tables.markdown(Results.read(BASELINE)))
    README.write_text(readme(README.read_text()))
