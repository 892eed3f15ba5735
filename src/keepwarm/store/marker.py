"""Which directory is a store: one with `keepwarm-store.json` in it.

A start deletes leftovers and moves bad files, so it must never run in a directory of someone else.
The marker is written into an empty directory before anything else is made there.

`sealed.json` beside it marks a store as encrypted. It holds the salt and a sealed empty string that
only the right key opens; without this file the store cannot be opened at all.
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from keepwarm.errors import BadInput, BadRecord
from keepwarm.files import SharedLock
from keepwarm.records.cipher import Cipher, derive_key
from keepwarm.store.atomic import Files, open_unlinked
from keepwarm.store.names import INDEX, SEALED

MARKER = "keepwarm-store.json"
VERSION = 2
MAX_BYTES = 4096  # of a marker
UNFINISHED = re.compile(re.escape(f".{MARKER}.") + "[0-9a-f]{32}")
NOT_CONTENT = ("lost+found", ".DS_Store")  # in every new file system; in folders seen in Finder
KEY_VERSION = 1
CHECK = b"keepwarm.check.1"  # what the sealed empty string is sealed under
SALT_BYTES = 16
SCRYPT: dict[str, int] = {"n": 1 << 17, "r": 8, "p": 1}  # 128 MiB, and half a second
SETTINGS = "KEEPWARM_ENCRYPTION_KEY, the key or @file"


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
            fields = json.loads(file.read(MAX_BYTES))
            is_ours, version = bool(fields["keepwarm"] == "store"), int(fields["version"])
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


def unlock(
    root: Path,
    secret: str | None,
    files: Files | None = None,
    handshake: Callable[[bytes], bytes] = bytes,
) -> Cipher | None:
    """The cipher of a store, None without a secret. An empty store is marked as sealed.

    `handshake` returns the mark that other machines have, whose salt is taken, or the given one.
    """
    if not secret:
        return None
    files = files or Files()
    root = claim(root, files)
    files.make_directory(root / "tmp")
    with SharedLock(root / "tmp" / "index").hold():
        if not (root / SEALED).exists():
            return _encrypt(root, secret, files, handshake)
        return _decrypt(root, secret)


def make_mark(cipher: Cipher, salted: Mapping[str, object]) -> bytes:
    """A mark by which a key is recognised; `salted` is what else is in it."""
    return json.dumps({**salted, "check": cipher.seal(CHECK, b"").hex()}).encode()


def opens(cipher: Cipher, mark: bytes) -> bool:
    """Whether a mark was made with this cipher's key."""
    try:
        cipher.open(CHECK, bytes.fromhex(json.loads(mark)["check"]))
    except (BadRecord, ValueError, KeyError, TypeError, RecursionError):
        return False
    return True


def check_encryption(root: Path, cipher: Cipher | None) -> None:
    """Raise where a store is sealed and there is no key, or the reverse. Changes nothing."""
    is_sealed = (root / SEALED).exists()
    if is_sealed and cipher is None:
        raise BadInput(f"The store {root} is encrypted; set {SETTINGS} to open it.")
    if cipher is not None and not is_sealed:
        raise _plain(root)


def _encrypt(root: Path, secret: str, files: Files, handshake: Callable[[bytes], bytes]) -> Cipher:
    if (root / INDEX).exists() or _has_blocks(root):
        raise _plain(root)
    salt = os.urandom(SALT_BYTES)
    cipher = Cipher(derive_key(secret, salt, SCRYPT))
    own = make_mark(cipher, {"version": KEY_VERSION, "salt": salt.hex(), "scrypt": SCRYPT})
    mark = handshake(own)
    theirs = None if mark == own else _opened_elsewhere(mark, secret)
    temp = root / "tmp" / SEALED
    files.discard(temp)
    files.write(temp, [mark if theirs else own])
    files.publish(temp, root / SEALED)
    return theirs or cipher


def _opened_elsewhere(mark: bytes, secret: str) -> Cipher | None:
    """The cipher that another machine's mark makes; None if the secret does not open it.

    Whoever can write there could make the passphrase easy to guess, so its cost must be ours.
    """
    try:
        fields = json.loads(mark)
        if fields["version"] != KEY_VERSION or fields["scrypt"] != SCRYPT:
            return None
        cipher = Cipher(derive_key(secret, bytes.fromhex(fields["salt"]), SCRYPT))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return cipher if opens(cipher, mark) else None


def _decrypt(root: Path, secret: str) -> Cipher:
    path = root / SEALED
    try:
        marker = json.loads(path.read_text())
        if marker["version"] > KEY_VERSION:
            raise BadInput(f"{path} was written by a newer Keepwarm; update this one.")
        cipher = Cipher(derive_key(secret, bytes.fromhex(marker["salt"]), marker["scrypt"]))
        cipher.open(CHECK, bytes.fromhex(marker["check"]))
    except BadRecord as error:
        raise BadInput(
            f"The key does not open the store {root}; set {SETTINGS} to the key it was made with."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is damaged; restore a copy of it to open the store.") from error
    return cipher


def _has_blocks(root: Path) -> bool:
    patterns = ("blocks/*/*", "agents/*", "responses/*")
    return any(next(root.glob(pattern), None) for pattern in patterns)


def _plain(root: Path) -> BadInput:
    return BadInput(
        f"The store {root} is not encrypted; unset {SETTINGS} to open it, "
        "or name an empty directory for an encrypted one."
    )
