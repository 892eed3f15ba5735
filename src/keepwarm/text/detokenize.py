"""Token ids to text while they are made; joined, the pieces are what decoding all ids gives.

mlx-lm's own streaming detokenizers are not used: on byte-level models they drop a leading space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """The text of one sequence, piece by piece.

    A piece is held back while a later token could still change it: inside a character of several
    bytes, and inside a run of byte tokens, which decoders judge as a whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # what the last piece came from: the context of the next one
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes; empty while it completes none."""
        self._held.append(token)
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not name or _BYTE.fullmatch(name):
            return ""
        piece = self._piece()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._shown, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """What was still held back; an incomplete character comes out as U+FFFD."""
        piece = self._piece()
        self._shown, self._held = [], []
        return piece

    def _piece(self) -> str:
        context = decode(self._tokenizer, self._shown)
        return decode(self._tokenizer, self._shown + self._held)[len(context) :]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The whole text of these ids, special tokens included, spaces left as they are."""
    text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    return text


class Found(NamedTuple):
    start: int
    which: int  # of the marks


def find_first(text: str, marks: Sequence[str]) -> Found | None:
    """The mark that is complete first; of two that end together, the longer one.

    So it does not matter in which portions the text arrives.
    """
    places = [(text.find(mark), which) for which, mark in enumerate(marks)]
    found = [Found(start, which) for start, which in places if start >= 0]
    return min(found, key=lambda each: (each.start + len(marks[each.which]), each), default=None)


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(m.startswith(text[-n:]) for m in marks)), 0)
