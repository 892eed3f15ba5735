"""Which directory is a store: one with `keepwarm-store.json` in it.

A start deletes leftovers and moves bad files, so it must never run in a directory of someone else.
The marker is written into an empty directory before anything else is made there. Stores of versions
without it are recognised by what they hold, not by the names of their folders, and are then marked.
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.store.atomic import Files, open_unlinked
from keepwarm.store.names import DIRECTORY, INDEX, SEALED, parse_name
from keepwarm.store.record import check_identity, open_record

MARKER = "keepwarm-store.json"
VERSION = 1
MAX_BYTES = 4096  # of a marker
UNFINISHED = re.compile(re.escape(f".{MARKER}.") + "[0-9a-f]{32}")
NOT_CONTENT = ("lost+found", ".DS_Store")  # in every new file system; in folders seen in Finder
INDEX_TABLE = b"CREATE TABLE blocks(\n  key BLOB PRIMARY KEY, parent BLOB NOT NULL, namespace BLOB"
INDEX_MAGIC = {INDEX: b"SQLite format 3\0", f"{INDEX}-wal": b"\x37\x7f\x06"}
SCHEMA_WITHIN = 1 << 20  # bytes; tables are the first that is written to the index and its log
MAX_AGENT_BYTES = 1 << 24
AGENT_FIELDS = {"id", "namespace", "blocks", "n_tokens", "turns"}  # since the first version
SEALED_FIELDS = {"version", "salt", "scrypt", "check"}


def claim(root: Path, files: Files) -> Path:
    """Make an empty or missing directory a store, and refuse one that is neither empty nor a store.

    Returns its path without links: the store's own path may be one, nothing inside it may be.
    """
    root = Path(os.path.realpath(root))
    missing = [path for path in root.parents if not path.exists()]
    for path in (*reversed(missing), root):
        files.make_directory(path)
    is_marked = _is_marked(root)
    if not (is_marked or _is_empty(root) or _is_old_store(root) or _is_marked(root)):
        raise BadInput(
            f"{root} is not empty and is not a store of Keepwarm, so nothing in it is touched; "
            "name an empty or a new directory as KEEPWARM_STORE."
        )
    _refuse_links(root)
    if not is_marked:
        _mark(root, files)
    return root


def _is_marked(root: Path) -> bool:
    if (root / MARKER).is_symlink():
        return False
    try:
        with open_unlinked(root / MARKER) as file:
            said = json.loads(file.read(MAX_BYTES))
            is_ours, version = bool(said["keepwarm"] == "store"), int(said["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if is_ours and version > VERSION:
        raise BadInput(
            f"The store {root} was written by a newer Keepwarm; "
            "update this one, or name another directory as KEEPWARM_STORE."
        )
    return is_ours


def _mark(root: Path, files: Files) -> None:
    temp = root / f".{MARKER}.{uuid.uuid4().hex}"
    files.write(temp, [json.dumps({"keepwarm": "store", "version": VERSION}).encode()])
    try:
        files.publish(temp, root / MARKER)
    except FileNotFoundError:  # another process has marked it, and took ours for a leftover
        if not _is_marked(root):
            raise
    for entry in _entries(root):
        if UNFINISHED.fullmatch(entry.name):
            files.discard(Path(entry.path))


def _is_empty(root: Path) -> bool:
    """Also with an unfinished marker of a process that was killed."""
    names = (entry.name for entry in _entries(root))
    return all(name in NOT_CONTENT or UNFINISHED.fullmatch(name) for name in names)


def _refuse_links(root: Path) -> None:
    """A link in place of a directory or file that we use would lead out of the store."""
    for directory in (root, root / "blocks"):
        for entry in _entries(directory):
            if entry.is_symlink():
                raise BadInput(
                    f"{entry.path} is a symbolic link, and none is followed inside a store; "
                    "put what it points at in its place, or remove it."
                )


def _is_old_store(root: Path) -> bool:
    return (
        _has_index(root)
        or _has_sealed(root)
        or any(map(_is_record, _record_paths(root)))
        or any(_is_agent(Path(entry.path)) for entry in _entries(root / "agents"))
    )


def _has_index(root: Path) -> bool:
    """Whether our tables are in the index or its log. Read as bytes: SQLite would write files."""
    for name, magic in INDEX_MAGIC.items():
        with suppress(OSError), open_unlinked(root / name) as file:
            data = file.read(SCHEMA_WITHIN)
            if data.startswith(magic) and INDEX_TABLE in data:
                return True
    return False


def _has_sealed(root: Path) -> bool:
    return _read_object(root / SEALED, MAX_BYTES).keys() == SEALED_FIELDS


def _is_agent(path: Path) -> bool:
    """Whether it is the file of an agent, under its name."""
    said = _read_object(path, MAX_AGENT_BYTES) if path.suffix == ".json" else {}
    return said.keys() >= AGENT_FIELDS and said["id"] == path.stem


def _read_object(path: Path, max_bytes: int) -> dict[str, object]:
    """A JSON object; empty if there is none."""
    try:
        with open_unlinked(path) as file:
            said = json.loads(file.read(max_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _record_paths(root: Path) -> Iterator[Path]:
    """Files under the names of records; links are neither followed nor listed."""
    for directory in _entries(root / "blocks"):
        if DIRECTORY.fullmatch(directory.name) and directory.is_dir(follow_symlinks=False):
            for entry in _entries(Path(directory.path)):
                if entry.name.startswith(directory.name) and parse_name(entry.name):
                    yield Path(entry.path)


def _is_record(path: Path) -> bool:
    """Whether the header is one of ours; a newer or a sealed one is too."""
    name = parse_name(path.name)
    try:
        file = open_unlinked(path)
    except OSError:
        return False
    with file:
        try:
            header = open_record(file, os.fstat(file.fileno()).st_size).header
            check_identity(header, *name) if name else None
        except (NewerFormat, PermissionError):  # the latter: sealed, and no key was given
            return True
        except (BadRecord, OSError):
            return False
    return True


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """Empty where there is no such directory, or a link in its place."""
    try:
        if stat.S_ISDIR(directory.lstat().st_mode):
            return list(os.scandir(directory))
    except FileNotFoundError:
        pass
    return []
