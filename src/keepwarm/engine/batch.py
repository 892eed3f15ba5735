"""Sequences that are decoded together: one forward pass gives each of them a token.

A step has three parts:

    emit      return every row's current token
    feed      run the model on these tokens
    sample    pick every row's next token from the logits, each row by its own rules

A GPU is fed first, so that it computes while the host handles the tokens. Rows leave before
`sample`: then every emitted token is in the caches and in `row.tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx

from keepwarm import kv
from keepwarm.engine.sampling import Sampler, logprobs_of, sample, token_info
from keepwarm.text.request import TokenInfo


class Row:
    """One sequence in a batch: the tokens in its cache, and how its next one is sampled."""

    def __init__(self, tokens: Sequence[int], sampler: Sampler, top_logprobs: int | None) -> None:
        self.tokens = list(tokens)
        self.sampler = sampler
        self.top_logprobs = top_logprobs
        self.logprobs: mx.array | None = None  # of the current token, if requested
        self.pending: int | None = None  # sampled before its batch failed, and not fed

    def sample_first(self, logits: mx.array) -> mx.array:
        """The first token, from the logits (1, vocabulary) after the prompt."""
        self.set_logprobs(logits)
        if self.pending is not None:
            token_id, self.pending = self.pending, None
            return mx.array([token_id], dtype=mx.uint32)
        adjusted = logits if self.sampler.is_plain else self.sampler.adjust(logits)
        token = sample([self.sampler], adjusted)
        mx.async_eval(token)
        return token

    def set_logprobs(self, logits: mx.array) -> None:
        """Remember the distribution that the current token comes from, if requested."""
        self.logprobs = None if self.top_logprobs is None else logprobs_of(logits)[0]

    def append(self, token: int) -> TokenInfo:
        """Make the emitted token part of the sequence; it goes into the cache."""
        self.tokens.append(token)
        self.sampler.accept(token)
        if self.logprobs is None:
            return TokenInfo(token)
        return token_info(self.logprobs, token, self.top_logprobs)


R = TypeVar("R", bound=Row)


class Batch(Generic[R]):
    """A single row keeps its own caches; from two on they are merged, and stay merged."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._caches: kv.Caches = []
        self._merged = False
        self._tokens: mx.array | None = None  # (rows,), every row's current token
        self._logits: mx.array | None = None  # after it, between feed and sample
        self._is_emitted = False  # the current tokens were
        self._has_newcomer = False
        self.rows: list[R] = []

    def join(self, row: R, caches: kv.Caches, token: mx.array) -> None:
        """Add a sequence whose caches hold `row.tokens` and whose next token is `token`."""
        if not self.rows:
            self._caches, self._merged = caches, False
        elif not self._merged:
            self._caches, self._merged = kv.merge([self._caches, caches]), True
        else:
            kv.extend(self._caches, kv.merge([caches]))
        tokens = [token] if self._tokens is None else [self._tokens, token]
        self._tokens = mx.concatenate(tokens)
        self._has_newcomer = True
        self.rows.append(row)

    @property
    def runs_ahead(self) -> bool:
        """Whether to feed before emitting: a GPU computes while the host handles the tokens.

        On a CPU `feed` returns after the step, and the client waits for a first token.
        """
        return not self._has_newcomer and mx.default_device() != mx.Device(mx.cpu)

    def emit(self) -> list[tuple[R, int]]:
        """Every row's current token."""
        emitted = list(zip(self.rows, self._current_tokens(), strict=True))
        self._is_emitted = True
        return emitted

    def feed(self) -> None:
        """Run the model on every row's current token."""
        assert self._tokens is not None
        self._has_newcomer = False
        logits = self._module(self._tokens[:, None], cache=self._caches)
        self._logits = logits[:, -1, :]
        mx.async_eval(self._logits)

    def disband(self) -> list[R]:
        """Dissolve a failed batch: its rows, each with the token it was about to be fed."""
        rows, self.rows = self.rows, []
        try:
            tokens = [] if self._is_emitted else self._current_tokens()
        except Exception:  # sampling them is what failed
            tokens = []
        for row, token in zip(rows, tokens, strict=False):
            row.pending = token
        self._caches, self._tokens, self._logits = [], None, None  # frees memory for the rebuild
        return rows

    def _current_tokens(self) -> list[int]:
        assert self._tokens is not None
        return self._tokens.tolist()  # type: ignore[return-value]

    def sample(self) -> dict[R, Exception]:
        """Pick every row's next token; the rows whose own rules failed, which must leave."""
        assert self._logits is not None
        failed: dict[R, Exception] = {}
        logits = self._logits
        if not all(row.sampler.is_plain for row in self.rows):
            adjusted = [self._adjust(i, row, failed) for i, row in enumerate(self.rows)]
            logits = mx.concatenate(adjusted)
        for i, row in enumerate(self.rows):
            row.set_logprobs(self._logits[i : i + 1])
        self._tokens = sample([row.sampler for row in self.rows], logits)
        self._logits, self._is_emitted = None, False
        mx.async_eval(self._tokens)
        return failed

    def leave(self, rows: Iterable[R]) -> list[kv.Caches]:
        """Remove rows; the caches of each. The other rows are not affected."""
        leaving = [self.rows.index(row) for row in rows]
        if not leaving:
            return []
        caches = [self._extract(i) for i in leaving]
        keep = [i for i in range(len(self.rows)) if i not in leaving]
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self._caches, self._tokens, self._logits, self._is_emitted = [], None, None, False
            return caches
        kv.filter_rows(self._caches, keep)
        index = mx.array(keep)
        assert self._tokens is not None
        self._tokens = self._tokens[index]
        self._logits = None if self._logits is None else self._logits[index]
        return caches

    def peek(self, row: R) -> kv.Caches:
        """The caches of one row, which stays in the batch; do not change them."""
        return self._extract(self.rows.index(row))

    def _extract(self, index: int) -> kv.Caches:
        caches = kv.extract(self._caches, index) if self._merged else self._caches
        return kv.evaluate(caches)

    def _adjust(self, index: int, row: R, failed: dict[R, Exception]) -> mx.array:
        assert self._logits is not None
        logits = self._logits[index : index + 1]
        try:
            return logits if row.sampler.is_plain else row.sampler.adjust(logits)
        except Exception as error:  # only the row with this rule ends
            failed[row] = error
            return logits
