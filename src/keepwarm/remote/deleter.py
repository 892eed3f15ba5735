"""Deletes from tiers that machines share what was deleted here, now or when they can be reached."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import TypeAlias

from keepwarm.concurrency import CallError
from keepwarm.errors import StoreFailed
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.cipher import Cipher
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.erasing import erase_blocks
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.disk.tombstones import Tombstone, Tombstones

LOG = logging.getLogger(__name__)
RETRY_S = 2.0  # how often tiers are looked at that could not be reached

Keep: TypeAlias = Collection[BlockKey]
Erase: TypeAlias = Callable[[Tombstone, Keep], bool]


class RemoteDeleter:
    """Works through tombstones."""

    def __init__(
        self, tombstones: Tombstones, keep: Callable[[], Keep], erase: Callable[[str], Erase]
    ) -> None:
        """`keep` are the blocks of all agents here. `erase` is what deletes from the tier at an
        address; it returns False where that must be tried again.
        """
        self._tombstones = tombstones
        self._keep = keep
        self._erase = erase

    def finish(self) -> list[str]:
        """Delete what can be deleted now; the addresses of tiers that still have some of it."""
        places, unreached = self._tombstones.places(), set()
        found = self._tombstones.all()
        keep = self._keep() if found else ()
        for path, tombstone in found.items():
            wanted = [address for address in tombstone.left if address in places]
            left = [at for at in wanted if at in unreached or not self._erase(at)(tombstone, keep)]
            unreached.update(left)
            self._tombstones.finish(path, tombstone, left)
        return [address for address in places if address in unreached]

    def left(self) -> list[str]:
        """The addresses of tiers that have some of it, as far as is known now."""
        left = {address for dead in self._tombstones.all().values() for address in dead.left}
        return [address for address in self._tombstones.places() if address in left]


class DeleterThread:
    """Does so in a server, whenever something was deleted and as long as something is left."""

    def __init__(self, deleter: RemoteDeleter) -> None:
        self._deleter = deleter
        self._changed = threading.Condition()
        self._n_noticed, self._n_tried = 1, 0  # deletions; an earlier process may have left some
        self._left: list[str] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="keepwarm-deleter", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Something was deleted; from any thread, without waiting."""
        with self._changed:
            self._n_noticed += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> list[str]:
        """Wait until it was tried; the addresses of tiers that were not reached by then."""
        with self._changed:
            until = self._n_noticed
            self._changed.wait_for(lambda: self._n_tried >= until or self._closing, timeout_s)
            if self._n_tried >= until:
                return list(self._left)
        return self._deleter.left()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (n_noticed := self._next()) is not None:
            try:
                left = self._deleter.finish()
            except StoreFailed as error:
                LOG.warning("what was deleted could not be deleted from shared tiers: %s", error)
                left = self._left
            with self._changed:
                self._n_tried, self._left = n_noticed, left
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Wait for a deletion, or for the time of another try; how many deletions there were."""
        with self._changed:
            timeout_s = RETRY_S if self._left else None
            self._changed.wait_for(
                lambda: self._n_noticed > self._n_tried or self._closing, timeout_s
            )
            return None if self._closing else self._n_noticed


def erase_from(tiers: Mapping[str, RemoteTier]) -> Callable[[str], Erase]:
    """Deletes from tiers that are open, by address."""

    def of(address: str) -> Erase:
        tier = tiers.get(address)
        return lambda dead, keep: (
            tier is not None and tier.erase(dead.namespaces, dead.blocks, keep)
        )

    return of


def erase_at_once(password: str, cipher: Cipher | None) -> Callable[[str], Erase]:
    """Deletes from tiers that are opened for it, as by the command line."""

    def of(address: str) -> Erase:
        def erase(dead: Tombstone, keep: Keep) -> bool:
            with closing(open_backend(address, password)) as backend:
                try:
                    erase_blocks(backend, cipher, dead.namespaces, dead.blocks, keep)
                except CallError as error:
                    LOG.info("a shared tier does not answer: %s", error)
                    return False
            return True

        return erase

    return of
