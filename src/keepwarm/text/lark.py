"""Lark, the language of llguidance's grammars: marks as tokens, thoughts before an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from keepwarm.text.parsing import Lead


class Writer:
    """Texts as Lark; a token that was added to the vocabulary stands as its number."""

    def __init__(self, tokenizer: Any) -> None:
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        names = sorted(self.added, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def literal(self, text: str) -> str:
        parts, end = [], 0
        for match in self._split.finditer(text):
            parts += [_quoted(text[end : match.start()]), f"<[{self.added[match[0]]}]>"]
            end = match.end()
        return " ".join(part for part in [*parts, _quoted(text[end:])] if part)

    def starts_with_token(self, text: str) -> bool:
        return self._split.match(text) is not None

    def has_token(self, text: str) -> bool:
        return self._split.search(text) is not None

    def without(self, mark: str) -> str:
        """Any text, of one letter at least, in which this one does not stand."""
        return f"/(?s:.+)/ & ~/(?s:.*){_in_regex(mark)}(?s:.*)/"

    def until(self, mark: str) -> str:
        """The body of a rule, lazy where the mark is all text: what comes before it, and it."""
        if self.starts_with_token(mark):
            return f"/(?s:.*)/ {self.literal(mark)}"  # a regex never matches such a token
        return f"/(?s:.*){_in_regex(mark)}/"

    def thoughts(self, lead: Lead) -> Iterator[str]:
        """The rules of `thoughts`: a model that thinks may leave them out."""
        if not lead.think:
            yield 'thoughts: ""'
            return
        lazy = "" if self.starts_with_token(lead.thought) else "[lazy]"
        yield f"thought{lazy}: {self.until(lead.thought)}"
        yield f"thoughts: ({self.literal(lead.think)} thought)?"


def led(tokenizer: Any, lead: Lead) -> str:
    """A grammar of what leads up to an answer, which is another grammar by the name `answer`.

    Empty where nothing does.
    """
    if lead == Lead():
        return ""
    writer = Writer(tokenizer)
    start = f"start: thoughts {writer.literal(lead.header)} @answer"
    return "\n".join([start, *writer.thoughts(lead)]) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
