"""Sampling: the next token of every row of a batch, each by its own rules, in one call.

    adjust    one row: repetition penalty, then bias and the other penalties, then the grammar
    sample    all rows: the best token, or a draw from what top_p, min_p and top_k leave

A row draws with random keys of its own seed, so other rows never change its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.random import Philox, SeedSequence
from numpy.typing import NDArray

from keepwarm.text.request import Sampling, TokenInfo, TopLogprob
from keepwarm.text.sampling_rules import DrawRules

if TYPE_CHECKING:
    from keepwarm.text.grammar import GrammarMatcher

ZERO_LOGPROB = -9999.0  # for probability 0, as OpenAI does: JSON has no infinity
MIN_TEMPERATURE = 1e-6  # below it every draw is the best token, and the division overflows


class Sampler:
    """How one sequence samples its tokens. The engine's thread owns it.

    `choice` numbers the answers of one request: from one seed each gets its own draws.
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
        self.rules = DrawRules().of(sampling)
        self.is_greedy = self.rules.temperature == 0 or self.rules.top_k == 1
        self._grammar = grammar
        self._stop_tokens = frozenset(stop_tokens)
        self._seen: set[int] = set()  # tokens of the answer
        self._repeated = self._start_repeated(n_vocab, prompt_tokens)
        self._offset = self._start_offset(n_vocab)
        seed = None if sampling.seed is None else sampling.seed % 2**64
        self._keys = Philox(SeedSequence(seed, spawn_key=(choice,)))
        self.key = self._next_key()

    @property
    def is_plain(self) -> bool:
        """Whether `adjust` has nothing to do: no bias, no penalties, no grammar."""
        return self._repeated is None and self._offset is None and self._grammar is None

    @property
    def is_finished(self) -> bool:
        """Whether the grammar allows no further token: the answer is complete."""
        return self._grammar is not None and self._grammar.finished

    def fitted(self, draft: Sequence[int]) -> Sequence[int]:
        """What of a draft may come, or what must come instead."""
        return draft if self._grammar is None else self._grammar.fitted(draft)

    def adjust(self, logits: mx.array) -> mx.array:
        """Logits (1, vocabulary) under this row's rules. BadInput if its grammar is stuck."""
        scores = logits.astype(mx.float32)
        if self._repeated is not None:
            penalty = self.rules.repetition_penalty
            weaker = mx.where(scores < 0, scores * penalty, scores / penalty)
            scores = mx.where(self._repeated, weaker, scores)
        if self._offset is not None:
            scores = scores + self._offset
        if self._grammar is not None:
            scores = mx.where(mx.array(self._grammar.mask()), scores, -mx.inf)
        return scores

    def accept(self, token: int) -> None:
        """Update the rules with a sampled token. A stop token is not part of the answer."""
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
        """The key of the k-th token depends only on the seed and k, so a repeated draw is equal."""
        return np.asarray(self._keys.random_raw(1)).view(np.uint32)

    @property
    def _penalises(self) -> bool:
        return bool(self.sampling.presence_penalty or self.sampling.frequency_penalty)

    def _start_repeated(self, n_vocab: int, prompt_tokens: Sequence[int]) -> mx.array | None:
        """Tokens of the prompt and the answer, (vocabulary,) of bool."""
        if self.rules.repetition_penalty == 1:
            return None
        repeated = np.zeros(n_vocab, np.bool_)
        repeated[list(prompt_tokens)] = True
        return mx.array(repeated)

    def _start_offset(self, n_vocab: int) -> mx.array | None:
        """Added to each logit, (vocabulary,): the bias, later also the penalties."""
        bias = self.sampling.logit_bias
        if not bias and not self._penalises:
            return None
        offset = np.zeros(n_vocab, np.float32)
        offset[list(bias)] = list(bias.values())
        return mx.array(offset)


def sample(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """Adjusted logits (rows, vocabulary) to tokens (rows,), lazily. Changes no sampler."""
    best = mx.argmax(logits, axis=-1)
    drawn = [i for i, sampler in enumerate(samplers) if not sampler.is_greedy]
    if not drawn:
        return best
    rows = mx.array(drawn)
    best[rows] = _draw([samplers[i] for i in drawn], logits[rows])
    return best


def logprobs_of(logits: mx.array) -> mx.array:
    """Log-probabilities (rows, vocabulary) in fp32."""
    scores = logits.astype(mx.float32)
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


class HostLogprobs:
    """Log-probabilities of several rows, copied to the host together when the first is needed:
    after every copy this thread waits for its turn among the threads that run Python.
    """

    def __init__(self, logits: mx.array) -> None:
        self._lazy = logprobs_of(logits)

    @cached_property
    def rows(self) -> NDArray[np.float32]:
        return np.array(self._lazy)


def token_info(logprobs_row: NDArray[np.float32], token: int, top: int | None) -> TokenInfo:
    """A token with its log-probability and those of the `top` likeliest."""
    if top is None:
        return TokenInfo(token)
    row = np.maximum(logprobs_row, ZERO_LOGPROB)
    likeliest = _likeliest(row, min(top, row.size))
    return TokenInfo(
        token, float(row[token]), tuple(TopLogprob(i, float(row[i])) for i in likeliest)
    )


class PromptScores:
    """Log-probabilities of a prompt's tokens, from the logits before each."""

    def __init__(self, first: int, top: int | None) -> None:
        self._top = top
        self.tokens = [TokenInfo(first)]

    def add(self, logits: mx.array, tokens: Sequence[int]) -> None:
        """The next tokens; row i of the logits (rows, vocabulary) is what token i comes from."""
        if not tokens:  # a slice of the last token alone, which nothing follows
            return
        rows = HostLogprobs(logits[: len(tokens)]).rows
        self.tokens += [
            token_info(row, token, self._top) for row, token in zip(rows, tokens, strict=True)
        ]


def _likeliest(row: NDArray[np.float32], n_tokens: int) -> list[int]:
    """Ids of the likeliest tokens, the best first, equal ones in order of their ids."""
    if not n_tokens:
        return []
    least = np.partition(row, -n_tokens)[-n_tokens]
    candidates: list[int] = np.flatnonzero(row >= least).tolist()
    return sorted(candidates, key=lambda i: (-row[i], i))[:n_tokens]


def _draw(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """One token for each row, by Gumbel noise, which never picks a token of probability zero."""
    scores = logits.astype(mx.float32)
    scores = scores - scores.max(axis=-1, keepdims=True)
    kept = mx.where(scores < _thresholds(samplers, scores), -mx.inf, scores)
    temperatures = _column([max(c.rules.temperature, MIN_TEMPERATURE) for c in samplers])
    keys = mx.array(np.stack([sampler.key for sampler in samplers]))
    noise = mx.vmap(lambda key: mx.random.gumbel(scores.shape[1:], key=key))(keys)
    return mx.argmax(kept / temperatures + noise, axis=-1)


def _thresholds(samplers: Sequence[Sampler], scores: mx.array) -> mx.array:
    """The lowest score, (rows, 1), that top_p, min_p and top_k keep; the best score is 0.

    Each filter sees the whole distribution, so together they are the highest threshold.
    """
    least = _column([math.log(c.rules.min_p) if c.rules.min_p else -math.inf for c in samplers])
    ranked = [i for i, c in enumerate(samplers) if c.rules.top_k or c.rules.top_p < 1]
    if ranked:
        rows = mx.array(ranked)
        by_rank = _rank_thresholds([samplers[i].rules for i in ranked], scores[rows])
        least[rows] = mx.maximum(least[rows], by_rank)
    return least


def _rank_thresholds(rules: Sequence[DrawRules], scores: mx.array) -> mx.array:
    """The lowest score that both top_k and top_p keep."""
    n_vocab = scores.shape[-1]
    counts = [min(s.top_k or n_vocab, n_vocab) for s in rules]
    largest = max(counts)  # only these are sorted
    best = scores if largest == n_vocab else mx.topk(scores, largest, axis=-1)
    best = -mx.sort(-best, axis=-1)
    mass = mx.exp(best - mx.logsumexp(scores, axis=-1, keepdims=True))
    mass_above = mx.cumsum(mass, axis=-1, inclusive=False)
    wanted = _column([s.top_p if s.top_p < 1 else math.inf for s in rules])
    n_nucleus = (mass_above < wanted).sum(axis=-1, keepdims=True)
    n_kept = mx.minimum(n_nucleus, mx.array(counts)[:, None])
    return mx.take_along_axis(best, n_kept - 1, axis=-1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]
