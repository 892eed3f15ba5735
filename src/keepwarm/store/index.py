"""What is on disk, in SQLite, shared by all processes that use one directory.

The index is a convenience: files are the truth, and it is rebuilt from them when it is lost.
A write first reserves its bytes, so that several processes together stay under the cap.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm.prefix.blocks import KEY_BYTES, BlockKey, Namespace, common_tokens
from keepwarm.store.eviction import SHORT_BRANCH, SUPERSEDED_S, after_use
from keepwarm.store.names import SUFFIXES
from keepwarm.store.record import Header, Part
from keepwarm.store.schema import PRAGMAS, SCHEMA_VERSION, statements
from keepwarm.store.tier import Child, Known, State, Stored

MAX_KEYS = 30_000  # of one query
NEIGHBOURS = 4  # on each side of a query


class Victim(NamedTuple):
    key: BlockKey
    n_bytes: int


class Index:
    """One connection, one lock; every method is one transaction.

    `path` is a file that several processes may share, or ":memory:".
    """

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            path, timeout=30, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        self._db.create_function("after_use", 3, after_use, deterministic=True)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        for pragma in PRAGMAS:
            self._db.execute(f"PRAGMA {pragma}")
        with self._transaction() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in statements():
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"index version {version}, not {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled back by itself
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _synced_transaction(self) -> Iterator[sqlite3.Connection]:
        """Survives a power cut, and nobody sees it before it does."""
        with self._lock:
            self._db.execute("PRAGMA synchronous = FULL")
            try:
                with self._transaction() as db:
                    yield db
            finally:
                self._db.execute("PRAGMA synchronous = NORMAL")

    def _rows(self, query: str, arguments: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, tuple(arguments)).fetchall()

    # Look-ups

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, Known]:
        rows = self._among("SELECT key, d, w, s, n_tokens, w_rows", "doomed = 0 AND key", keys)
        return {
            BlockKey(key): Known(_parts(d > 0, w > 0, s > 0), n_tokens, w_rows, d + w + s)
            for key, d, w, s, n_tokens, w_rows in rows
        }

    def states(self, parents: Collection[BlockKey]) -> list[State]:
        rows = self._among(
            "SELECT key, parent, n_tokens", "s > 0 AND doomed = 0 AND parent", parents
        )
        return [State(BlockKey(key), BlockKey(parent), n) for key, parent, n in rows]

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
        found = []
        for compare, order in (("<=", "DESC"), (">", "ASC")):
            rows = self._rows(
                f"SELECT key, tokens FROM tokens WHERE parent = ? AND tokens {compare} ? "  # noqa: S608
                f"ORDER BY tokens {order} LIMIT {NEIGHBOURS}",
                (parent, tokens),
            )
            found += [Child(BlockKey(key), common_tokens(held, tokens)) for key, held in rows]
        return sorted((c for c in found if c.n_common), key=lambda c: -c.n_common)

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

    def walk(self) -> Iterator[Stored]:
        last = b""
        while True:
            rows = self._rows(
                "SELECT key, parent, namespace, number, n_tokens, d, w, s, used, pins "
                "FROM blocks WHERE doomed = 0 AND key > ? ORDER BY key LIMIT 1000",
                (last,),
            )
            for key, parent, namespace, number, n_tokens, d, w, s, used, pins in rows:
                sizes = {p: n for p, n in zip(Part, (d, w, s), strict=True) if n}
                yield Stored(
                    BlockKey(key), BlockKey(parent), Namespace(namespace),
                    number, n_tokens, sizes, used, pins > 0,
                )  # fmt: skip
            if not rows:
                return
            last = rows[-1][0]

    def n_bytes(self) -> int:
        """Bytes of all records, those being written included."""
        return int(self._rows("SELECT value FROM counts WHERE name = 'bytes'")[0][0])

    def n_blocks(self) -> int:
        return int(self._rows("SELECT count(*) FROM blocks WHERE doomed = 0")[0][0])

    # Writes

    def reserve(
        self, key: BlockKey, parent: BlockKey, n_bytes: int, writer: str, limit: int | None
    ) -> int | None:
        """Claim room for a record about to be written; None if it would pass the limit."""
        with self._transaction() as db:
            (used,) = db.execute("SELECT value FROM counts WHERE name = 'bytes'").fetchone()
            if limit is not None and used + n_bytes > limit:
                return None
            query = "INSERT INTO writes(key, parent, n_bytes, writer) VALUES (?, ?, ?, ?)"
            return db.execute(query, (key, parent, n_bytes, writer)).lastrowid

    def cancel(self, reservation: int) -> None:
        with self._transaction() as db:
            _end_write(db, reservation)

    def add(
        self,
        header: Header,
        n_bytes: int,
        now: float,
        reservation: int | None = None,
        value: float = 0,
    ) -> None:
        """Enter a published record and end its reservation."""
        key, n_tokens = header.key, len(header.tokens) // 4
        sizes = [n_bytes if part is header.part else 0 for part in Part]
        with self._transaction() as db:
            if reservation is not None:
                _end_write(db, reservation)
            self._supersede(db, header, now)
            row = (key, header.parent, header.namespace, header.number, n_tokens, *sizes,
                   header.w_rows, now, value)  # fmt: skip
            query = (
                "INSERT INTO blocks(key, parent, namespace, number, n_tokens, d, w, s, w_rows, "
                "used, value) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            )
            if db.execute(query, row).rowcount:
                kept = (header.parent, self._kept_tokens(header), key)
                db.execute("INSERT OR IGNORE INTO tokens VALUES (?, ?, ?)", kept)
            else:
                self._set_part(db, key, header.part, n_bytes, header.w_rows)

    def _kept_tokens(self, header: Header) -> bytes:
        """What stands for its tokens in their table."""
        return header.tokens

    def touch(self, keys: Collection[BlockKey], now: float) -> None:
        query = "UPDATE blocks SET value = after_use(used, value, ?), used = ? WHERE key = ?"
        with self._transaction() as db:
            db.executemany(query, ((now, now, key) for key in dict.fromkeys(keys)))

    def _supersede(self, db: sqlite3.Connection, header: Header, now: float) -> None:
        """A block that begins as a short branch does replaces it: an answer rendered anew, say."""
        if not db.execute(
            "SELECT 1 FROM blocks WHERE key = ? AND children > 0", (header.parent,)
        ).fetchone():
            return
        beside = [c for c in self.children(header.parent, header.tokens) if c.key != header.key]
        branch = self._branch(beside[0].key) if beside else []
        if len(branch) <= SHORT_BRANCH:
            query = "UPDATE blocks SET value = ? WHERE key = ? AND used <= ?"
            db.executemany(query, ((SUPERSEDED_S, key, now) for key in branch))

    def _branch(self, key: BlockKey) -> list[BlockKey]:
        """A block and what is below it, but no more than it takes to be a long branch."""
        query = (
            "WITH RECURSIVE down(key) AS (SELECT ? UNION ALL "
            "SELECT b.key FROM blocks b JOIN down ON b.parent = down.key) "
            "SELECT key FROM down LIMIT ?"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key, SHORT_BRANCH + 1))]

    def doom(self, keys: Iterable[BlockKey]) -> None:
        """Mark blocks as being deleted: nobody finds them, and a crash does not bring them back."""
        with self._transaction():
            self._mark(keys)

    def _mark(self, keys: Iterable[BlockKey]) -> None:
        query = "UPDATE blocks SET doomed = 1 WHERE key = ?"
        self._db.executemany(query, ((key,) for key in keys))

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks whose files are gone.

        Synced: a mark that came back after a power cut would delete what was put since.
        """
        with self._synced_transaction() as db:
            db.executemany("DELETE FROM blocks WHERE key = ? AND doomed", ((k,) for k in keys))

    def drop_part(self, key: BlockKey, part: Part) -> None:
        """Forget one part; a block without parts is forgotten whole."""
        with self._transaction() as db:
            self._set_part(db, key, part, 0, 0)
            db.execute("DELETE FROM blocks WHERE key = ? AND d + w + s = 0 AND NOT doomed", (key,))

    def _set_part(
        self, db: sqlite3.Connection, key: BlockKey, part: Part, n_bytes: int, w_rows: int
    ) -> None:
        rows = f", w_rows = {w_rows:d}" if part is Part.WINDOW else ""
        query = f"UPDATE blocks SET {part.value} = ?{rows} WHERE key = ? AND NOT doomed"  # noqa: S608
        db.execute(query, (n_bytes, key))

    def doomed(self) -> list[BlockKey]:
        return [BlockKey(row[0]) for row in self._rows("SELECT key FROM blocks WHERE doomed = 1")]

    def is_doomed(self, key: BlockKey) -> bool:
        return bool(self._rows("SELECT 1 FROM blocks WHERE key = ? AND doomed", (key,)))

    def victims(
        self, n_bytes: int, spare: Collection[BlockKey] = (), priority: float = math.inf
    ) -> list[Victim]:
        """Unpinned blocks that nothing descends from, least valuable first, freeing `n_bytes`.

        None of a higher priority: what comes is not worth more than they are.
        """
        chosen, freed = [], 0
        query = (
            "SELECT key, d + w + s FROM blocks b WHERE children = 0 AND pins = 0 AND doomed = 0 "
            "AND used + value <= ? "
            "AND NOT EXISTS (SELECT 1 FROM writes w WHERE b.key IN (w.key, w.parent)) "
            "ORDER BY used + value"
        )
        with self._lock, closing(self._db.execute(query, (priority,))) as rows:
            for key, size in rows:
                if freed >= n_bytes:
                    break
                if key not in spare:
                    chosen.append(Victim(BlockKey(key), size))
                    freed += size
        return chosen

    def condemn(self, n_bytes: int, spare: Collection[BlockKey] = ()) -> list[BlockKey]:
        """Choose victims and mark them in one step, so that nobody pins one in between."""
        with self._transaction():
            keys = [victim.key for victim in self.victims(n_bytes, spare)]
            self._mark(keys)
        return keys

    def evict(self, n_bytes: int, spare: Collection[BlockKey], priority: float) -> list[Victim]:
        """Forget victims one by one, each with its parent in line, where no files are to remove."""
        gone: list[Victim] = []
        with self._transaction() as db:
            while n_bytes > 0 and (found := self.victims(1, spare, priority)):
                db.execute("DELETE FROM blocks WHERE key = ?", (found[0].key,))
                gone += found
                n_bytes -= found[0].n_bytes
        return gone

    def pin(self, key: BlockKey, owner: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (key, owner))

    def unpin(self, key: BlockKey, owner: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM pins WHERE key = ? AND owner = ?", (key, owner))

    def unpin_owner(self, owner: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM pins WHERE owner = ?", (owner,))

    def owners(self, key: BlockKey) -> list[str]:
        return [row[0] for row in self._rows("SELECT owner FROM pins WHERE key = ?", (key,))]

    def writers(self) -> set[str]:
        return {row[0] for row in self._rows("SELECT DISTINCT writer FROM writes")}

    def forget_writer(self, writer: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM writes WHERE writer = ?", (writer,))

    def names(self, first: bytes = b"") -> dict[str, int]:
        """The file names of all records whose keys begin so, and their bytes; doomed ones too."""
        query = "SELECT lower(hex(key)), d, w, s FROM blocks WHERE key BETWEEN ? AND ?"
        rows = self._rows(query, (first, first.ljust(KEY_BYTES, b"\xff")))
        named = ((stem, zip(SUFFIXES, sizes, strict=True)) for stem, *sizes in rows)
        return {stem + suffix: n for stem, parts in named for suffix, n in parts if n}

    def checkpoint(self) -> None:
        """Fold the log into the file and cut it, so that deleted tokens are gone from both."""
        with self._lock:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._db.close()


def is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether others kept SQLite waiting for too long, which says nothing against the file."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _end_write(db: sqlite3.Connection, reservation: int | None) -> None:
    db.execute("DELETE FROM writes WHERE id = ?", (reservation,))


@cache
def _parts(d: bool, w: bool, s: bool) -> frozenset[Part]:
    return frozenset(part for part, held in zip(Part, (d, w, s), strict=True) if held)
