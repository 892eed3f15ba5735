"""Recent prompts, from which a miss is explained.

Tokens are held packed, four bytes each, and compared as bytes: never by length, never by a hash.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from keepwarm.prefix.blocks import common_tokens_beyond, pack

SIMILAR_TOKENS = 16  # the opening of a template is shared by all, and says nothing


class RememberedPrompt(NamedTuple):
    """An earlier prompt, with its answer where there was one."""

    packed: bytes
    cuts: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // 4


class NearestPrompt(NamedTuple):
    """The most similar earlier prompt, and how far it agrees; None and 0 where there is none."""

    n_common: int
    entry: RememberedPrompt | None


Reason: TypeAlias = Literal["new", "diverged", "evicted"]


class MissExplanation(NamedTuple):
    """Why a prompt was not restored further. Positions only, no text.

    new        nothing like it was seen, or only its beginning, and that was restored
    diverged   an earlier prompt was the same up to `nearest` and then another
    evicted    an earlier prompt was the same further on, but that is no longer kept
    """

    position: int  # the first token that was not restored
    message: int | None  # which message it stands in; None: after the last
    reason: Reason
    nearest: int


MAX_PROMPTS = 1024  # every one is looked at for each request


class RecentPrompts:
    """Prompts seen lately, bounded in bytes and number, least recently seen first out.

    `whose` tells namespaces and tenants apart: nobody's miss is explained by another's prompt.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._numbers = count()
        self._seen: OrderedDict[tuple[Hashable, int], RememberedPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def remember(self, whose: Hashable, tokens: Sequence[int], cuts: Sequence[int] = ()) -> None:
        """Keep a prompt in mind; the shorter ones that it continues need not be."""
        entry = RememberedPrompt(pack(tokens), tuple(cuts))
        for key in self._of(whose):
            if entry.packed.startswith(self._seen[key].packed):
                self._forget(key)
        self._seen[whose, next(self._numbers)] = entry
        self._n_bytes += len(entry.packed)
        while self._n_bytes > self._max_bytes or len(self._seen) > MAX_PROMPTS:
            self._forget(next(iter(self._seen)))

    def nearest(self, whose: Hashable, tokens: Sequence[int]) -> NearestPrompt:
        packed, best = pack(tokens), NearestPrompt(0, None)
        for key in reversed(self._of(whose)):
            entry = self._seen[key]
            if n_common := common_tokens_beyond(entry.packed, packed, best.n_common):
                best = NearestPrompt(n_common, entry)
        return best

    def explain(
        self,
        whose: Hashable,
        tokens: Sequence[int],
        cuts: Sequence[int],
        restored: int,
        *,
        only_at_cuts: bool = False,
    ) -> MissExplanation | None:
        """Why no more than `restored` tokens were; None where all were that can be.

        `cuts[i]` is where message i ends. A model with state layers is restored `only_at_cuts`.
        Ask before the prompt itself is remembered.
        """
        if restored >= len(tokens) - 1:
            return None
        n_common, entry = self.nearest(whose, tokens)
        message = bisect_right(cuts, restored)
        return MissExplanation(
            position=restored,
            message=message if message < len(cuts) else None,
            reason=_reason(len(tokens), restored, n_common, entry, only_at_cuts),
            nearest=n_common,
        )

    def forget(self, whose: Hashable) -> None:
        for key in self._of(whose):
            self._forget(key)

    def _of(self, whose: Hashable) -> list[tuple[Hashable, int]]:
        return [key for key in self._seen if key[0] == whose]

    def _forget(self, key: tuple[Hashable, int]) -> None:
        self._n_bytes -= len(self._seen.pop(key).packed)


def _reason(
    n_prompt: int, restored: int, n_common: int, entry: RememberedPrompt | None, only_at_cuts: bool
) -> Reason:
    if entry is None or n_common < min(SIMILAR_TOKENS, n_prompt - 1):
        return "new"
    if only_at_cuts:
        kept = max((cut for cut in entry.cuts if cut <= n_common), default=0)
    else:
        kept = min(n_common, n_prompt - 1)
    if restored < kept:
        return "evicted"
    return "diverged" if n_common < entry.n_tokens else "new"
