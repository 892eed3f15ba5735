"""The index of a disk tier, in SQLite, shared by all processes that use it.

Files are the truth: a lost or damaged index is rebuilt from them. A write first reserves its bytes,
so that several processes together stay under the limit.
"""

from __future__ import annotations

import heapq
import logging
import math
import sqlite3
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm.errors import BadInput, BadRecord, Busy, NewerFormat, StoreFailed
from keepwarm.files import FILE_MODE, SharedLock
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Header, Part, PrefillTime
from keepwarm.store.eviction import (
    CLOCK_TOLERANCE_S,
    DISK_HALF_LIFE_S,
    SHORT_BRANCH,
    SUPERSEDED,
    Checkpoint,
    after_use,
    prefill_saved,
)
from keepwarm.store.index.database import Database
from keepwarm.store.index.forgotten import ForgottenLog
from keepwarm.store.marker import check_encryption
from keepwarm.store.names import INDEX, INDEX_FILES, SUFFIXES
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
    is_busy,
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

    def bytes_by_namespace(self) -> Counter[Namespace]:
        query = "SELECT min(key), namespace, sum(d + w + s) FROM blocks GROUP BY namespace"
        sums: Counter[Namespace] = Counter()
        for key, stored, n_bytes in self._rows(query):  # of sealed names, each is another
            sums[self.decode_namespace(key, stored)] += n_bytes
        return sums

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


MAX_TOUCHES = 20_000  # waiting for the next write; then the oldest are forgotten
LATEST = "latest use"  # in `counts`, in seconds since 1970
EVICTABLE = (
    "pins = 0 AND deleting = 0 AND used + value + cost <= ? "
    "AND NOT EXISTS (SELECT 1 FROM writes w WHERE b.key IN (w.key, w.parent))"
)


PIN_PARENT = (
    "WITH RECURSIVE down(key) AS (SELECT ?2 UNION ALL "
    "SELECT b.key FROM blocks b JOIN down ON b.parent = down.key) "
    "INSERT OR IGNORE INTO pins SELECT ?1, owner FROM pins WHERE key IN down"
)


class Victim(NamedTuple):
    """A block that may be evicted; they sort in the order of eviction."""

    priority: float
    key: BlockKey
    parent: BlockKey
    n_bytes: int


class Index:
    """Every change is one transaction. Queries are in `lookups`."""

    def __init__(self, path: Path, cipher: Cipher | None = None) -> None:
        self._touched: deque[tuple[float, float, BlockKey]] = deque(maxlen=MAX_TOUCHES)
        self._cancelled: deque[int] = deque()  # reservations that the next change ends
        after = partial(after_use, half_life_s=DISK_HALF_LIFE_S)
        self.database = Database(path, [("after_use", 3, after), ("cost_of", 5, self.cost_of)])
        self.lookups = (
            Lookups(self.database) if cipher is None else SealedLookups(self.database, cipher)
        )
        self.forgotten = ForgottenLog(self.database, self.lookups.encode_owner)

    def cost_of(self, number: int, n_tokens: int, d: int, w: int, s: int) -> float:
        """What the block saves, as seconds by which it outlives a block that saves 1."""
        return DISK_HALF_LIFE_S * math.log2(prefill_saved(number, n_tokens, d, w, s))

    def priority_of(self, header: Header, n_bytes: int, now: float) -> float:
        """The priority of a new record: that of a block used once, now."""
        sizes = (n_bytes if part is header.part else 0 for part in Part)
        return now + self.cost_of(header.number, len(header.tokens) // 4, *sizes)

    @contextmanager
    def _transaction(
        self, synced: bool = False, wait_s: float | None = None
    ) -> Iterator[sqlite3.Connection]:
        ended: list[int] = []
        try:
            with self.database.transaction(synced, wait_s) as db:
                while self._cancelled:
                    ended.append(self._cancelled.popleft())
                    _end_write(db, ended[-1])
                if touches := list(self._take_touches()):
                    set_to = "value = after_use(used, value, ?), used = ?"
                    db.executemany(f"UPDATE blocks SET {set_to} WHERE key = ?", touches)  # noqa: S608
                    _note_time(db, max(now for now, *_ in touches))
                yield db
        except BaseException:
            self._cancelled.extend(ended)  # they were rolled back too
            raise

    def _take_touches(self) -> Iterator[tuple[float, float, BlockKey]]:
        while self._touched:
            yield self._touched.popleft()

    def _flush_touches(self, wait_s: float | None = None) -> None:
        """Unless other processes write meanwhile; losing a few uses does no harm."""
        with suppress(sqlite3.OperationalError):
            if self._touched:
                with self._transaction(wait_s=wait_s):
                    pass

    def walk(self) -> Iterator[StoredBlock]:
        self._flush_touches(wait_s=0.0)
        yield from self.lookups.walk()

    def close(self) -> None:
        with self.database.lock:
            with suppress(sqlite3.Error):
                self._flush_touches()
            self.database.close()

    def reserve(
        self, key: BlockKey, parent: BlockKey, n_bytes: int, writer: str, limit: int | None
    ) -> int | None:
        """Reserve bytes for a record about to be written; None if that would exceed the limit."""
        with self._transaction() as db:
            (used,) = db.execute("SELECT value FROM counts WHERE name = 'bytes'").fetchone()
            if limit is not None and used + n_bytes > limit:
                return None
            query = "INSERT INTO writes(key, parent, n_bytes, writer) VALUES (?, ?, ?, ?)"
            return db.execute(query, (key, parent, n_bytes, writer)).lastrowid

    def cancel(self, reservation: int) -> None:
        """End a reservation now, or with the next change if another process writes for too long."""
        self._cancelled.append(reservation)
        with suppress(sqlite3.OperationalError), self._transaction():
            pass

    def add(
        self,
        header: Header,
        n_bytes: int,
        now: float,
        reservation: int | None = None,
        prefill: PrefillTime | None = None,
    ) -> None:
        """Add the row of a published record and end its reservation."""
        key, n_tokens = header.key, len(header.tokens) // 4
        sizes = [n_bytes if part is header.part else 0 for part in Part]
        with self._transaction() as db:
            if reservation is not None:
                _end_write(db, reservation)
            _note_time(db, now)
            self._supersede(db, header, now)
            cost = self.cost_of(header.number, n_tokens, *sizes)
            row = (key, header.parent, self.lookups.encode_namespace(header), header.number,
                   n_tokens, *sizes, header.w_rows, now, cost,
                   *(prefill or (None, None)))  # fmt: skip
            query = (
                "INSERT INTO blocks(key, parent, namespace, number, n_tokens, d, w, s, w_rows, "
                "used, cost, prefill_s, machine) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING"
            )
            if db.execute(query, row).rowcount:
                tokens = (header.parent, self.lookups.encode_tokens(header), key)
                db.execute("INSERT OR IGNORE INTO tokens VALUES (?, ?, ?)", tokens)
            else:
                self._set_part(db, key, header.part, n_bytes, header.w_rows)

    def touch(self, keys: Collection[BlockKey], now: float) -> None:
        """Note a use; the next change writes it, as a write of its own would cost a request ms."""
        self._touched.extend((now, now, key) for key in dict.fromkeys(keys))

    def _supersede(self, db: sqlite3.Connection, header: Header, now: float) -> None:
        """Devalue a short sibling branch with the same first tokens: an answer rendered anew."""
        if not db.execute(
            "SELECT 1 FROM blocks WHERE key = ? AND children > 0", (header.parent,)
        ).fetchone():
            return
        children = self.lookups.children(header.parent, header.tokens)
        sizes = self.lookups.have([child.key for child in children if child.key != header.key])
        # A sibling that this block continues is a checkpoint inside it.
        parted = [c.key for c in children if c.key in sizes and c.n_common < sizes[c.key].n_tokens]
        branch = self.lookups.first_of_branch(parted[0], SHORT_BRANCH + 1) if parted else []
        if len(branch) <= SHORT_BRANCH:
            query = "UPDATE blocks SET value = ? WHERE key = ? AND used <= ?"
            value = SUPERSEDED * DISK_HALF_LIFE_S
            db.executemany(query, ((value, key, now) for key in branch))

    def mark_deleting(self, keys: Iterable[BlockKey]) -> None:
        """Hide blocks from look-ups before their files go, so that a crash cannot revive them."""
        with self._transaction() as db:
            _mark_deleting(db, keys)

    def delete_marked(self, keys: Iterable[BlockKey]) -> None:
        """Delete the rows of marked blocks, whose files are gone.

        Synced: a tombstone that came back after a power cut would delete what was put since.
        """
        with self._transaction(synced=True) as db:
            db.executemany("DELETE FROM blocks WHERE key = ? AND deleting", ((k,) for k in keys))

    def delete_part(self, key: BlockKey, part: Part, wait_s: float | None = None) -> None:
        """Delete one part; the row goes with the last part. What is before it stays protected by
        the pins on it and on what follows it.
        """
        with self._transaction(wait_s=wait_s) as db:
            self._set_part(db, key, part, 0, 0)
            query = "DELETE FROM blocks WHERE key = ? AND d + w + s = 0 AND NOT deleting"
            query += " RETURNING parent"
            for (parent,) in db.execute(query, (key,)).fetchall():
                db.execute(PIN_PARENT, (parent, key))

    def _set_part(
        self, db: sqlite3.Connection, key: BlockKey, part: Part, n_bytes: int, w_rows: int
    ) -> None:
        rows = f", w_rows = {w_rows:d}" if part is Part.WINDOW else ""
        query = f"UPDATE blocks SET {part.value} = ?{rows} WHERE key = ? AND NOT deleting"  # noqa: S608
        db.execute(query, (n_bytes, key))
        query = "UPDATE blocks SET cost = cost_of(number, n_tokens, d, w, s) WHERE key = ?"
        db.execute(query, (key,))

    def find_victims(
        self,
        n_bytes: int,
        exclude: Collection[BlockKey] = (),
        priority: float = math.inf,
    ) -> list[Victim]:
        """Unpinned blocks, the least valuable first and each after its descendants, that together
        free `n_bytes`; none at all where that cannot be reached.

        Only blocks up to this priority: the new block is worth no more than the others.
        """
        chosen: list[Victim] = []
        freed = 0
        with self.database.lock, closing(self._eviction_order(exclude, priority)) as rows:
            while freed < n_bytes and (row := next(rows, None)) is not None:
                chosen.append(row)
                freed += row.n_bytes
        return chosen if freed >= n_bytes else []

    def _eviction_order(
        self, exclude: Collection[BlockKey], priority: float
    ) -> Generator[Victim, None, None]:
        """Blocks without descendants, and each parent once its last child was taken."""
        columns = "SELECT used + value + cost, key, parent, d + w + s FROM blocks b"
        leaves = f"{columns} WHERE children = 0 AND {EVICTABLE} ORDER BY used + value + cost"
        above = f"{columns} WHERE key = ? AND children = ? AND {EVICTABLE}"
        taken: Counter[BlockKey] = Counter()
        parents: list[Victim] = []
        with closing(self.database.execute(leaves, (priority,))) as found:
            leaf = found.fetchone()
            while leaf or parents:
                if parents and (leaf is None or parents[0] < leaf):
                    block = heapq.heappop(parents)
                else:
                    block, leaf = Victim(*leaf), found.fetchone()
                if block.key in exclude:
                    continue
                yield block
                taken[block.parent] += 1
                arguments = (block.parent, taken[block.parent], priority)
                for parent in self.database.rows(above, arguments):
                    heapq.heappush(parents, Victim(*parent))

    def select_victims(
        self, n_bytes: int, exclude: Collection[BlockKey] = (), priority: float = math.inf
    ) -> list[BlockKey]:
        """Find victims and mark them in one step, so that none is pinned in between."""
        with self._transaction() as db:
            keys = [victim.key for victim in self.find_victims(n_bytes, exclude, priority)]
            _mark_deleting(db, keys)
        return keys

    def pin(self, key: BlockKey, owner: str) -> None:
        row = (key, self.lookups.encode_owner(owner))
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", row)

    def pin_only(self, owner: str, keys: Iterable[BlockKey]) -> None:
        """Replace all pins of an owner in one step that survives a power cut."""
        owner = self.lookups.encode_owner(owner)
        with self._transaction(synced=True) as db:
            db.execute("DELETE FROM pins WHERE owner = ?", (owner,))
            rows = ((key, owner) for key in keys)
            db.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", rows)

    def unpin_others(self, owners: Iterable[str]) -> None:
        """Delete all pins but those of these owners, and TTL pins."""
        kept = set(map(self.lookups.encode_owner, owners))
        with self._transaction(synced=True) as db:
            known = [owner for (owner,) in db.execute("SELECT DISTINCT owner FROM pins")]
            gone = [it for it in known if it not in kept and not it.startswith(TTL_PIN)]
            db.executemany("DELETE FROM pins WHERE owner = ?", ((owner,) for owner in gone))

    def expire_ttl_pins(self, now: float) -> int:
        """Delete the TTL pins that have ended; returns their number."""
        query = (
            "DELETE FROM pins WHERE substr(owner, 1, ?) = ? "
            "AND CAST(substr(owner, ? + 1) AS REAL) <= ?"
        )
        known = (len(TTL_PIN), TTL_PIN, len(TTL_PIN), now)
        with self._transaction() as db:
            return db.execute(query, known).rowcount

    def follow_clock(self, now: float) -> None:
        """If the clock was set back, move uses and TTL pins back with it.

        Otherwise what was used while it was ahead would outlive everything new.
        """
        known = self.database.rows("SELECT value FROM counts WHERE name = ?", (LATEST,))
        if known and known[0][0] <= now + CLOCK_TOLERANCE_S:
            return
        with self._transaction() as db:
            (used,) = db.execute("SELECT max(used) FROM blocks").fetchone()
            latest = known[0][0] if known else used or now
            if latest > now:
                db.execute("UPDATE blocks SET used = ? WHERE used > ?", (now, now))
                self._move_ttl_pins(db, latest, now - latest)
            db.execute("INSERT OR REPLACE INTO counts VALUES (?, ?)", (LATEST, now))

    def _move_ttl_pins(self, db: sqlite3.Connection, after: float, by_s: float) -> None:
        """What was left of them then is what is left now."""
        rows = db.execute(
            "SELECT key, owner FROM pins WHERE substr(owner, 1, ?) = ?", (len(TTL_PIN), TTL_PIN)
        ).fetchall()
        for key, owner in rows:
            until = float(owner.removeprefix(TTL_PIN))
            if until > after:
                db.execute("DELETE FROM pins WHERE key = ? AND owner = ?", (key, owner))
                moved = (key, f"{TTL_PIN}{until + by_s:.0f}")
                db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", moved)

    def cancel_writes(self, writer: str) -> None:
        """End all reservations of a process that has died."""
        with self._transaction() as db:
            db.execute("DELETE FROM writes WHERE writer = ?", (writer,))


def _mark_deleting(db: sqlite3.Connection, keys: Iterable[BlockKey]) -> None:
    db.executemany("UPDATE blocks SET deleting = 1 WHERE key = ?", ((key,) for key in keys))


def _note_time(db: sqlite3.Connection, now: float) -> None:
    query = "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = max(value, ?)"
    db.execute(query, (LATEST, now, now))


def _end_write(db: sqlite3.Connection, reservation: int) -> None:
    db.execute("DELETE FROM writes WHERE id = ?", (reservation,))


DAMAGED = f"{INDEX}-damaged"  # tells the next start to rebuild
OUTAGES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
)
LOG = logging.getLogger(__name__)


def open_index(root: Path, cipher: Cipher | None) -> Index:
    """The index, or an empty one where it is lost or damaged; the record files refill it."""
    path = root / INDEX
    with SharedLock(root / "tmp" / "index").hold():
        check_encryption(root, cipher)
        try:
            path.touch(FILE_MODE)
            index = Index(path, cipher)
            if not (root / DAMAGED).exists():
                return index
            index.close()
        except NewerFormat as error:
            raise BadInput(
                f"The store {root} was written by a newer Keepwarm; "
                "update this one, or name another directory as KEEPWARM_STORE."
            ) from error
        except sqlite3.DatabaseError as error:
            if is_busy(error):
                raise Busy(f"Other processes are using the index of {root}; try again.") from error
            if _is_outage(error):
                raise StoreFailed(
                    f"The index of {root} cannot be opened ({error}); "
                    "look at its disk, then try again."
                ) from error
        LOG.warning("The index is damaged, or of an earlier version; it is being rebuilt")
        for name in (*INDEX_FILES, DAMAGED):
            (root / name).unlink(missing_ok=True)
        path.touch(FILE_MODE)
        return Index(path, cipher)


def note_damage(root: Path) -> None:
    """Let the next start rebuild the index."""
    with suppress(OSError):  # the start finds most damage itself
        (root / DAMAGED).touch(FILE_MODE)


def _is_outage(error: sqlite3.Error) -> bool:
    """Whether the disk is full, read-only or failing; the file itself may be fine."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in OUTAGES
