"""Opens the index of a store; rebuilds it if it is lost or damaged."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from keepwarm.errors import BadInput, Busy, NewerFormat, StoreFailed
from keepwarm.store.atomic import FILE_MODE, exclusive
from keepwarm.store.index.index import Index
from keepwarm.store.names import INDEX, INDEX_FILES
from keepwarm.store.seal import Seal
from keepwarm.store.tier import is_busy
from keepwarm.store.unlock import check_encryption

DAMAGED = f"{INDEX}-damaged"  # tells the next start to rebuild
OUTAGES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
)
LOG = logging.getLogger(__name__)


def open_index(root: Path, seal: Seal | None) -> Index:
    """The index, or an empty one where it is lost or damaged; the record files refill it."""
    path = root / INDEX
    with exclusive(root / "tmp" / "index"):
        check_encryption(root, seal)
        try:
            path.touch(FILE_MODE)
            index = Index(path, seal)
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
        return Index(path, seal)


def note_damage(root: Path) -> None:
    """Let the next start rebuild the index."""
    (root / DAMAGED).touch(FILE_MODE)


def _is_outage(error: sqlite3.Error) -> bool:
    """Whether the disk is full, read-only or failing; the file itself may be fine."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in OUTAGES
