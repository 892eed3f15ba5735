"""Text that coding agents change, and the order of a prompt's beginning in spite of it.

Agents write volatile text into prompts that are otherwise the same in every session: lines that
change with every request and mean nothing to a local model, which the server has removed, and
blocks that differ between projects and days, which are moved. A rule knows a line by its exact
format, and a block by the line it begins with and by where it ends; all other text is stable.

Lines are removed only where clients put them: in system messages and in blocks that are one
reminder, never in text of the user, of a tool or of the model.

Stable system text comes first. What is volatile in it is handed to the template as a later system
message, before the user speaks. A system message directly behind the user's first one that holds
such text comes before it, too. Text of users is never changed. The order depends on these messages
alone, so that every turn of a conversation has the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.request import SYSTEM_ROLES, Breakpoint, Message, Request
from keepwarm.text.template import BETWEEN, Template, text_of
from keepwarm.text.tools import DEFERRED

REMINDER_OPENS, _CLOSE = "<system-reminder>\n", "\n</system-reminder>"
_STABLE_REMINDER = re.compile(r"The following (?:skills are available|tools are reachable) ")
UNCACHED = "uncached"  # the name of what stands behind the last `cache_control` mark
LATE = "system-message"  # its name in the receipt: it came before the user's first message


class LinePosition(StrEnum):
    HEAD = "the first line of a system block"
    TAIL = "the last line of a system block"
    LINE = "any line of a system block"
    REMINDER = "a `<system-reminder>` block with nothing else"
    REMINDER_LINE = "any line of a `<system-reminder>` block"


@dataclass(frozen=True)
class VolatileText:
    """One kind of volatile text: a line that is removed, or a block that is moved."""

    name: str
    sent_by: str
    pattern: re.Pattern[str]  # of a whole line, or of the beginning of a block
    end: re.Pattern[str] | None = None  # of a block, searched behind its beginning
    hint: str = ""  # in every block; a text without it is not searched
    is_passing: bool = False  # a block that differs within a project, too
    positions: AbstractSet[LinePosition] = frozenset()  # of a line that is removed
    is_default: bool = False  # the line is removed unless a client switches that off
    example: str = ""

    @cached_property
    def any_line(self) -> re.Pattern[str]:
        """Matches every such line of a text."""
        return re.compile(f"^(?:{self.pattern.pattern})$", re.MULTILINE)


class VolatileSpan(NamedTuple):
    start: int
    end: int
    name: str
    is_passing: bool


def _line(
    name: str,
    pattern: str,
    positions: AbstractSet[LinePosition],
    sent_by: str,
    example: str,
    *,
    is_default: bool = True,
) -> VolatileText:
    line = VolatileText(name, sent_by, re.compile(pattern), positions=positions, example=example)
    return replace(line, is_default=is_default)


def _block(
    name: str, hint: str, start: str, end: str, sent_by: str, *, is_passing: bool = False
) -> VolatileText:
    first, last = (re.compile(each, re.MULTILINE) for each in (start, end))
    return VolatileText(name, sent_by, first, last, hint, is_passing)


_COUNTER = {LinePosition.HEAD, LinePosition.TAIL, LinePosition.REMINDER}
_NUMBER = r"[0-9][0-9.,]*[kKmM]?"

VOLATILE = (
    _line(
        "billing-header",
        r"x-anthropic-billing-header:(?: [a-z][a-z0-9_]*=[^;\n]*;)+",
        {LinePosition.HEAD},
        "Claude Code: version, entry point and a hash of the request",
        "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=0f1e2;",
    ),
    _line(
        "total-tokens",
        r"<total_tokens>(?:[0-9]+|Infinite) tokens left</total_tokens>",
        _COUNTER,
        "Claude Code: tokens left in another model's context",
        "<total_tokens>180000 tokens left</total_tokens>",
    ),
    _line(
        "token-usage",
        r"Token usage: [0-9]+/[0-9]+; -?[0-9]+ remaining",
        _COUNTER,
        "Claude Code: tokens used of another model's context",
        "Token usage: 20000/200000; 180000 remaining",
    ),
    _line(
        "budget",
        rf"USD budget: \${_NUMBER}/\${_NUMBER}; \$-?{_NUMBER} remaining",
        _COUNTER,
        "Claude Code: money spent at another model's price",
        "USD budget: $0.10/$5; $4.90 remaining",
    ),
    _line(
        "output-tokens",
        rf"Output tokens — turn: {_NUMBER}(?: / {_NUMBER})? · session: {_NUMBER}",
        _COUNTER,
        "Claude Code: tokens generated in this turn and session",
        "Output tokens — turn: 1.2k / 8k · session: 9.6k",
    ),
    _line(
        "date",
        (
            r"[ \t]*(?:Today's date is [0-9]{4}-[0-9]{2}-[0-9]{2}\."
            r"|Today's date: [A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9]{4}"
            r"|<current_date>[0-9]{4}-[0-9]{2}-[0-9]{2}</current_date>)"
        ),
        {LinePosition.LINE, LinePosition.REMINDER_LINE},
        "Claude Code, opencode, Codex: today's date, which the model then does not know",
        "Today's date is 2026-01-31.",
        is_default=False,
    ),
    _block(
        "environment",
        "# Environment\nYou have been invoked",
        r"^# Environment\nYou have been invoked in the following environment: ?\n",
        r"^(?! - )|\Z",
        "Claude Code: working directory, platform, shell",
    ),
    _block(
        "environment",
        "<env>\n",
        r"^(?:[^\n]*\benvironment you are running in:\n)?<env>\n",
        r"^</env>(?:\n|\Z)",
        "opencode, Continue, earlier Claude Code: working directory, platform, date",
    ),
    _block(
        "environment",
        "<cwd>\n",
        r"^<cwd>\n",
        r"^</cwd>(?:\n|\Z)",
        "pi: working directory",
    ),
    _block(
        "memory",
        "# Memory\n",
        r"^# Memory\n\nYou have a persistent file-based memory ",
        r"^(?=# )|\Z",
        "Claude Code: the folder of its notes on the project",
    ),
    _block(
        "memory",
        "# auto memory\n",
        r"^(?:---\n\n)?# auto memory\n\nYou have (?:a|two) persistent",
        r"^(?=## )|\Z",
        "Qwen Code: the folders of its notes",
    ),
    _block(
        "memory",
        "MEMORY.md\n",
        r"^## [^\n]*\bMEMORY\.md\n",
        r"\Z",
        "Qwen Code: the index of its notes, at the end of the text",
    ),
    _block(
        "instructions",
        "Instructions from: ",
        r"^Instructions from: [^\n]+\n",
        r"^(?=Skills provide specialized instructions )|\Z",
        "opencode: AGENTS.md of the project",
    ),
    _block(
        "instructions",
        "--- Context from: ",
        r"^--- Context from: [^\n]+ ---\n",
        r"^--- End of Context from: [^\n]+ ---(?:\n|\Z)",
        "Qwen Code: QWEN.md of the project",
    ),
    _block(
        "instructions",
        '<context name="userRules">\n',
        r'^<context name="userRules">\n',
        r"^</context>(?:\n|\Z)",
        "Continue: AGENTS.md of the project, rules",
    ),
    _block(
        "instructions",
        "<project_context>\n",
        r"^<project_context>\n",
        r"^</project_context>(?:\n|\Z)",
        "pi: AGENTS.md of the project",
    ),
    _block(
        "git-status",
        "gitStatus: This is",
        r"^gitStatus: This is the git status at the start of the conversation\.",
        r"\Z",
        "earlier Claude Code",
        is_passing=True,
    ),
    _block(
        "git-status",
        "Git snapshot at conversation start.",
        r"^Git snapshot at conversation start\.[^\n]*\n```text\n",
        r"^```(?:\n|\Z)",
        "Qwen Code",
        is_passing=True,
    ),
    _block(
        "git-status",
        '<context name="gitStatus">This is',
        r'^<context name="gitStatus">This is the git status at the start of the conversation\.',
        r"^</context>(?:\n|\Z)",
        "Continue",
        is_passing=True,
    ),
    _block(
        "date",
        "Today's date is ",
        r"^Today's date is [^\n]+",
        r"(?:\n|\Z)",
        "Claude Code",
        is_passing=True,
    ),
)
LINES = tuple(each for each in VOLATILE if each.end is None)
BLOCKS = tuple(each for each in VOLATILE if each.end is not None)


class Ordering:
    """Which prompts of one model are reordered, and how."""

    def __init__(self, setting: str, template: Template, native_tools: bool) -> None:
        """`known`: where the template writes the tools, blocks of known clients alone are moved;
        `all`: there, too, what stands behind a `cache_control` mark; or `off`."""
        is_on = setting != "off"
        self.tools_first = is_on and not native_tools
        self._moves_text = self.tools_first or (is_on and template.takes_system_behind_tools)
        self._moves_uncached = self.tools_first or setting == "all"
        self._splits_user = template.takes_system_between and template.takes_late_system

    def of(self, request: Request) -> Arrangement:
        """The arrangement of a request; one without tools stays as it is."""
        messages = request.messages or ()
        if not self._moves_text or all(tool.get(DEFERRED) for tool in request.tools):
            return Arrangement()
        found = Arrangement.of(
            messages, splits_user=self._splits_user, moves_uncached=self._moves_uncached
        )
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
    def of(
        cls, messages: Sequence[Message], *, splits_user: bool, moves_uncached: bool = True
    ) -> Arrangement:
        """For a conversation as the client sent it.

        `splits_user`: the template takes a system message between two of the user.
        `moves_uncached`: what stands behind the last `cache_control` mark counts as volatile.
        """
        n_first = sum(1 for _ in takewhile(_is_system, messages))
        user, late = n_first, n_first + 1
        has_user = len(messages) > user and messages[user].get("role") == "user"
        first = messages[:n_first]
        spans = {at: _volatile_spans(each, moves_uncached) for at, each in enumerate(first)}
        has_late = has_user and len(messages) > late and _is_system(messages[late])
        if has_late and (found := find_volatile(text_of(messages[late]))):
            spans[late] = found
        if not any(spans.values()):
            return cls()
        return cls(
            names=_names(spans, has_late=late in spans),
            spans=spans,
            n_opening=n_first + has_user + (late in spans),
            n_reminders=_n_stable_reminders(messages[user].get("content"))
            if has_user and splits_user
            else 0,
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


def _volatile_spans(message: Message, moves_uncached: bool) -> Sequence[VolatileSpan]:
    text, n_cached = text_of(message), _n_cached_chars(message.get("content"))
    found = find_volatile(text)
    if n_cached is None or not moves_uncached:
        return found
    return _with_uncached(found, n_cached, len(text))


def _names(spans: Mapping[int, Sequence[VolatileSpan]], *, has_late: bool) -> tuple[str, ...]:
    moved = {span.name for each in spans.values() for span in each}
    return tuple(sorted(moved | {LATE} if has_late else moved))


def _without(text: str, spans: Sequence[VolatileSpan]) -> str:
    """The rest of a text; how many blocks were in it cannot be seen."""
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), len(text)]
    kept = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return BETWEEN.join(piece.strip("\n") for piece in kept if piece.strip()) if spans else text


def find_volatile(text: str) -> list[VolatileSpan]:
    """The volatile blocks of a system text, in their order; none lies in another."""
    blocks = [block for block in BLOCKS if block.hint in text]
    found = sorted(span for block in blocks for span in _spans(text, block))
    apart: list[VolatileSpan] = []
    for span in found:
        if not apart or span.start >= apart[-1].end:
            apart.append(span)
    return apart


def _with_uncached(
    spans: Sequence[VolatileSpan], n_cached: int, n_chars: int
) -> list[VolatileSpan]:
    """The spans, and between them all that stands behind character `n_cached`."""
    edges = [n_cached, *(edge for span in spans for edge in span[:2] if edge > n_cached), n_chars]
    gaps = [
        VolatileSpan(start, end, UNCACHED, is_passing=False)
        for start, end in pairwise(edges)
        if start < end and not any(span.start <= start < span.end for span in spans)
    ]
    return sorted([*spans, *gaps])


def _n_cached_chars(content: Any) -> int | None:
    """The length of a text, joined from parts, up to its last `cache_control` mark."""
    parts = _parts(content)
    marked = [at for at, part in enumerate(parts, 1) if part.get("cache_control")]
    return _n_chars(parts[: marked[-1]]) if marked else None


def _n_stable_reminders(content: Any) -> int:
    """The length of the reminders that a user message begins with, if they are known as stable."""
    parts = _parts(content)[:-1]  # one stays
    return _n_chars(list(takewhile(_is_stable, parts)))


def reminder_body(text: str) -> str | None:
    """What is in a block that is one reminder and nothing else.

    Text between two reminders is not part of either.
    """
    whole = text.removesuffix("\n")
    if not whole.startswith(REMINDER_OPENS) or not whole.endswith(_CLOSE):
        return None
    body = whole[len(REMINDER_OPENS) : -len(_CLOSE)]
    is_one = len(whole) >= len(REMINDER_OPENS) + len(_CLOSE) and _CLOSE[1:] not in body
    return body if is_one else None


def _spans(text: str, block: VolatileText) -> Iterator[VolatileSpan]:
    at = 0
    while start := block.pattern.search(text, at):
        end = block.end.search(text, start.end()) if block.end else None
        if end is None:
            return
        at = end.end()
        yield VolatileSpan(start.start(), at, block.name, block.is_passing)


def _is_stable(part: Mapping[str, Any]) -> bool:
    body = reminder_body(part["text"])
    return body is not None and bool(_STABLE_REMINDER.match(body))


def _parts(content: Any) -> Sequence[Mapping[str, Any]]:
    """The parts of a content; none if it is one text, or not of texts alone."""
    parts = content if isinstance(content, list | tuple) else ()
    are_texts = all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts)
    return parts if are_texts else ()


def _n_chars(parts: Sequence[Mapping[str, Any]]) -> int:
    """Of parts joined by line breaks, as `template.text_of` does."""
    return len("\n".join(part["text"] for part in parts))


# Lines that are removed


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
        left, found = _scrub_message(message, rules)
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


def _scrub_message(message: Message, rules: Rules) -> tuple[Message | None, set[str]]:
    """The rest of a message, None if nothing is left, and the names of the rules that matched."""
    content, role = message.get("content"), message.get("role")
    if isinstance(content, str):
        text, names = _scrub_block(role, content, rules)
        left: object = [] if text is None else text
    else:
        left, names = _scrub_parts(role, content or [], rules)
    if not names:
        return message, names
    return ({**message, "content": left} if left else None), names


def _scrub_parts(role: object, parts: Parts, rules: Rules) -> tuple[Parts, set[str]]:
    found = [(part, *_scrub_block(role, part.get("text") or "", rules)) for part in parts]
    names = set[str]().union(*(names for _, _, names in found))
    return [{**part, "text": text} for part, text, _ in found if text is not None], names


def _scrub_block(role: object, text: str, rules: Rules) -> tuple[str | None, set[str]]:
    """The rest of one block of text; None if all of it was removed."""
    body = reminder_body(text)
    if body is not None and role in (*SYSTEM_ROLES, "user"):
        left, names = _scrub_lines(body, rules, in_reminder=True)
        after = text[len(REMINDER_OPENS) + len(body) :]
        return (f"{REMINDER_OPENS}{left}{after}" if left.strip() or not names else None), names
    if role in SYSTEM_ROLES:
        left, names = _scrub_lines(text, rules, in_reminder=False)
        return (left if left.strip() or not names else None), names
    return text, set()


def _scrub_lines(text: str, rules: Rules, *, in_reminder: bool) -> tuple[str, set[str]]:
    """The rest of a text, and the names of the rules that matched.

    Only lines that may match are looked at, because a text may have a million of them.
    """
    found: dict[int, tuple[int, str]] = {}  # end and rule of a line, by its start
    for rule in rules:
        for start, end in _matching_lines(text, rule, in_reminder):
            found.setdefault(start, (end, rule.name))
    kept, at = [], 0
    for start, (end, _) in sorted(found.items()):
        if start > at:
            kept.append(text[at : start - 1])
        at = end + 1
    if at <= len(text):
        kept.append(text[at:])
    return "\n".join(kept), {name for _, name in found.values()}


def _matching_lines(text: str, rule: VolatileText, in_reminder: bool) -> Iterator[tuple[int, int]]:
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
