"""From the setting `remote` to tiers."""

from __future__ import annotations

import platform
import time
from contextlib import closing
from importlib.metadata import version
from typing import NamedTuple

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.config import Settings
from keepwarm.device.machine import backend as mlx_backend
from keepwarm.errors import BadInput
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.handshake import MARK_S, check_kind, read_mark
from keepwarm.remote.records import FleetKey
from keepwarm.remote.speed import TierSpeed
from keepwarm.remote.tier import RemoteTier
from keepwarm.remote.trial import time_blobs, try_backend
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.memory import MemoryTier
from keepwarm.store.names import SEALED


class RemoteReport(NamedTuple):
    """How fast a shared tier is, or why it cannot be used."""

    address: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # read
    problem: str = ""
    put_bytes_per_s: float = 0.0  # 0: it is full


TRIALS = 5  # of a measurement
START_S = 1.0  # that a start waits for trials of all


def open_remotes(
    settings: Settings, memory: MemoryTier, disk: DiskTier | None, mixed: bool
) -> list[RemoteTier]:
    """The shared tiers of the settings, in order. One that does not answer is tried again.

    A `mixed` machine may hold blocks of other classes, so that what it computes has its own.
    """
    password = settings.read_secret("remote_password")
    cipher = None if disk is None else disk.cipher
    mark = (disk.root / SEALED).read_bytes() if disk is not None and cipher is not None else b""
    fleet_key = FleetKey.parse(settings.read_secret("fleet_key"))
    tiers = [
        RemoteTier(
            open_backend(address, password),
            f"mixed-{compute_class()}" if mixed else compute_class(),
            cipher,
            memory,
            mark=mark,
            fleet_key=fleet_key,
            any_class=settings.share_numerics == "any",
        )
        for address in settings.remotes
    ]
    until = time.monotonic() + START_S
    for tier in tiers:
        tier.wait_until_tried(max(0.0, until - time.monotonic()))
    return tiers


def measure_remotes(settings: Settings) -> list[RemoteReport]:
    """Try each shared tier of the settings; nothing stays there."""
    password, is_sealed = (
        settings.read_secret("remote_password"),
        bool(settings.read_secret("encryption_key")),
    )
    return [_measure(address, password, is_sealed) for address in settings.remotes]


def _measure(address: str, password: str, is_sealed: bool) -> RemoteReport:
    speed = TierSpeed()
    with closing(open_backend(address, password)) as backend:
        try:
            for _ in range(TRIALS):
                try_backend(backend, speed)
            if (mark := read_mark(backend, CallDeadline(MARK_S))) is not None:
                check_kind(mark, is_sealed)
            rates = time_blobs(backend, speed.bytes_per_s)
        except (CallError, BadInput) as error:
            return RemoteReport(address, problem=str(error))
    read = rates.read if rates.put else speed.bytes_per_s
    return RemoteReport(address, speed.latency_s, read, put_bytes_per_s=rates.put)


def compute_class() -> str:
    """What numbers depend on besides the namespace, which has the dtypes of keys and values."""
    kind = mlx_backend()
    processor = f"-{platform.machine()}" if kind == "cpu" else ""
    minor = ".".join(version("mlx").split(".")[:2])
    return f"{kind}{processor}-mlx-{minor}"
