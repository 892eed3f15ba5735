"""Token ids to text as they are generated; joined, the pieces are what decoding all ids gives.

mlx-lm's own streaming detokenizers are not used: on byte-level models they drop a leading space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from keepwarm.text.request import TokenInfo

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_HELD = 8  # tokens of what may be one character, which has at most four bytes
MAX_KNOWN = 1 << 16  # pieces, of some 300 bytes each


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
            return self._settled(piece) if len(self._held) > MAX_HELD else ""
        self._shown, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """The text still held back; an incomplete character becomes U+FFFD."""
        piece = self._piece()
        self._shown, self._held = [], []
        return piece

    def _settled(self, piece: str) -> str:
        """The beginning of a long piece that ends inside a character, up to the end of another:
        inside one the halves would not add up. It is not decoded again for every further token.
        """
        for end in range(len(self._held) - 1, len(self._held) - MAX_HELD, -1):
            head, rest = self._held[:end], self._held[end:]
            text, after = decode(self._tokenizer, head), decode(self._tokenizer, rest)
            if text and after and text + after == piece:
                self._shown, self._held = head, rest
                return text
        return ""

    def _piece(self) -> str:
        context = decode(self._tokenizer, self._shown)
        return decode(self._tokenizer, self._shown + self._held)[len(context) :]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of these ids, special tokens included, spaces unchanged."""
    text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    return text


class Piece(NamedTuple):
    text: str
    numbers: list[int]  # its bytes


class Pieces:
    """Text and bytes of one model's tokens, each computed once (two threads may race)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Piece] = {}
        self._ends = frozenset(tokenizer.eos_token_ids)

    def of(self, token: int) -> Piece:
        found = self._known.get(token)
        if found is None:
            data = self._bytes(token)
            found = Piece(data.decode(errors="replace"), list(data))
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[token] = found
        return found

    def n_letters(self, tokens: Sequence[TokenInfo]) -> int:
        """Of their text: a character may be several tokens."""
        data = b"".join(bytes(self.of(info.token).numbers) for info in tokens)
        return len(data.decode(errors="replace"))

    def shown(self, tokens: Sequence[TokenInfo]) -> list[TokenInfo]:
        """All but end-of-sequence tokens, which are not part of the answer."""
        return [info for info in tokens if info.token not in self._ends]

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        text = decode(self._tokenizer, [token])
        if _REPLACEMENT in text and set(name) <= _BYTE_LEVEL.keys():
            return bytes(_BYTE_LEVEL[character] for character in name)
        if name.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoders drop it at the start of a text
        return text.encode()


def _byte_level() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes unchanged, others from U+0100 up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in plain]
    names = [chr(byte) for byte in plain] + [chr(0x100 + index) for index in range(len(moved))]
    return dict(zip(names, plain + moved, strict=True))


_BYTE_LEVEL = _byte_level()


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
