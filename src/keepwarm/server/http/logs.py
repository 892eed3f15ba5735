"""The server's log, on standard error: what failed and where, without exception messages.

The message of an exception from another library may quote its input, which may be a prompt.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TypeAlias

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def log_to_stderr() -> None:
    """Log warnings and errors, unless the embedding program has configured logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(LINE))
    logging.basicConfig(handlers=[handler])


class RedactingFormatter(logging.Formatter):
    """Shows class and traceback of an exception and its causes, but no messages."""

    def formatException(self, ei: Raised) -> str:  # noqa: N802, named by the standard library
        return "\n".join(_describe(error) for error in _causes(ei[1]))


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
