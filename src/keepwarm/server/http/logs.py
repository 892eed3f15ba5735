"""The server's log, on standard error: what failed and where, without exception messages.

The message of an exception from another library may quote its input, which may be a prompt.
What a client can repeat is not logged each time: the log does not fill the disk.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeAlias

LINES_PER_MINUTE = 20  # from one place in the code
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def log_to_stderr() -> None:
    """Log warnings and errors, unless the embedding program has configured logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(LINE))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(handlers=[handler])


class RedactingFormatter(logging.Formatter):
    """Shows class and traceback of an exception and its causes, but no messages."""

    def formatException(self, ei: Raised) -> str:  # noqa: N802, named by the standard library
        return "\n".join(_describe(error) for error in _causes(ei[1]))


class RepeatLimit(logging.Filter):
    """Drops lines of one place in the code beyond so many a minute, and says later how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # minute's begin, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        began, lines = self._counts.get(place, (now, 0))
        if now - began >= 60:
            self._tell(record, lines - LINES_PER_MINUTE)
            began, lines = now, 0
        self._counts[place] = began, lines + 1
        return lines < LINES_PER_MINUTE

    def _tell(self, record: logging.LogRecord, n_dropped: int) -> None:
        if n_dropped > 0:
            record.msg = f"{record.getMessage()} ({n_dropped} lines like this were left out)"
            record.args = None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _describe(error: BaseException) -> str:
    kind = type(error)
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"{kind.__module__}.{kind.__qualname__}, raised at (innermost last)\n{where}".rstrip()
