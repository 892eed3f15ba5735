"""Where a text may be cut, so that the tokens of its pieces are the tokens of the whole.

The `tokenizers` library first looks for added tokens. What is between two of them goes through the
normalizer, the pre-tokenizer and the model on its own, whatever is around it. So a text is cut
before an added token if three things are certain for this tokenizer:

- Nothing but the library tokenises, and all its steps are known to look at one part of the text at
  a time. (Metaspace may treat the beginning of a text differently; a piece begins with a token.)
- The token is found wherever its name is: no other added token can lie across its beginning, or
  begin alike and be longer, and it is not looked for in normalised text only.
- It takes no part in what is left of it: it does not strip spaces there, and begins with a
  character that neither ends a word nor is a space.

A text of a tokenizer for which this does not hold is one piece.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer

from keepwarm.text.bounds.size import tokenizer_steps

MIN_PIECE = 2_000  # characters; many short pieces take longer to tokenise than few

FIRST = frozenset(string.punctuation) - {"_"}  # of a token that texts are cut before
MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
STEPS = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
        *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
        *("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    }
)
# Methods of transformers that stand between a text and the library.
ENCODES = frozenset(
    {
        *("__call__", "__getattribute__", "encode", "_encode_plus", "_batch_encode_plus"),
        *("_call_one", "_convert_encoding", "set_truncation_and_padding", "backend_tokenizer"),
    }
)


class Cutter:
    """Cuts the texts of one tokenizer. Immutable."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: of tokens that texts may be cut before."""
        self._names = re.compile("|".join(map(re.escape, sorted(names))) or "(?!)")

    @classmethod
    def of(cls, tokenizer: Any, written: Iterable[str | None]) -> Cutter:
        """`written`: texts in which the template writes tokens.

        Prompts are cut before these, and before those that begin and end a text, which templates
        have as variables.
        """
        if not tokenizer.has_chat_template or not _tokenises_in_parts(tokenizer):
            return cls()
        backend: Tokenizer = tokenizer.backend_tokenizer
        added = list(backend.get_added_tokens_decoder().values())
        is_literal = not tokenizer_steps(backend.normalizer)
        ends = (getattr(tokenizer, name, None) for name in ("bos_token", "eos_token"))
        texts = [text for text in (*written, *ends) if text]
        possible = [
            token.content
            for token in added
            if _stays_to_the_right(token) and (is_literal or not token.normalized)
        ]
        wanted = [name for name in possible if any(name in text for text in texts)]
        names = [token.content for token in added]
        return cls(name for name in wanted if not _may_be_hidden(name, names))

    def pieces(self, text: str) -> list[str]:
        """The text in pieces: a long part is one by itself, short ones are together.

        When a text goes on, all but the last stay the same.
        """
        places = [found.start() for found in self._names.finditer(text)]
        starts = [0]
        for start, end in pairwise([*places, len(text)]):
            if max(start - starts[-1], end - start) >= MIN_PIECE and start:
                starts.append(start)
        return [text[start:end] for start, end in pairwise([*starts, len(text)])]


def _tokenises_in_parts(tokenizer: Any) -> bool:
    """Whether the library alone tokenises, part by part, and always the same."""
    inner = getattr(tokenizer.encode, "__self__", None)
    backend = getattr(inner, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or _encodes_differently(inner):
        return False
    if backend.encode_special_tokens or getattr(inner, "split_special_tokens", False):
        return False  # then special tokens are text
    model = backend.model
    if type(model).__name__ not in MODELS or getattr(model, "dropout", None):
        return False
    try:
        steps = [*tokenizer_steps(backend.normalizer), *tokenizer_steps(backend.pre_tokenizer)]
    except Exception:  # the library raises no other; it has a step of somebody's own
        return False
    return all(step["type"] in STEPS for step in steps)


def _encodes_differently(inner: Any) -> bool:
    """Whether a class of somebody's own stands between a text and the library."""
    classes = type(inner).__mro__
    own = [each for each in classes if not each.__module__.startswith("transformers.tokenization_")]
    places = [vars(inner), *map(vars, own[: own.index(object)])]
    return any(not ENCODES.isdisjoint(place) for place in places)


def _stays_to_the_right(token: AddedToken) -> bool:
    flagged = token.lstrip or token.single_word
    return token.content[:1] in FIRST and not flagged


def _may_be_hidden(name: str, names: Collection[str]) -> bool:
    """Whether another token can lie across the beginning of this one, or take its place."""
    if any(other.startswith(name) for other in names if other != name):
        return True
    others = [other for other in names if name[0] in other[1:]]
    ends = (other[at:] for other in others for at in range(1, len(other)))
    return any(end.startswith(name) or name.startswith(end) for end in ends)
