"""Text to tokens: only what is new is tokenised, and boundaries show where parts begin again.

A text is split where the tokens of its pieces are certain to be the tokens of the whole. The
`tokenizers` library first looks for added tokens. What is between two of them goes through the
normalizer, the pre-tokenizer and the model on its own, whatever is around it. So a text is split
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
import secrets
import string
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import AddedToken, Tokenizer

from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.past_answers import KnownSpan
from keepwarm.text.prompt_limits import tokenizer_steps
from keepwarm.text.special_tokens import Encode

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
MAX_BYTES = 32 << 20
ENTRY_BYTES = 300  # overhead of one piece in Python, without its tokens
Tokens: TypeAlias = "array[int]"
# Tokens of parts of a prompt, each with the character it begins at.
EncodeParts: TypeAlias = Callable[[Sequence[tuple[str, int]]], list[Tokens]]
MARGIN = 1_000  # characters; text further on no longer changes the tokens before it


class TextSplitter:
    """Splits the texts of one tokenizer. Immutable."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: of tokens that texts may be cut before."""
        self._names = re.compile("|".join(map(re.escape, sorted(names))) or "(?!)")

    @classmethod
    def of(cls, tokenizer: Any, written: Iterable[str | None]) -> TextSplitter:
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
            if _leaves_left_text(token) and (is_literal or not token.normalized)
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


def _leaves_left_text(token: AddedToken) -> bool:
    flagged = token.lstrip or token.single_word
    return token.content[:1] in FIRST and not flagged


def _may_be_hidden(name: str, names: Collection[str]) -> bool:
    """Whether another token can lie across the beginning of this one, or take its place."""
    if any(other.startswith(name) for other in names if other != name):
        return True
    others = [other for other in names if name[0] in other[1:]]
    ends = (other[at:] for other in others for at in range(1, len(other)))
    return any(end.startswith(name) or name.startswith(end) for end in ends)


class TextOwner(NamedTuple):
    """Whose texts they are, and how they are tokenised."""

    tenant: str
    is_masked: bool  # see `special_tokens`


@dataclass
class _TenantTokens:
    """The pieces of one tenant, the least recently used first."""

    pieces: OrderedDict[bytes, Tokens] = field(default_factory=OrderedDict)
    n_bytes: int = 0


class TokenCache:
    """The tokens of pieces of text, bounded in bytes. Thread-safe.

    A tenant finds only its own. Texts are stored as digests only. The tenant that holds most gives
    way.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._tenants: dict[str, _TenantTokens] = {}
        self.n_bytes = 0

    def find(self, owner: TextOwner, texts: Sequence[str]) -> list[Tokens | None]:
        """The tokens of those that are known."""
        keys = [self._key(owner, text) for text in texts]
        with self._lock:
            pieces = self._tenants.get(owner.tenant, _TenantTokens()).pieces
            for key in pieces.keys() & keys:
                pieces.move_to_end(key)
            return [pieces.get(key) for key in keys]

    def keep(self, owner: TextOwner, found: Mapping[str, Tokens]) -> None:
        keys = {self._key(owner, text): tokens for text, tokens in found.items()}
        with self._lock:
            held = self._tenants.setdefault(owner.tenant, _TenantTokens())
            for key, tokens in keys.items():
                if key not in held.pieces:
                    held.pieces[key] = tokens
                    self._count(held, tokens, 1)
            while self.n_bytes > self._max_bytes:
                self._drop_one()

    def clear(self) -> None:
        with self._lock:
            self._tenants.clear()
            self.n_bytes = 0

    def _drop_one(self) -> None:
        tenant, held = max(self._tenants.items(), key=lambda item: item[1].n_bytes)
        _, tokens = held.pieces.popitem(last=False)
        self._count(held, tokens, -1)
        if not held.pieces:
            del self._tenants[tenant]

    def _count(self, held: _TenantTokens, tokens: Tokens, sign: int) -> None:
        n_bytes = sign * (ENTRY_BYTES + tokens.itemsize * len(tokens))
        held.n_bytes += n_bytes
        self.n_bytes += n_bytes

    def _key(self, owner: TextOwner, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        person = b"masked" if owner.is_masked else b"plain"
        return blake2b(data, digest_size=20, key=self._secret, person=person).digest()


@dataclass(frozen=True)
class IncrementalEncoder:
    """Tokenises parts of a prompt: in pieces, and only those that are not known."""

    to_tokens: Encode
    splitter: TextSplitter
    known: TokenCache | None  # None: whole, and nothing is kept
    owner: TextOwner
    keeps: bool

    def __call__(self, text: str, start: int) -> list[int]:
        return self.all([(text, start)])[0].tolist()

    def all(self, parts: Sequence[tuple[str, int]]) -> list[Tokens]:
        """The tokens of several parts, each with the character it begins at."""
        if self.known is None:
            return [array("I", self.to_tokens(text, start)) for text, start in parts]
        cut = [self.splitter.pieces(text) for text, _ in parts]
        tokens = self._tokens(self.known, list(dict.fromkeys(chain.from_iterable(cut))))
        return [_joined(tokens[piece] for piece in pieces) for pieces in cut]

    def _tokens(self, known: TokenCache, pieces: Sequence[str]) -> dict[str, Tokens]:
        pairs = zip(pieces, known.find(self.owner, pieces), strict=True)
        found = {piece: tokens for piece, tokens in pairs if tokens is not None}
        new = {p: array("I", self.to_tokens(p, 0)) for p in pieces if p not in found}
        if new and self.keeps:
            known.keep(self.owner, new)
        return found | new


def _joined(pieces: Iterable[Tokens]) -> Tokens:
    tokens = array("I")
    for piece in pieces:
        tokens += piece
    return tokens


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
    spans: Sequence[KnownSpan] = ()  # past answers
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
    return TokenisedText(text, tokens, boundaries, spans, len(before))


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
