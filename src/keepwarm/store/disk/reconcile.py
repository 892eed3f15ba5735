"""At a start: finish what a crash interrupted, and make index and files agree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.atomic import Files, is_alive
from keepwarm.store.disk.records import RecordFiles
from keepwarm.store.names import bytes_of, directories, size_of, strays
from keepwarm.store.record import Part

LOG = logging.getLogger(__name__)


def make_directories(root: Path, files: Files) -> set[Path]:
    """Make missing directories; returns those of blocks, which are synced."""
    for name in ("blocks", "agents", "quarantine", "tmp"):
        files.make_directory(root / name)
    blocks = root / "blocks"
    found = {path for path in blocks.iterdir() if path.is_dir() and not path.is_symlink()}
    files.sync_directory(blocks)
    return found


def reconcile(records: RecordFiles, finish_deleting: Callable[[BlockKey], None], now: float) -> int:
    """Finish deletions, cancel reservations of dead processes, add rows for files without one, and
    delete rows without a file. Returns the bytes of files in `blocks/` that are not records.
    """
    for writer in records.index.lookups.writers():
        if not is_alive(records.root / "tmp", writer):
            records.index.cancel_writes(writer)
    with records.names_lock.hold():
        for key in records.index.lookups.deleting():
            finish_deleting(key)
    n_bytes = sum(map(bytes_of, strays(records.root)))
    for directory in directories(records.root):
        changes = directory.changes(records.index.lookups.names(directory.first))
        n_bytes += sum(map(bytes_of, changes.strays))
        n_bytes += sum(_adopt(records, key, part, now) for key, part in changes.added)
        for key, part in changes.missing:
            records.delete_missing(key, part)
    return n_bytes


def _adopt(records: RecordFiles, key: BlockKey, part: Part, now: float) -> int:
    """Add the row of a file; returns the file's bytes if it must stay without one."""
    path = records.path_of(key, part)
    try:
        with records.names_lock.hold():
            header = records.use_record(key, part, lambda _, opened: opened.header)
            about = path.stat()
            records.index.add(header, about.st_size, min(about.st_mtime, now))
    except BadRecord as bad:
        records.quarantine(key, part, str(bad))
    except NewerFormat as newer:
        records.skip_newer(key, part, str(newer))
        return size_of(path)
    except FileNotFoundError:
        return 0  # another process has deleted it
    except OSError as error:
        LOG.warning("%s could not be indexed: %s", path.name, error)
    return 0
