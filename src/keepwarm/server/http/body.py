"""JSON that came in: what a parser lets through and nothing behind it can bear is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress

from fastapi import Request

from keepwarm.errors import BadInput
from keepwarm.server.http.limits import UPLOADS

MAX_DEPTH = 100  # levels; the parsers of schemas give up at 128
NESTED = (dict, list)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def sound_json(request: Request) -> None:
    """Refuse half characters, numbers that JSON does not know, and what nests too deep."""
    if "json" not in request.headers.get("content-type", "").lower() or request.url.path in UPLOADS:
        return
    body = await request.body()
    with suppress(ValueError, RecursionError):  # what cannot be parsed is refused elsewhere
        value = await request.json()  # was parsed once already, and is not parsed again
        check(value)
        if _SURROGATE.search(body):
            _check_characters(value)


def check(value: object) -> None:
    """Level by level, so that no depth is too deep to be measured."""
    level = _nested([value])
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [each for outer in level for each in _nested(_inside(outer))]
    if level:
        raise BadInput(f"The body nests deeper than {MAX_DEPTH} levels; send a flatter one.")


def _inside(outer: dict[str, object] | list[object]) -> Iterable[object]:
    return outer.values() if isinstance(outer, dict) else outer


def _nested(values: Iterable[object]) -> list[dict[str, object] | list[object]]:
    """The objects and lists among these values, whose numbers must be finite."""
    found = []
    for value in values:
        if isinstance(value, NESTED):
            found.append(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadInput("The body holds a number that is not finite; JSON knows no such one.")
    return found


def _check_characters(value: object) -> None:
    """Halves of surrogate pairs, which JSON can write and no tokenizer can read."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadInput("The body holds half a character (a lone surrogate); mend it.") from error
