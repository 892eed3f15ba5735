"""Message content as OpenAI's APIs send it: text, or a list of text parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from pydantic import Field

from keepwarm.errors import BadField
from keepwarm.server.http.body import JsonInput

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ContentPart(JsonInput):
    """A part of a message. Text only; media are rejected."""

    type: str = Field(description="`text`; any other type is rejected.")
    text: str | None = None
    refusal: str | None = None


Content: TypeAlias = str | Sequence[ContentPart] | None


def text_of(content: Content, where: str) -> str:
    """The text of a message, one part per line."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content, where))


def content_of(content: Content, where: str) -> str | list[dict[str, str]]:
    """The content as it was sent. Parts are not joined: scrubbing rules apply to each part."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": text} for text in _texts(content, where)]


def _texts(parts: Sequence[ContentPart], where: str) -> list[str]:
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        raise unsupported_part(part.type, where)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise BadField(f"{where} has no text; add text or remove the part.", where)
    return text


def unsupported_part(kind: str, where: str) -> BadField:
    return BadField(f"{where} has type {kind!r}, but this model reads text only.", where)
