"""Removes lines that change with every request and mean nothing to a local model.

Coding agents write counters and billing lines into their prompts; a prompt that differs in its
first line shares no prefix with the previous one. A rule removes whole lines of one exact format,
and only where clients put them: in system messages and in blocks that are one reminder, never in
text of the user, of a tool or of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.request import Breakpoint, Message, Request
from keepwarm.text.volatile import REMINDER_OPENS, reminder_body

HEADER = "x-keepwarm-scrub"
SYSTEM_ROLES = ("system", "developer")


class LinePosition(StrEnum):
    HEAD = "the first line of a system block"
    TAIL = "the last line of a system block"
    LINE = "any line of a system block"
    REMINDER = "a `<system-reminder>` block that holds nothing else"
    REMINDER_LINE = "any line of a `<system-reminder>` block"


@dataclass(frozen=True)
class Rule:
    name: str
    pattern: re.Pattern[str]  # matches one whole line
    positions: frozenset[LinePosition]
    default: bool
    sent_by: str
    example: str

    @cached_property
    def any_line(self) -> re.Pattern[str]:
        """Matches every such line of a text."""
        return re.compile(f"^(?:{self.pattern.pattern})$", re.MULTILINE)


class ScrubResult(NamedTuple):
    messages: Sequence[Message]
    names: tuple[str, ...]  # of the rules that matched
    new_index: tuple[int, ...]  # old index → new index of the last message kept so far, or -1


Parts: TypeAlias = Sequence[Mapping[str, Any]]


class Positions(NamedTuple):
    """The positions of lines in one kind of block."""

    any_line: frozenset[LinePosition]
    first: LinePosition | None = None
    last: LinePosition | None = None
    only: LinePosition | None = None  # the first and last at once


_IN_SYSTEM = Positions(
    frozenset({LinePosition.LINE}), first=LinePosition.HEAD, last=LinePosition.TAIL
)
_IN_REMINDER = Positions(frozenset({LinePosition.REMINDER_LINE}), only=LinePosition.REMINDER)

_COUNTER = frozenset({LinePosition.HEAD, LinePosition.TAIL, LinePosition.REMINDER})
_NUMBER = r"[0-9][0-9.,]*[kKmM]?"

RULES = (
    Rule(
        "billing-header",
        re.compile(r"x-anthropic-billing-header:(?: [a-z][a-z0-9_]*=[^;\n]*;)+"),
        frozenset({LinePosition.HEAD}),
        default=True,
        sent_by="Claude Code: version, entry point and a hash of the request",
        example="x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=0f1e2;",
    ),
    Rule(
        "total-tokens",
        re.compile(r"<total_tokens>(?:[0-9]+|Infinite) tokens left</total_tokens>"),
        _COUNTER,
        default=True,
        sent_by="Claude Code: tokens left in another model's context",
        example="<total_tokens>180000 tokens left</total_tokens>",
    ),
    Rule(
        "token-usage",
        re.compile(r"Token usage: [0-9]+/[0-9]+; -?[0-9]+ remaining"),
        _COUNTER,
        default=True,
        sent_by="Claude Code: tokens used of another model's context",
        example="Token usage: 20000/200000; 180000 remaining",
    ),
    Rule(
        "budget",
        re.compile(rf"USD budget: \${_NUMBER}/\${_NUMBER}; \$-?{_NUMBER} remaining"),
        _COUNTER,
        default=True,
        sent_by="Claude Code: money spent at another model's price",
        example="USD budget: $0.10/$5; $4.90 remaining",
    ),
    Rule(
        "output-tokens",
        re.compile(rf"Output tokens — turn: {_NUMBER}(?: / {_NUMBER})? · session: {_NUMBER}"),
        _COUNTER,
        default=True,
        sent_by="Claude Code: tokens generated in this turn and session",
        example="Output tokens — turn: 1.2k / 8k · session: 9.6k",
    ),
    Rule(
        "date",
        re.compile(
            r"[ \t]*(?:Today's date is [0-9]{4}-[0-9]{2}-[0-9]{2}\."
            r"|Today's date: [A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9]{4}"
            r"|<current_date>[0-9]{4}-[0-9]{2}-[0-9]{2}</current_date>)"
        ),
        frozenset({LinePosition.LINE, LinePosition.REMINDER_LINE}),
        default=False,
        sent_by="Claude Code, opencode, Codex: today's date, which the model then does not know",
        example="Today's date is 2026-01-31.",
    ),
)


def select_rules(*switches: str) -> tuple[Rule, ...]:
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
    return tuple(rule for rule in RULES if rule.name in on)


def rules_for(setting: str, headers: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules for one request: the server's setting, changed by the request's header."""
    return select_rules(setting, headers.get(HEADER, ""))


def scrub_request(request: Request, rules: Sequence[Rule]) -> Request:
    """The request without the lines that the rules match; breakpoints move with their messages."""
    if request.messages is None:
        return request
    messages, names, new_index = scrub_messages(request.messages, rules)
    breakpoints = tuple(
        Breakpoint(_moved(each.message, new_index), each.ttl_s) for each in request.breakpoints
    )
    return replace(request, messages=messages, breakpoints=breakpoints, scrubbed=names)


def scrub_messages(messages: Sequence[Message], rules: Sequence[Rule]) -> ScrubResult:
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
        rule.name for rule in RULES if word == "all" or (word == "default" and rule.default)
    )


def _checked(name: str) -> str:
    names = [rule.name for rule in RULES]
    if name not in names:
        known = ", ".join(names)
        raise BadInput(f"{name!r} is not a scrubbing rule; use {known}, all, none or default.")
    return name


def _message(message: Message, rules: Sequence[Rule]) -> tuple[Message | None, set[str]]:
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


def _parts(role: object, parts: Parts, rules: Sequence[Rule]) -> tuple[Parts, set[str]]:
    found = [(part, *_block(role, part.get("text") or "", rules)) for part in parts]
    names = set[str]().union(*(names for _, _, names in found))
    return [{**part, "text": text} for part, text, _ in found if text is not None], names


def _block(role: object, text: str, rules: Sequence[Rule]) -> tuple[str | None, set[str]]:
    """The rest of one block of text; None if all of it was removed."""
    body = reminder_body(text)
    if body is not None and role in (*SYSTEM_ROLES, "user"):
        left, names = _lines(body, rules, _IN_REMINDER)
        after = text[len(REMINDER_OPENS) + len(body) :]
        return (f"{REMINDER_OPENS}{left}{after}" if left.strip() or not names else None), names
    if role in SYSTEM_ROLES:
        left, names = _lines(text, rules, _IN_SYSTEM)
        return (left if left.strip() or not names else None), names
    return text, set()


def _lines(text: str, rules: Sequence[Rule], positions: Positions) -> tuple[str, set[str]]:
    """The rest of a text, and the names of the rules that matched.

    Only lines that may match are looked at, because a text may have a million of them.
    """
    found: dict[int, tuple[int, str]] = {}  # end and rule of a line, by its start
    for rule in rules:
        for start, end in _matches(text, rule, positions):
            found.setdefault(start, (end, rule.name))
    kept, at = [], 0
    for start, (end, _) in sorted(found.items()):
        if start > at:
            kept.append(text[at : start - 1])
        at = end + 1
    if at <= len(text):
        kept.append(text[at:])
    return "\n".join(kept), {name for _, name in found.values()}


def _matches(text: str, rule: Rule, positions: Positions) -> Iterator[tuple[int, int]]:
    """Where the lines are that a rule matches."""
    if rule.positions & positions.any_line:
        yield from (each.span() for each in rule.any_line.finditer(text))
        return
    first_end, last_start = text.find("\n"), text.rfind("\n") + 1
    lines = {
        positions.first: (0, first_end if first_end >= 0 else len(text)),
        positions.last: (last_start, len(text)),
        positions.only: (0, len(text)) if first_end < 0 else None,
    }
    for position, line in lines.items():
        if line is not None and position in rule.positions and rule.pattern.fullmatch(text, *line):
            yield line
