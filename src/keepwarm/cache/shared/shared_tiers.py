"""All that a store does with other machines."""

from __future__ import annotations

from collections.abc import Callable, Collection

from keepwarm.cache.shared.opening import is_mixed, open_remotes
from keepwarm.cache.shared.sharing import Sharer
from keepwarm.cache.shared.tombstones import Tombstones
from keepwarm.cache.shared.unsharing import Erase, Unsharing, UnsharingThread, erase_from
from keepwarm.config import Settings
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.wear import Wear
from keepwarm.store.memory import MemoryTier
from keepwarm.store.remote.janitor import PlaceLimits
from keepwarm.store.tier import BlockInfo
from keepwarm.store.tiers import Tiers

UNSHARING_S = 2.0  # that a deletion waits for shared tiers


class SharedTiers:
    """The shared tiers of the settings, what is written to them and what is deleted from them."""

    def __init__(self, settings: Settings, memory: MemoryTier, disk: DiskTier | None) -> None:
        self._settings = settings
        self._disk = disk
        self.is_mixed = is_mixed(settings, disk)
        self.tiers = open_remotes(settings, memory, disk, self.is_mixed)
        self.sharer: Sharer | None = None
        self._unsharing: UnsharingThread | None = None
        limits = PlaceLimits(settings.remote_bytes, settings.remote_age_s)
        janitors = (tier.keep_within(limits) for tier in self.tiers)
        self._janitors = [janitor for janitor in janitors if janitor is not None]

    def start(
        self,
        here: Tiers,
        kept: Callable[[Collection[BlockKey]], dict[BlockKey, BlockInfo]],
        unsharing: Callable[[Callable[[str], Erase]], Unsharing],
    ) -> None:
        """Share what is `kept` on disk and used again; delete what was deleted there."""
        addresses, per_day = self._settings.remotes, self._settings.remote_writes_per_day or None
        if not self.tiers or self._disk is None:
            return
        budget = Wear(self._disk.root, per_day, name="shared-writes")
        self.sharer = Sharer(self.tiers, here, kept, budget)
        Tombstones(self._disk).share_with(addresses)
        tiers = dict(zip(addresses, self.tiers, strict=True))
        self._unsharing = UnsharingThread(unsharing(erase_from(tiers)))

    def notice_deletion(self, deletions: object) -> None:  # noqa: ARG002
        """Something was deleted here by any process; does not wait."""
        if self._unsharing is not None:
            self._unsharing.notice()

    def unreached(self) -> list[str]:
        """The addresses of tiers that still have some of what was deleted; a deletion may wait."""
        return [] if self._unsharing is None else self._unsharing.wait(UNSHARING_S)

    def stop(self) -> None:
        """Write and delete no more."""
        if self.sharer is not None:
            self.sharer.close()
        if self._unsharing is not None:
            self._unsharing.close()
        for janitor in self._janitors:
            janitor.close()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
