"""A text and its tokens, with boundaries from which parts of it can be tokenised again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.past_answers import KnownSpan
from keepwarm.text.rendering.pieces import Tokens
from keepwarm.text.special_tokens import Encode

# Tokens of parts of a prompt, each with the character it begins at.
EncodeParts: TypeAlias = Callable[[Sequence[tuple[str, int]]], list[Tokens]]

MARGIN = 1_000  # characters; text further on no longer changes the tokens before it


class TokenBoundary(NamedTuple):
    """A position from which text is tokenised independently, mostly that of a special token."""

    n_before: int  # tokens before it
    start: int  # in the text
    end: int


@dataclass(frozen=True)
class TokenisedText:
    """A text and its tokens; past answers as the tokens that were generated."""

    text: str
    tokens: list[int]
    boundaries: list[TokenBoundary]
    spliced: int = 0  # tokens of past answers
    n_before: int = 0  # tokens before the text


def tokenise(
    tokenizer: Any,
    to_tokens: EncodeParts,
    text: str,
    spans: Sequence[KnownSpan] = (),
    before: Sequence[int] = (),
) -> TokenisedText:
    """Past answers become their own tokens; the text between two of them is tokenised whole."""
    tokens = list(before)
    boundaries: list[TokenBoundary] = []
    names = _special_names(tokenizer)
    ends = [*spans, KnownSpan(len(text), len(text), ())]
    starts = [0, *(span.end for span in spans)]
    pairs = list(zip(starts, ends, strict=True))
    parts = to_tokens([(text[start : span.start], start) for start, span in pairs])
    for (start, span), between in zip(pairs, parts, strict=True):
        boundaries.append(TokenBoundary(len(tokens), start, start))
        boundaries += _boundaries(names, text, start, between, len(tokens))
        tokens += between
        boundaries.append(TokenBoundary(len(tokens), span.start, span.start))
        tokens += span.tokens
    spliced = sum(len(span.tokens) for span in spans)
    return TokenisedText(text, tokens, boundaries, spliced, len(before))


def find_cut(to_tokens: Encode, whole: TokenisedText, part: str, reach: int) -> int | None:
    """The common token prefix with a text, tokenised from the last boundary both share."""
    shared = common_prefix(whole.text, part)
    if shared == len(whole.text):
        return len(whole.tokens)
    nearest = bisect_right(whole.boundaries, shared, key=lambda boundary: boundary.end) - 1
    n_before, start, _ = whole.boundaries[nearest]
    if shared - start > reach:
        return None
    rest = to_tokens(part[start : shared + MARGIN], start)
    after = whole.tokens[n_before : n_before + len(rest)]
    return n_before + common_prefix(after, rest)


def _special_names(tokenizer: Any) -> dict[int, str]:
    if not tokenizer.has_chat_template:
        return {}
    names = {token: name for name, token in tokenizer.get_added_vocab().items()}
    names.pop(tokenizer.unk_token_id, None)  # it replaces text other than its name
    return names


def _boundaries(
    names: dict[int, str], text: str, end: int, tokens: Tokens, n_before: int
) -> Iterator[TokenBoundary]:
    """The special tokens of a rendering; a cut tokenises from the last one, not from the start."""
    for index in np.flatnonzero(np.isin(np.asarray(memoryview(tokens)), list(names))).tolist():
        name = names[tokens[index]]
        start = text.find(name, end)
        if start < 0:
            return
        end = start + len(name)
        yield TokenBoundary(n_before + index, start, end)
