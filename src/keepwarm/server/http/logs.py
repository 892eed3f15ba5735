"""The log of a server process, on standard error: what failed and where, nobody's words.

Somebody else's exception may quote what it was given, and that may be a prompt.
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
    """Warnings and worse; nothing changes where whoever embeds us has set up a log of their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(Wordless(LINE))
    logging.basicConfig(handlers=[handler])


class Wordless(logging.Formatter):
    """Shows the class and the place of an exception and of its causes, and not its message."""

    def formatException(self, ei: Raised) -> str:  # noqa: N802, its name in the library
        return "\n".join(_told(error) for error in _causes(ei[1]))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _told(error: BaseException) -> str:
    kind = type(error)
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"{kind.__module__}.{kind.__qualname__}, raised at (innermost last)\n{where}".rstrip()
