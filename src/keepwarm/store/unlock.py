"""From the user's key or passphrase to the seal of a store.

`sealed.json` under the root marks a store as encrypted. It holds the salt and a sealed empty string
that only the right key opens; without this file the store cannot be opened at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path

from keepwarm.errors import BadInput, BadRecord
from keepwarm.store.atomic import Files, exclusive
from keepwarm.store.marker import claim
from keepwarm.store.names import INDEX, SEALED
from keepwarm.store.seal import KEY_BYTES, Seal

VERSION = 1
CHECK = b"keepwarm.check.1"  # what the sealed empty string is sealed under
SALT_BYTES = 16
SCRYPT: dict[str, int] = {"n": 1 << 17, "r": 8, "p": 1}  # 128 MiB, and half a second
MIN_PASSPHRASE = 12  # characters
SETTINGS = "KEEPWARM_ENCRYPTION_KEY, the key or @file"


def unlock(
    root: Path,
    secret: str | None,
    files: Files | None = None,
    handshake: Callable[[bytes], bytes] = bytes,
) -> Seal | None:
    """The seal of a store, None without a secret. An empty store is marked as sealed.

    `handshake` returns the mark that other machines have, whose salt is taken, or the given one.
    """
    if not secret:
        return None
    files = files or Files()
    root = claim(root, files)
    files.make_directory(root / "tmp")
    with exclusive(root / "tmp" / "index"):
        if not (root / SEALED).exists():
            return _mark(root, secret, files, handshake)
        return _check(root, secret)


def make_mark(seal: Seal, salted: Mapping[str, object]) -> bytes:
    """A mark by which a key is recognised; `salted` is what else is in it."""
    return json.dumps({**salted, "check": seal.seal(CHECK, b"").hex()}).encode()


def check_encryption(root: Path, seal: Seal | None) -> None:
    """Raise where a store is sealed and there is no key, or the reverse. Changes nothing."""
    is_sealed = (root / SEALED).exists()
    if is_sealed and seal is None:
        raise BadInput(f"The store {root} is encrypted; set {SETTINGS} to open it.")
    if seal is not None and not is_sealed:
        raise _plain(root)


def _mark(root: Path, secret: str, files: Files, handshake: Callable[[bytes], bytes]) -> Seal:
    if (root / INDEX).exists() or _has_blocks(root):
        raise _plain(root)
    salt = os.urandom(SALT_BYTES)
    seal = Seal(derive_key(secret, salt, SCRYPT))
    own = make_mark(seal, {"version": VERSION, "salt": salt.hex(), "scrypt": SCRYPT})
    mark = handshake(own)
    theirs = None if mark == own else _opened_elsewhere(mark, secret)
    temp = root / "tmp" / SEALED
    files.discard(temp)
    files.write(temp, [mark if theirs else own])
    files.publish(temp, root / SEALED)
    return theirs or seal


def _opened_elsewhere(mark: bytes, secret: str) -> Seal | None:
    """The seal that another machine's mark makes; None if the secret does not open it.

    Whoever can write there could make the passphrase easy to guess, so its cost must be ours.
    """
    try:
        said = json.loads(mark)
        if said["version"] != VERSION or said["scrypt"] != SCRYPT:
            return None
        seal = Seal(derive_key(secret, bytes.fromhex(said["salt"]), SCRYPT))
        seal.open(CHECK, bytes.fromhex(said["check"]))
    except (BadRecord, ValueError, KeyError, TypeError, RecursionError):
        return None
    return seal


def _check(root: Path, secret: str) -> Seal:
    path = root / SEALED
    try:
        marker = json.loads(path.read_text())
        if marker["version"] > VERSION:
            raise BadInput(f"{path} was written by a newer Keepwarm; update this one.")
        seal = Seal(derive_key(secret, bytes.fromhex(marker["salt"]), marker["scrypt"]))
        seal.open(CHECK, bytes.fromhex(marker["check"]))
    except BadRecord as error:
        raise BadInput(
            f"The key does not open the store {root}; set {SETTINGS} to the key it was made with."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is damaged; restore a copy of it to open the store.") from error
    return seal


def derive_key(secret: str, salt: bytes, scrypt: Mapping[str, int]) -> bytes:
    """Base64 of 32 bytes is the key itself; anything else is a passphrase for scrypt."""
    try:
        key = b64decode(secret, altchars=b"-_" if {"-", "_"} & set(secret) else None, validate=True)
    except ValueError:
        key = b""
    if len(key) == KEY_BYTES:
        return key
    if len(secret) < MIN_PASSPHRASE:
        raise BadInput(
            f"The encryption key is shorter than {MIN_PASSPHRASE} characters; "
            "use a longer passphrase, or base64 of 32 random bytes."
        )
    return hashlib.scrypt(
        secret.encode(), salt=salt, maxmem=1 << 28, dklen=KEY_BYTES,
        n=scrypt["n"], r=scrypt["r"], p=scrypt["p"],
    )  # fmt: skip


def _has_blocks(root: Path) -> bool:
    patterns = ("blocks/*/*", "agents/*", "responses/*")
    return any(next(root.glob(pattern), None) for pattern in patterns)


def _plain(root: Path) -> BadInput:
    return BadInput(
        f"The store {root} is not encrypted; unset {SETTINGS} to open it, "
        "or name an empty directory for an encrypted one."
    )
