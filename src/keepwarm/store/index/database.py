"""Two SQLite connections for all threads of a process: one reads, one writes.

A reader waits neither for a writer of another process (WAL) nor for a thread of its own that waits
for one.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from keepwarm.errors import NewerFormat, StoreFailed
from keepwarm.files import LOCK_WAIT_S
from keepwarm.store.tier import is_busy

SCHEMA_VERSION = 5
PRAGMAS = (
    "page_size = 8192",  # a row of tokens fits: on smaller pages each needs an overflow page
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "checkpoint_fullfsync = ON",  # on macOS, where `fsync` leaves data in the drive's cache
    "secure_delete = ON",  # deleted tokens are overwritten
    "wal_autocheckpoint = 128",  # pages; the log counts towards the limit too
    "journal_size_limit = 1048576",
)
# The first generation and the first change are random, so that those of an index which was rebuilt
# are not taken for an earlier one's.
SCHEMA = """
CREATE TABLE blocks(
  key BLOB PRIMARY KEY, parent BLOB NOT NULL, namespace BLOB NOT NULL, number INTEGER NOT NULL,
  n_tokens INTEGER NOT NULL, d INTEGER NOT NULL DEFAULT 0, w INTEGER NOT NULL DEFAULT 0,
  s INTEGER NOT NULL DEFAULT 0, w_rows INTEGER NOT NULL DEFAULT 0,
  used REAL NOT NULL, value REAL NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0,
  children INTEGER NOT NULL DEFAULT 0,
  pins INTEGER NOT NULL DEFAULT 0, deleting INTEGER NOT NULL DEFAULT 0,
  prefill_s REAL, machine TEXT
) WITHOUT ROWID;
CREATE INDEX by_parent ON blocks(parent);
CREATE INDEX victims ON blocks(used + value + cost)
  WHERE children = 0 AND pins = 0 AND deleting = 0;
CREATE INDEX states ON blocks(parent) WHERE s > 0 AND deleting = 0;
CREATE TABLE tokens(
  parent BLOB, tokens BLOB, key BLOB NOT NULL, PRIMARY KEY(parent, tokens)
) WITHOUT ROWID;
CREATE TABLE pins(key BLOB, owner TEXT, PRIMARY KEY(key, owner)) WITHOUT ROWID;
CREATE TABLE writes(
  id INTEGER PRIMARY KEY, key BLOB NOT NULL, parent BLOB NOT NULL, n_bytes INTEGER NOT NULL,
  writer TEXT NOT NULL
);
CREATE TABLE counts(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counts VALUES ('bytes', 0), ('blocks', 0);
CREATE TABLE forgotten(
  generation INTEGER NOT NULL, owner TEXT NOT NULL, key BLOB, parent BLOB, n_tokens INTEGER
);
INSERT INTO counts VALUES ('generation', (random() & 0xffffffffff) + 1);
CREATE TABLE changes(number INTEGER PRIMARY KEY, key BLOB NOT NULL);
INSERT INTO changes VALUES ((random() & 0xffffffffff) + 1, x'');
CREATE TRIGGER changed AFTER INSERT ON changes BEGIN
  DELETE FROM changes WHERE number <= NEW.number - 4096;
END;
CREATE TRIGGER child_came AFTER INSERT ON blocks BEGIN
  INSERT INTO changes(key) VALUES (NEW.key);
  UPDATE blocks SET children = children + 1 WHERE key = NEW.parent;
  UPDATE blocks SET
    children = (SELECT count(*) FROM blocks c WHERE c.parent = NEW.key),
    pins = (SELECT count(*) FROM pins p WHERE p.key = NEW.key) WHERE key = NEW.key;
  UPDATE counts SET value = value + NEW.d + NEW.w + NEW.s WHERE name = 'bytes';
  UPDATE counts SET value = value + 1 WHERE name = 'blocks';
END;
CREATE TRIGGER child_went AFTER DELETE ON blocks BEGIN
  INSERT INTO changes(key) VALUES (OLD.key);
  DELETE FROM tokens WHERE parent = OLD.parent AND key = OLD.key;
  UPDATE blocks SET children = children - 1 WHERE key = OLD.parent;
  UPDATE counts SET value = value - OLD.d - OLD.w - OLD.s WHERE name = 'bytes';
  UPDATE counts SET value = value - NOT OLD.deleting WHERE name = 'blocks';
END;
CREATE TRIGGER deleting AFTER UPDATE OF deleting ON blocks WHEN NEW.deleting BEGIN
  INSERT INTO changes(key) VALUES (OLD.key);
  DELETE FROM tokens WHERE parent = OLD.parent AND key = OLD.key;
  UPDATE counts SET value = value - NOT OLD.deleting WHERE name = 'blocks';
END;
CREATE TRIGGER size_changed AFTER UPDATE OF d, w, s ON blocks BEGIN
  INSERT INTO changes(key) VALUES (NEW.key);
  UPDATE counts SET value = value + NEW.d + NEW.w + NEW.s - OLD.d - OLD.w - OLD.s
    WHERE name = 'bytes';
END;
CREATE TRIGGER pinned AFTER INSERT ON pins BEGIN
  UPDATE blocks SET pins = pins + 1 WHERE key = NEW.key;
END;
CREATE TRIGGER unpinned AFTER DELETE ON pins BEGIN
  UPDATE blocks SET pins = pins - 1 WHERE key = OLD.key;
END;
CREATE TRIGGER write_began AFTER INSERT ON writes BEGIN
  UPDATE counts SET value = value + NEW.n_bytes WHERE name = 'bytes';
END;
CREATE TRIGGER write_ended AFTER DELETE ON writes BEGIN
  UPDATE counts SET value = value - OLD.n_bytes WHERE name = 'bytes';
END;
"""


def statements() -> Iterator[str]:
    """The schema, one statement at a time."""
    statement = ""
    for line in SCHEMA.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


READ_WAIT_S = 0.1  # only while another process opens, repairs or closes the index


class Database:
    """A file that several processes may share. If another process replaces it, because it was
    damaged, the new one is opened.
    """

    def __init__(
        self, path: Path, functions: Sequence[tuple[str, int, Callable[..., Any]]]
    ) -> None:
        """SQL can call the functions: pure ones, each with its name and number of arguments."""
        self.lock = threading.RLock()  # of the connection that writes
        self._reading = threading.Lock()
        self._is_stuck = False  # the last wait for another process was in vain
        self._writer: int | None = None  # the thread in a transaction
        self._path = path
        self._functions = functions
        self._open()
        try:
            self._open_reader()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        self._file = _file_at(self._path)
        self._db = _connect(self._path, LOCK_WAIT_S)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            self._file = None
            raise

    def _open_reader(self) -> None:
        file = _file_at(self._path)
        self._reader = _connect(self._path, READ_WAIT_S)
        self._read_file = file

    def _prepare(self) -> None:
        for name, n_arguments, function in self._functions:
            self._db.create_function(name, n_arguments, function, deterministic=True)
        if self._version() > SCHEMA_VERSION:  # before anything is changed
            raise NewerFormat(f"index version {self._version()} is newer than {SCHEMA_VERSION}")
        for pragma in PRAGMAS:
            self._db.execute(f"PRAGMA {pragma}")
        with self.transaction() as db:
            version = self._version()
            if version == 0:
                for statement in statements():
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"index version {version}, not {SCHEMA_VERSION}")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def transaction(
        self, synced: bool = False, wait_s: float | None = None
    ) -> Iterator[sqlite3.Connection]:
        """Commit at the end, roll back on an exception.

        Synced, it is on disk before any other connection sees it. Raises a busy error if others
        write for longer than LOCK_WAIT_S, or than `wait_s`. Once a wait was in vain none waits any
        more until a transaction could begin: the other process may be stopped.
        """
        with self._locked(LOCK_WAIT_S if wait_s is None else wait_s) as bound_s:
            if synced:
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA fullfsync = ON")  # on macOS
            try:
                self._begin(bound_s)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled back by itself
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._writer = None
                if synced:
                    self._db.execute("PRAGMA fullfsync = OFF")
                    self._db.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[float]:
        """Hold the lock among threads; yields how long to wait for other processes."""
        wait_s = 0.0 if self._is_stuck else wait_s
        if not self.lock.acquire(timeout=wait_s):
            raise _busy()
        try:
            if self._file != _file_at(self._path, self._file):
                self._db.close()
                try:
                    self._open()
                except NewerFormat as error:  # to running requests, an outage
                    raise sqlite3.OperationalError(str(error)) from error
            yield wait_s
        finally:
            self.lock.release()

    def _begin(self, wait_s: float) -> None:
        self._db.execute(f"PRAGMA busy_timeout = {round(1000 * wait_s)}")
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            self._is_stuck = self._is_stuck or (is_busy(error) and wait_s > 0)
            raise
        self._is_stuck = False
        self._writer = threading.get_ident()

    def execute(self, query: str, arguments: Iterable[Any] = ()) -> sqlite3.Cursor:
        """On the connection that writes; the caller holds the lock until it has read the rows."""
        return self._db.execute(query, tuple(arguments))

    def rows(self, query: str, arguments: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """In a transaction, as it stands there; otherwise what was last committed."""
        if self._writer == threading.get_ident():
            return self.execute(query, arguments).fetchall()
        with self._reading:
            if self._read_file != _file_at(self._path, self._read_file):
                with closing(self._reader):
                    self._open_reader()
            return self._reader.execute(query, tuple(arguments)).fetchall()

    def checkpoint(self) -> None:
        """Fold the log into the file and truncate it."""
        with self._locked(LOCK_WAIT_S) as wait_s:
            self._db.execute(f"PRAGMA busy_timeout = {round(1000 * wait_s)}")
            failed, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if failed:
            raise StoreFailed(
                "What was deleted is still in the log of the index, which other processes are "
                "using; try again when they are done."
            )

    def scrub(self) -> None:
        """Rewrite the file, so that nothing deleted is left in it or in its log.

        SQLite overwrites deleted rows, but not the copies that stay behind where pages were split
        or merged.
        """
        with self._locked(LOCK_WAIT_S) as wait_s:
            self._db.execute(f"PRAGMA busy_timeout = {round(1000 * wait_s)}")
            self._db.execute("PRAGMA temp_store = MEMORY")  # no copy of it in another directory
            self._db.execute("VACUUM")
        self.checkpoint()

    def set_flag(self, name: str) -> None:
        """Remember that something was done to this index; a rebuilt index has no flags."""
        with self.transaction() as db:
            db.execute("INSERT OR IGNORE INTO counts VALUES (?, 1)", (name,))

    def has_flag(self, name: str) -> bool:
        return bool(self.rows("SELECT 1 FROM counts WHERE name = ?", (name,)))

    def close(self) -> None:
        with self.lock, self._reading:
            self._reader.close()
            self._db.close()


def is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _file_at(path: Path, default: int | None = None) -> int | None:
    """The inode of a file; the given one while there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return default


def _connect(path: Path, wait_s: float) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=wait_s, isolation_level=None, check_same_thread=False, cached_statements=64
    )


def _busy() -> sqlite3.OperationalError:
    """As SQLite raises it."""
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error
