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
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from keepwarm.errors import BadInput, Busy, NewerFormat, StoreFailed
from keepwarm.files import FILE_MODE, SharedLock
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Header, Part, PrefillTime
from keepwarm.store.eviction import (
    CLOCK_TOLERANCE_S,
    DISK_HALF_LIFE_S,
    SHORT_BRANCH,
    SUPERSEDED,
    after_use,
    prefill_saved,
)
from keepwarm.store.index.database import Database
from keepwarm.store.index.forgotten import ForgottenLog
from keepwarm.store.index.lookups import Lookups, SealedLookups
from keepwarm.store.marker import check_encryption
from keepwarm.store.names import INDEX, INDEX_FILES
from keepwarm.store.tier import (
    TTL_PIN,
    StoredBlock,
    is_busy,
)

MAX_TOUCHES = 20_000  # waiting for the next write; then the oldest are forgotten
LATEST = "latest use"  # in `counts`, in seconds since 1970
EVICTABLE = (
    "pins = 0 AND deleting = 0 AND used + value + cost <= ? "
    "AND NOT EXISTS (SELECT 1 FROM writes w WHERE b.key IN (w.key, w.parent))"
)


class Victim(NamedTuple):
    key: BlockKey
    n_bytes: int


class _Candidate(NamedTuple):
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
        self.database = Database(path)
        self.database.add_function("after_use", 3, self._after_use)
        self.database.add_function("cost_of", 5, self.cost_of)
        self.lookups = (
            Lookups(self.database) if cipher is None else SealedLookups(self.database, cipher)
        )
        self.forgotten = ForgottenLog(self.database, self.lookups.encode_owner)

    def _after_use(self, used: float, value: float, now: float) -> float:
        return after_use(used, value, now, DISK_HALF_LIFE_S)

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
        with self.database.transaction(synced, wait_s) as db:
            while self._cancelled:
                _end_write(db, self._cancelled.popleft())
            if touches := list(self._take_touches()):
                set_to = "value = after_use(used, value, ?), used = ?"
                db.executemany(f"UPDATE blocks SET {set_to} WHERE key = ?", touches)  # noqa: S608
                _note_time(db, max(now for now, *_ in touches))
            yield db

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
        """Delete one part; the row goes with the last part."""
        with self._transaction(wait_s=wait_s) as db:
            self._set_part(db, key, part, 0, 0)
            db.execute(
                "DELETE FROM blocks WHERE key = ? AND d + w + s = 0 AND NOT deleting", (key,)
            )

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
                chosen.append(Victim(row.key, row.n_bytes))
                freed += row.n_bytes
        return chosen if freed >= n_bytes else []

    def _eviction_order(
        self, exclude: Collection[BlockKey], priority: float
    ) -> Generator[_Candidate, None, None]:
        """Blocks without descendants, and each parent once its last child was taken."""
        columns = "SELECT used + value + cost, key, parent, d + w + s FROM blocks b"
        leaves = f"{columns} WHERE children = 0 AND {EVICTABLE} ORDER BY used + value + cost"
        above = f"{columns} WHERE key = ? AND children = ? AND {EVICTABLE}"
        taken: Counter[BlockKey] = Counter()
        parents: list[_Candidate] = []
        with closing(self.database.execute(leaves, (priority,))) as found:
            leaf = found.fetchone()
            while leaf or parents:
                if parents and (leaf is None or parents[0] < leaf):
                    block = heapq.heappop(parents)
                else:
                    block, leaf = _Candidate(*leaf), found.fetchone()
                if block.key in exclude:
                    continue
                yield block
                taken[block.parent] += 1
                arguments = (block.parent, taken[block.parent], priority)
                for parent in self.database.rows(above, arguments):
                    heapq.heappush(parents, _Candidate(*parent))

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

    def unpin(self, key: BlockKey, owner: str) -> None:
        row = (key, self.lookups.encode_owner(owner))
        with self._transaction() as db:
            db.execute("DELETE FROM pins WHERE key = ? AND owner = ?", row)

    def pin_only(self, owner: str, keys: Iterable[BlockKey]) -> None:
        """Replace all pins of an owner in one step that survives a power cut."""
        owner = self.lookups.encode_owner(owner)
        with self._transaction(synced=True) as db:
            db.execute("DELETE FROM pins WHERE owner = ?", (owner,))
            rows = ((key, owner) for key in keys)
            db.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", rows)

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
        LOG.warning("the index is damaged and is rebuilt")
        for name in (*INDEX_FILES, DAMAGED):
            (root / name).unlink(missing_ok=True)
        path.touch(FILE_MODE)
        return Index(path, cipher)


def note_damage(root: Path) -> None:
    """Let the next start rebuild the index."""
    (root / DAMAGED).touch(FILE_MODE)


def _is_outage(error: sqlite3.Error) -> bool:
    """Whether the disk is full, read-only or failing; the file itself may be fine."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in OUTAGES
