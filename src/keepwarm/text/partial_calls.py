"""Tool calls that a model is still writing, in the formats whose arguments are JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from keepwarm.text.request import ToolCall
from keepwarm.text.template import MAX_DEPTH

MAX_HEADER = 4096  # characters; what is longer is no call
_JSON = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_HARMONY = r"(?P<name>[\w.-]+).*?<\|message\|>\s*(?=\{)"
_MISTRAL = r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"
_KIMI = (
    r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*"
    r"(?P<id>(?:functions\.)?(?P<name>[^<]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_BLANKS = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ATOM = re.compile(r"[-+.\w]+")
_CLOSING = {"{": "}", "[": "]"}
_LONGEST_ESCAPE = 12  # a pair of surrogates


class CallHeader(NamedTuple):
    """What comes before the arguments of a call, and a call f(a=1) to try a parser with."""

    pattern: re.Pattern[str]
    example: str


JSON_HEADER = CallHeader(re.compile(_JSON), '{"name": "f", "arguments": {"a": 1}}')
HARMONY_HEADER = CallHeader(re.compile(_HARMONY, re.DOTALL), 'f<|message|>{"a": 1}')
HEADERS = {  # by the delimiter that begins calls
    "to=functions.": HARMONY_HEADER,
    "[TOOL_CALLS]": CallHeader(re.compile(_MISTRAL), 'f[ARGS]{"a": 1}'),
    "<|tool_calls_section_begin|>": CallHeader(
        re.compile(_KIMI),
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    ),
}


class CallPiece(NamedTuple):
    """A part of a call that is being written."""

    id: str
    name: str
    arguments: str  # the new part of them


class _PartialCall(NamedTuple):
    id: str
    name: str
    pieces: list[str]
    json: JsonPieces


class PartialToolCalls:
    """The calls between two delimiters, as they are written."""

    def __init__(
        self,
        header: CallHeader | None,
        names: Collection[str],
        own_id: Callable[[str], str],
        most: int,
    ) -> None:
        """`names` are the tools offered; `own_id` gives the id of a call, from the model's if it
        wrote one; `most` is how many calls may be made.
        """
        self._header = header
        self._names = names
        self._own_id = own_id
        self._most = most
        self._calls: list[_PartialCall] = []
        self._held = ""  # may become the header of the next call

    @property
    def is_in_string(self) -> bool:
        """Whether what comes next is text in the arguments of a call."""
        return bool(self._calls) and self._calls[-1].json.is_in_string

    def add(self, text: str) -> Iterator[CallPiece]:
        """The parts of calls that this text adds."""
        while text:
            if self._calls and not self._calls[-1].json.is_complete:
                text = yield from self._continue(self._calls[-1], text)
            else:
                text = self._begin(text)

    def finish(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The calls that a parser found, as they were begun; none if they are not the same."""
        names = [call.name for call in calls]
        if names[: len(self._calls)] != [begun.name for begun in self._calls]:
            return []
        if not all(begun.json.is_complete for begun in self._calls):
            return []
        begun = [ToolCall(each.id, each.name, "".join(each.pieces)) for each in self._calls]
        return [*begun, *(call._replace(id=self._own_id(call.id)) for call in calls[len(begun) :])]

    def _continue(self, call: _PartialCall, text: str) -> Generator[CallPiece, None, str]:
        """Read on; the text behind the arguments."""
        piece = call.json.add(text)
        if piece:
            call.pieces.append(piece)
            yield CallPiece(call.id, call.name, piece)
        return call.json.rest if call.json.is_complete else ""

    def _begin(self, text: str) -> str:
        """Look for the next call; the text behind its header."""
        if self._header is None or len(self._calls) >= self._most:
            return ""
        self._held += text
        found = self._header.pattern.match(self._held)
        if found is None or found["name"] not in self._names:
            self._most = 0 if found or len(self._held) > MAX_HEADER else self._most
            return ""
        call_id = self._own_id(found.groupdict().get("id") or "")
        self._calls.append(_PartialCall(call_id, found["name"], [], JsonPieces()))
        rest, self._held = self._held[found.end() :], ""
        return rest


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

    @property
    def is_in_string(self) -> bool:
        """Also if the string is never closed; not after what is no JSON."""
        return self._in_string and not self.rest

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
        if len(self._open) == MAX_DEPTH:
            raise ValueError("too deep")
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
