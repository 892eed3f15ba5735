"""An opened store: its tiers, its writer and its readers, made in one place and closed in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepwarm.cache.restore.manager import Manager
from keepwarm.cache.restore.reading import Reader
from keepwarm.cache.restore.writing import MemoryOnly, Saver, Writer
from keepwarm.cache.shelf import Shelf
from keepwarm.config import Settings
from keepwarm.kv.layout import Layout
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import Tier
from keepwarm.store.tiers import Tiers


@dataclass(frozen=True)
class Budgets:
    """Bytes each place may take. No disk at all is `disk = False`."""

    memory_bytes: int | None = 1 << 30  # None: nobody has chosen, so whoever opens it may
    queue_bytes: int = 1 << 30
    disk: bool = True
    disk_bytes: int | None = 20 << 30
    min_free_disk_bytes: int = 2 << 30
    disk_writes_per_day: int | None = None  # bytes; SSDs wear

    @classmethod
    def of(cls, settings: Settings) -> Budgets:
        return cls(
            memory_bytes=settings.memory_bytes or None,
            disk_bytes=settings.disk_bytes,
            disk_writes_per_day=settings.disk_writes_per_day or None,
        )


class OpenedStore:
    """Memory before what is still on its way to disk before disk."""

    def __init__(
        self, root: Path, budgets: Budgets | None = None, secret: str | None = None
    ) -> None:
        budgets = budgets or Budgets()
        self.memory = MemoryTier(budgets.memory_bytes or 0)
        self.shelf: Shelf | None = None
        self.saver: Saver = MemoryOnly(self.memory)
        tiers: list[tuple[str, Tier]] = [("memory", self.memory)]
        if budgets.disk:
            limits = DiskLimits(budgets.disk_bytes, budgets.min_free_disk_bytes)
            self.shelf = Shelf(root, limits, budgets.disk_writes_per_day, secret)
            disk = self.shelf.disk
            writer = Writer(self.memory, disk, budgets.queue_bytes, self.shelf.wear)
            self.saver = writer
            tiers += [("memory", writer.queued), ("disk", disk)]
        self.named_tiers = {"memory": self.memory} | dict(tiers[2:])
        self.tiers = Tiers(tiers)
        self.reader = Reader(self.tiers)

    def manager(self, identity: Identity, layout: Layout) -> Manager:
        """What one model with one set of KV options uses of this store."""
        name = namespace(identity) if self.shelf is None else self.shelf.register(identity)
        return Manager(name, layout, self.tiers, self.reader, self.saver)

    def close(self) -> None:
        """Write what is queued and let go of files."""
        self.saver.close()
        self.reader.close()
        self.memory.close()
        if self.shelf is not None:
            self.shelf.close()
