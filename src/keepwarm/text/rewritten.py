"""Tool results as a later call would write them back.

A file is read with line numbers, and written back without them, in a call that may be JSON: other
tokens for the same text. What a model repeats is looked up in this form too (`engine/drafts`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from keepwarm.text.request import Message
from keepwarm.text.template import text_of

MAX_CHARACTERS = 1 << 16  # of all results together; the latest count
MIN_NUMBERED = 0.8  # of the lines, to be taken for line numbers
_NUMBER = re.compile(r"^ *\d+(?:\t|→|\| ?|: ?)", re.MULTILINE)


def rewritten(messages: Sequence[Message], *, as_json: bool) -> Iterator[str]:
    """The latest results of tools without line numbers, and escaped where calls are JSON; the
    latest first. Not those that would stay as they are.
    """
    n_left = MAX_CHARACTERS
    for message in reversed(messages):
        if message.get("role") != "tool":
            continue
        text = text_of(message)[:n_left]
        n_left -= len(text)
        plain = _without_numbers(text)
        written = json.dumps(plain, ensure_ascii=False)[1:-1] if as_json else plain
        if written != text:
            yield written


def _without_numbers(text: str) -> str:
    n_lines = text.count("\n") + (not text.endswith("\n"))
    stripped, n_numbered = _NUMBER.subn("", text)
    return stripped if n_numbered >= MIN_NUMBERED * n_lines else text
