"""One SQLite connection for all threads of a process, guarded by one lock."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepwarm.errors import NewerFormat, StoreFailed
from keepwarm.store.index.schema import PRAGMAS, SCHEMA_VERSION, statements


class Database:
    """`path` is a file that several processes may share, or ":memory:"."""

    def __init__(self, path: Path | str) -> None:
        self.lock = threading.RLock()
        self._db = sqlite3.connect(
            path, timeout=30, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
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

    def add_function(self, name: str, n_arguments: int, function: Callable[..., Any]) -> None:
        """Let SQL call a pure function."""
        self._db.create_function(name, n_arguments, function, deterministic=True)

    @contextmanager
    def transaction(self, synced: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit at the end, roll back on an exception.

        Synced, it is on disk before any other connection sees it.
        """
        with self.lock:
            if synced:
                self._db.execute("PRAGMA synchronous = FULL")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled back by itself
                    self._db.execute("ROLLBACK")
                raise
            finally:
                if synced:
                    self._db.execute("PRAGMA synchronous = NORMAL")

    def execute(self, query: str, arguments: Iterable[Any] = ()) -> sqlite3.Cursor:
        """The caller holds the lock until it has read the rows."""
        return self._db.execute(query, tuple(arguments))

    def rows(self, query: str, arguments: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with self.lock:
            return self.execute(query, arguments).fetchall()

    def checkpoint(self) -> None:
        """Fold the log into the file and truncate it."""
        with self.lock:
            is_busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise StoreFailed(
                "What was deleted is still in the log of the index, which other processes are "
                "using; try again when they are done."
            )

    def scrub(self) -> None:
        """Rewrite the file, so that nothing deleted is left in it or in its log.

        SQLite overwrites deleted rows, but not the copies that stay behind where pages were split
        or merged.
        """
        with self.lock:
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
        with self.lock:
            self._db.close()


def is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether other processes kept SQLite waiting for too long; the file itself may be fine."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
