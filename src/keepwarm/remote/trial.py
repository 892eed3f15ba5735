"""Trying a shared place before it is used: can it do what a tier needs, and how fast is it?"""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.errors import BadInput
from keepwarm.remote.backend import Backend, FolderRange, at_most
from keepwarm.remote.speed import TierSpeed

TRIAL_BYTES = 1 << 20
TRIAL_S = 5.0  # the longest it may take
FOLDER = "trial"
N_TIMED = 3  # blobs, read at the same time as those of a prompt are
TIMED_S = 0.2  # that each of them should take
TIMED_BYTES = 1 << 18, 1 << 22  # the least and the most
PATIENT_S = 30.0
NO_PARTS = "It cannot be used as a shared tier: it does not read parts of blobs"


def try_backend(backend: Backend, speed: TierSpeed) -> None:
    """Put, find, read and delete a blob, and measure it. Raises CallError where that fails, and
    BadInput if the place does something else than it is asked.

    A full place can still be read from. One that replaces blobs is good enough, because equal names
    have equal content.
    """
    deadline, name = CallDeadline(TRIAL_S), f"{FOLDER}/{uuid.uuid4().hex}"
    time_calls(backend, speed, deadline)
    data = os.urandom(TRIAL_BYTES)
    if not backend.put(name, [data], deadline.left_s()):
        return
    try:
        _check(backend, name, data, speed, deadline)
    finally:
        backend.delete([name], deadline.left_s())


class BlobRates(NamedTuple):
    """Bytes in a second."""

    put: float = 0.0  # 0 if it is full
    read: float = 0.0


def time_blobs(backend: Backend, bytes_per_s: float) -> BlobRates:
    """Put some blobs, one after the other, and read them at the same time; about `bytes_per_s` is
    expected. Raises CallError where that fails.
    """
    least, most = TIMED_BYTES
    data = os.urandom(max(least, min(most, int(bytes_per_s * TIMED_S))))
    names = [f"{FOLDER}/{uuid.uuid4().hex}" for _ in range(N_TIMED)]
    try:
        began = time.perf_counter()
        if not all(backend.put(name, [data], PATIENT_S) for name in names):
            return BlobRates()
        put = time.perf_counter()
        with ThreadPoolExecutor(N_TIMED) as readers:
            list(readers.map(lambda name: backend.read(name, at_most(most), PATIENT_S), names))
        n_bytes, end = N_TIMED * len(data), time.perf_counter()
        return BlobRates(n_bytes / (put - began), n_bytes / (end - put))
    finally:
        backend.delete(names, PATIENT_S)


def time_calls(backend: Backend, speed: TierSpeed, deadline: CallDeadline) -> None:
    """Measure how fast a place answers; the first call may have to connect."""
    backend.sizes([FOLDER], deadline.left_s())
    for _ in range(2):
        with speed.calling():
            backend.sizes([FOLDER], deadline.left_s())


def _check(
    backend: Backend, name: str, data: bytes, speed: TierSpeed, deadline: CallDeadline
) -> None:
    take = at_most(TRIAL_BYTES)
    with speed.reading(TRIAL_BYTES) as add:
        whole = backend.read(name, take, deadline.left_s())
        add(TRIAL_BYTES)
    if whole is None or bytes(whole) != data:
        raise CallError("it returned other bytes than were put")
    try:
        with speed.calling():
            part = backend.read(name, take, deadline.left_s(), start=1000, n_bytes=100)
    except CallError as error:  # it reads the whole, so it is there
        raise BadInput(f"{NO_PARTS} ({error}).") from error
    if part is None or bytes(part) != data[1000:1100]:
        raise BadInput(f"{NO_PARTS}.")
    with speed.calling():
        wanted = FolderRange(FOLDER, name.rpartition("/")[2])
        (listed,) = backend.look([wanted], deadline.left_s())
    if name not in [one.name for one in listed]:
        raise BadInput("It cannot be used as a shared tier: it does not list what was put.")
