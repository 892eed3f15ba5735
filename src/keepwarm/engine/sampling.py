"""The next token from the logits: each sequence by its own rules, all of them in one call.

    adjust    one row: repetition penalty, then bias and the other penalties, then the grammar
    sample    all rows: the best token, or a draw from what top_p, min_p and top_k leave

A row draws with keys of its own seed, so its neighbours never change what it says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from keepwarm.text.request import Sampling, TokenInfo, TopLogprob

if TYPE_CHECKING:
    from keepwarm.text.grammar import GrammarMatcher

NEVER = -9999.0  # the log of a probability of zero, as OpenAI writes it: JSON has no infinity
COLDEST = 1e-6  # below it a draw is the best token anyway, and the division overflows


class Chooser:
    """How one sequence chooses its tokens. The engine thread owns it.

    `choice` tells the answers of one request apart: each has draws of its own from one seed.
    """

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        prompt_tokens: Sequence[int] = (),
        grammar: GrammarMatcher | None = None,
        stop_tokens: Collection[int] = (),
        *,
        choice: int = 0,
    ) -> None:
        self.sampling = sampling
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self._grammar = grammar
        self._stop_tokens = frozenset(stop_tokens)
        self._seen: set[int] = set()  # tokens of the answer
        self._repeated = self._start_repeated(n_vocab, prompt_tokens)
        self._offset = self._start_offset(n_vocab)
        seed = None if sampling.seed is None else sampling.seed % 2**64
        self._keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(choice,)))
        self.key = self._next_key()

    @property
    def plain(self) -> bool:
        """Whether `adjust` has nothing to do: no bias, no penalties, no grammar."""
        return self._repeated is None and self._offset is None and self._grammar is None

    @property
    def finished(self) -> bool:
        """Whether the grammar allows nothing more: the answer is complete."""
        return self._grammar is not None and self._grammar.finished

    def adjust(self, logits: mx.array) -> mx.array:
        """Logits (1, vocabulary) under this row's rules. EngineFailed if its grammar is stuck."""
        scores = logits.astype(mx.float32)
        if self._repeated is not None:
            penalty = self.sampling.repetition_penalty
            weaker = mx.where(scores < 0, scores * penalty, scores / penalty)
            scores = mx.where(self._repeated, weaker, scores)
        if self._offset is not None:
            scores = scores + self._offset
        if self._grammar is not None:
            scores = mx.where(mx.array(self._grammar.mask()), scores, -mx.inf)
        return scores

    def accept(self, token: int) -> None:
        """Note the token that was chosen. A stop token ends the answer and is no part of it."""
        self.key = self._next_key()
        if token in self._stop_tokens:
            return
        if self._repeated is not None:
            self._repeated[token] = True
        if self._penalises:
            new = self.sampling.presence_penalty if token not in self._seen else 0.0
            assert self._offset is not None
            self._offset = self._offset.at[token].add(-new - self.sampling.frequency_penalty)
        self._seen.add(token)
        if self._grammar is not None:
            self._grammar.advance(token)

    def _next_key(self) -> NDArray[np.uint32]:
        """The key of the k-th token depends on the seed and on k alone: a draw that failed and is
        made again gives the same."""
        return np.asarray(self._keys.random_raw(1)).view(np.uint32)

    @property
    def _penalises(self) -> bool:
        return bool(self.sampling.presence_penalty or self.sampling.frequency_penalty)

    def _start_repeated(self, n_vocab: int, prompt_tokens: Sequence[int]) -> mx.array | None:
        """Tokens of the prompt and the answer, (vocabulary,) of bool."""
        if self.sampling.repetition_penalty == 1:
            return None
        repeated = np.zeros(n_vocab, np.bool_)
        repeated[list(prompt_tokens)] = True
        return mx.array(repeated)

    def _start_offset(self, n_vocab: int) -> mx.array | None:
        """What is added to each logit, (vocabulary,): the bias, later the penalties too."""
        bias = self.sampling.logit_bias
        if not bias and not self._penalises:
            return None
        offset = np.zeros(n_vocab, np.float32)
        offset[list(bias)] = list(bias.values())
        return mx.array(offset)


def sample(choosers: Sequence[Chooser], logits: mx.array) -> mx.array:
    """Adjusted logits (rows, vocabulary) to tokens (rows,), lazily. Changes no chooser."""
    best = mx.argmax(logits, axis=-1)
    drawn = [i for i, chooser in enumerate(choosers) if not chooser.greedy]
    if not drawn:
        return best
    rows = mx.array(drawn)
    best[rows] = _draw([choosers[i] for i in drawn], logits[rows])
    return best


def logprobs_of(logits: mx.array) -> mx.array:
    """Log-probabilities (rows, vocabulary) in fp32."""
    scores = logits.astype(mx.float32)
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def token_info(logprobs_row: mx.array, token: int, top: int | None) -> TokenInfo:
    """A token with its log-probability and those of the `top` likeliest; waits for the values."""
    if top is None:
        return TokenInfo(token)
    row = np.maximum(np.array(logprobs_row), NEVER)
    likeliest = _likeliest(row, min(top, row.size))
    return TokenInfo(
        token, float(row[token]), tuple(TopLogprob(i, float(row[i])) for i in likeliest)
    )


def _likeliest(row: NDArray[np.float32], n_tokens: int) -> list[int]:
    """Ids of the likeliest tokens, the best first, equal ones in order of their ids."""
    if not n_tokens:
        return []
    least = np.partition(row, -n_tokens)[-n_tokens]
    candidates: list[int] = np.flatnonzero(row >= least).tolist()
    return sorted(candidates, key=lambda i: (-row[i], i))[:n_tokens]


def _draw(choosers: Sequence[Chooser], logits: mx.array) -> mx.array:
    """One token a row, by Gumbel noise: no token of probability zero ever comes out."""
    scores = logits.astype(mx.float32)
    scores = scores - scores.max(axis=-1, keepdims=True)
    kept = mx.where(scores < _thresholds(choosers, scores), -mx.inf, scores)
    temperatures = _column([max(c.sampling.temperature, COLDEST) for c in choosers])
    keys = mx.array(np.stack([chooser.key for chooser in choosers]))
    noise = mx.vmap(lambda key: mx.random.gumbel(scores.shape[1:], key=key))(keys)
    return mx.argmax(kept / temperatures + noise, axis=-1)


def _thresholds(choosers: Sequence[Chooser], scores: mx.array) -> mx.array:
    """The least score, (rows, 1), that top_p, min_p and top_k leave; the best one scores 0.

    Each filter looks at the whole distribution, so together they are the highest threshold.
    """
    least = _column(
        [math.log(c.sampling.min_p) if c.sampling.min_p else -math.inf for c in choosers]
    )
    ranked = [i for i, c in enumerate(choosers) if c.sampling.top_k or c.sampling.top_p < 1]
    if ranked:
        rows = mx.array(ranked)
        by_rank = _rank_thresholds([choosers[i].sampling for i in ranked], scores[rows])
        least[rows] = mx.maximum(least[rows], by_rank)
    return least


def _rank_thresholds(samplings: Sequence[Sampling], scores: mx.array) -> mx.array:
    """The least score among the first top_k, and among those that make up top_p."""
    n_vocab = scores.shape[-1]
    counts = [min(s.top_k or n_vocab, n_vocab) for s in samplings]
    largest = max(counts)  # only so many need to be sorted
    best = scores if largest == n_vocab else mx.topk(scores, largest, axis=-1)
    best = -mx.sort(-best, axis=-1)
    mass = mx.exp(best - mx.logsumexp(scores, axis=-1, keepdims=True))
    mass_above = mx.cumsum(mass, axis=-1, inclusive=False)
    wanted = _column([s.top_p if s.top_p < 1 else math.inf for s in samplings])
    n_nucleus = (mass_above < wanted).sum(axis=-1, keepdims=True)
    n_kept = mx.minimum(n_nucleus, mx.array(counts)[:, None])
    return mx.take_along_axis(best, n_kept - 1, axis=-1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]
