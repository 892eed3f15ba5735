"""Removes lines that change with every request and mean nothing to a local model.

Coding agents write counters and billing lines into their prompts; a prompt that differs in its
first line shares no prefix with the previous one. A rule removes whole lines of one exact format,
and only where clients put them: in system messages and in blocks that are one reminder, never in
text of the user, of a tool or of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.request import SYSTEM_ROLES, Breakpoint, Message, Request
from keepwarm.text.volatile import (
    LINES,
    REMINDER_OPENS,
    LinePosition,
    VolatileText,
    reminder_body,
)

HEADER = "x-keepwarm-scrub"


class ScrubResult(NamedTuple):
    messages: Sequence[Message]
    names: tuple[str, ...]  # of the rules that matched
    new_index: tuple[int, ...]  # old index → new index of the last message kept so far, or -1


Parts: TypeAlias = Sequence[Mapping[str, Any]]
Rules: TypeAlias = Sequence[VolatileText]


def select_rules(*switches: str) -> Rules:
    """The default rules, changed by each list of switches in turn.

    A switch is a rule's name, or `-name` to turn it off; `all`, `none` and `default` reset all.
    """
    on = _group("default")
    for word in (word.strip() for text in switches for word in text.split(",")):
        if word in ("all", "none", "default"):
            on = _group(word)
        elif word.startswith("-"):
            on = on - {_checked(word[1:])}
        elif word:
            on = on | {_checked(word)}
    return tuple(rule for rule in LINES if rule.name in on)


def rules_for(setting: str, headers: Mapping[str, str]) -> Rules:
    """The rules for one request: the server's setting, changed by the request's header."""
    return select_rules(setting, headers.get(HEADER, ""))


def scrub_request(request: Request, rules: Rules) -> Request:
    """The request without the lines that the rules match; breakpoints move with their messages."""
    if request.messages is None:
        return request
    messages, names, new_index = scrub_messages(request.messages, rules)
    breakpoints = tuple(
        Breakpoint(_moved(each.message, new_index), each.ttl_s) for each in request.breakpoints
    )
    return replace(request, messages=messages, breakpoints=breakpoints, scrubbed=names)


def scrub_messages(messages: Sequence[Message], rules: Rules) -> ScrubResult:
    """Drops a message that becomes empty, but never all messages."""
    kept: list[Message] = []
    names: set[str] = set()
    new_index = []
    for message in messages:
        left, found = _message(message, rules)
        names |= found
        if left is not None:
            kept.append(left)
        new_index.append(len(kept) - 1)
    if not kept:
        return ScrubResult(messages, (), tuple(range(len(messages))))
    return ScrubResult(kept, tuple(sorted(names)), tuple(new_index))


def _moved(index: int, new_index: Sequence[int]) -> int:
    return new_index[index] if index >= 0 else index


def _group(word: str) -> frozenset[str]:
    return frozenset(
        rule.name for rule in LINES if word == "all" or (word == "default" and rule.is_default)
    )


def _checked(name: str) -> str:
    names = [rule.name for rule in LINES]
    if name not in names:
        known = ", ".join(names)
        raise BadInput(f"{name!r} is not a scrubbing rule; use {known}, all, none or default.")
    return name


def _message(message: Message, rules: Rules) -> tuple[Message | None, set[str]]:
    """The rest of a message, None if nothing is left, and the names of the rules that matched."""
    content, role = message.get("content"), message.get("role")
    if isinstance(content, str):
        text, names = _block(role, content, rules)
        left: object = [] if text is None else text
    else:
        left, names = _parts(role, content or [], rules)
    if not names:
        return message, names
    return ({**message, "content": left} if left else None), names


def _parts(role: object, parts: Parts, rules: Rules) -> tuple[Parts, set[str]]:
    found = [(part, *_block(role, part.get("text") or "", rules)) for part in parts]
    names = set[str]().union(*(names for _, _, names in found))
    return [{**part, "text": text} for part, text, _ in found if text is not None], names


def _block(role: object, text: str, rules: Rules) -> tuple[str | None, set[str]]:
    """The rest of one block of text; None if all of it was removed."""
    body = reminder_body(text)
    if body is not None and role in (*SYSTEM_ROLES, "user"):
        left, names = _lines(body, rules, in_reminder=True)
        after = text[len(REMINDER_OPENS) + len(body) :]
        return (f"{REMINDER_OPENS}{left}{after}" if left.strip() or not names else None), names
    if role in SYSTEM_ROLES:
        left, names = _lines(text, rules, in_reminder=False)
        return (left if left.strip() or not names else None), names
    return text, set()


def _lines(text: str, rules: Rules, *, in_reminder: bool) -> tuple[str, set[str]]:
    """The rest of a text, and the names of the rules that matched.

    Only lines that may match are looked at, because a text may have a million of them.
    """
    found: dict[int, tuple[int, str]] = {}  # end and rule of a line, by its start
    for rule in rules:
        for start, end in _matches(text, rule, in_reminder):
            found.setdefault(start, (end, rule.name))
    kept, at = [], 0
    for start, (end, _) in sorted(found.items()):
        if start > at:
            kept.append(text[at : start - 1])
        at = end + 1
    if at <= len(text):
        kept.append(text[at:])
    return "\n".join(kept), {name for _, name in found.values()}


def _matches(text: str, rule: VolatileText, in_reminder: bool) -> Iterator[tuple[int, int]]:
    """Where the lines are that a rule matches."""
    any_line = LinePosition.REMINDER_LINE if in_reminder else LinePosition.LINE
    if any_line in rule.positions:
        yield from (each.span() for each in rule.any_line.finditer(text))
        return
    first_end, last_start = text.find("\n"), text.rfind("\n") + 1
    is_one = first_end < 0
    lines = {
        LinePosition.HEAD: None if in_reminder else (0, len(text) if is_one else first_end),
        LinePosition.TAIL: None if in_reminder else (last_start, len(text)),
        LinePosition.REMINDER: (0, len(text)) if in_reminder and is_one else None,
    }
    for position, line in lines.items():
        if line is not None and position in rule.positions and rule.pattern.fullmatch(text, *line):
            yield line
