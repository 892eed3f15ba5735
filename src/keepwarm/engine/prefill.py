"""Prefilling a prompt, a slice at a time, and how long a slice may be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from keepwarm import kv
from keepwarm.prefix.blocks import BLOCK_TOKENS

# Up to this length the last token is fed with the slice before it: one forward pass less, for a
# few more rows of logits.
SHORT_SLICE = 64


class Prefill:
    """One prompt that is being prefilled. Its caches hold `n_done` tokens, even after an error."""

    def __init__(
        self,
        module: Any,
        tokens: Sequence[int],
        caches: kv.Caches,
        n_done: int,
        *,
        cuts: Iterable[int] = (),
        needs_checkpoints: bool = False,
    ) -> None:
        """`needs_checkpoints`: some layers (states, small windows) restore only at slice ends."""
        self._module = module
        self._tokens = tokens
        self._needs_checkpoints = needs_checkpoints
        self._cuts = {*cuts, len(tokens) - 1} if needs_checkpoints else set()
        self.caches = caches
        self.n_done = n_done

    @property
    def is_at_cut(self) -> bool:
        """Whether a checkpoint is to be kept here."""
        return self.n_done in self._cuts

    def add_cut(self, n_tokens: int) -> None:
        """End a slice there and keep a checkpoint: another request waits for it."""
        if n_tokens > self.n_done:
            self._cuts.add(n_tokens)

    def feed(self, n_tokens: int) -> mx.array | None:
        """Feed at most `n_tokens`; the logits after the last token of the prompt, else None."""
        end = self._end_of_slice(n_tokens)
        logits = self._module(mx.array([self._tokens[self.n_done : end]]), cache=self.caches)
        last = logits[:, -1, :] if end == len(self._tokens) else None
        kv.evaluate(self.caches)  # MLX is lazy: other logits are never computed
        if last is not None:
            mx.eval(last)
        self.n_done = end
        return last

    def _end_of_slice(self, n_tokens: int) -> int:
        start, total = self.n_done, len(self._tokens)
        end = min(start + max(n_tokens, 1), total)
        if self._needs_checkpoints:
            end = min(end, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        end = min([end, *(cut for cut in self._cuts if start < cut < end)])
        if end == total and end - start > SHORT_SLICE:
            end -= 1
        return end


@dataclass
class SliceSizer:
    """Measures prefill and decode speed and derives the length of a slice."""

    max_slice: int = 512
    steps_per_slice: float = 4.25  # a slice beside decoding takes as long as this many steps
    slice_s: float = 0.5  # a slice without decoding; bounds how long a cancellation waits
    token_s: float = 0.005  # to prefill one token
    step_s: float = 0.05  # one decode step of the batch

    def slice_tokens(self, decoding: bool) -> int:
        target = self.steps_per_slice * self.step_s if decoding else self.slice_s
        return int(min(max(target / self.token_s, 16), self.max_slice))

    def record_slice(self, n_tokens: int, seconds: float) -> None:
        if n_tokens >= 8:  # shorter slices measure the weights' bandwidth
            self.token_s = 0.5 * self.token_s + 0.5 * seconds / n_tokens

    def record_step(self, seconds: float) -> None:
        self.step_s = 0.8 * self.step_s + 0.2 * seconds


class Stopwatch:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started
