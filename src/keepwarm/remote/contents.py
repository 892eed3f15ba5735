"""What a shared place holds, for those who look after it: told by names, and verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from keepwarm.concurrency import CallError
from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.remote.backend import Backend, Listed
from keepwarm.remote.compression import memory_for
from keepwarm.remote.janitor import walk
from keepwarm.remote.records import FleetKey, RemoteNames, RemoteRecord, decode_named

READ_S = 60.0  # a record; nobody waits for it


class HeldBlob(NamedTuple):
    """A record, or what is told of past answers, which nobody can read here."""

    listed: Listed
    compute_class: str
    namespace: Namespace
    record: RemoteRecord | None


def held_blobs(backend: Backend) -> Iterator[HeldBlob]:
    """Those of all classes; raises CallError. Redis looks through all of its keys for it."""
    for listed in walk(backend):
        with suppress(ValueError):  # others may write there too
            compute_class, namespace, parent, last = listed.name.split("/")
            names = RemoteNames(compute_class, has_mac=last.endswith(".mac"))
            within = Namespace(bytes.fromhex(namespace)), BlockKey(bytes.fromhex(parent))
            record = names.parse(listed, *within, compute_class)
            yield HeldBlob(listed, compute_class, within[0], record)


def find_fault(
    backend: Backend,
    name: str,
    record: RemoteRecord,
    cipher: Cipher | None,
    fleet_key: FleetKey | None,
) -> str:
    """Why a record cannot be used here; empty if it can, or is gone by now."""

    def verify(data: memoryview) -> str:
        if name.endswith(".mac"):
            if fleet_key is None:
                return "it needs the fleet key"
            data = fleet_key.checked(name, data)
        decode_named(data, record, cipher)
        return ""

    try:
        return backend.fetch(name, memory_for, verify, READ_S) or ""
    except (BadRecord, NewerFormat, CallError) as error:
        return str(error)
