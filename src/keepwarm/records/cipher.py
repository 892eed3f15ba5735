"""Encryption at rest: AES-256-GCM for bytes, HMAC-SHA256 for names.

Sealed bytes open only under the name they were sealed with, so they cannot be changed, renamed or
exchanged. The keys for bytes and for names are derived from the given key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from base64 import b64decode
from collections.abc import Mapping
from typing import TypeAlias

from keepwarm.errors import BadInput, BadRecord
from keepwarm.prefix.blocks import Namespace

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
MIN_PASSPHRASE = 12  # characters
OVERHEAD = NONCE_BYTES + TAG_BYTES  # bytes that sealing adds

Bytes: TypeAlias = bytes | bytearray | memoryview


class Cipher:
    """Encrypts and decrypts with one key. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise BadInput(
                "Encryption needs the package cryptography; "
                "install it with: pip install 'keepwarm[encryption]'"
            ) from error
        self._cipher = AESGCM(_derive(key, b"keepwarm.bytes.1"))
        self._names = _derive(key, b"keepwarm.names.1")
        self._invalid = InvalidTag

    def seal(self, name: bytes, data: Bytes) -> bytes:
        """Nonce, ciphertext and tag; different each time."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, name)

    def open(self, name: bytes, data: Bytes) -> bytes:
        """The bytes sealed under this name; raises BadRecord for any others."""
        view = memoryview(data)
        try:
            return self._cipher.decrypt(view[:NONCE_BYTES], view[NONCE_BYTES:], name)
        except (self._invalid, ValueError) as error:
            raise BadRecord("it was not sealed under this name, or was changed") from error

    def hidden(self, kind: str, value: bytes) -> bytes:
        """A name of 32 bytes that reveals nothing of the value; always the same for it."""
        return hmac.digest(self._names, kind.encode() + b"\0" + value, "sha256")


def stored_namespace(cipher: Cipher | None, name: Namespace) -> Namespace:
    """The namespace of a store's keys.

    In a sealed store it is secret: without it no one can hash a prompt and test whether the store
    has it.
    """
    return name if cipher is None else Namespace(cipher.hidden("namespace", name))


def _derive(key: bytes, use: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes")
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=use).derive(key)


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
