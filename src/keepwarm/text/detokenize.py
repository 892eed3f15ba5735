"""Token ids to text as they are generated; joined, the pieces are what decoding all ids gives.

mlx-lm's own streaming detokenizers are not used: on byte-level models they drop a leading space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Decodes one sequence, piece by piece.

    A piece is held back while a later token could still change it: inside a character of several
    bytes, and inside a run of byte tokens, which decoders treat as a whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # tokens of the last piece: context for the next
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes, which may be empty."""
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
        """The text still held back; an incomplete character becomes U+FFFD."""
        piece = self._piece()
        self._shown, self._held = [], []
        return piece

    def _piece(self) -> str:
        context = decode(self._tokenizer, self._shown)
        return decode(self._tokenizer, self._shown + self._held)[len(context) :]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of these ids, special tokens included, spaces unchanged."""
    text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    return text


class DelimiterMatch(NamedTuple):
    start: int  # in the text
    which: int  # index of the delimiter


def find_first(text: str, delimiters: Sequence[str]) -> DelimiterMatch | None:
    """The delimiter that ends first; of two that end together, the longer one.

    The result does not depend on how the text arrives in pieces.
    """
    starts = [(text.find(delimiter), index) for index, delimiter in enumerate(delimiters)]
    found = [DelimiterMatch(start, index) for start, index in starts if start >= 0]
    return min(found, key=lambda m: (m.start + len(delimiters[m.which]), m), default=None)


def held_back(text: str, delimiters: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a delimiter."""
    longest = min(len(text), max(map(len, delimiters), default=1) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(d.startswith(text[-n:]) for d in delimiters)), 0)
