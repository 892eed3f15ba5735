"""Where a request starts from: one decision for every path, by the content of tokens alone.

    live cache                 stored blocks             decision
    ─────────────────────────  ────────────────────────  ─────────────────────────────
    a true prefix              no further, or too slow   EXTEND it
    shares a beginning, can    no further, or too slow   TRIM a copy to that beginning
    be trimmed
    whatever                   further, and worth it     RESTORE them
    shares nothing, or none    none                      PREFILL ALL: nothing is known
    shares, cannot be trimmed  none, or too slow         REBUILD: known, but of no use
    shares nothing, or none    too slow                  REBUILD

"Further" counts prompt tokens, of which the last is never served: a model must be fed one. Loading
is worth it if it takes no longer than to compute the tokens it spares beyond the live cache.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from keepwarm.prefix.blocks import common_tokens


class Action(StrEnum):
    EXTEND = "extend"
    TRIM = "trim"
    RESTORE = "restore"
    REBUILD = "rebuild"
    PREFILL_ALL = "prefill all"


class Candidate(NamedTuple):
    """A live cache beside a prompt: how many leading tokens they share, how many it holds."""

    n_common: int
    n_held: int
    can_trim: bool

    @classmethod
    def of(cls, held: bytes, prompt: bytes, can_trim: bool) -> Candidate:
        """From packed tokens."""
        return cls(common_tokens(held, prompt), len(held) // 4, can_trim)

    def serves(self, n_prompt: int) -> int:
        """How many tokens of the prompt it can stand for, one of them always left to feed."""
        if self.is_prefix(n_prompt):
            return self.n_held
        return min(self.n_common, max(0, n_prompt - 1)) if self.can_trim else 0

    def is_prefix(self, n_prompt: int) -> bool:
        return self.n_common == self.n_held < n_prompt


class Stored(NamedTuple):
    """What blocks could restore, and how long loading them would take."""

    n_tokens: int
    load_s: float


class Decision(NamedTuple):
    """What to do, and how many tokens of the prompt need not be computed then."""

    action: Action
    n_tokens: int


NO_CANDIDATE = Candidate(0, 0, can_trim=False)
NOTHING_STORED = Stored(0, 0.0)


def decide(
    n_prompt: int,
    live: Candidate = NO_CANDIDATE,
    stored: Stored = NOTHING_STORED,
    prefill_tokens_per_s: float = 50.0,
) -> Decision:
    """The table above. Pure: takes nothing, loads nothing."""
    limit = max(0, n_prompt - 1)
    n_live, n_stored = live.serves(n_prompt), min(stored.n_tokens, limit)
    spared = n_stored - n_live
    if spared > 0 and stored.load_s * prefill_tokens_per_s <= spared:
        return Decision(Action.RESTORE, n_stored)
    if n_live:
        action = Action.EXTEND if live.is_prefix(n_prompt) else Action.TRIM
        return Decision(action, n_live)
    known = n_stored or min(live.n_common, limit)
    return Decision(Action.REBUILD if known else Action.PREFILL_ALL, 0)
