"""All that a store does with other machines: the remote stores of the settings, opened, written to,
deleted from and measured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from keepwarm import blas
from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.config import Settings
from keepwarm.device import machine
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import Backend, Listed
from keepwarm.remote.compression import memory_for
from keepwarm.remote.deleter import DeleterThread, RemoteDeleter, erase_from
from keepwarm.remote.handshake import MARK_S, check_kind, read_mark
from keepwarm.remote.health import TRIAL_S, RemoteSpeed, time_blobs, try_backend
from keepwarm.remote.janitor import RemoteLimits, walk
from keepwarm.remote.records import FleetKey, RemoteNames, RemoteRecord, decode_named
from keepwarm.remote.tier import ASK_S, BATCH_CALLS, MAX_ASK_SHARE, RemoteTier
from keepwarm.remote.uploader import Uploader
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.tombstones import Tombstones
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.memory import MemoryTier
from keepwarm.store.names import SEALED
from keepwarm.store.tier import BlockInfo, NamedBlock
from keepwarm.store.tiers import Tiers


class RemoteReport(NamedTuple):
    """How fast a shared tier is, or why it cannot be used."""

    address: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # read
    problem: str = ""
    put_bytes_per_s: float = 0.0  # 0: it is full or read-only

    @property
    def far_s(self) -> float:
        """It is too far for prompts that take less to compute: a question is two round trips, and
        as many to connect. 0 if it is near.
        """
        asking_s = 2 * BATCH_CALLS * self.latency_s
        return asking_s / MAX_ASK_SHARE if asking_s > ASK_S else 0.0


TRIALS = 5  # of a measurement
START_S = 1.0  # that a start waits for trials of all
DELETING_S = 2.0  # that a deletion waits for shared tiers


class SharedTiers:
    """The shared tiers of the settings, what is written to them and what is deleted from them."""

    def __init__(
        self,
        settings: Settings,
        memory: MemoryTier,
        disk: DiskTier,
        is_mixed: bool,
        on_unverified: Callable[[Namespace], None],
    ) -> None:
        """`on_unverified` is called with the namespace of a record that anybody could have put
        there.
        """
        self._settings = settings
        self._disk = disk
        self.tiers = self._opened(memory, is_mixed, on_unverified)
        self.uploader: Uploader | None = None
        self._deleter: DeleterThread | None = None
        limits = RemoteLimits(settings.remote_bytes, settings.remote_age_s)
        for tier in self.tiers:
            tier.keep_within(limits, disk.root)

    def _opened(
        self, memory: MemoryTier, is_mixed: bool, on_unverified: Callable[[Namespace], None]
    ) -> list[RemoteTier]:
        """In order. One that does not answer is tried again.

        A mixed machine may hold blocks of other classes, so that what it computes has its own.
        """
        settings, disk = self._settings, self._disk
        password = settings.read_secret("remote_password")
        mark = b"" if disk.cipher is None else (disk.root / SEALED).read_bytes()
        numerics = compute_class(settings.home)
        fleet_key = FleetKey.parse(settings.read_secret("fleet_key"))
        tiers = [
            RemoteTier(
                open_backend(address, password),
                f"mixed-{numerics}" if is_mixed else numerics,
                disk.cipher,
                memory,
                address=address,
                mark=mark,
                fleet_key=fleet_key,
                any_class=settings.share_numerics == "any",
                on_unverified=on_unverified,
                flags=disk.index.database,
            )
            for address in settings.remotes
        ]
        until = time.monotonic() + START_S
        for tier in tiers:
            tier.health.wait_until_tried(max(0.0, until - time.monotonic()))
        return tiers

    def start(
        self,
        here: Tiers,
        kept: Callable[[Collection[BlockKey]], dict[BlockKey, BlockInfo]],
        keep: Callable[[], Collection[BlockKey]],
        *,
        may_share: Callable[[], bool] = lambda: True,
    ) -> None:
        """Share what is `kept` on disk and used again, as long as its class is that of the tiers;
        delete what was deleted there, but for what agents `keep`.
        """
        addresses, per_day = self._settings.remotes, self._settings.remote_writes_per_day or None
        budget = WriteBudget(self._disk.root, per_day, name="uploaded")
        tombstones = Tombstones(self._disk)
        tombstones.share_with(addresses)

        def delete_later(namespace: Namespace, block: NamedBlock) -> None:
            tombstones.add([namespace], [block])
            self.notice_deletion(block)

        sharing = self.tiers, here, kept, budget, delete_later
        self.uploader = Uploader(*sharing, may_share=may_share)
        tiers = dict(zip(addresses, self.tiers, strict=True))
        self._deleter = DeleterThread(RemoteDeleter(tombstones, keep, erase_from(tiers)))

    def notice_deletion(self, deletions: object) -> None:  # noqa: ARG002
        """Something was deleted here by any process; does not wait."""
        if self._deleter is not None:
            self._deleter.notice()

    def unreached(self) -> list[str]:
        """The addresses of tiers that still have some of what was deleted; a deletion may wait."""
        return [] if self._deleter is None else self._deleter.wait(DELETING_S)

    def stop(self) -> None:
        """Write and delete no more."""
        if self.uploader is not None:
            self.uploader.close()
        if self._deleter is not None:
            self._deleter.close()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def measure_remotes(settings: Settings) -> list[RemoteReport]:
    """Try each shared tier of the settings; nothing stays there."""
    password, is_sealed = (
        settings.read_secret("remote_password"),
        bool(settings.read_secret("encryption_key")),
    )
    return [_measure(address, password, is_sealed) for address in settings.remotes]


def _measure(address: str, password: str, is_sealed: bool) -> RemoteReport:
    speed = RemoteSpeed()
    with closing(open_backend(address, password)) as backend:
        try:
            for _ in range(TRIALS):
                try_backend(backend, speed, CallDeadline(TRIAL_S))
            if (mark := read_mark(backend, CallDeadline(MARK_S))) is not None:
                check_kind(mark, is_sealed)
            rates = time_blobs(backend, speed.bytes_per_s)
        except (CallError, BadInput) as error:
            return RemoteReport(address, problem=str(error))
    read = rates.read if rates.put else speed.bytes_per_s
    return RemoteReport(address, speed.latency_s, read, put_bytes_per_s=rates.put)


def compute_class(home: Path) -> str:
    """What numbers depend on besides the namespace, which has the dtypes of keys and values: the
    kind and family of the processor, the BLAS of a CPU, and the versions of what computes.
    """
    blas.start(home)  # as a model does that is loaded later
    kind, library = machine.backend(), blas.in_use()
    parts = [kind, machine.architecture(), *([library.name] if library and kind == "cpu" else [])]
    for package in ("mlx", "mlx-lm"):
        parts += [package, ".".join(version(package).split(".")[:2])]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(parts))


# What a shared store holds, for those who look after it: told by names, and verified.

READ_S = 60.0  # a record; nobody waits for it


class HeldBlob(NamedTuple):
    """A record, or what is told of past answers, or what names that."""

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
    """Why a record cannot be used here; empty if it can, or is gone by now. Raises CallError."""

    def verify(data: memoryview) -> str:
        if name.endswith(".mac"):
            if fleet_key is None:
                return "it needs the fleet key"
            data = fleet_key.checked(name, data)
        decode_named(data, record, cipher)
        return ""

    try:
        return backend.fetch(name, memory_for, verify, READ_S) or ""
    except (BadRecord, NewerFormat) as error:
        return str(error)
