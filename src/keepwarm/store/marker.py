"""Which directory is a store: one with `keepwarm-store.json` in it.

A start deletes leftovers and moves bad files, so it must never run in a directory of someone else.
The marker is written into an empty directory before anything else is made there.
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from pathlib import Path

from keepwarm.errors import BadInput
from keepwarm.store.atomic import Files, open_unlinked

MARKER = "keepwarm-store.json"
VERSION = 2
MAX_BYTES = 4096  # of a marker
UNFINISHED = re.compile(re.escape(f".{MARKER}.") + "[0-9a-f]{32}")
NOT_CONTENT = ("lost+found", ".DS_Store")  # in every new file system; in folders seen in Finder


def claim(root: Path, files: Files) -> Path:
    """Make an empty or missing directory a store, and refuse one that is neither empty nor a store.

    Returns its path without links: the store's own path may be one, nothing inside it may be.
    """
    root = Path(os.path.realpath(root))
    missing = [path for path in root.parents if not path.exists()]
    for path in (*reversed(missing), root):
        files.make_directory(path)
    is_marked = _is_marked(root)
    if not (is_marked or _is_empty(root) or _is_marked(root)):
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
    if is_ours and version < VERSION:
        raise BadInput(
            f"The store {root} has the format {version} of an earlier Keepwarm and is not read; "
            "delete it, or name another directory as KEEPWARM_STORE."
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


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """Empty where there is no such directory, or a link in its place."""
    try:
        if stat.S_ISDIR(directory.lstat().st_mode):
            return list(os.scandir(directory))
    except FileNotFoundError:
        pass
    return []
