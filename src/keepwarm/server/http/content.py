"""Message content as clients send it: text, text files, and parts that a text model cannot read."""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Sequence
from typing import Annotated, Self, TypeAlias

from pydantic import BeforeValidator, Field

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.http.body import JsonInput
from keepwarm.text.request import SYSTEM_ROLES

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
FILE_PARTS = frozenset({"file", "input_file"})
RESULT_ROLES = ("tool", "function")
TEXT_TYPES = frozenset({"application/json", "application/xml", "application/yaml"})
NOTE = "[{}: left out, because this model reads text only]"
# The word for a kind of part, by what its type contains; the first that fits.
WORDS = {
    "tool_result": "tool result",
    "_output": "tool result",
    "tool_use": "tool call",
    "_call": "tool call",
    "search_result": "search result",
    "compaction": "summary",
    "image": "image",
    "audio": "audio",
    "video": "video",
    "file": "file",
    "document": "document",
}


class FileData(JsonInput):
    """A file in the request itself: base64, or a data URL."""

    file_data: str | None = None
    filename: str | None = None


class ContentPart(FileData):
    """A part of a message: text, or a text file. In the history others become a note."""

    type: str = Field(description="`text`, or a file of text; others are noted or rejected.")
    text: str | None = None
    refusal: str | None = None
    file: FileData | None = None


def text_part(given: object) -> object:
    """A text alone as a part."""
    return {"type": "text", "text": given} if isinstance(given, str) else given


AnyPart: TypeAlias = Annotated[ContentPart, BeforeValidator(text_part)]
Content: TypeAlias = str | Sequence[ContentPart] | None


class SkippedContent:
    """Parts that a text model cannot read: a note in their place, and their kinds in the receipt.

    The note is the same every time, so that the prompt keeps its prefix.
    """

    def __init__(self, newest: str = "") -> None:
        """`newest`, as `messages[2]`, is the message of the user whose parts are refused."""
        self._newest = newest
        self._kinds: set[str] = set()

    @classmethod
    def of(cls, settings: Settings, name: str, roles: Sequence[str | None]) -> Self:
        """Of messages in the list of this name; behind the newest may be some of the system.

        One right behind results of tools belongs to them: clients put their images there.
        """
        turns = [i for i, role in enumerate(roles) if role not in SYSTEM_ROLES]
        last = [roles[i] for i in turns[-2:]]
        is_users = last[-1:] == ["user"] and last[0] not in RESULT_ROLES
        return cls(f"{name}[{turns[-1]}]" if is_users and not settings.skip_unreadable else "")

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(self._kinds))

    def leave_out(self, word: str) -> None:
        """Name it only: encrypted reasoning needs no note, since templates may drop reasoning."""
        self._kinds.add(word)

    def note(self, kind: str, where: str) -> str:
        """The text in place of a part of this type."""
        if self._newest and where.startswith(self._newest):
            raise BadField(
                f"{where} has type {kind!r}, but this model reads text only; leave it out.", where
            )
        word = next((word for part, word in WORDS.items() if part in kind), "part")
        self._kinds.add(word)
        return NOTE.format(word)


def text_of(content: Content, where: str, unread: SkippedContent) -> str:
    """The text of a message, one part per line."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content, where, unread))


def content_of(content: Content, where: str, unread: SkippedContent) -> str | list[dict[str, str]]:
    """The content as it was sent. Parts are not joined: scrubbing rules apply to each part."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": text} for text in _texts(content, where, unread)]


def titled(title: str | None, text: str) -> str:
    return f"{title}\n{text}" if title else text


def decode_text(data: str, media_type: str | None) -> str | None:
    """The text in base64 data; None if it is something else."""
    if not media_type or not (media_type.startswith("text/") or media_type in TEXT_TYPES):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _texts(parts: Sequence[ContentPart], where: str, unread: SkippedContent) -> list[str]:
    return [_part(part, f"{where}[{index}]", unread) for index, part in enumerate(parts)]


def _part(part: ContentPart, where: str, unread: SkippedContent) -> str:
    if part.type in FILE_PARTS:
        text = _file_text(part.file or part)
        return unread.note(part.type, where) if text is None else text
    if part.type not in TEXT_PARTS:
        return unread.note(part.type, where)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise BadField(f"{where} has no text; add text or remove the part.", where)
    return text


def _file_text(file: FileData) -> str | None:
    """The text of a text file, with its name; None if it is another file, or not in the request."""
    about, _, data = (file.file_data or "").rpartition(",")
    named = mimetypes.guess_type(file.filename or "")[0]
    text = decode_text(data, about.removeprefix("data:").partition(";")[0] or named)
    return None if text is None else titled(file.filename, text)
