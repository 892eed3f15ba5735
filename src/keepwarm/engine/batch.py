"""Sequences that are decoded together: one forward pass gives each of them a token.

A step has three parts:

    emit      return every row's current token
    feed      run the model on these tokens
    sample    pick every row's next token from the logits, each row by its own rules

A GPU is fed first, so that it computes while the host handles the tokens. Rows leave before
`sample`: then every emitted token is in the caches and in `row.tokens`.

A row may be fed a draft behind its token: tokens that may come next. Between feed and sample then

    accept    the drafted tokens that the row's own sampling picks too, one after the other
    settle    take back the others

Until it is settled a batch holds tokens that nobody emitted: no row may leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import mlx.core as mx

from keepwarm import kv
from keepwarm.engine.sampling import HostLogprobs, Sampler, sample, token_info
from keepwarm.text.request import TokenInfo


class Row:
    """One sequence in a batch: the tokens in its cache, and how its next one is sampled."""

    def __init__(self, tokens: Sequence[int], sampler: Sampler, top_logprobs: int | None) -> None:
        self.tokens = list(tokens)
        self.sampler = sampler
        self.top_logprobs = top_logprobs
        self._logprobs: tuple[HostLogprobs, int] | None = None  # and which of its rows

    def sample_first(self, logits: mx.array) -> mx.array:
        """The first token, from the logits (1, vocabulary) after the prompt."""
        _set_logprobs([self], logits)
        adjusted = logits if self.sampler.is_plain else self.sampler.adjust(logits)
        token = sample([self.sampler], adjusted)
        mx.async_eval(token)
        return token

    def set_logprobs(self, logprobs: HostLogprobs, index: int) -> None:
        """Remember the distribution that the current token comes from."""
        self._logprobs = logprobs, index

    def append(self, token: int) -> TokenInfo:
        """Make the emitted token part of the sequence; it goes into the cache."""
        self.tokens.append(token)
        self.sampler.accept(token)
        if self._logprobs is None:
            return TokenInfo(token)
        logprobs, index = self._logprobs
        return token_info(logprobs.rows[index], token, self.top_logprobs)


R = TypeVar("R", bound=Row)


def works_beside_host() -> bool:
    """Whether the device computes while the host goes on."""
    return bool(mx.default_device() != mx.Device(mx.cpu))


@dataclass
class FedDraft:
    """Tokens that a row was fed behind its current one."""

    tokens: Sequence[int]
    n_right: int = 0
    is_open: bool = True  # the next one may be right

    @property
    def next_token(self) -> int | None:
        is_last = not self.is_open or self.n_right == len(self.tokens)
        return None if is_last else self.tokens[self.n_right]


class Batch(Generic[R]):
    """A single row keeps its own caches; from two on they are merged, and stay merged."""

    def __init__(self, module: Any, *, own_ends: bool = False) -> None:
        """`own_ends`: every row can take back its own number of tokens. Else only a sequence alone
        may be fed a draft.
        """
        self._module = module
        self._own_ends = own_ends
        self._caches: kv.Caches = []
        self._merged = False
        self._tokens: mx.array | None = None  # (rows,), every row's current token
        self._logits: mx.array | None = None  # after it, between feed and sample
        self._fed: list[FedDraft] = []  # of every row, until they are settled
        self._states: kv.States = ()  # before them
        self.n_again = 0  # tokens a row that the latest step computed twice
        self.waited_s = 0.0  # by the host for the latest tokens
        self._has_newcomer = False
        self.can_run_ahead = works_beside_host()
        self.rows: list[R] = []

    def join(self, row: R, caches: kv.Caches, token: mx.array) -> None:
        """Add a sequence whose caches hold `row.tokens` and whose next token is `token`."""
        if not self.rows:
            self._caches, self._merged = caches, False
        elif not self._merged:
            self._caches, self._merged = self._merge(self._caches, caches), True
        else:
            kv.extend(self._caches, self._merge(caches))
        tokens = [token] if self._tokens is None else [self._tokens, token]
        self._tokens = mx.concatenate(tokens)
        self._has_newcomer = True
        self.rows.append(row)

    def _merge(self, *rows: kv.Caches) -> kv.Caches:
        return kv.merge(rows, own_ends=self._own_ends)

    @property
    def can_draft(self) -> bool:
        return self._own_ends or not self._merged

    @property
    def runs_ahead(self) -> bool:
        """Whether to feed before emitting: a GPU computes while the host handles the tokens.

        On a CPU `feed` returns after the step, and the client waits for a first token.
        """
        return self.can_run_ahead and not self._has_newcomer

    def emit(self) -> list[tuple[R, int]]:
        """Every row's current token."""
        return list(zip(self.rows, self._current_tokens(), strict=True))

    def feed(self, drafts: Mapping[R, Sequence[int]] | None = None) -> int:
        """Run the model on every row's current token, and on the drafts behind them; the number of
        tokens a row. With drafts it is computed when this returns; on a CPU also without any.
        """
        assert self._tokens is not None
        self._has_newcomer, self.n_again = False, 0
        if drafts and any(drafts.values()):
            return self._feed_drafts([drafts.get(row, ()) for row in self.rows])
        logits = self._module(self._tokens[:, None], cache=self._caches)
        self._logits = logits[:, -1, :]
        (mx.async_eval if drafts is None or self.can_run_ahead else mx.eval)(self._logits)
        return 1

    def _feed_drafts(self, drafts: Sequence[Sequence[int]]) -> int:
        if self._own_ends and not self._merged:
            self._caches, self._merged = self._merge(self._caches), True
        self._states = () if self._own_ends else kv.states_of(self._caches)
        width = 1 + max(map(len, drafts))
        lines = [
            [token, *draft, *[0] * (width - 1 - len(draft))]
            for token, draft in zip(self._current_tokens(), drafts, strict=True)
        ]
        self._fed = [FedDraft(draft) for draft in drafts]
        self._logits = self._module(mx.array(lines), cache=self._caches)[:, -width:, :]
        mx.eval(self._logits)
        return width

    def accept(self) -> list[tuple[R, int]]:
        """The next drafted token of every row for which its own sampling picks it too; empty when
        no draft is right any more.
        """
        open_rows = [i for i, fed in enumerate(self._fed) if fed.next_token is not None]
        if not open_rows:
            return []
        failed: dict[R, Exception] = {}  # these fail again in `sample`
        picked: Any = self._pick(open_rows, self._logits_of(open_rows), failed).tolist()
        accepted = []
        for i, token in zip(open_rows, picked, strict=True):
            fed = self._fed[i]
            if token == fed.next_token and self.rows[i] not in failed:
                fed.n_right += 1
                accepted.append((self.rows[i], token))
            else:
                fed.is_open = False
        return accepted

    def end_draft(self, row: R) -> None:
        """Accept no more for a row: its answer ended."""
        self._fed[self.rows.index(row)].is_open = False

    def settle(self) -> dict[R, tuple[int, int]]:
        """Take back what was fed and not accepted; of every row, how many tokens were drafted and
        accepted.
        """
        counts = [(len(fed.tokens), fed.n_right) for fed in self._fed]
        if not counts:
            return dict.fromkeys(self.rows, (0, 0))
        assert self._logits is not None
        n_fed = self._logits.shape[1] - 1
        self._logits = self._logits_of(range(len(self.rows)))
        if self._own_ends:
            kv.trim(self._caches, [n_fed - fed.n_right for fed in self._fed])
        elif self._fed[0].n_right < n_fed:
            self._feed_again(self._fed[0])
        self._fed, self._states = [], ()
        return dict(zip(self.rows, counts, strict=True))

    def _feed_again(self, fed: FedDraft) -> None:
        """A state takes nothing back: what is right is fed once more, from the state before."""
        kv.trim(self._caches, 1 + len(fed.tokens), self._states)
        right = [*self._current_tokens(), *fed.tokens[: fed.n_right]]
        self._module(mx.array([right]), cache=self._caches)
        kv.evaluate(self._caches)
        self.n_again = len(right)

    def _logits_of(self, rows: Iterable[int]) -> mx.array:
        """After the latest right token of each row, (rows, vocabulary)."""
        assert self._logits is not None
        places = [(i, self._fed[i].n_right) for i in rows]
        return mx.stack([self._logits[place] for place in places])

    def disband(self) -> list[R]:
        """Dissolve a failed batch: its rows. What was sampled and not emitted is sampled again: a
        device that failed may never have written it.
        """
        rows, self.rows = self.rows, []
        self._caches, self._tokens, self._logits = [], None, None  # frees memory for the rebuild
        self._fed, self._states = [], ()
        return rows

    def _current_tokens(self) -> list[int]:
        assert self._tokens is not None
        return self._tokens.tolist()  # type: ignore[return-value]

    def sample(self) -> dict[R, Exception]:
        """Pick every row's next token; the rows whose own rules failed, which must leave."""
        assert self._logits is not None
        failed: dict[R, Exception] = {}
        self._tokens = self._pick(range(len(self.rows)), self._logits, failed)
        self._logits = None
        mx.async_eval(self._tokens)
        return failed

    def _pick(
        self, indices: Sequence[int], logits: mx.array, failed: dict[R, Exception]
    ) -> mx.array:
        """A token for each of these rows, by its own rules, from its logits."""
        rows = [self.rows[i] for i in indices]
        _set_logprobs(rows, logits)
        if not all(row.sampler.is_plain for row in rows):
            pairs = enumerate(rows)
            logits = mx.concatenate([_adjust(row, logits[i : i + 1], failed) for i, row in pairs])
        return sample([row.sampler for row in rows], logits)

    def leave(self, rows: Iterable[R]) -> list[kv.Caches]:
        """Remove rows; the caches of each. The other rows are not affected."""
        leaving = [self.rows.index(row) for row in rows]
        if not leaving:
            return []
        caches = [self._extract(i) for i in leaving]
        keep = [i for i in range(len(self.rows)) if i not in leaving]
        if keep:
            kv.filter_rows(self._caches, keep)
            index = mx.array(keep)
            assert self._tokens is not None
            self._tokens = self._tokens[index]
            self._logits = None if self._logits is None else self._logits[index]
        else:
            self._caches, self._tokens, self._logits = [], None, None
        self.rows = [self.rows[i] for i in keep]  # last: if it fails, they are rebuilt or ended
        return caches

    def token_of(self, row: R) -> mx.array:
        """A row's current token, with which it can join another batch."""
        assert self._tokens is not None
        index = self.rows.index(row)
        return self._tokens[index : index + 1]

    def peek(self, row: R) -> kv.Caches:
        """The caches of one row, which stays in the batch; do not change them."""
        return self._extract(self.rows.index(row))

    def _extract(self, index: int) -> kv.Caches:
        caches = kv.extract(self._caches, index) if self._merged else self._caches
        return kv.evaluate(caches)


def _set_logprobs(rows: Sequence[Row], logits: mx.array) -> None:
    """Have the rows that report logprobs remember where they come from."""
    asked = [i for i, row in enumerate(rows) if row.top_logprobs is not None]
    if asked:
        logprobs = HostLogprobs(logits[mx.array(asked)])
        for place, i in enumerate(asked):
            rows[i].set_logprobs(logprobs, place)


def _adjust(row: R, logits: mx.array, failed: dict[R, Exception]) -> mx.array:
    try:
        return logits if row.sampler.is_plain else row.sampler.adjust(logits)
    except Exception as error:  # only the row with this rule ends
        failed[row] = error
        return logits
