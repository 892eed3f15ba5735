"""What is on disk, in SQLite, shared by all processes that use one directory.

The index is a convenience: files are the truth, and it is rebuilt from them when it is lost.
A write first reserves its bytes, so that several processes together stay under the cap.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.eviction import (
    MEMORY_HALF_LIFE_S,
    SHORT_BRANCH,
    SUPERSEDED,
    after_use,
    prefill_saved,
)
from keepwarm.store.index.lookup import Lookups
from keepwarm.store.record import Header, Part
from keepwarm.store.tier import StoredBlock

MAX_TOUCHES = 20_000  # that wait for the next write
TTL_PIN = "mark:"  # an owner that lets go by itself: the time of its end follows
EVICTABLE = (
    "pins = 0 AND doomed = 0 AND used + value + cost <= ? "
    "AND NOT EXISTS (SELECT 1 FROM writes w WHERE b.key IN (w.key, w.parent))"
)


class Victim(NamedTuple):
    key: BlockKey
    n_bytes: int


class _Row(NamedTuple):
    """A block that may go, in the order in which they go."""

    priority: float
    key: BlockKey
    parent: BlockKey
    n_bytes: int


class Index(Lookups):
    """One connection, one lock; every method is one transaction."""

    def __init__(self, path: Path | str, half_life_s: float = MEMORY_HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._touched: deque[tuple[float, float, BlockKey]] = deque()
        super().__init__(path)

    def _prepare(self) -> None:
        self._db.create_function("after_use", 3, self._after_use, deterministic=True)
        self._db.create_function("cost_of", 5, self.cost_of, deterministic=True)
        super()._prepare()

    def _after_use(self, used: float, value: float, now: float) -> float:
        return after_use(used, value, now, self._half_life_s)

    def cost_of(self, number: int, n_tokens: int, d: int, w: int, s: int) -> float:
        """What the block spares, as seconds by which it outlives one that spares 1."""
        return self._half_life_s * math.log2(prefill_saved(number, n_tokens, d, w, s))

    def priority_of(self, header: Header, n_bytes: int, now: float) -> float:
        """What a record has that comes now: as much as one used once."""
        sizes = (n_bytes if part is header.part else 0 for part in Part)
        return now + self.cost_of(header.number, len(header.tokens) // 4, *sizes)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with super()._transaction() as db:
            if self._touched:
                set_to = "value = after_use(used, value, ?), used = ?"
                db.executemany(f"UPDATE blocks SET {set_to} WHERE key = ?", self._take_touches())  # noqa: S608
            yield db

    def _take_touches(self) -> Iterator[tuple[float, float, BlockKey]]:
        while self._touched:
            yield self._touched.popleft()

    def _settle(self) -> None:
        """Write down the uses that wait for it."""
        if self._touched:
            with self._transaction():
                pass

    def walk(self) -> Iterator[StoredBlock]:
        self._settle()
        yield from super().walk()

    def close(self) -> None:
        with self._lock:
            with suppress(sqlite3.Error):  # uses are no loss
                self._settle()
            super().close()

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
            cost = self.cost_of(header.number, n_tokens, *sizes)
            row = (key, header.parent, header.namespace, header.number, n_tokens, *sizes,
                   header.w_rows, now, value, cost)  # fmt: skip
            query = (
                "INSERT INTO blocks(key, parent, namespace, number, n_tokens, d, w, s, w_rows, "
                "used, value, cost) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING"
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
        """Note a use. It is written down with the next change: alone it would cost a request ms."""
        self._touched.extend((now, now, key) for key in dict.fromkeys(keys))
        if len(self._touched) > MAX_TOUCHES:
            self._settle()

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
            value = SUPERSEDED * self._half_life_s
            db.executemany(query, ((value, key, now) for key in branch))

    def _branch(self, key: BlockKey) -> list[BlockKey]:
        """A block and what is below it, but no more than it takes to be a long branch."""
        query = (
            "WITH RECURSIVE down(key) AS (SELECT ? UNION ALL "
            "SELECT b.key FROM blocks b JOIN down ON b.parent = down.key) "
            "SELECT key FROM down LIMIT ?"
        )
        return [BlockKey(row[0]) for row in self._rows(query, (key, SHORT_BRANCH + 1))]

    def mark_deleting(self, keys: Iterable[BlockKey]) -> None:
        """Mark blocks as being deleted: nobody finds them, and a crash does not bring them back."""
        with self._transaction():
            self._mark(keys)

    def _mark(self, keys: Iterable[BlockKey]) -> None:
        query = "UPDATE blocks SET doomed = 1 WHERE key = ?"
        self._db.executemany(query, ((key,) for key in keys))

    def delete_marked(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks whose files are gone.

        Synced: a mark that came back after a power cut would delete what was put since.
        """
        with self._synced_transaction() as db:
            db.executemany("DELETE FROM blocks WHERE key = ? AND doomed", ((k,) for k in keys))

    def delete_part(self, key: BlockKey, part: Part) -> None:
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
        query = "UPDATE blocks SET cost = cost_of(number, n_tokens, d, w, s) WHERE key = ?"
        db.execute(query, (key,))

    def find_victims(
        self,
        n_bytes: int,
        spare: Collection[BlockKey] = (),
        priority: float = math.inf,
        partly: bool = False,
    ) -> list[Victim]:
        """Unpinned blocks, least valuable first and every one after its descendants, that together
        free `n_bytes`; none at all where that cannot be reached, unless `partly` will do.

        None of a higher priority: what comes is not worth more than they are.
        """
        chosen: list[Victim] = []
        freed = 0
        with self._lock, closing(self._in_line(spare, priority)) as rows:
            while freed < n_bytes and (row := next(rows, None)) is not None:
                chosen.append(Victim(row.key, row.n_bytes))
                freed += row.n_bytes
        return chosen if partly or freed >= n_bytes else []

    def _in_line(self, spare: Collection[BlockKey], priority: float) -> Generator[_Row, None, None]:
        """Blocks that nothing descends from, and each parent once its last child was taken."""
        columns = "SELECT used + value + cost, key, parent, d + w + s FROM blocks b"
        leaves = f"{columns} WHERE children = 0 AND {EVICTABLE} ORDER BY used + value + cost"
        above = f"{columns} WHERE key = ? AND children = ? AND {EVICTABLE}"
        taken: Counter[BlockKey] = Counter()
        bared: list[_Row] = []
        with closing(self._db.execute(leaves, (priority,))) as found:
            leaf = found.fetchone()
            while leaf or bared:
                if bared and (leaf is None or bared[0] < leaf):
                    row = heapq.heappop(bared)
                else:
                    row, leaf = _Row(*leaf), found.fetchone()
                if row.key in spare:
                    continue
                yield row
                taken[row.parent] += 1
                for parent in self._rows(above, (row.parent, taken[row.parent], priority)):
                    heapq.heappush(bared, _Row(*parent))

    def select_victims(
        self, n_bytes: int, spare: Collection[BlockKey] = (), priority: float = math.inf
    ) -> list[BlockKey]:
        """Choose victims and mark them in one step, so that nobody pins one in between."""
        with self._transaction():
            keys = [victim.key for victim in self.find_victims(n_bytes, spare, priority)]
            self._mark(keys)
        return keys

    def evict(
        self, n_bytes: int, spare: Collection[BlockKey], priority: float, partly: bool = False
    ) -> list[Victim]:
        """Choose victims and forget them, where no files are to remove."""
        with self._transaction() as db:
            gone = self.find_victims(n_bytes, spare, priority, partly)
            db.executemany("DELETE FROM blocks WHERE key = ?", ((v.key,) for v in gone))
        return gone

    def pin(self, key: BlockKey, owner: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (key, owner))

    def unpin(self, key: BlockKey, owner: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM pins WHERE key = ? AND owner = ?", (key, owner))

    def pin_only(self, owner: str, keys: Iterable[BlockKey]) -> None:
        """Pin these for an owner, and nothing else of his, in one step that survives a crash."""
        with self._synced_transaction() as db:
            db.execute("DELETE FROM pins WHERE owner = ?", (owner,))
            rows = ((key, owner) for key in keys)
            db.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", rows)

    def expire_ttl_pins(self, now: float) -> int:
        """End the pins of marks whose time has come; how many these were."""
        query = (
            "DELETE FROM pins WHERE substr(owner, 1, ?1) = ?2 "
            "AND CAST(substr(owner, ?1 + 1) AS REAL) <= ?3"
        )
        with self._transaction() as db:
            return db.execute(query, (len(TTL_PIN), TTL_PIN, now)).rowcount

    def cancel_writes(self, writer: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM writes WHERE writer = ?", (writer,))


def _end_write(db: sqlite3.Connection, reservation: int | None) -> None:
    db.execute("DELETE FROM writes WHERE id = ?", (reservation,))
