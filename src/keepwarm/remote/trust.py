"""What is believed of a shared tier: verified records, and with a fleet key only those of machines
that have it.

Digests in a record show damage; anybody can make them fit. So a MAC of all its bytes lies beside
each record, and a record without one that fits is not used. Sealed records need none.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from keepwarm.concurrency import CallDeadline
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Record, check_identity
from keepwarm.remote.backend import Backend
from keepwarm.remote.compression import decode_record, memory_for, undo_code
from keepwarm.remote.names import MAC, RecordPlace, RemoteNames

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


class FetchedRecord(NamedTuple):
    record: Record
    n_bytes: int  # that were sent


class VerifiedRecords:
    """The records of a place, each verified before anybody sees it."""

    def __init__(
        self,
        backend: Backend,
        names: RemoteNames,
        cipher: Cipher | None,
        fleet_key: FleetKey | None,
    ) -> None:
        self._backend, self._names = backend, names
        self._seal, self._fleet_key = cipher, fleet_key

    def fetch(self, place: RecordPlace, deadline: CallDeadline) -> FetchedRecord | None:
        """None if it is not there; raises BadRecord or NewerFormat if it cannot be used."""
        name, verify = self._names.of(place), partial(self._verified, place)
        if self._fleet_key is None:
            return self._backend.fetch(name, memory_for, verify, deadline.left_s())
        data = self._backend.read(name, memory_for, deadline.left_s())
        if data is None:
            return None
        mac = self._backend.read(name + MAC, memory_for, deadline.left_s())
        self._fleet_key.check(name, data, mac)
        return verify(data)

    def _verified(self, place: RecordPlace, data: memoryview) -> FetchedRecord:
        try:
            record = decode_record(data if self._seal else undo_code(data), self._seal)
        except PermissionError as error:  # no key for it; a place would be out of order
            raise NewerFormat(str(error)) from error
        check_identity(record.header, place.key, place.part)
        return FetchedRecord(record, len(data))
