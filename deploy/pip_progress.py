#!/usr/bin/env python3
"""Run pip with one line of progress in place of its log, which is shown only if pip fails.

Arguments are those of `pip install`; needs only Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 78
SEEN = re.compile(r"(?:Collecting|Requirement already satisfied:) (\S+?)[=<>;\[ ]")
ROWS_BETWEEN = 20  # where the output is not a terminal


def main(arguments: list[str]) -> int:
    total, lines = n_locked(arguments), []
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        for note in progress(keep(pip.stdout or (), lines), total):
            show(note)
    show("" if sys.stdout.isatty() else None)
    if pip.returncode:
        sys.stdout.writelines(lines)
    return pip.returncode


def n_locked(arguments: list[str]) -> int:
    """Packages in the requirement files: more than pip will look at, where markers leave some."""
    files = [Path(each) for each in arguments if each.endswith(".lock")]
    return sum(len(re.findall(r"^\S+==", file.read_text(), re.MULTILINE)) for file in files)


def keep(source: Iterator[str], lines: list[str]) -> Iterator[str]:
    for line in source:
        lines.append(line)
        yield line


def progress(lines: Iterator[str], total: int) -> Iterator[str]:
    """What pip is at, as `Packages: 12 of 58, numpy`."""
    n_seen = 0
    for line in lines:
        if found := SEEN.match(line):
            n_seen += 1
            if sys.stdout.isatty() or n_seen % ROWS_BETWEEN == 1:
                yield f"Packages: {n_seen} of {max(total, n_seen)}, {found[1]}"
        elif line.startswith("Installing collected packages"):
            n = line.count(",") + 1
            yield f"Installing {n} package{'s' * (n > 1)}"


def show(note: str | None) -> None:
    if note is not None:
        end = f"\r\033[K{note[:WIDTH]}" if sys.stdout.isatty() else f"{note[:WIDTH]}\n"
        sys.stdout.write(end)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
