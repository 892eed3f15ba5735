"""The beginning of a conversation in the order in which other sessions reuse most of it.

Stable system text comes first. What is volatile in it is handed to the template as a later system
message, before the user speaks. A system message directly behind the user's first one that holds
such text comes before it, too. Text of users is never changed. The order depends on these messages
alone, so that every turn of a conversation has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from keepwarm.text.request import Message, Request
from keepwarm.text.template import BETWEEN, Template, text_of
from keepwarm.text.tools import DEFERRED
from keepwarm.text.volatile import (
    VolatileSpan,
    find_volatile,
    n_cached_chars,
    n_stable_reminders,
    with_uncached,
)

SYSTEM_ROLES = ("system", "developer")
LATE = "system-message"  # its name in the receipt: it came before the user's first message


class Ordering:
    """Which prompts of one model are reordered, and how."""

    def __init__(self, setting: str, template: Template, native_tools: bool) -> None:
        """`own`: where Keepwarm writes the tools; `all`: where the template does, too; or `off`."""
        moves_behind = setting == "all" and template.takes_system_behind_tools
        self.tools_first = not native_tools and setting != "off"
        self._moves_text = self.tools_first or (native_tools and moves_behind)
        self._splits_user = template.takes_system_between and template.takes_late_system

    def of(self, request: Request) -> Arrangement:
        """The arrangement of a request; one without tools stays as it is."""
        messages = request.messages or ()
        if not self._moves_text or all(tool.get(DEFERRED) for tool in request.tools):
            return Arrangement()
        found = Arrangement.of(messages, splits_user=self._splits_user)
        has_both = self.tools_first and bool(messages) and _is_system(messages[0])
        return replace(found, names=("tools", *found.names)) if has_both else found


@dataclass(frozen=True)
class Arrangement:
    """What is moved at the beginning of a conversation; by default nothing."""

    names: tuple[str, ...] = ()  # of what is moved, for the receipt
    spans: Mapping[int, Sequence[VolatileSpan]] = field(default_factory=dict)  # by system message
    n_opening: int = 0  # messages up to the last that is moved
    n_reminders: int = 0  # characters of the user's message that stay before the volatile text

    @classmethod
    def of(cls, messages: Sequence[Message], *, splits_user: bool) -> Arrangement:
        """For a conversation as the client sent it.

        `splits_user`: the template takes a system message between two of the user.
        """
        n_first = sum(1 for _ in takewhile(_is_system, messages))
        user, late = n_first, n_first + 1
        has_user = len(messages) > user and messages[user].get("role") == "user"
        spans = {at: _volatile_spans(messages[at]) for at in range(n_first)}
        has_late = has_user and len(messages) > late and _is_system(messages[late])
        if has_late and (found := find_volatile(text_of(messages[late]))):
            spans[late] = found
        if not any(spans.values()):
            return cls()
        return cls(
            names=_names(spans, has_late=late in spans),
            spans=spans,
            n_opening=n_first + has_user + (late in spans),
            n_reminders=_n_reminders(messages[user]) if has_user and splits_user else 0,
        )

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, or the first of them, in their new order; see `Template.conform`."""
        opening = messages[: self.n_opening]
        users = [each for at, each in enumerate(opening) if at not in self.spans]
        before, after = self._parted(users)
        volatile = self._volatile(opening)
        return [
            *self.stable(messages),
            *before,
            *([{"role": "system", "content": volatile}] if volatile else []),
            *after,
            *messages[self.n_opening :],
        ]

    def stable(self, messages: Sequence[Message]) -> list[Message]:
        """The system messages at the beginning, without what is volatile."""
        opening = enumerate(messages[: self.n_opening])
        left = [
            {**each, "content": _without(each["content"], self.spans[at])}
            for at, each in opening
            if at in self.spans
        ]
        return [each for each in left if each["content"].strip()]

    def _volatile(self, opening: Sequence[Message]) -> str:
        """What differs within a project comes last."""
        found = [
            (span.is_passing, opening[at]["content"][span.start : span.end].strip("\n"))
            for at, spans in self.spans.items()
            if at < len(opening)
            for span in spans
        ]
        return BETWEEN.join(text for _, text in sorted(found, key=lambda each: each[0]) if text)

    def _parted(self, users: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        if not users or not self.n_reminders:
            return [], list(users)
        content = users[0]["content"]
        reminders, rest = content[: self.n_reminders], content[self.n_reminders + 1 :]
        return [{**users[0], "content": reminders}], [{**users[0], "content": rest}]


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _volatile_spans(message: Message) -> Sequence[VolatileSpan]:
    text, n_cached = text_of(message), n_cached_chars(message.get("content"))
    found = find_volatile(text)
    return found if n_cached is None else with_uncached(found, n_cached, len(text))


def _names(spans: Mapping[int, Sequence[VolatileSpan]], *, has_late: bool) -> tuple[str, ...]:
    moved = {span.name for each in spans.values() for span in each}
    return tuple(sorted(moved | {LATE} if has_late else moved))


def _n_reminders(message: Message) -> int:
    return n_stable_reminders(message.get("content"))


def _without(text: str, spans: Sequence[VolatileSpan]) -> str:
    """The rest of a text; how many blocks were in it cannot be seen."""
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), len(text)]
    kept = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return BETWEEN.join(piece.strip("\n") for piece in kept if piece.strip()) if spans else text
