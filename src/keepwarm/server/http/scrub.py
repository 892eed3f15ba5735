"""Parts of a prompt that change from request to request and mean nothing to a local model.

Coding agents write counters and billing lines into their prompts; a prompt that differs in its
first line shares nothing with the one before. A rule removes one whole line of an exact shape, and
only where clients put it: in system messages and in blocks that are a reminder as a whole, never
in what a person wrote, what a tool gave back or what the model said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.request import Breakpoint, Message, Request

HEADER = "x-keepwarm-scrub"
SYSTEM_ROLES = ("system", "developer")


class Place(StrEnum):
    HEAD = "the first line of a system block"
    TAIL = "the last line of a system block"
    LINE = "any line of a system block"
    REMINDER = "a `<system-reminder>` block that holds nothing else"
    REMINDER_LINE = "any line of a `<system-reminder>` block"


@dataclass(frozen=True)
class Rule:
    name: str
    pattern: re.Pattern[str]  # of one whole line
    places: frozenset[Place]
    default: bool
    sent_by: str
    example: str


class Scrubbed(NamedTuple):
    messages: Sequence[Message]
    names: tuple[str, ...]  # of the rules that found something
    where: tuple[int, ...]  # old index → index of the last message kept up to there, or -1


Parts: TypeAlias = Sequence[Mapping[str, Any]]
Places: TypeAlias = Callable[[int, int], Set[Place]]  # of a line, by its number among how many

_COUNTER = frozenset({Place.HEAD, Place.TAIL, Place.REMINDER})
_NUMBER = r"[0-9][0-9.,]*[kKmM]?"

RULES = (
    Rule(
        "billing-header",
        re.compile(r"x-anthropic-billing-header:(?: [a-z][a-z0-9_]*=[^;\n]*;)+"),
        frozenset({Place.HEAD}),
        default=True,
        sent_by="Claude Code: version, entry point and a hash of the request",
        example="x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=0f1e2;",
    ),
    Rule(
        "total-tokens",
        re.compile(r"<total_tokens>(?:[0-9]+|Infinite) tokens left</total_tokens>"),
        _COUNTER,
        default=True,
        sent_by="Claude Code: what is left of another model's context",
        example="<total_tokens>180000 tokens left</total_tokens>",
    ),
    Rule(
        "token-usage",
        re.compile(r"Token usage: [0-9]+/[0-9]+; -?[0-9]+ remaining"),
        _COUNTER,
        default=True,
        sent_by="Claude Code: what was used of another model's context",
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
        sent_by="Claude Code: tokens written in this turn and session",
        example="Output tokens — turn: 1.2k / 8k · session: 9.6k",
    ),
    Rule(
        "date",
        re.compile(
            r"[ \t]*(?:Today's date is [0-9]{4}-[0-9]{2}-[0-9]{2}\."
            r"|Today's date: [A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9]{4}"
            r"|<current_date>[0-9]{4}-[0-9]{2}-[0-9]{2}</current_date>)"
        ),
        frozenset({Place.LINE, Place.REMINDER_LINE}),
        default=False,
        sent_by="Claude Code, opencode, Codex: today; without it the model does not know the date",
        example="Today's date is 2026-01-31.",
    ),
)


def choose(*switches: str) -> tuple[Rule, ...]:
    """The rules in force: the defaults, then each list of switches in turn.

    A switch is a rule's name, or `-name` to leave it out; `all`, `none` and `default` start anew.
    """
    on = _group("default")
    for word in (word.strip() for text in switches for word in text.split(",")):
        if word in ("all", "none", "default"):
            on = _group(word)
        elif word.startswith("-"):
            on = on - {_known(word[1:])}
        elif word:
            on = on | {_known(word)}
    return tuple(rule for rule in RULES if rule.name in on)


def rules(setting: str, headers: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules for one request: as the server is set, and what the request's header changes."""
    return choose(setting, headers.get(HEADER, ""))


def clean(request: Request, rules: Sequence[Rule]) -> Request:
    """The request without what the rules name; its breakpoints stand where they stood."""
    if request.messages is None:
        return request
    messages, names, where = scrub(request.messages, rules)
    breakpoints = tuple(
        Breakpoint(_moved(each.message, where), each.ttl_s) for each in request.breakpoints
    )
    return replace(request, messages=messages, breakpoints=breakpoints, scrubbed=names)


def scrub(messages: Sequence[Message], rules: Sequence[Rule]) -> Scrubbed:
    """Messages without what the rules name. One left empty goes; a prompt never goes whole."""
    kept: list[Message] = []
    names: set[str] = set()
    where = []
    for message in messages:
        left, found = _message(message, rules)
        names |= found
        if left is not None:
            kept.append(left)
        where.append(len(kept) - 1)
    if not kept:
        return Scrubbed(messages, (), tuple(range(len(messages))))
    return Scrubbed(kept, tuple(sorted(names)), tuple(where))


def _moved(index: int, where: Sequence[int]) -> int:
    return where[index] if index >= 0 else index


def _group(word: str) -> frozenset[str]:
    return frozenset(
        rule.name for rule in RULES if word == "all" or (word == "default" and rule.default)
    )


def _known(name: str) -> str:
    names = [rule.name for rule in RULES]
    if name not in names:
        known = ", ".join(names)
        raise BadInput(f"No scrubbing rule is named {name!r}; there are {known}, all and none.")
    return name


def _message(message: Message, rules: Sequence[Rule]) -> tuple[Message | None, set[str]]:
    """What is left of a message, None for nothing, and the names of the rules that applied."""
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


# One reminder and nothing else: what stands between two of them is not a reminder.
_REMINDER = re.compile(
    r"(<system-reminder>\n)((?:(?!</system-reminder>).)*)(\n</system-reminder>\n?)", re.DOTALL
)


def _block(role: object, text: str, rules: Sequence[Rule]) -> tuple[str | None, set[str]]:
    """What is left of one block of text; None when what was removed was all of it."""
    reminder = _REMINDER.fullmatch(text)
    if reminder and role in (*SYSTEM_ROLES, "user"):
        before, body, after = reminder.groups()
        left, names = _lines(body, rules, _reminder_places)
        return (f"{before}{left}{after}" if left.strip() or not names else None), names
    if role in SYSTEM_ROLES:
        left, names = _lines(text, rules, _system_places)
        return (left if left.strip() or not names else None), names
    return text, set()


def _lines(text: str, rules: Sequence[Rule], places: Places) -> tuple[str, set[str]]:
    lines = text.split("\n")
    found = [_rule_for(line, places(i, len(lines)), rules) for i, line in enumerate(lines)]
    left = [line for line, name in zip(lines, found, strict=True) if name is None]
    return "\n".join(left), {name for name in found if name is not None}


def _rule_for(line: str, places: Set[Place], rules: Sequence[Rule]) -> str | None:
    matching = (r.name for r in rules if r.places & places and r.pattern.fullmatch(line))
    return next(matching, None)


def _system_places(index: int, n_lines: int) -> Set[Place]:
    ends = {Place.HEAD: index == 0, Place.TAIL: index == n_lines - 1}
    return {Place.LINE, *(place for place, here in ends.items() if here)}


def _reminder_places(_index: int, n_lines: int) -> Set[Place]:
    return {Place.REMINDER_LINE, Place.REMINDER} if n_lines == 1 else {Place.REMINDER_LINE}
