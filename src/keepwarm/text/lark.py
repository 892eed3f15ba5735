"""Lark, the grammar language of llguidance: delimiters as tokens, reasoning before an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from keepwarm.text.parsing import Preamble


class LarkWriter:
    """Writes text as Lark; a token that was added to the vocabulary is written as its id."""

    def __init__(self, tokenizer: Any) -> None:
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        names = sorted(self.added, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def literal(self, text: str) -> str:
        parts, end = [], 0
        for match in self._split.finditer(text):
            parts += [_quote(text[end : match.start()]), f"<[{self.added[match[0]]}]>"]
            end = match.end()
        return " ".join(part for part in [*parts, _quote(text[end:])] if part)

    def starts_with_token(self, text: str) -> bool:
        return self._split.match(text) is not None

    def has_token(self, text: str) -> bool:
        return self._split.search(text) is not None

    def without(self, excluded: str) -> str:
        """A terminal: one character or more of text that does not contain `excluded`."""
        return f"/(?s:.+)/ & ~/(?s:.*){_escape(excluded)}(?s:.*)/"

    def until(self, end: str) -> str:
        """The body of a rule: any text, then `end`. Make the rule lazy if `end` is plain text."""
        if self.starts_with_token(end):
            return f"/(?s:.*)/ {self.literal(end)}"  # a regex never matches such a token
        return f"/(?s:.*){_escape(end)}/"

    def thoughts(self, preamble: Preamble) -> Iterator[str]:
        """The rule `thoughts`, optional reasoning, and the rules it needs."""
        if not preamble.think_start:
            yield 'thoughts: ""'
            return
        lazy = "" if self.starts_with_token(preamble.think_end) else "[lazy]"
        yield f"thought{lazy}: {self.until(preamble.think_end)}"
        yield f"thoughts: ({self.literal(preamble.think_start)} thought)?"


def preamble_grammar(tokenizer: Any, preamble: Preamble) -> str:
    """A grammar for a preamble and then `@answer`, which is another grammar.

    Empty for an empty preamble.
    """
    if preamble == Preamble():
        return ""
    writer = LarkWriter(tokenizer)
    start = f"start: thoughts {writer.literal(preamble.header)} @answer"
    return "\n".join([start, *writer.thoughts(preamble)]) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
