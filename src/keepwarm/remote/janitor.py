"""Keeps a shared directory or bucket within its limits, which nobody else does.

Ends of prompts go before their beginnings, and of these the least recently used first. One machine
at a time does it, under a lease: a blob that its holder renews. Clocks of machines are not
compared: a lease is over when it was seen unchanged for long enough, and ages are by the clock of
the place.
"""

from __future__ import annotations

import heapq
import os
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import psutil

from keepwarm.remote.backend import NAME, Backend, Listed, at_most
from keepwarm.remote.records import list_classes, parse_last

LEASE_FOLDER = "janitor"
LEASE = f"{LEASE_FOLDER}/lease"
LEASE_S = 1800.0
UNFINISHED = "tmp", "trial"  # folders of what is gone after a moment
UNFINISHED_S = 86400.0
MAX_LEASE = 1 << 10  # bytes
OWNER = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,9}) ")  # of a lease
FIRST_SWEEP_S, SWEEP_S = 60.0, 600.0  # since the start, and how often
CALL_S = 30.0  # nobody waits for it
AT_ONCE = 256  # names deleted in one call
DEPTH = 3  # slashes in the name of a record
NOTHING = 0, None  # known of what is there


class RemoteLimits(NamedTuple):
    """What a place may hold, and for how long unused; 0 is no limit."""

    n_bytes: int = 0
    age_s: float = 0.0


class _Block(NamedTuple):
    """The blobs of a block. Its folder with its parent's name as the last word tells the parent."""

    parent: str
    blobs: list[Listed]

    @property
    def used(self) -> float:
        return max(blob.used for blob in self.blobs)

    @property
    def n_bytes(self) -> int:
        return sum(blob.n_bytes for blob in self.blobs)


class Janitor:
    def __init__(
        self,
        backend: Backend,
        limits: RemoteLimits,
        store: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store`: the machine's own, by which it knows its lease again after a restart."""
        self._backend = backend
        self._limits = limits
        self._clock = clock
        name = f"{socket.gethostname()}:{store}".encode(errors="surrogateescape")
        self._holder = blake2b(name, digest_size=16).hexdigest().encode()
        self._seen, self._since = b"", 0.0  # another's lease, and since when it is the same
        # Bytes that its last sweep has left, and seconds since their first use; other machines'
        # sweeps tell theirs.
        self.found: tuple[int, float | None] = NOTHING

    def sweep(self) -> int:
        """Delete what is over the limits, if this machine holds the lease; how many blobs.

        Raises CallError.
        """
        if not self._hold_lease():
            self.found = NOTHING
            return 0
        listed = list(walk(self._backend))
        now = self._now([one.used for one in listed])
        over = list(surplus(listed, self._limits, now))
        doomed = [*over, *self._leftovers(now)]
        for start in range(0, len(doomed), AT_ONCE):
            if not self._hold_lease():
                self.found = NOTHING
                return start
            self._backend.delete([one.name for one in doomed[start : start + AT_ONCE]], CALL_S)
        left = set(listed) - set(over)
        oldest_s = max(0.0, now - min(one.used for one in left)) if left else None
        self.found = sum(one.n_bytes for one in left), oldest_s
        return len(doomed)

    def _hold_lease(self) -> bool:
        """Take or renew the lease; False if another machine has it. A full place cannot store one,
        and needs a sweep most, so whoever could take the lease sweeps without it.
        """
        found = self._read_lease()
        if found is not None and not self._is_own(found):
            if found != self._seen:
                self._seen, self._since = found, self._clock()
            if self._clock() - self._since < LEASE_S:
                return False
        own = b"%s %d %s" % (self._holder, os.getpid(), uuid.uuid4().hex.encode())
        if not self._backend.put(LEASE, [own], CALL_S, replace=found is not None):
            self._backend.touch([LEASE], CALL_S)  # its time is the clock of the place
        return self._read_lease() in (own, found)

    def _is_own(self, found: bytes) -> bool:
        """Whether a lease is of this process, or of one before it that was killed: a server that is
        restarted often would otherwise never sweep.
        """
        owner = OWNER.match(found)
        if owner is None or owner[1] != self._holder:
            return False
        pid = int(owner[2])
        return pid == os.getpid() or not psutil.pid_exists(pid)

    def _leftovers(self, now: float) -> Iterator[Listed]:
        """What machines that were killed have left unfinished."""
        for folder in UNFINISHED:
            for one in list_all(self._backend, folder):
                if now - one.used > UNFINISHED_S and NAME.fullmatch(one.name):
                    yield one

    def _read_lease(self) -> bytes | None:
        found = self._backend.read(LEASE, at_most(MAX_LEASE), CALL_S, n_bytes=MAX_LEASE)
        return None if found is None else bytes(found)

    def _now(self, used: Sequence[float]) -> float:
        """When the lease was renewed, by the place's clock, or without one the latest use."""
        times = [one.used for one in self._backend.list_names(LEASE_FOLDER, CALL_S)]
        return max(times or used, default=0.0)


def list_all(backend: Backend, folder: str) -> Iterator[Listed]:
    """By pages: no time is enough for all names of a large bucket."""
    after = ""
    while page := backend.list_page(folder, CALL_S, after):
        yield from page
        after = page[-1].name


def walk(backend: Backend) -> Iterator[Listed]:
    """All records."""
    folders = list_classes(backend, CALL_S)
    while folders:
        for one in list_all(backend, folders.pop()):
            if one.name.count("/") < DEPTH:
                folders += [one.name] if NAME.fullmatch(one.name) else []
            elif parse_last(one.name) is not None:
                yield one


def surplus(listed: Iterable[Listed], limits: RemoteLimits, now: float) -> Iterator[Listed]:
    """What to delete, ends first."""
    blocks: dict[str, _Block] = {}
    for one in listed:
        parent, _, last = one.name.rpartition("/")
        within = parent.rpartition("/")[0]
        own = f"{within}/{last.split('.')[1]}"
        blocks.setdefault(own, _Block(parent, [])).blobs.append(one)
    n_children = Counter(block.parent for block in blocks.values())
    ends = [(block.used, own) for own, block in blocks.items() if not n_children[own]]
    heapq.heapify(ends)
    n_bytes = sum(block.n_bytes for block in blocks.values())
    while ends:
        used, own = heapq.heappop(ends)
        is_old = limits.age_s and now - used > limits.age_s
        if not is_old and not (limits.n_bytes and n_bytes > limits.n_bytes):
            return
        parent, blobs = blocks[own]
        n_bytes -= blocks[own].n_bytes
        yield from blobs
        n_children[parent] -= 1
        if not n_children[parent] and parent in blocks:
            heapq.heappush(ends, (blocks[parent].used, parent))
