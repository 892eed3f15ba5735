"""Pages that are made from the code: the command line's help, the table of settings.

python -m tests.kit.generated     writes them; tests/test_docs.py holds them to the code
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from keepwarm.cli.main import app
from keepwarm.config import Settings

DOCS = Path(__file__).parents[2] / "docs"
COMMAND_LINE = DOCS / "cli.md"
TUNING = DOCS / "tuning.md"
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
    "home": "everything the program keeps; only as `KEEPWARM_HOME`",
    "model": "the one that runs when none is named ([names](models.md#names))",
    "max_tokens": "longest answer of `run` and `chat`",
    "temperature": "where a request does not say; 0 takes the best token",
    "port": "0 takes a free one",
    "max_body_bytes": "of one request",
    "request_timeout_s": "an answer that takes longer is ended; 0 is no limit",
}
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


if __name__ == "__main__":
    COMMAND_LINE.write_text(command_line())
    TUNING.write_text(tuning(TUNING.read_text()))
