"""Sequences that are decoded together: one run of the weights gives each of them a token.

A step has three parts:

    give      say which everybody's current token is
    feed      run the model on these tokens
    choose    pick everybody's next token from the logits, each row by its own rules

A GPU is fed first, so that it computes while the host looks at tokens. Before the choice rows may
leave: whatever was given and fed is in the caches, and a row's ledger says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx

from keepwarm import kv
from keepwarm.engine.sampling import Chooser, logprobs_of, sample, token_info
from keepwarm.text.request import TokenInfo


class Row:
    """One sequence in a batch: the tokens in its cache, and how its next one is chosen."""

    def __init__(self, tokens: Sequence[int], chooser: Chooser, top_logprobs: int | None) -> None:
        self.tokens = list(tokens)
        self.chooser = chooser
        self.top_logprobs = top_logprobs
        self.logprobs: mx.array | None = None  # of the current token, where they are asked for
        self.pending: int | None = None  # chosen before its batch died, and not fed

    def choose_first(self, logits: mx.array) -> mx.array:
        """The first token, from the logits (1, vocabulary) after what was read."""
        self.look(logits)
        if self.pending is not None:
            chosen, self.pending = self.pending, None
            return mx.array([chosen], dtype=mx.uint32)
        adjusted = logits if self.chooser.plain else self.chooser.adjust(logits)
        token = sample([self.chooser], adjusted)
        mx.async_eval(token)
        return token

    def look(self, logits: mx.array) -> None:
        """Remember the distribution that the current token comes from, if it is asked for."""
        self.logprobs = None if self.top_logprobs is None else logprobs_of(logits)[0]

    def fed(self, token: int) -> TokenInfo:
        """The current token was given out and goes into the cache: it is part of the sequence."""
        self.tokens.append(token)
        self.chooser.accept(token)
        if self.logprobs is None:
            return TokenInfo(token)
        return token_info(self.logprobs, token, self.top_logprobs)


R = TypeVar("R", bound=Row)


class Batch(Generic[R]):
    """A lone row keeps its own caches; from two on they are merged, and stay so."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._caches: kv.Caches = []
        self._merged = False
        self._tokens: mx.array | None = None  # (rows,), everybody's current token
        self._logits: mx.array | None = None  # after it, between feed and choose
        self._is_given = False  # the current tokens were given out
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
        """Whether to feed before giving: a GPU has the next step to do while tokens are read.

        A CPU is done with the step before `feed` returns, and a first token is waited for.
        """
        return not self._has_newcomer and mx.default_device() != mx.Device(mx.cpu)

    def give(self) -> list[tuple[R, int]]:
        """Everybody's current token."""
        given = list(zip(self.rows, self._current(), strict=True))
        self._is_given = True
        return given

    def feed(self) -> None:
        """Run the model on everybody's current token."""
        assert self._tokens is not None
        self._has_newcomer = False
        logits = self._module(self._tokens[:, None], cache=self._caches)
        self._logits = logits[:, -1, :]
        mx.async_eval(self._logits)

    def disband(self) -> list[R]:
        """Give up a batch that died: its rows, each with the token it was about to be fed."""
        rows, self.rows = self.rows, []
        try:
            tokens = [] if self._is_given else self._current()
        except Exception:  # what chose them is what died
            tokens = []
        for row, token in zip(rows, tokens, strict=False):
            row.pending = token
        self._caches, self._tokens, self._logits = [], None, None  # room for building it anew
        return rows

    def _current(self) -> list[int]:
        assert self._tokens is not None
        return self._tokens.tolist()  # type: ignore[return-value]

    def choose(self) -> dict[R, Exception]:
        """Pick everybody's next token. A row whose own rules fail comes back; it must leave."""
        assert self._logits is not None
        failed: dict[R, Exception] = {}
        logits = self._logits
        if not all(row.chooser.plain for row in self.rows):
            adjusted = [self._adjust(i, row, failed) for i, row in enumerate(self.rows)]
            logits = mx.concatenate(adjusted)
        for i, row in enumerate(self.rows):
            row.look(self._logits[i : i + 1])
        self._tokens = sample([row.chooser for row in self.rows], logits)
        self._logits, self._is_given = None, False
        mx.async_eval(self._tokens)
        return failed

    def leave(self, rows: Iterable[R]) -> list[kv.Caches]:
        """Take rows out, each with caches of its own; those that stay do not notice."""
        leaving = [self.rows.index(row) for row in rows]
        if not leaving:
            return []
        caches = [self._extract(i) for i in leaving]
        keep = [i for i in range(len(self.rows)) if i not in leaving]
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self._caches, self._tokens, self._logits, self._is_given = [], None, None, False
            return caches
        kv.filter_rows(self._caches, keep)
        index = mx.array(keep)
        assert self._tokens is not None
        self._tokens = self._tokens[index]
        self._logits = None if self._logits is None else self._logits[index]
        return caches

    def peek(self, row: R) -> kv.Caches:
        """The caches of one row, which stays; do not change them."""
        return self._extract(self.rows.index(row))

    def _extract(self, index: int) -> kv.Caches:
        caches = kv.extract(self._caches, index) if self._merged else self._caches
        return kv.evaluate(caches)

    def _adjust(self, index: int, row: R, failed: dict[R, Exception]) -> mx.array:
        assert self._logits is not None
        logits = self._logits[index : index + 1]
        try:
            return logits if row.chooser.plain else row.chooser.adjust(logits)
        except Exception as error:  # a rule may be anybody's code; its row alone suffers
            failed[row] = error
            return logits
