"""Pins that end by themselves: somebody asked to keep a prompt up to here, for so long.

The end stands in the owner's name, so that any process can let go of what has expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, block_key, chain, pack
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import TTL_PIN

TTL_S = 300.0  # for who names none


class Marks:
    def __init__(self, disk: DiskTier, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._clock = clock

    def hold(
        self, namespace: Namespace, tokens: Sequence[int], place: int, ttl_s: float | None
    ) -> None:
        """Keep the blocks of a conversation up to a token; asking again makes it longer.

        The block that the place lies in is kept whole: eviction takes no ancestor of a pinned one.
        So is one that ends there, if there is one: on state models it has the checkpoint.
        """
        refs = list(chain(namespace, tokens))
        last = (place - 1) // BLOCK_TOKENS
        if not 0 <= last < len(refs):
            return
        start = last * BLOCK_TOKENS
        ending = block_key(namespace, refs[last].parent, pack(tokens[start:place]))
        until = self._clock() + (TTL_S if ttl_s is None else ttl_s)
        for key in {refs[last].key, *self._disk.have([ending])}:
            self._disk.pin(key, f"{TTL_PIN}{until:.0f}")

    def sweep(self) -> int:
        """Let go of what has expired; how many pins that were. Eviction does so by itself."""
        return self._disk.index.expire_ttl_pins(self._clock())
