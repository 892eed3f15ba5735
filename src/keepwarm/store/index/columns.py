"""The columns that a sealed store hides: tokens, namespaces and owners of pins."""

from __future__ import annotations

from typing import Protocol

from keepwarm.errors import BadRecord
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Header
from keepwarm.store.index.database import Database
from keepwarm.store.tier import NEIGHBOURS, TTL_PIN, Child, by_common_tokens


class Columns(Protocol):
    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]: ...

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        """Blocks of the same parent whose tokens are a proper prefix of this block's."""

    def is_fork(self, parent: BlockKey, child: BlockKey | None = None) -> bool:
        """Whether blocks after `parent` part from each other; not before the end of `child`."""

    def encode_tokens(self, header: Header) -> bytes: ...

    def encode_namespace(self, header: Header) -> bytes: ...

    def decode_namespace(self, key: BlockKey, stored: bytes) -> Namespace: ...

    def encode_owner(self, owner: str) -> str: ...


class PlainColumns:
    """Stored as they are, and found by their order."""

    def __init__(self, database: Database) -> None:
        self._rows = database.rows

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        """In the order of token bytes the longest common prefixes are neighbours of the query."""
        near = self._neighbours(parent, tokens, "<=", "DESC")
        if len(near) == NEIGHBOURS:  # there may be more of them
            near |= self._beginnings(parent, tokens)
        near |= self._neighbours(parent, tokens, ">", "ASC")
        return by_common_tokens(near, tokens)

    def _neighbours(
        self, parent: BlockKey, tokens: bytes, compare: str, order: str
    ) -> dict[BlockKey, bytes]:
        query = (
            f"SELECT key, tokens FROM tokens WHERE parent = ? AND tokens {compare} ? "  # noqa: S608
            f"ORDER BY tokens {order} LIMIT {NEIGHBOURS}"
        )
        return dict(self._rows(query, (parent, tokens)))

    def _beginnings(self, parent: BlockKey, tokens: bytes) -> dict[BlockKey, bytes]:
        """Children that are prefixes of the query: other rows may lie between it and them."""
        query = (
            "WITH RECURSIVE ends(at) AS (SELECT 4 UNION ALL SELECT at + 4 FROM ends "
            "WHERE at < length(?)) SELECT key, tokens FROM ends "
            "CROSS JOIN tokens ON parent = ? AND tokens = substr(?, 1, at)"
        )
        return dict(self._rows(query, (tokens, parent, tokens)))

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        query = (
            "SELECT o.key FROM tokens t JOIN blocks b ON b.key = t.key AND b.parent = t.parent "
            "JOIN tokens o ON o.parent = t.parent AND length(o.tokens) < length(t.tokens) "
            "AND o.tokens = substr(t.tokens, 1, length(o.tokens)) WHERE b.key = ?"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key,))]

    def is_fork(self, parent: BlockKey, child: BlockKey | None = None) -> bool:
        own = self._rows("SELECT tokens FROM tokens WHERE parent = ? AND key = ?", (parent, child))
        first = own[0][0] if own else b""
        after = "FROM tokens WHERE parent = ? AND tokens BETWEEN ? AND ?"
        where = (parent, first, first.ljust(4 * BLOCK_TOKENS + 1, b"\xff"))
        last = self._rows(f"SELECT tokens {after} ORDER BY tokens DESC LIMIT 1", where)
        parts = f"SELECT 1 {after} AND tokens != substr(?, 1, length(tokens)) LIMIT 1"
        return bool(last and self._rows(parts, (*where, last[0][0])))

    def encode_tokens(self, header: Header) -> bytes:
        return header.tokens

    def encode_namespace(self, header: Header) -> bytes:
        return header.namespace

    def decode_namespace(self, key: BlockKey, stored: bytes) -> Namespace:  # noqa: ARG002
        return Namespace(stored)

    def encode_owner(self, owner: str) -> str:
        return owner


class SealedColumns:
    """Encrypted. Sealed tokens have no order, so all children of a parent are decrypted to find
    the best: linear in their number, some 7 µs each.
    """

    def __init__(self, database: Database, cipher: Cipher) -> None:
        self._rows = database.rows
        self._seal = cipher

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        siblings = self._siblings(parent)
        shared = by_common_tokens(siblings, tokens)
        prefixes = [c for c in shared[2 * NEIGHBOURS :] if 4 * c.n_common == len(siblings[c.key])]
        return shared[: 2 * NEIGHBOURS] + prefixes

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        rows = self._rows("SELECT parent FROM blocks WHERE key = ?", (key,))
        siblings = self._siblings(BlockKey(rows[0][0])) if rows else {}
        own = siblings.pop(key, b"")
        return [k for k, held in siblings.items() if len(held) < len(own) and own.startswith(held)]

    def is_fork(self, parent: BlockKey, child: BlockKey | None = None) -> bool:
        siblings = self._siblings(parent)
        own = siblings.get(child, b"") if child else b""
        after = [tokens for tokens in siblings.values() if tokens.startswith(own)]
        longest = max(after, key=len, default=b"")
        return not all(longest.startswith(tokens) for tokens in after)

    def _siblings(self, parent: BlockKey) -> dict[BlockKey, bytes]:
        """The tokens of every child; those that cannot be decrypted are left out."""
        rows = self._rows("SELECT key, tokens FROM tokens WHERE parent = ?", (parent,))
        opened = {BlockKey(key): self._open(b"tokens", key, held) for key, held in rows}
        return {key: tokens for key, tokens in opened.items() if tokens}

    def encode_tokens(self, header: Header) -> bytes:
        return self._seal.seal(b"tokens" + header.key, header.tokens)

    def encode_namespace(self, header: Header) -> bytes:
        return self._seal.seal(b"namespace" + header.key, header.namespace)

    def decode_namespace(self, key: BlockKey, stored: bytes) -> Namespace:
        return Namespace(self._open(b"namespace", key, stored))

    def encode_owner(self, owner: str) -> str:
        """A TTL pin stays readable: any process must be able to end it."""
        if owner.startswith(TTL_PIN):
            return owner
        return self._seal.hidden("owner", owner.encode()).hex()

    def _open(self, kind: bytes, key: bytes, data: bytes) -> bytes:
        """Empty where the row was tampered with: the files are the truth, not the index."""
        try:
            return self._seal.open(kind + key, data)
        except BadRecord:
            return b""
