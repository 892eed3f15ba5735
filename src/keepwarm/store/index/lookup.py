"""Queries of the index: which blocks exist, what follows them, how many bytes they take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace
from keepwarm.store.index.columns import Columns
from keepwarm.store.index.database import Database
from keepwarm.store.names import SUFFIXES
from keepwarm.store.record import Part
from keepwarm.store.thinning import Checkpoint
from keepwarm.store.tier import BlockInfo, CheckpointRef, Child, NamedBlock, StoredBlock

MAX_KEYS = 30_000  # of one query


class Leaf(NamedTuple):
    """A block without descendants."""

    key: BlockKey
    namespace: Namespace
    number: int
    n_tokens: int
    used: float


class Lookups:
    """Read only."""

    def __init__(self, database: Database, columns: Columns) -> None:
        self._rows = database.rows
        self._columns = columns

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        rows = self._among("SELECT key, d, w, s, n_tokens, w_rows", "deleting = 0 AND key", keys)
        return {
            BlockKey(key): BlockInfo(_parts(d > 0, w > 0, s > 0), n_tokens, w_rows, d + w + s)
            for key, d, w, s, n_tokens, w_rows in rows
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

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self._columns.children(parent, tokens)

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        return self._columns.shorter_siblings(key)

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

    def leaves(self) -> list[Leaf]:
        """Blocks without descendants, the last used first."""
        query = (
            "SELECT key, namespace, number, n_tokens, used FROM blocks "
            "WHERE children = 0 AND deleting = 0 ORDER BY used DESC, key"
        )
        decode = self._columns.decode_namespace
        return [Leaf(BlockKey(k), decode(k, name), *rest) for k, name, *rest in self._rows(query)]

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
            at, is_fork = number * BLOCK_TOKENS + n_tokens, self._columns.is_fork(*place)
            yield Checkpoint(at, BlockKey(key), beside, n_bytes, pins > 0, is_fork)

    def walk(self) -> Iterator[StoredBlock]:
        last = b""
        while True:
            rows = self._rows(
                "SELECT key, parent, namespace, number, n_tokens, d, w, s, used, pins "
                "FROM blocks WHERE deleting = 0 AND key > ? ORDER BY key LIMIT 1000",
                (last,),
            )
            for key, parent, namespace, number, n_tokens, d, w, s, used, pins in rows:
                sizes = {p: n for p, n in zip(Part, (d, w, s), strict=True) if n}
                yield StoredBlock(
                    BlockKey(key), BlockKey(parent),
                    self._columns.decode_namespace(key, namespace),
                    number, n_tokens, sizes, used, pins > 0,
                )  # fmt: skip
            if not rows:
                return
            last = rows[-1][0]

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

    def writers(self) -> set[str]:
        return {row[0] for row in self._rows("SELECT DISTINCT writer FROM writes")}

    def names(self, first: bytes = b"") -> dict[str, int]:
        """File names and bytes of all records whose keys begin so, also of those being deleted."""
        query = "SELECT lower(hex(key)), d, w, s FROM blocks WHERE key BETWEEN ? AND ?"
        rows = self._rows(query, (first, first.ljust(KEY_BYTES, b"\xff")))
        named = ((stem, zip(SUFFIXES, sizes, strict=True)) for stem, *sizes in rows)
        return {stem + suffix: n for stem, parts in named for suffix, n in parts if n}


@cache
def _parts(d: bool, w: bool, s: bool) -> frozenset[Part]:
    return frozenset(part for part, held in zip(Part, (d, w, s), strict=True) if held)
