"""All that a store does with other machines."""

from __future__ import annotations

from collections.abc import Callable, Collection

from keepwarm.config import Settings
from keepwarm.prefix.blocks import BlockKey
from keepwarm.remote.deleter import DeleterThread, RemoteDeleter, erase_from
from keepwarm.remote.janitor import RemoteLimits
from keepwarm.remote.opening import open_remotes
from keepwarm.remote.uploader import Uploader
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.tombstones import Tombstones
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import BlockInfo
from keepwarm.store.tiers import Tiers

DELETING_S = 2.0  # that a deletion waits for shared tiers


class SharedTiers:
    """The shared tiers of the settings, what is written to them and what is deleted from them."""

    def __init__(
        self, settings: Settings, memory: MemoryTier, disk: DiskTier | None, is_mixed: bool
    ) -> None:
        self._settings = settings
        self._disk = disk
        self.tiers = open_remotes(settings, memory, disk, is_mixed)
        self.uploader: Uploader | None = None
        self._deleter: DeleterThread | None = None
        limits = RemoteLimits(settings.remote_bytes, settings.remote_age_s)
        janitors = (tier.keep_within(limits) for tier in self.tiers)
        self._janitors = [janitor for janitor in janitors if janitor is not None]

    def start(
        self,
        here: Tiers,
        kept: Callable[[Collection[BlockKey]], dict[BlockKey, BlockInfo]],
        keep: Callable[[], Collection[BlockKey]],
    ) -> None:
        """Share what is `kept` on disk and used again; delete what was deleted there, but for what
        agents `keep`.
        """
        addresses, per_day = self._settings.remotes, self._settings.remote_writes_per_day or None
        if not self.tiers or self._disk is None:
            return
        budget = WriteBudget(self._disk.root, per_day, name="shared-writes")
        self.uploader = Uploader(self.tiers, here, kept, budget)
        tombstones = Tombstones(self._disk)
        tombstones.share_with(addresses)
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
        for janitor in self._janitors:
            janitor.close()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
