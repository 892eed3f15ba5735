"""Parts of a system text that differ between projects, and from one day to the next.

Coding agents write them into text that is otherwise the same in every session. A rule knows one
kind of block by the line it begins with and by where it ends; all other text counts as stable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

REMINDER_OPENS, _CLOSE = "<system-reminder>\n", "\n</system-reminder>"
_STABLE_REMINDER = re.compile(r"The following (?:skills are available|tools are reachable) ")
UNCACHED = "uncached"  # the name of what stands behind the last `cache_control` mark


@dataclass(frozen=True)
class VolatileBlock:
    """One kind of block: what it begins with, and where it ends, searched from there."""

    name: str
    hint: str  # in every start; a text without it is not searched
    start: re.Pattern[str]
    end: re.Pattern[str]
    is_passing: bool  # it differs within a project, too
    sent_by: str


class VolatileSpan(NamedTuple):
    start: int
    end: int
    name: str
    is_passing: bool


def _block(
    name: str, hint: str, start: str, end: str, sent_by: str, *, is_passing: bool = False
) -> VolatileBlock:
    first, last = (re.compile(each, re.MULTILINE) for each in (start, end))
    return VolatileBlock(name, hint, first, last, is_passing, sent_by)


BLOCKS = (
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


def find_volatile(text: str) -> list[VolatileSpan]:
    """The volatile blocks of a system text, in their order; none lies in another."""
    blocks = [block for block in BLOCKS if block.hint in text]
    found = sorted(span for block in blocks for span in _spans(text, block))
    apart: list[VolatileSpan] = []
    for span in found:
        if not apart or span.start >= apart[-1].end:
            apart.append(span)
    return apart


def with_uncached(spans: Sequence[VolatileSpan], n_cached: int, n_chars: int) -> list[VolatileSpan]:
    """The spans, and between them all that stands behind character `n_cached`."""
    edges = [n_cached, *(edge for span in spans for edge in span[:2] if edge > n_cached), n_chars]
    gaps = [
        VolatileSpan(start, end, UNCACHED, is_passing=False)
        for start, end in pairwise(edges)
        if start < end and not any(span.start <= start < span.end for span in spans)
    ]
    return sorted([*spans, *gaps])


def n_cached_chars(content: Any) -> int | None:
    """The length of a text, joined from parts, up to its last `cache_control` mark."""
    parts = _parts(content)
    marked = [at for at, part in enumerate(parts, 1) if part.get("cache_control")]
    return _n_chars(parts[: marked[-1]]) if marked else None


def n_stable_reminders(content: Any) -> int:
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


def _spans(text: str, block: VolatileBlock) -> Iterator[VolatileSpan]:
    at = 0
    while start := block.start.search(text, at):
        end = block.end.search(text, start.end())
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
