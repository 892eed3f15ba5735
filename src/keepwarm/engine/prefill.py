"""Prefilling a prompt, a slice at a time, and how long a slice may be."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from keepwarm import kv
from keepwarm.cache.restore.rates import PrefillTimes, SliceCosts
from keepwarm.engine.sampling import PromptScores
from keepwarm.errors import UnsupportedModel
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import Embedded, Event, Scored, Vector

# Up to this length the last token is fed with the slice before it: one forward pass less, for a
# few more rows of logits.
SHORT_SLICE = 64
FIRST_SLICE = 128  # until longer ones have been measured
MIN_SLICE = 16
GRAPHS = 256  # that MLX keeps on CUDA
SCORED_SLICE = 64  # tokens whose logits are held at once
NEARLY = 1.05  # how much more a token may cost alone than in the best slice
PATIENCE = 2  # times as long as usual a slice may take to be as cheap as that, or the last
DEARER = 1.15  # how much more a token may cost beside running answers than in the best slice
SMALLEST = 1e-12  # length of a vector
MARGIN = 0.8  # of the longest wait for a token: slices vary

Clock: TypeAlias = Callable[[], float]


class Prefill:
    """One prompt that is being prefilled. Its caches hold `n_done` tokens, even after an error."""

    def __init__(
        self,
        module: Any,
        tokens: Sequence[int],
        caches: kv.Caches,
        n_done: int,
        *,
        points: Iterable[int] = (),
        whole_blocks: bool = False,
        scores: PromptScores | None = None,
        times: PrefillTimes | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """At `points` slices end and a checkpoint is kept; `whole_blocks`: see `end_of_slice`.
        To `times`, which reach to `n_done`, the slices are added."""
        self._module = module
        self._tokens = tokens
        self._clock = clock
        self._whole_blocks = whole_blocks
        self._points = set(points)
        self.caches = caches
        self.n_done = n_done
        self.scores = scores
        self._times = times or PrefillTimes()
        self.waited_s = 0.0  # by the latest slice, for what the device had to finish before it

    @property
    def is_at_point(self) -> bool:
        """Whether a checkpoint is to be kept here."""
        return self.n_done in self._points

    def add_point(self, n_tokens: int) -> None:
        """End a slice there and keep a checkpoint: another request waits for it."""
        if n_tokens > self.n_done:
            self._points.add(n_tokens)

    def forget_time(self) -> None:
        """The latest slice took longer than the same would again."""
        self._times.forget(self.n_done)

    def results(self, last: mx.array, prepared: PreparedRequest) -> Iterator[Event]:
        """What the prompt alone gives; `last` is what `feed` returned at its end."""
        if self.scores is not None:
            yield Scored(0, tuple(self.scores.tokens))
        if prepared.request.embed:
            yield Embedded(unit_vector(last, prepared.n_vocab))

    def feed(self, n_tokens: int) -> mx.array | None:
        """Feed about `n_tokens`; the logits after the last token of the prompt, else None."""
        total, whole, slice_watch = len(self._tokens), self._whole_blocks, Stopwatch(self._clock)
        n_tokens = min(n_tokens, SCORED_SLICE) if self.scores else n_tokens
        end = end_of_slice(self.n_done, n_tokens, total, self._points, whole_blocks=whole)
        logits = self._module(mx.array([self._tokens[self.n_done : end]]), cache=self.caches)
        if self.scores is not None:
            self.scores.add(logits[0], self._tokens[self.n_done + 1 : end + 1])
        last = logits[:, -1, :] if end == total else None
        # MLX is lazy, so the slice has not begun; a GPU may still compute the last decode step.
        watch = Stopwatch(self._clock)
        mx.synchronize()
        self.waited_s = watch.seconds()
        kv.evaluate(self.caches)  # other logits are never computed
        if last is not None:
            mx.eval(last)
        if end - self.n_done > 1:  # else its last token, which the same prompt feeds again
            self._times.add(end, slice_watch.seconds() - self.waited_s)
        self.n_done = end
        return last


def end_of_slice(
    start: int,
    n_tokens: int,
    total: int,
    points: Iterable[int] = (),
    *,
    whole_blocks: bool = False,
) -> int:
    """Where a slice of about `n_tokens` ends. Only this function decides it.

    `n_tokens` is what the device does best (`SliceSizer`); `points` are the prompt's restore points
    and the places that other requests wait for. The slice ends at the next point, if that is
    nearer. A rest of a quarter more is not worth a slice of its own. With `whole_blocks` it ends
    with the last block that it completes, unless with the prompt. The last token is fed alone,
    unless the slice is short.
    """
    end = start + max(n_tokens, 1)
    if end + n_tokens // 4 >= total:
        end = total
    elif whole_blocks and end // BLOCK_TOKENS > start // BLOCK_TOKENS:
        end -= end % BLOCK_TOKENS
    end = min([end, *(point for point in points if start < point < end)])
    return end - 1 if end == total and end - start > SHORT_SLICE else end


@dataclass
class SliceSizer:
    """How long the next slice of a prompt may be, by what slices and decode steps cost.

    Alone: as long as `alone_s` permits, and if that is short, long enough to cost hardly more than
    the best; what is then left of the prompt goes with it, if it is no longer. Beside running
    answers: the shortest that makes prefilling no dearer than DEARER times the best, and no longer
    than an answer may wait for its next token: `steps_per_gap` decode steps, or `gap_s` if that is
    more.

    With `on_grid` slices are powers of two that end at multiples of their length. On CUDA, MLX
    builds a graph for every new pair of slice and context, which takes as long as the slice.
    """

    max_slice: int = 512
    gap_s: float = 0.0
    steps_per_gap: float = 8.0
    alone_s: float = 1.5  # how long a cancellation waits
    on_grid: bool = False
    token_s: float = 0.005  # to prefill one token, as last measured
    _steps: deque[float] = field(default_factory=lambda: deque([0.05], maxlen=5))
    _shapes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=GRAPHS))

    @classmethod
    def for_this_device(cls) -> SliceSizer:
        if mx.default_device() != mx.gpu:
            return cls()
        return cls(2048, gap_s=0.25, on_grid=mx.cuda.is_available())

    @property
    def step_s(self) -> float:
        """One decode step of the batch."""
        return median(self._steps)

    def slice_tokens(
        self, costs: SliceCosts, context: int, decoding: bool, rest: int = sys.maxsize
    ) -> int:
        """`context`: the tokens before the slice; `rest`: those that are still to be fed."""
        n_tokens = self._best(costs, context, decoding)
        if not self.on_grid:
            is_last = not decoding and rest <= min(2 * n_tokens, self.max_slice)
            return rest if is_last and self._is_bearable(costs, rest, context) else n_tokens
        to_grid = n_tokens - context % n_tokens
        return to_grid if to_grid >= n_tokens // 4 else to_grid + n_tokens

    def _best(self, costs: SliceCosts, context: int, decoding: bool) -> int:
        lengths = self._lengths()
        tried = max(FIRST_SLICE, 2 * costs.longest)  # no longer: what was not measured is a guess
        if not costs:
            return max(n for n in lengths if n <= tried)
        seconds = {n: costs.seconds(n, context) for n in lengths}
        longest_s = self._longest_wait() if decoding else self.alone_s
        fitting = [n for n in lengths if n <= tried and seconds[n] <= longest_s] or lengths[:1]
        if not decoding:
            return max(fitting[-1], self._thrifty(seconds))
        per_token = {n: (seconds[n] + self.step_s) / n for n in lengths}
        enough = DEARER * min(per_token.values())
        return next((n for n in fitting if per_token[n] <= enough), fitting[-1])

    def _is_bearable(self, costs: SliceCosts, n_tokens: int, context: int) -> bool:
        """Whether a slice keeps others waiting not much longer than usual."""
        return not costs or costs.seconds(n_tokens, context) <= PATIENCE * self.alone_s

    def _thrifty(self, seconds: Mapping[int, float]) -> int:
        """The shortest slice that costs hardly more than the best, if it takes not much longer than
        `alone_s`."""
        enough = NEARLY * min(seconds[n] / n for n in seconds)
        longest_s = PATIENCE * self.alone_s
        fitting = [n for n in seconds if n <= FIRST_SLICE and seconds[n] <= longest_s]
        return next((n for n in fitting if seconds[n] / n <= enough), max(fitting, default=0))

    def record_slice(self, n_tokens: int, seconds: float) -> None:
        if n_tokens >= MIN_SLICE:  # shorter slices measure the weights' bandwidth
            self.token_s = seconds / n_tokens

    def is_first(self, n_tokens: int) -> bool:
        """Whether none of about this length was fed yet; on CUDA it compiles kernels."""
        power = round(log2(n_tokens))
        return self.on_grid and all(round(log2(n)) != power for n, _ in self._shapes)

    def is_typical(self, costs: SliceCosts, n_tokens: int, context: int) -> bool:
        """Whether a slice there shows what such slices cost: not if a graph was built for it, and
        others of its length were measured; nor the first of all."""
        if not self.on_grid:
            return True
        knows = costs.knows(n_tokens) if costs else not self._shapes
        is_new = (n_tokens, context) not in self._shapes
        if is_new:
            self._shapes.append((n_tokens, context))
        return not (is_new and knows)

    def record_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def _longest_wait(self) -> float:
        """Of a running answer for a slice."""
        return MARGIN * max(self.gap_s, self.steps_per_gap * self.step_s) - self.step_s

    def _lengths(self) -> list[int]:
        """Powers of two, those in the middle between them, and the longest."""
        powers = [MIN_SLICE << i for i in range(self.max_slice.bit_length())]
        between = [n for power in powers for n in (power, power * 3 // 2)]
        lengths = powers if self.on_grid else between
        return [*(n for n in lengths if n < self.max_slice), self.max_slice]


def unit_vector(hidden: mx.array, n_vocab: int) -> Vector:
    """A row of hidden states, of length 1."""
    if hidden.shape[-1] == n_vocab:  # a few of mlx-lm's models have their head inside
        raise UnsupportedModel(
            "mlx-lm does not give the hidden states of this architecture, so this model cannot "
            "embed; use another."
        )
    row = hidden[0].astype(mx.float32)
    return np.array(row / mx.maximum(mx.linalg.norm(row), SMALLEST), np.float32)


class Stopwatch:
    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()

    def seconds(self) -> float:
        return self._clock() - self._started
