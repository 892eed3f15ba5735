"""One SQLite connection for the threads of a process: opened, asked and changed under one lock."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepwarm.errors import NewerFormat, StoreFailed
from keepwarm.store.index.schema import PRAGMAS, SCHEMA_VERSION, statements


class Database:
    """`path` is a file that several processes may share, or ":memory:"."""

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.RLock()
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
        with self._transaction() as db:
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

    def checkpoint(self) -> None:
        """Fold the log into the file and cut it."""
        with self._lock:
            is_busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise StoreFailed(
                "What was deleted is still in the log of the index, which is in use by others; "
                "try again when they are done."
            )

    def scrub(self) -> None:
        """Write the file anew, so that nothing of what was deleted is left in it or in its log.

        SQLite overwrites rows that are deleted, but not the copies that stay behind where pages
        were split or merged.
        """
        with self._lock:
            self._db.execute("PRAGMA temp_store = MEMORY")  # no copy of it in another directory
            self._db.execute("VACUUM")
        self.checkpoint()

    def set_flag(self, what: str) -> None:
        """Remember that something was done to this very index; a new one knows nothing of it."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO counts VALUES (?, 1)", (what,))

    def has_flag(self, what: str) -> bool:
        return bool(self._rows("SELECT 1 FROM counts WHERE name = ?", (what,)))

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
