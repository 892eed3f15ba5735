"""What the index is asked: which blocks are there, what follows them, what they take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace, common_tokens
from keepwarm.store.index.database import Database
from keepwarm.store.names import SUFFIXES
from keepwarm.store.record import Part
from keepwarm.store.thinning import Checkpoint
from keepwarm.store.tier import BlockInfo, CheckpointRef, Child, StoredBlock

MAX_KEYS = 30_000  # of one query
NEIGHBOURS = 4  # on each side of a query


class Leaf(NamedTuple):
    """The last block of something kept."""

    key: BlockKey
    number: int
    n_tokens: int
    used: float


class Lookups(Database):
    """Changes nothing."""

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        rows = self._among("SELECT key, d, w, s, n_tokens, w_rows", "doomed = 0 AND key", keys)
        return {
            BlockKey(key): BlockInfo(_parts(d > 0, w > 0, s > 0), n_tokens, w_rows, d + w + s)
            for key, d, w, s, n_tokens, w_rows in rows
        }

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        rows = self._among(
            "SELECT key, parent, n_tokens", "s > 0 AND doomed = 0 AND parent", parents
        )
        return [CheckpointRef(BlockKey(key), BlockKey(parent), n) for key, parent, n in rows]

    def _among(self, select: str, where: str, keys: Collection[BlockKey]) -> list[tuple[Any, ...]]:
        """One query for all keys, in as many pieces as SQLite takes."""
        wanted, rows = list(keys), []
        for start in range(0, len(wanted), MAX_KEYS):
            some = wanted[start : start + MAX_KEYS]
            marks = ",".join("?" * len(some))
            rows += self._rows(f"{select} FROM blocks WHERE {where} IN ({marks})", some)
        return rows

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        """In the order of token bytes the longest common prefixes are neighbours of the query."""
        near = self._neighbours(parent, tokens, "<=", "DESC")
        if len(near) == NEIGHBOURS:  # there may be more of them
            near |= self._beginnings(parent, tokens)
        near |= self._neighbours(parent, tokens, ">", "ASC")
        found = [Child(key, common_tokens(held, tokens)) for key, held in near.items()]
        return sorted((c for c in found if c.n_common), key=lambda c: -c.n_common)

    def _neighbours(
        self, parent: BlockKey, tokens: bytes, compare: str, order: str
    ) -> dict[BlockKey, bytes]:
        query = (
            f"SELECT key, tokens FROM tokens WHERE parent = ? AND tokens {compare} ? "  # noqa: S608
            f"ORDER BY tokens {order} LIMIT {NEIGHBOURS}"
        )
        return dict(self._rows(query, (parent, tokens)))

    def _beginnings(self, parent: BlockKey, tokens: bytes) -> dict[BlockKey, bytes]:
        """Children whose tokens the query begins with: any number may lie between it and them."""
        query = (
            "WITH RECURSIVE ends(at) AS (SELECT 4 UNION ALL SELECT at + 4 FROM ends "
            "WHERE at < length(?1)) SELECT key, tokens FROM ends "
            "CROSS JOIN tokens ON parent = ?2 AND tokens = substr(?1, 1, at)"
        )
        return dict(self._rows(query, (tokens, parent)))

    def parents(self, key: BlockKey) -> Iterator[BlockKey]:
        """The chain from a block up to its first, the block itself included."""
        query = (
            "WITH RECURSIVE up(key, parent) AS (SELECT key, parent FROM blocks WHERE key = ? "
            "UNION ALL SELECT b.key, b.parent FROM blocks b JOIN up ON b.key = up.parent) "
            "SELECT key FROM up"
        )
        return (BlockKey(row[0]) for row in self._rows(query, (key,)))

    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Everything below a block, deepest first, the block itself left out."""
        query = (
            "WITH RECURSIVE down(key, depth) AS (SELECT key, 1 FROM blocks WHERE parent = ? "
            "UNION ALL SELECT b.key, depth + 1 FROM blocks b JOIN down ON b.parent = down.key) "
            "SELECT key FROM down ORDER BY depth DESC"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key,))]

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        """Blocks beside this one whose tokens this one begins with: what it has outgrown."""
        query = (
            "SELECT o.key FROM tokens t JOIN blocks b ON b.key = t.key AND b.parent = t.parent "
            "JOIN tokens o ON o.parent = t.parent AND length(o.tokens) < length(t.tokens) "
            "AND o.tokens = substr(t.tokens, 1, length(o.tokens)) WHERE b.key = ?"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key,))]

    def children_of(self, parent: BlockKey) -> list[BlockKey]:
        query = "SELECT key FROM blocks WHERE parent = ? AND doomed = 0"
        return [BlockKey(row[0]) for row in self._rows(query, (parent,))]

    def outgrown(self, key: BlockKey) -> list[BlockKey]:
        """Shorter siblings that this block serves as well as they do: same rows, and no state."""
        query = (
            "SELECT 1 FROM blocks b, blocks old WHERE b.key = ? AND old.key = ? "
            "AND old.s = 0 AND old.pins = 0 AND old.children = 0 "
            "AND (old.d = 0 OR b.d > 0) AND (old.w = 0 OR b.w > 0 AND b.w_rows = b.n_tokens)"
        )
        return [old for old in self.shorter_siblings(key) if self._rows(query, (key, old))]

    def checkpoints(self, key: BlockKey) -> tuple[list[Checkpoint], int]:
        """The states on the way to a block that has one, and the K and V bytes on that way."""
        found = self._rows("SELECT 1 FROM blocks WHERE key = ? AND s > 0 AND NOT doomed", (key,))
        way = list(self.parents(key)) if found else []
        rows = self._among("SELECT key, parent, d + w * (w_rows > 0)", "key", way)
        at = {parent: own for own, parent, _ in rows}
        return list(self._checkpoints(at)), sum(n_bytes for *_, n_bytes in rows)

    def _checkpoints(self, way: Mapping[BlockKey, BlockKey]) -> Iterator[Checkpoint]:
        """Those on a way, given as blocks by their parents, and those inside its blocks."""
        states = {state.key: state.parent for state in self.states(list(way))}
        rows = self._among("SELECT key, number, n_tokens, s, pins", "key", list(states))
        for key, number, n_tokens, n_bytes, pins in rows:
            beside = way[states[key]]
            if key != beside and key not in self.shorter_siblings(beside):
                continue  # another conversation's
            held = pins > 0 or self._part_at(key if n_tokens == BLOCK_TOKENS else states[key])
            at = number * BLOCK_TOKENS + n_tokens
            yield Checkpoint(at, BlockKey(key), beside, n_bytes, held)

    def _part_at(self, key: BlockKey) -> bool:
        """Whether more than one conversation goes on from here."""
        query = "SELECT count(*) FROM blocks WHERE parent = ? AND n_tokens = ? AND NOT doomed"
        return int(self._rows(query, (key, BLOCK_TOKENS))[0][0]) > 1

    def walk(self) -> Iterator[StoredBlock]:
        last = b""
        while True:
            rows = self._rows(
                "SELECT key, parent, namespace, number, n_tokens, d, w, s, used, pins "
                "FROM blocks WHERE doomed = 0 AND key > ? ORDER BY key LIMIT 1000",
                (last,),
            )
            for key, parent, namespace, number, n_tokens, d, w, s, used, pins in rows:
                sizes = {p: n for p, n in zip(Part, (d, w, s), strict=True) if n}
                yield StoredBlock(
                    BlockKey(key), BlockKey(parent), Namespace(namespace),
                    number, n_tokens, sizes, used, pins > 0,
                )  # fmt: skip
            if not rows:
                return
            last = rows[-1][0]

    def leaves(self) -> list[Leaf]:
        """Blocks that nothing descends from, used last first."""
        query = (
            "SELECT key, number, n_tokens, used FROM blocks WHERE children = 0 AND doomed = 0 "
            "ORDER BY used DESC, key"
        )
        return [Leaf(BlockKey(key), *rest) for key, *rest in self._rows(query)]

    def n_bytes(self) -> int:
        """Bytes of all records, those being written included."""
        return int(self._rows("SELECT value FROM counts WHERE name = 'bytes'")[0][0])

    def n_blocks(self) -> int:
        return int(self._rows("SELECT count(*) FROM blocks WHERE doomed = 0")[0][0])

    def deleting(self) -> list[BlockKey]:
        return [BlockKey(row[0]) for row in self._rows("SELECT key FROM blocks WHERE doomed = 1")]

    def is_deleting(self, key: BlockKey) -> bool:
        return bool(self._rows("SELECT 1 FROM blocks WHERE key = ? AND doomed", (key,)))

    def owners(self, key: BlockKey) -> list[str]:
        return [row[0] for row in self._rows("SELECT owner FROM pins WHERE key = ?", (key,))]

    def writers(self) -> set[str]:
        return {row[0] for row in self._rows("SELECT DISTINCT writer FROM writes")}

    def names(self, first: bytes = b"") -> dict[str, int]:
        """The file names of all records whose keys begin so, and their bytes; doomed ones too."""
        query = "SELECT lower(hex(key)), d, w, s FROM blocks WHERE key BETWEEN ? AND ?"
        rows = self._rows(query, (first, first.ljust(KEY_BYTES, b"\xff")))
        named = ((stem, zip(SUFFIXES, sizes, strict=True)) for stem, *sizes in rows)
        return {stem + suffix: n for stem, parts in named for suffix, n in parts if n}


@cache
def _parts(d: bool, w: bool, s: bool) -> frozenset[Part]:
    return frozenset(part for part, held in zip(Part, (d, w, s), strict=True) if held)
