"""The messages of a conversation at the end of a turn, and their form in a bundle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from keepwarm.errors import BadRecord
from keepwarm.units import printable

MAX_BUNDLED_BYTES = 8 << 20
MAX_BUNDLED_VALUES = 1 << 18
OPENING_CHARACTERS = 60
TAG = re.compile(r"\s*+<([\w-]++)[^<>]*+>")  # as clients put context before the user's words
MAX_ELEMENTS = 20  # of context


@dataclass(frozen=True)
class KeptTurn:
    """A conversation up to the end of a turn, as it was rendered, with the answer of that turn."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    verbatim: bool = True  # the text of the last answer is that of its tokens

    def opening(self) -> str:
        """The first words of the user, for people; empty if there are none."""
        contents = [each.get("content") for each in self.messages if each["role"] == "user"]
        texts = (text for content in contents for text in _texts(content))
        return next(filter(None, map(_opening, texts)), "")

    def to_bundle(self) -> bytes:
        """As JSON; empty if it is more than an import accepts."""
        data = json.dumps(asdict(self)).encode()
        return data if _is_small(data) else b""

    @classmethod
    def from_bundle(cls, data: bytes) -> KeptTurn:
        """From a stranger: raises BadRecord unless it is what a client could have sent."""
        if not _is_small(data):
            raise BadRecord("it has too many messages")
        try:
            turn = cls(**json.loads(data))
            is_sound = all(map(_is_message, turn.messages)) and all(map(_is_tool, turn.tools))
            is_sound &= isinstance(turn.thinking, bool | None)
            is_sound &= isinstance(turn.template_options, dict)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            is_sound = False
        if not is_sound:
            raise BadRecord("its messages are not those of a conversation")
        return turn


def _texts(content: Any) -> Iterator[str]:
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    yield from (text for text in texts if isinstance(text, str))


def _opening(text: str) -> str:
    """Without elements before it, and without what would move a terminal's cursor."""
    at = 0
    for _ in range(MAX_ELEMENTS):
        if (tag := TAG.match(text, at)) is None:
            break
        end = f"</{tag[1]}>"
        if (found := text.find(end, tag.end())) < 0:
            break
        at = found + len(end)
    words = " ".join(printable(text[at : at + 8 * OPENING_CHARACTERS]).split())
    return words if len(words) <= OPENING_CHARACTERS else f"{words[: OPENING_CHARACTERS - 1]}…"


def _is_small(data: bytes) -> bool:
    """Each value takes more memory than it has bytes."""
    n_values = sum(map(data.count, (b",", b"[", b"{")))
    return len(data) <= MAX_BUNDLED_BYTES and n_values <= MAX_BUNDLED_VALUES


def _is_message(message: Any) -> bool:
    texts = (message["role"], message.get("name", ""), message.get("reasoning_content", ""))
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(part["text"], str) for part in parts)
        and all(map(_is_call, message.get("tool_calls", [])))
    )


def _is_call(call: Any) -> bool:
    function = call["function"]
    return all(isinstance(function[key], str) for key in ("name", "arguments"))


def _is_tool(tool: Any) -> bool:
    function = tool["function"]
    return isinstance(function["name"], str) and isinstance(function.get("parameters", {}), dict)
