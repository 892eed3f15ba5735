"""How far something is that takes a while: one line on standard error.

On a terminal the line is replaced in place and removed at the end. Elsewhere a line is printed
every few seconds, so that what is quick prints nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from keepwarm.units import format_bytes

PLAIN_S = 5.0  # between two lines where there is no terminal
COUNTS_S = 0.1  # between two counts on a terminal
BAR = 20  # characters
CLEAR = "\r\033[K"


class ProgressLine:
    """Says what is being done, or how much of it."""

    def __init__(self, label: str, stream: TextIO, at_once: bool = False) -> None:
        self._label = label
        self._stream = stream
        self._in_place = stream.isatty()
        self._next = 0.0 if at_once or self._in_place else time.monotonic() + PLAIN_S

    def say(self, what: str) -> None:
        """What is being done now, as "reading weights, 40 %"."""
        if self._in_place or self._is_due:
            self._write(f"{self._label}: {what}", PLAIN_S)

    def count(self, done: int, total: int) -> None:
        """So many of all."""
        self._draw(done, total, in_thousands)

    def count_bytes(self, done: int, total: int) -> None:
        self._draw(done, total, format_bytes)

    def _draw(self, done: int, total: int, shown: Callable[[int], str]) -> None:
        if self._is_due:
            self._write(f"{self._label} {drawn(done, total, shown)}", COUNTS_S)

    def clear(self) -> None:
        if self._in_place:
            self._stream.write(CLEAR)
            self._stream.flush()

    @property
    def _is_due(self) -> bool:
        return time.monotonic() >= self._next

    def _write(self, text: str, pause_s: float) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"{CLEAR}{text[:width]}" if self._in_place else f"{text}\n")
        self._stream.flush()
        self._next = time.monotonic() + (pause_s if self._in_place else PLAIN_S)


@contextmanager
def shown(label: str, *, at_once: bool = False) -> Iterator[ProgressLine]:
    """A line for as long as the `with` lasts; `at_once` also says what may be over soon."""
    line = ProgressLine(label, sys.stderr, at_once)
    try:
        yield line
    finally:
        line.clear()


def in_thousands(number: int) -> str:
    return f"{number:,}"


def drawn(done: int, total: int, shown: Callable[[int], str] = in_thousands) -> str:
    """A bar in proportion, and its figures."""
    if total <= 0:
        return shown(done)
    share = min(1.0, done / total)
    bar = ("█" * int(BAR * share)).ljust(BAR, "░")
    return f"{bar} {shown(done)} of {shown(total)} ({int(100 * share)} %)"
