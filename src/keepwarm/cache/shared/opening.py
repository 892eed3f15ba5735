"""From the setting `remote` to tiers."""

from __future__ import annotations

import platform
import time
from contextlib import closing
from importlib.metadata import version
from typing import NamedTuple

from keepwarm.config import Settings
from keepwarm.device.machine import backend as mlx_backend
from keepwarm.errors import BadInput
from keepwarm.store.blobs.backend import BlobError
from keepwarm.store.blobs.opening import open_backend
from keepwarm.store.memory import MemoryTier
from keepwarm.store.remote.speed import TierSpeed
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.remote.trial import try_backend
from keepwarm.store.seal import Seal

class RemoteReport(NamedTuple):
    """How fast a shared tier is, or why it cannot be used."""

    address: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    problem: str = ""


TRIALS = 5  # of a measurement
START_S = 1.0  # that a start waits for trials of all


def open_remotes(
    settings: Settings, seal: Seal | None, memory: MemoryTier
) -> list[RemoteTier]:
    """The shared tiers of the settings, in order. One that does not answer is tried again."""
    password = settings.read_remote_password()
    backends = [open_backend(address, password) for address in settings.remotes]
    tiers = [RemoteTier(each, numerics_class(), seal, memory) for each in backends]
    until = time.monotonic() + START_S
    for tier in tiers:
        tier.wait_until_tried(max(0.0, until - time.monotonic()))
    return tiers


def measure_remotes(settings: Settings) -> list[RemoteReport]:
    """Try each shared tier of the settings; nothing stays there."""
    password = settings.read_remote_password()
    return [_measure(address, password) for address in settings.remotes]


def _measure(address: str, password: str) -> RemoteReport:
    speed = TierSpeed()
    with closing(open_backend(address, password)) as backend:
        try:
            for _ in range(TRIALS):
                try_backend(backend, speed)
        except (BlobError, BadInput) as error:
            return RemoteReport(address, problem=str(error))
    return RemoteReport(address, speed.latency_s, speed.bytes_per_s)


def numerics_class() -> str:
    """What numbers depend on besides the namespace, which has the dtypes of keys and values."""
    kind = mlx_backend()
    processor = f"-{platform.machine()}" if kind == "cpu" else ""
    minor = ".".join(version("mlx").split(".")[:2])
    return f"{kind}{processor}-mlx-{minor}"
