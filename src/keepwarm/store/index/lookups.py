"""What the index of a disk tier answers, plain or sealed. Read only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from keepwarm.errors import BadRecord
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Header, Part, PrefillTime
from keepwarm.store.eviction import Checkpoint
from keepwarm.store.index.database import Database
from keepwarm.store.names import SUFFIXES
from keepwarm.store.tier import (
    NEIGHBOURS,
    TTL_PIN,
    BlockChanges,
    BlockInfo,
    CheckpointRef,
    Child,
    NamedBlock,
    StoredBlock,
    by_common_tokens,
)

MAX_KEYS = 30_000  # of one query
STORED = "SELECT key, parent, namespace, number, n_tokens, d, w, s, used, pins"


class Lookups:
    """Stored as they are, tokens are found by their order."""

    def __init__(self, database: Database) -> None:
        self._rows = database.rows

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        columns = "SELECT key, d, w, s, n_tokens, w_rows, prefill_s, machine"
        rows = self._among(columns, "deleting = 0 AND key", keys)
        return {
            BlockKey(key): BlockInfo(
                _parts(d > 0, w > 0, s > 0),
                n_tokens,
                w_rows,
                d + w + s,
                None if prefill_s is None else PrefillTime(prefill_s, machine),
            )
            for key, d, w, s, n_tokens, w_rows, prefill_s, machine in rows
        }

    def named(self, keys: Collection[BlockKey]) -> list[NamedBlock]:
        """Those of these blocks that are stored."""
        rows = self._among("SELECT key, parent, n_tokens", "key", keys)
        return [NamedBlock(BlockKey(key), BlockKey(parent), n) for key, parent, n in rows]

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        rows = self._among(
            "SELECT key, parent, n_tokens", "s > 0 AND deleting = 0 AND parent", parents
        )
        return [CheckpointRef(BlockKey(key), BlockKey(parent), n) for key, parent, n in rows]

    def _among(self, select: str, where: str, keys: Collection[BlockKey]) -> list[tuple[Any, ...]]:
        """One query for all keys, split where SQLite limits the number of arguments."""
        wanted, rows = list(keys), []
        for start in range(0, len(wanted), MAX_KEYS):
            some = wanted[start : start + MAX_KEYS]
            marks = ",".join("?" * len(some))
            rows += self._rows(f"{select} FROM blocks WHERE {where} IN ({marks})", some)
        return rows

    def children_of(self, parent: BlockKey) -> list[BlockKey]:
        query = "SELECT key FROM blocks WHERE parent = ? AND deleting = 0"
        return [BlockKey(row[0]) for row in self._rows(query, (parent,))]

    def parents(self, key: BlockKey) -> Iterator[BlockKey]:
        """The chain from a block up to its first, the block itself included."""
        query = (
            "WITH RECURSIVE up(key, parent) AS (SELECT key, parent FROM blocks WHERE key = ? "
            "UNION ALL SELECT b.key, b.parent FROM blocks b JOIN up ON b.key = up.parent) "
            "SELECT key FROM up"
        )
        return (BlockKey(row[0]) for row in self._rows(query, (key,)))

    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Everything below a block, deepest first, without the block itself."""
        query = (
            "WITH RECURSIVE down(key, depth) AS (SELECT key, 1 FROM blocks WHERE parent = ? "
            "UNION ALL SELECT b.key, depth + 1 FROM blocks b JOIN down ON b.parent = down.key) "
            "SELECT key FROM down ORDER BY depth DESC"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key,))]

    def first_of_branch(self, key: BlockKey, limit: int) -> list[BlockKey]:
        """A block and what is below it, at most `limit` blocks."""
        query = (
            "WITH RECURSIVE down(key) AS (SELECT ? UNION ALL "
            "SELECT b.key FROM blocks b JOIN down ON b.parent = down.key) "
            "SELECT key FROM down LIMIT ?"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key, limit))]

    def superseded(self, key: BlockKey) -> list[BlockKey]:
        """Shorter siblings that this block can replace: it has their rows, they have no state."""
        query = (
            "SELECT 1 FROM blocks b, blocks old WHERE b.key = ? AND old.key = ? "
            "AND old.s = 0 AND old.pins = 0 AND old.children = 0 "
            "AND (old.d = 0 OR b.d > 0) AND (old.w = 0 OR b.w > 0 AND b.w_rows = b.n_tokens)"
        )
        return [old for old in self.shorter_siblings(key) if self._rows(query, (key, old))]

    def checkpoints(self, key: BlockKey) -> tuple[list[Checkpoint], int]:
        """The states on the path to a block that has one, and the K and V bytes on that path."""
        found = self._rows("SELECT 1 FROM blocks WHERE key = ? AND s > 0 AND NOT deleting", (key,))
        path = list(self.parents(key)) if found else []
        rows = self._among("SELECT key, parent, d + w * (w_rows > 0)", "key", path)
        by_parent = {parent: own for own, parent, _ in rows}
        return list(self._checkpoints(by_parent)), sum(n_bytes for *_, n_bytes in rows)

    def _checkpoints(self, path: Mapping[BlockKey, BlockKey]) -> Iterator[Checkpoint]:
        """States at the ends of the path's blocks and inside them; `path` is blocks by parent."""
        states = {state.key: state.parent for state in self.states(list(path))}
        rows = self._among("SELECT key, number, n_tokens, s, pins", "key", list(states))
        for key, number, n_tokens, n_bytes, pins in rows:
            beside = path[states[key]]
            if key != beside and key not in self.shorter_siblings(beside):
                continue  # it belongs to another conversation
            place = (states[key], key) if n_tokens < BLOCK_TOKENS else (key,)
            at, is_fork = number * BLOCK_TOKENS + n_tokens, self.is_fork(*place)
            yield Checkpoint(at, BlockKey(key), beside, n_bytes, pins > 0, is_fork)

    def walk(self) -> Iterator[StoredBlock]:
        last = b""
        query = f"{STORED} FROM blocks WHERE deleting = 0 AND key > ? ORDER BY key LIMIT 1000"
        while rows := self._rows(query, (last,)):
            yield from map(self._stored, rows)
            last = rows[-1][0]

    def changes(self, since: int) -> BlockChanges:
        """What any process has put or deleted since a number that was returned before."""
        rows = self._rows("SELECT number, key FROM changes WHERE number >= ? ORDER BY 1", (since,))
        if not rows or rows[0][0] != since:
            return BlockChanges(self._rows("SELECT max(number) FROM changes")[0][0], None)
        changed: dict[BlockKey, StoredBlock | None] = {BlockKey(key): None for _, key in rows[1:]}
        for row in self._among(STORED, "deleting = 0 AND key", changed):
            changed[row[0]] = self._stored(row)
        return BlockChanges(rows[-1][0], changed)

    def _stored(self, row: tuple[Any, ...]) -> StoredBlock:
        key, parent, namespace, number, n_tokens, d, w, s, used, pins = row
        sizes = {p: n for p, n in zip(Part, (d, w, s), strict=True) if n}
        return StoredBlock(
            BlockKey(key), BlockKey(parent), self.decode_namespace(key, namespace),
            number, n_tokens, sizes, used, pins > 0,
        )  # fmt: skip

    def n_bytes(self) -> int:
        """Bytes of all records, reserved ones included."""
        return int(self._rows("SELECT value FROM counts WHERE name = 'bytes'")[0][0])

    def n_blocks(self) -> int:
        return int(self._rows("SELECT value FROM counts WHERE name = 'blocks'")[0][0])

    def deleting(self) -> list[BlockKey]:
        return [BlockKey(row[0]) for row in self._rows("SELECT key FROM blocks WHERE deleting = 1")]

    def is_deleting(self, key: BlockKey) -> bool:
        return bool(self._rows("SELECT 1 FROM blocks WHERE key = ? AND deleting", (key,)))

    def owners(self, key: BlockKey) -> list[str]:
        return [row[0] for row in self._rows("SELECT owner FROM pins WHERE key = ?", (key,))]

    def pinned_by(self, owner: str) -> set[BlockKey]:
        rows = self._rows("SELECT key FROM pins WHERE owner = ?", (self.encode_owner(owner),))
        return {BlockKey(row[0]) for row in rows}

    def writers(self) -> set[str]:
        return {row[0] for row in self._rows("SELECT DISTINCT writer FROM writes")}

    def names(self, first: bytes = b"") -> dict[str, int]:
        """File names and bytes of all records whose keys begin so, also of those being deleted."""
        query = "SELECT lower(hex(key)), d, w, s FROM blocks WHERE key BETWEEN ? AND ?"
        rows = self._rows(query, (first, first.ljust(KEY_BYTES, b"\xff")))
        named = ((stem, zip(SUFFIXES, sizes, strict=True)) for stem, *sizes in rows)
        return {stem + suffix: n for stem, parts in named for suffix, n in parts if n}

    # The columns that a sealed store hides: tokens, namespaces and owners of pins

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
        """Blocks of the same parent whose tokens are a proper prefix of this block's."""
        query = (
            "SELECT o.key FROM tokens t JOIN blocks b ON b.key = t.key AND b.parent = t.parent "
            "JOIN tokens o ON o.parent = t.parent AND length(o.tokens) < length(t.tokens) "
            "AND o.tokens = substr(t.tokens, 1, length(o.tokens)) WHERE b.key = ?"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key,))]

    def is_fork(self, parent: BlockKey, child: BlockKey | None = None) -> bool:
        """Whether blocks after `parent` part from each other; not before the end of `child`."""
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


@cache
def _parts(d: bool, w: bool, s: bool) -> frozenset[Part]:
    return frozenset(part for part, held in zip(Part, (d, w, s), strict=True) if held)


class SealedLookups(Lookups):
    """Encrypted. Sealed tokens have no order, so all children of a parent are decrypted to find
    the best: linear in their number, some 7 µs each.
    """

    def __init__(self, database: Database, cipher: Cipher) -> None:
        super().__init__(database)
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
