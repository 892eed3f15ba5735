"""The server's log, on standard error: requests, and what failed and where.

The message of an exception from another library may quote its input, which may be a prompt, so it
is left out. What anyone can repeat is not logged each time: the log does not fill the disk.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

from keepwarm.config import Settings

LINES_PER_MINUTE = 20  # from one place in the code
FIELDS, UNLIMITED = "keepwarm_fields", "keepwarm_unlimited"  # attributes of a record
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def log_to_stderr(settings: Settings) -> None:
    """Log in the format of the settings, unless the embedding program has configured logging.

    The level is that of Keepwarm's own lines; of other libraries only warnings are logged.
    """
    handler = logging.StreamHandler()
    as_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else RedactingFormatter(LINE))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("keepwarm").setLevel(settings.log_level.upper())


def log_fields(
    logger: logging.Logger, level: int, fields: dict[str, Any], *, limited: bool = False
) -> str:
    """A line of fields: `name=value` in text, members of the object in JSON; returns the text.

    A `limited` one is dropped if there are too many like it.
    """
    text = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
    logger.log(level, "%s", text, extra={FIELDS: fields, UNLIMITED: not limited})
    return text


def _word(value: object) -> str:
    """A value without spaces, or in quotes."""
    text = "-" if value is None or value == "" else str(value)
    return json.dumps(text) if re.search(r'[\s"=]', text) else text


class RedactingFormatter(logging.Formatter):
    """Shows class and traceback of an exception and its causes, but no messages."""

    def formatException(self, ei: Raised) -> str:  # noqa: N802, named by the standard library
        return "\n".join(_describe(error) for error in _causes(ei[1]))


class JsonFormatter(RedactingFormatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, None) or {"message": record.getMessage()}
        made = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{made}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RepeatLimit(logging.Filter):
    """Drops lines of one place in the code beyond so many a minute, and says later how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # minute's begin, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, UNLIMITED, False):
            return True
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
