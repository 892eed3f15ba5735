"""Computing a prompt from its front while its stored blocks are loaded from the back.

Where loading is slow, both at once take less time than either. They meet at the end of a block;
behind it rows are those that were loaded, which are the same as if they had been computed.
"""

from __future__ import annotations

from time import perf_counter

from keepwarm.cache.restore.loading import Fault, Loading
from keepwarm.engine.lane import Lane, WarmPrefix, log_failure
from keepwarm.engine.prefill import Prefill
from keepwarm.prefix.blocks import BLOCK_TOKENS


class Meeting:
    """Of one prompt. For the engine's thread."""

    def __init__(self, lane: Lane, loading: Loading, prefill: Prefill) -> None:
        self._lane, self._loading, self._prefill = lane, loading, prefill

    @property
    def most_tokens(self) -> int:
        """Of the next slice: it ends with a block, and hardly behind where both will meet."""
        n_between, load_s = self._n_between, self._load_s
        share = load_s / (load_s + self._prefill_s(n_between)) if n_between else 0.0
        n_blocks = max(1, int(share * n_between) // BLOCK_TOKENS)
        longest = BLOCK_TOKENS << (n_blocks.bit_length() - 1)  # a power of two, as on a grid
        return longest - self._prefill.n_done % BLOCK_TOKENS

    def join(self) -> WarmPrefix | None:
        """What is reused, once both have met or nothing can be loaded; None before that."""
        try:
            if self._prefill.n_done >= self._loading.point.n_tokens:
                return self._alone(None)
            return self._joined() if self._has_met else None
        except Exception:
            log_failure()
            return self._alone("error")

    def abandon(self) -> None:
        self._loading.abandon()

    def _joined(self) -> WarmPrefix:
        loading, prefill = self._loading, self._prefill
        loaded = loading.finish(prefill.caches, prefill.n_done // BLOCK_TOKENS)
        restored = loaded.restored
        if restored is None or restored.caches is None:
            return self._alone(loaded.fault)
        n_tokens = restored.n_tokens
        self._lane.restorer.touch(loading.tokens[:n_tokens], loading.keys)
        return WarmPrefix(restored.caches, n_tokens, restored.tokens_by_tier, n_tokens)

    def _alone(self, fault: Fault | None) -> WarmPrefix:
        """All is computed."""
        self.abandon()
        return WarmPrefix(self._prefill.caches, 0, {}, 0, fault)

    @property
    def _has_met(self) -> bool:
        """Waits where the rest is loaded before one more block would be computed."""
        self._loading.advance()
        n_done, block_s = self._prefill.n_done, self._prefill_s(BLOCK_TOKENS)
        if n_done % BLOCK_TOKENS or self._load_s > block_s:
            return False
        return self._loading.is_read(n_done, block_s)

    @property
    def _n_between(self) -> int:
        """Tokens that are neither computed nor loaded."""
        return max(0, self._loading.read_from - self._prefill.n_done)

    @property
    def _load_s(self) -> float:
        """Seconds until they would be loaded, at the speed until now."""
        loading = self._loading
        n_read = max(BLOCK_TOKENS, loading.point.n_tokens - loading.read_from)
        return self._n_between * (perf_counter() - loading.began) / n_read

    def _prefill_s(self, n_tokens: int) -> float:
        n_done = self._prefill.n_done
        return self._lane.restorer.rates.prefill_s(n_done, n_done + n_tokens)
