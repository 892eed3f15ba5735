"""Calls that a model has begun to write, in the formats whose arguments are JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import NamedTuple

from keepwarm.text.calls.json_pieces import JsonPieces
from keepwarm.text.request import ToolCall

MAX_HEADER = 4096  # characters; what is longer is no call
_JSON = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
_HARMONY = r"(?P<name>[\w.-]+).*?<\|message\|>\s*(?=\{)"
_MISTRAL = r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"
_KIMI = (
    r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*"
    r"(?P<id>(?:functions\.)?(?P<name>[^<]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)


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


class _Begun(NamedTuple):
    id: str
    name: str
    pieces: list[str]
    json: JsonPieces


class BegunCalls:
    """The calls between two delimiters, as they are written."""

    def __init__(
        self,
        header: CallHeader | None,
        names: Collection[str],
        new_id: Callable[[], str],
        most: int,
    ) -> None:
        """`names` are the tools offered; `most` is how many calls may be made."""
        self._header = header
        self._names = names
        self._new_id = new_id
        self._most = most
        self._calls: list[_Begun] = []
        self._held = ""  # may become the header of the next call

    def add(self, text: str) -> Iterator[CallPiece]:
        """The parts of calls that this text adds."""
        while text:
            if self._calls and not self._calls[-1].json.is_complete:
                text = yield from self._continue(self._calls[-1], text)
            else:
                text = self._begin(text)

    def settle(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The calls that a parser found, as they were begun; none if they are not the same."""
        names = [call.name for call in calls]
        if names[: len(self._calls)] != [begun.name for begun in self._calls]:
            return []
        if not all(begun.json.is_complete for begun in self._calls):
            return []
        begun = [ToolCall(each.id, each.name, "".join(each.pieces)) for each in self._calls]
        return [*begun, *calls[len(begun) :]]

    def _continue(self, call: _Begun, text: str) -> Generator[CallPiece, None, str]:
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
        call_id = found.groupdict().get("id") or self._new_id()
        self._calls.append(_Begun(call_id, found["name"], [], JsonPieces()))
        rest, self._held = self._held[found.end() :], ""
        return rest
