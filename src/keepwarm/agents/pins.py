"""Pins with a TTL: a client asked to keep a prompt up to some token for some time.

The expiry time is part of the pin's owner name, so that any process can end expired pins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, block_key, chain, pack
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import TTL_PIN

DEFAULT_TTL_S = 300.0


class TtlPins:
    def __init__(self, disk: DiskTier, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._clock = clock

    def pin(
        self, namespace: Namespace, tokens: Sequence[int], n_tokens: int, ttl_s: float | None
    ) -> None:
        """Keep the blocks of the first `n_tokens`; pinning again extends the time.

        The block that holds the last of them is pinned, which protects all its ancestors. So is
        one that ends exactly there, if it is stored: on state models it has the checkpoint.
        """
        refs = list(chain(namespace, tokens))
        last = (n_tokens - 1) // BLOCK_TOKENS
        if not 0 <= last < len(refs):
            return
        start = last * BLOCK_TOKENS
        ending = block_key(namespace, refs[last].parent, pack(tokens[start:n_tokens]))
        until = self._clock() + (DEFAULT_TTL_S if ttl_s is None else ttl_s)
        for key in {refs[last].key, *self._disk.have([ending])}:
            self._disk.pin(key, f"{TTL_PIN}{until:.0f}")

    def expire(self) -> int:
        """End expired pins; how many there were. Eviction also does this."""
        return self._disk.index.expire_ttl_pins(self._clock())
