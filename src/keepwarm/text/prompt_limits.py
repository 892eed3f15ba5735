"""Sizes of requests: what is too much before anything is rendered, and what is much."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from keepwarm.errors import BadInput, ContextTooLong
from keepwarm.text.request import Request

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
HEAVY_CHARACTERS = 64 << 10  # prompts of more are prepared in a process of their own
HEAVY_MESSAGES = 256
HEAVY_TOOLS = 64

# What composing (NFC) can save at most: a Greek letter with its three accents becomes one.
NFC_FACTOR = 4
METASPACE = "\u2581"  # for a blank, in vocabularies that are not of bytes
# Steps of a tokenizer that drop no text.
KEEPS_TEXT = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Punctuation", "Split"}
)


class TokenReach(NamedTuple):
    """How much text one token can stand for."""

    longest: int  # characters
    dropped: str  # characters that become no token at all
    n_words: int  # between blanks of ASCII; most tokens are of one


class PromptLimits:
    """What can possibly fit the context of one model. Immutable."""

    def __init__(self, name: str, n_context: int, tokenizer: Any) -> None:
        self._name = name
        self._n_context = n_context
        self._tokenizer = tokenizer

    def load(self) -> None:
        """Look at the vocabulary now."""
        _ = self._reach

    @cached_property
    def _reach(self) -> TokenReach | None:
        """Found out for the first long text: it takes the whole vocabulary."""
        return token_reach(self._tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """For the preparing process: without the tokenizer, which it has."""
        return {"_name": self._name, "_n_context": self._n_context, "_reach": self._reach}

    def check(self, request: Request) -> None:
        """Refuse a request that cannot fit the context, before it is rendered.

        Answers are not counted: templates leave out past reasoning.
        """
        if isinstance(request.prompt, str):
            self.check_texts([request.prompt])
        elif request.prompt is not None:
            self._check_least(len(request.prompt), "The prompt is {:,} tokens long")
        elif request.messages is not None:
            self._check_least(len(request.messages), "There are {:,} messages")
            given = [each for each in request.messages if each.get("role") != "assistant"]
            self.check_texts(text for each in given for text in _texts(each.get("content")))

    def check_texts(self, texts: Iterable[str]) -> None:
        """A token stands for so many characters at most, so more of them cannot fit."""
        texts = list(texts)
        total = sum(map(len, texts))
        if total <= self._n_context or self._reach is None:
            return
        longest, dropped, n_words = self._reach
        if not any(character in text for text in texts for character in dropped):
            least = -(-count_words(texts) // n_words)
            self._check_least(least, "The prompt is at least {:,} tokens long")
        if total > longest * self._n_context:
            total -= sum(text.count(character) for text in texts for character in dropped)
        if total > longest * self._n_context:
            raise ContextTooLong(
                f"The prompt is {total:,} characters long and {self._name} reads at most "
                f"{self._n_context - 1:,} tokens of at most {longest} each; shorten it.",
                *(-(-total // longest), self._n_context - 1),
            )

    def _check_least(self, n_tokens: int, what: str) -> None:
        if n_tokens >= self._n_context:
            raise ContextTooLong(
                f"{what.format(n_tokens)} and {self._name} reads at most "
                f"{self._n_context - 1:,} tokens; shorten it.",
                *(n_tokens, self._n_context - 1),
            )


def count_words(texts: Sequence[str]) -> int:
    """Between blanks of ASCII; with NumPy, which needs no interpreter for it."""
    found = np.frombuffer(f" {' '.join(texts)}".encode(errors="replace"), np.uint8)
    is_blank = (found == ord(" ")) | ((found >= ord("\t")) & (found <= ord("\r")))
    return int(np.count_nonzero(is_blank[:-1] & ~is_blank[1:]))


def check_counts(request: Request) -> None:
    """Refuse what no client sends, whatever the model."""
    for what, given, most in (
        ("messages", request.messages or (), MAX_MESSAGES),
        ("tools", request.tools, MAX_TOOLS),
        ("breakpoints", request.breakpoints, MAX_MESSAGES),
    ):
        if len(given) > most:
            raise BadInput(f"There are {len(given):,} {what}; send at most {most:,}.")


def is_heavy(request: Request) -> bool:
    """Whether preparing it takes long enough to disturb others."""
    if isinstance(request.prompt, str):
        return len(request.prompt) > HEAVY_CHARACTERS
    kept = request.history.turn if request.history else None  # which may have to be rendered
    messages = [*(kept.messages if kept else ()), *(request.messages or ())]
    if len(messages) > HEAVY_MESSAGES or len(request.tools) > HEAVY_TOOLS:
        return True
    return n_characters([messages, request.tools], HEAVY_CHARACTERS) > HEAVY_CHARACTERS


def n_characters(value: Any, enough: float = math.inf) -> int:
    """Characters in all texts of a JSON value, and one for anything else; stops at `enough`."""
    total, rest = 0, [value]
    while rest and total <= enough:
        each = rest.pop()
        total += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            rest += each.keys()
            rest += each.values()
        elif isinstance(each, Sequence) and not isinstance(each, str):
            rest += each
    return total


def token_reach(tokenizer: Any) -> TokenReach | None:
    """How much text one token can stand for; None if there is no limit.

    There is none if a step of the tokenizer may drop text, or put any number of unknown characters
    into one token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation is not None:
        return None
    steps = [*tokenizer_steps(backend.normalizer), *tokenizer_steps(backend.pre_tokenizer)]
    added = backend.get_added_tokens_decoder().values()
    if not all(map(_keeps_text, steps)) or any(each.lstrip or each.rstrip for each in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    dropped = _dropped(backend.model, steps, vocabulary)
    if dropped is None:
        return None
    factor = NFC_FACTOR if any(step["type"] == "NFC" for step in steps) else 1
    n_words = max(len(text.split()) for text in _token_texts(backend, vocabulary))
    return TokenReach(factor * max(map(len, vocabulary)), dropped, max(1, n_words))


def _token_texts(backend: Any, vocabulary: Iterable[str]) -> Iterator[str]:
    """The tokens with their blanks as blanks; other bytes are some letters."""
    if backend.model.byte_fallback:
        yield from (token.replace(METASPACE, " ") for token in vocabulary)
        return
    added = {each.content for each in backend.get_added_tokens_decoder().values()}
    blanks = str.maketrans({_byte_symbols(blank): blank for blank in string.whitespace})
    yield from (token if token in added else token.translate(blanks) for token in vocabulary)


def tokenizer_steps(component: Any) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if component is None:
        return []
    return list(_flat(json.loads(component.__getstate__())))


def _flat(step: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("normalizers") or step.get("pretokenizers") or ()
    return [each for part in inner for each in _flat(part)]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in KEEPS_TEXT and step.get("behavior") != "Removed"


def _dropped(
    model: Any, steps: Iterable[Mapping[str, Any]], vocabulary: Mapping[str, int]
) -> str | None:
    """The characters that become no token; None if that is not known.

    Others have at least the token of their last byte.
    """
    if type(model).__name__ != "BPE":
        return None
    if model.byte_fallback:
        complete = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return "" if complete else None
    if not any(step["type"] == "ByteLevel" for step in steps):
        return None
    last_bytes = (_byte_symbols(chr(0x80 + byte))[-1] for byte in range(0x40))
    if not all(symbol in vocabulary for symbol in last_bytes):
        return None
    return "".join(c for c in map(chr, range(0x80)) if _byte_symbols(c) not in vocabulary)


def _byte_symbols(character: str) -> str:
    """What byte-level tokenizers write for the bytes of a character."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(character))


def _texts(content: Any) -> Iterator[str]:
    """The texts of a message's content, which may be a list of parts."""
    for part in [content] if isinstance(content, str) else content or ():
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text
