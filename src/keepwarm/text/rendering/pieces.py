"""Tokens of texts that were tokenised before: a turn that continues another costs what is new."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple, TypeAlias

from keepwarm.text.rendering.cutting import Cutter
from keepwarm.text.special_tokens import Encode

MAX_BYTES = 32 << 20
ENTRY_BYTES = 300  # overhead of one piece in Python, without its tokens

Tokens: TypeAlias = "array[int]"


class PieceOwner(NamedTuple):
    """Whose texts they are, and how they are tokenised."""

    tenant: str
    is_masked: bool  # see `special_tokens`


@dataclass
class _Shelf:
    """The pieces of one tenant, the least recently used first."""

    pieces: OrderedDict[bytes, Tokens] = field(default_factory=OrderedDict)
    n_bytes: int = 0


class KnownPieces:
    """The tokens of pieces of text, bounded in bytes. Thread-safe.

    A tenant finds only its own. Texts are stored as digests only. The tenant that holds most gives
    way.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._shelves: dict[str, _Shelf] = {}
        self.n_bytes = 0

    def find(self, owner: PieceOwner, texts: Sequence[str]) -> list[Tokens | None]:
        """The tokens of those that are known."""
        keys = [self._key(owner, text) for text in texts]
        with self._lock:
            pieces = self._shelves.get(owner.tenant, _Shelf()).pieces
            for key in pieces.keys() & keys:
                pieces.move_to_end(key)
            return [pieces.get(key) for key in keys]

    def keep(self, owner: PieceOwner, found: Mapping[str, Tokens]) -> None:
        keys = {self._key(owner, text): tokens for text, tokens in found.items()}
        with self._lock:
            shelf = self._shelves.setdefault(owner.tenant, _Shelf())
            for key, tokens in keys.items():
                if key not in shelf.pieces:
                    shelf.pieces[key] = tokens
                    self._count(shelf, tokens, 1)
            while self.n_bytes > self._max_bytes:
                self._drop_one()

    def clear(self) -> None:
        with self._lock:
            self._shelves.clear()
            self.n_bytes = 0

    def _drop_one(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda item: item[1].n_bytes)
        _, tokens = shelf.pieces.popitem(last=False)
        self._count(shelf, tokens, -1)
        if not shelf.pieces:
            del self._shelves[tenant]

    def _count(self, shelf: _Shelf, tokens: Tokens, sign: int) -> None:
        n_bytes = sign * (ENTRY_BYTES + tokens.itemsize * len(tokens))
        shelf.n_bytes += n_bytes
        self.n_bytes += n_bytes

    def _key(self, owner: PieceOwner, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        person = b"masked" if owner.is_masked else b"plain"
        return blake2b(data, digest_size=20, key=self._secret, person=person).digest()


@dataclass(frozen=True)
class PieceEncoder:
    """Tokenises parts of a prompt: in pieces, and only those that are not known."""

    to_tokens: Encode
    cutter: Cutter
    known: KnownPieces | None  # None: whole, and nothing is kept
    owner: PieceOwner
    keeps: bool

    def __call__(self, text: str, start: int) -> list[int]:
        return self.all([(text, start)])[0].tolist()

    def all(self, parts: Sequence[tuple[str, int]]) -> list[Tokens]:
        """The tokens of several parts, each with the character it begins at."""
        if self.known is None:
            return [array("I", self.to_tokens(text, start)) for text, start in parts]
        cut = [self.cutter.pieces(text) for text, _ in parts]
        tokens = self._tokens(self.known, list(dict.fromkeys(chain.from_iterable(cut))))
        return [_joined(tokens[piece] for piece in pieces) for pieces in cut]

    def _tokens(self, known: KnownPieces, pieces: Sequence[str]) -> dict[str, Tokens]:
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
