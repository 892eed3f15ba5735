"""Trying a shared place before it is used: can it do what a tier needs, and how fast is it?"""

from __future__ import annotations

import os
import uuid

from keepwarm.errors import BadInput, BadRecord
from keepwarm.store.blobs.backend import Backend, BlobError, Listed
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.remote.speed import TierSpeed
from keepwarm.store.seal import Seal

TRIAL_BYTES = 1 << 20
TRIAL_S = 5.0  # the longest it may take
FOLDER = "trial"
MARK = "mark/keepwarm.mark.1"
PLAIN = b"plain"


def try_backend(backend: Backend, speed: TierSpeed) -> None:
    """Put, find, read and delete a blob, and measure it. Raises BlobError where that fails, and
    BadInput if the place does something else than it is asked.

    A full place can still be read from. One that replaces blobs is good enough, because equal names
    have equal content.
    """
    deadline, order = CallDeadline(TRIAL_S), uuid.uuid4().bytes
    blob = Listed(f"{FOLDER}/{order.hex()}", order)
    for _ in range(2):  # the first connects
        with speed.asking():
            backend.sizes([blob.name], deadline.left_s())
    data = os.urandom(TRIAL_BYTES)
    if not backend.put(blob.name, [data], deadline.left_s(), order):
        return
    try:
        _check(backend, blob, data, speed, deadline)
    finally:
        backend.delete([blob], deadline.left_s())


def check_mark(backend: Backend, seal: Seal | None) -> None:
    """Plain and sealed records never mix, nor those of two keys: the first machine leaves a mark.

    Raises BadInput if the mark is another machine's.
    """
    deadline = CallDeadline(TRIAL_S)
    found = backend.read(MARK, _new, deadline.left_s())
    if found is None:
        backend.put(MARK, [_mark_of(seal)], deadline.left_s())
        found = backend.read(MARK, _new, deadline.left_s())
    if found is None:
        raise BlobError("it does not keep what is put")
    mark = bytes(found)
    if seal is None and mark != PLAIN:
        raise BadInput(
            "It holds encrypted blocks; set KEEPWARM_ENCRYPTION_KEY to their key to use it."
        )
    if seal is not None and mark == PLAIN:
        raise BadInput("It holds blocks that are not encrypted; name an empty place instead.")
    if seal is not None:
        _open_mark(seal, mark)


def _mark_of(seal: Seal | None) -> bytes:
    return PLAIN if seal is None else seal.seal(MARK.encode(), b"")


def _open_mark(seal: Seal, mark: bytes) -> None:
    try:
        seal.open(MARK.encode(), mark)
    except BadRecord as error:
        raise BadInput(
            "It was encrypted with another key; use base64 of the same 32 bytes on all machines, "
            "because a passphrase gives each of them another key."
        ) from error


def _check(
    backend: Backend, blob: Listed, data: bytes, speed: TierSpeed, deadline: CallDeadline
) -> None:
    part = backend.read(blob.name, _new, deadline.left_s(), start=1000, n_bytes=100)
    if part is None or bytes(part) != data[1000:1100]:
        raise BadInput("It cannot be used as a shared tier: it does not read parts of blobs.")
    with speed.reading() as add:
        whole = backend.read(blob.name, _new, deadline.left_s())
        add(TRIAL_BYTES)
    if whole is None or bytes(whole) != data:
        raise BlobError("it returned other bytes than were put")
    listed = backend.list_names(FOLDER, deadline.left_s(), blob.order)
    if blob.name not in [one.name for one in listed]:
        raise BadInput("It cannot be used as a shared tier: it does not list what was put.")


def _new(n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))
