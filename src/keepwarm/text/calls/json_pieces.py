"""JSON as it arrives, rewritten piece by piece with the spaces that templates write.

Joined, the pieces are what `json.dumps(json.loads(text), ensure_ascii=False)` gives, but a key that
comes twice stays twice. At any time they are the beginning of valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum, auto

_BLANKS = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ATOM = re.compile(r"[-+.\w]+")
_CLOSING = {"{": "}", "[": "]"}
_LONGEST_ESCAPE = 12  # a pair of surrogates


class _Next(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonPieces:
    """Reads one JSON object, however its text is cut."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False  # what came is no JSON; the rest is ignored
        self.rest = ""  # not read yet; behind the object once it is complete
        self._open: list[str] = []  # brackets
        self._next = _Next.VALUE
        self._in_string = False

    def add(self, text: str) -> str:
        """What this text adds to the rewritten JSON."""
        if self.is_broken:
            return ""
        self.rest += text
        try:
            return "".join(self._read())
        except ValueError:
            self.is_broken = True
            return ""

    def _read(self) -> Iterator[str]:
        while not self.is_complete:
            if not self._in_string:
                self.rest = self.rest.lstrip(_BLANKS)
            piece = self._piece()
            if piece is None:
                return
            yield piece

    def _piece(self) -> str | None:
        """The next piece; None if more text is needed for it. ValueError: it is no JSON."""
        if not self.rest:
            return None
        if self._in_string:
            return self._string()
        first = self.rest[0]
        if not self._open and first != "{":
            raise ValueError("no object")
        if self._open and first == _CLOSING[self._open[-1]]:
            return self._end()
        if self._next in (_Next.COLON, _Next.COMMA_OR_END):
            return self._separator(first)
        return self._quote() if first == '"' else self._value(first)

    def _value(self, first: str) -> str | None:
        """The beginning of an object or a list, or a whole number or word."""
        if self._next in (_Next.KEY, _Next.KEY_OR_END):
            raise ValueError("no key")
        if first not in _CLOSING:
            return self._atom()
        self._take(1)
        self._open.append(first)
        self._next = _Next.KEY_OR_END if first == "{" else _Next.VALUE_OR_END
        return first

    def _end(self) -> str:
        if self._next not in (_Next.KEY_OR_END, _Next.VALUE_OR_END, _Next.COMMA_OR_END):
            raise ValueError("no value")
        self._next = _Next.COMMA_OR_END
        self.is_complete = len(self._open) == 1
        self._take(1)
        return _CLOSING[self._open.pop()]

    def _separator(self, first: str) -> str:
        is_colon = self._next is _Next.COLON
        if first != (":" if is_colon else ","):
            raise ValueError("no separator")
        self._take(1)
        is_key = not is_colon and self._open[-1] == "{"
        self._next = _Next.KEY if is_key else _Next.VALUE
        return f"{first} "

    def _quote(self) -> str:
        """The beginning or the end of a string."""
        self._take(1)
        if self._in_string:
            is_key = self._next in (_Next.KEY, _Next.KEY_OR_END)
            self._next = _Next.COLON if is_key else _Next.COMMA_OR_END
        self._in_string = not self._in_string
        return '"'

    def _string(self) -> str | None:
        """The next part of a string, or its end. No client could receive a lone surrogate."""
        if self.rest[0] == '"':
            return self._quote()
        found = _PLAIN.match(self.rest) or _PAIR.match(self.rest) or _ESCAPE.match(self.rest)
        if found is None or (found.re is _ESCAPE and _SURROGATE.match(found[0])):
            if self.rest[0] != "\\" or len(self.rest) >= _LONGEST_ESCAPE:
                raise ValueError("no string")
            return None
        self._take(found.end())
        return json.dumps(json.loads(f'"{found[0]}"'), ensure_ascii=False)[1:-1]

    def _atom(self) -> str | None:
        """A number, or true, false, null, once it is known where it ends."""
        found = _ATOM.match(self.rest)
        if found is None:
            raise ValueError("no value")
        if found.end() == len(self.rest):
            return None
        self._take(found.end())
        self._next = _Next.COMMA_OR_END
        return json.dumps(json.loads(found[0]), allow_nan=False)

    def _take(self, n: int) -> None:
        self.rest = self.rest[n:]
