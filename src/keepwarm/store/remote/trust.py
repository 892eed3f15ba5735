"""Who may write to a plain shared tier: with a fleet key, machines that have it.

Digests in a record show damage; anybody can make them fit. So a MAC of all its bytes lies beside
each record, and a record without one that fits is not used. Sealed records need none.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest

from keepwarm.errors import BadInput, BadRecord

KEY_BYTES = 32
MAC_BYTES = 32


class FleetKey:
    """What the machines of a fleet have in common."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def parse(cls, text: str) -> FleetKey | None:
        """From a setting; None if that is empty."""
        if not text:
            return None
        try:
            key = b64decode(text, validate=True)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise BadInput(
                "The fleet key is not base64 of 32 bytes; make one with: openssl rand -base64 32"
            )
        return cls(key)

    def mac(self, name: str, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Of all bytes under a name, which is part of it: a class is in no record."""
        mac = blake2b(key=self._key, digest_size=MAC_BYTES, person=b"keepwarm.fleet.1")
        mac.update(name.encode() + b"\0")
        for piece in pieces:
            mac.update(piece)
        return mac.digest()

    def check(self, name: str, data: memoryview, mac: memoryview | None) -> None:
        """Raise BadRecord unless a machine with this key has put the bytes under this name."""
        if mac is None or not compare_digest(self.mac(name, [data]), bytes(mac)):
            raise BadRecord("its MAC is missing or not made with the fleet key")
