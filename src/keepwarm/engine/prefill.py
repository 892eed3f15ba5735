"""Reading a prompt into a cache, a slice at a time, and keeping each block as it is done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from keepwarm import kv
from keepwarm.prefix.blocks import BLOCK_TOKENS

# Up to here the last token is read with the slice before it: one run of the weights less, for
# some more rows of the vocabulary's projection.
SHORT_SLICE = 64


class Prefill:
    """One prompt on its way into its caches. `n_done` tokens are in them, whatever happens."""

    def __init__(
        self,
        module: Any,
        tokens: Sequence[int],
        caches: kv.Caches,
        n_done: int,
        *,
        cuts: Iterable[int] = (),
        exact_places: bool = False,
    ) -> None:
        """`exact_places`: layers restored only where a slice ended: states, small windows."""
        self._module = module
        self._tokens = tokens
        self._exact = exact_places
        self._cuts = {*cuts, len(tokens) - 1} if exact_places else set()
        self.caches = caches
        self.n_done = n_done

    @property
    def n_left(self) -> int:
        return len(self._tokens) - self.n_done

    @property
    def at_cut(self) -> bool:
        """Whether the very place that it has come to is to be kept."""
        return self.n_done in self._cuts

    def cut_at(self, n_tokens: int) -> None:
        """End a slice there and keep the very place: somebody waits for it."""
        if n_tokens > self.n_done:
            self._cuts.add(n_tokens)

    def feed(self, n_tokens: int) -> mx.array | None:
        """Feed at most so many tokens; the logits after the last of the prompt, else None."""
        end = self._end_of_slice(n_tokens)
        logits = self._module(mx.array([self._tokens[self.n_done : end]]), cache=self.caches)
        last = logits[:, -1, :] if end == len(self._tokens) else None
        # Logits that nobody reads are never computed.
        kv.evaluate(self.caches)
        if last is not None:
            mx.eval(last)
        self.n_done = end
        return last

    def _end_of_slice(self, n_tokens: int) -> int:
        start, total = self.n_done, len(self._tokens)
        end = min(start + max(n_tokens, 1), total)
        if self._exact:
            end = min(end, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        end = min([end, *(cut for cut in self._cuts if start < cut < end)])
        if end == total and end - start > SHORT_SLICE:
            end -= 1
        return end


@dataclass
class Pace:
    """How long things take here, and so how long a slice may be."""

    max_slice: int = 512
    patience: float = 4.25  # a slice beside running answers takes as long as so many of their steps
    slice_s: float = 0.5  # a slice of its own: cancellation and newcomers wait for it
    token_s: float = 0.005  # reading one token in a slice
    step_s: float = 0.05  # one token for everybody

    def slice_tokens(self, decoding: bool) -> int:
        target = self.patience * self.step_s if decoding else self.slice_s
        return int(min(max(target / self.token_s, 16), self.max_slice))

    def saw_slice(self, n_tokens: int, seconds: float) -> None:
        if n_tokens >= 8:  # fewer tell of the weights, not of the tokens
            self.token_s = 0.5 * self.token_s + 0.5 * seconds / n_tokens

    def saw_step(self, seconds: float) -> None:
        self.step_s = 0.8 * self.step_s + 0.2 * seconds


class Stopwatch:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started
