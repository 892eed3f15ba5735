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

SIMILAR_TOKENS = 16  # fewer may be just the start of the chat template


class RememberedPrompt(NamedTuple):
    """An earlier prompt, with its answer if there was one."""

    packed: bytes
    cuts: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // 4


class NearestPrompt(NamedTuple):
    """The most similar earlier prompt, and how many tokens agree; None and 0 if there is none."""

    n_common: int
    entry: RememberedPrompt | None


Reason: TypeAlias = Literal["new", "diverged", "evicted"]


class MissExplanation(NamedTuple):
    """Why a prompt was not restored further. Positions only, no text.

    new        no similar prompt was seen, or all that was similar was restored
    diverged   an earlier prompt was the same up to `nearest` and then differed
    evicted    an earlier prompt was the same for longer, but is no longer stored
    """

    position: int  # the first token that was not restored
    message: int | None  # the message it is in; None: after the last
    reason: Reason
    nearest: int


MAX_PROMPTS = 1024  # each request is compared with all of them


class RecentPrompts:
    """Recent prompts, bounded in bytes and number; the least recent are dropped.

    `owner` separates namespaces and tenants: a miss is never explained by another tenant's prompt.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._numbers = count()
        self._seen: OrderedDict[tuple[Hashable, int], RememberedPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def remember(self, owner: Hashable, tokens: Sequence[int], cuts: Sequence[int] = ()) -> None:
        """Add a prompt, in place of shorter ones that it continues."""
        entry = RememberedPrompt(pack(tokens), tuple(cuts))
        for key in self._of(owner):
            if entry.packed.startswith(self._seen[key].packed):
                self._drop(key)
        self._seen[owner, next(self._numbers)] = entry
        self._n_bytes += len(entry.packed)
        while self._n_bytes > self._max_bytes or len(self._seen) > MAX_PROMPTS:
            self._drop(next(iter(self._seen)))

    def clear(self) -> None:
        self._seen.clear()
        self._n_bytes = 0

    def nearest(self, owner: Hashable, tokens: Sequence[int]) -> NearestPrompt:
        packed, best = pack(tokens), NearestPrompt(0, None)
        for key in reversed(self._of(owner)):
            entry = self._seen[key]
            if n_common := common_tokens_beyond(entry.packed, packed, best.n_common):
                best = NearestPrompt(n_common, entry)
        return best

    def explain(
        self,
        owner: Hashable,
        tokens: Sequence[int],
        cuts: Sequence[int],
        restored: int,
        *,
        held: int = 0,
        only_at_cuts: bool = False,
    ) -> MissExplanation | None:
        """Why no more than `restored` tokens were restored; None if that is all that can be.

        `cuts[i]` is where message i ends. The first `held` tokens are stored, though for want of a
        state or a window not all can be restored. A model that keeps states alone is restored
        `only_at_cuts`, those of the earlier prompt.
        Call it before the prompt itself is remembered.
        """
        if restored >= len(tokens) - 1:
            return None
        n_common, entry = self.nearest(owner, tokens)
        message = bisect_right(cuts, restored)
        return MissExplanation(
            position=restored,
            message=message if message < len(cuts) else None,
            reason=_reason(len(tokens), max(restored, held), n_common, entry, only_at_cuts),
            nearest=n_common,
        )

    def _of(self, owner: Hashable) -> list[tuple[Hashable, int]]:
        return [key for key in self._seen if key[0] == owner]

    def _drop(self, key: tuple[Hashable, int]) -> None:
        self._n_bytes -= len(self._seen.pop(key).packed)


def _reason(
    n_prompt: int, held: int, n_common: int, entry: RememberedPrompt | None, only_at_cuts: bool
) -> Reason:
    if entry is None or n_common < min(SIMILAR_TOKENS, n_prompt - 1):
        return "new"
    kept = min(n_common, n_prompt - 1)
    if only_at_cuts:
        kept = max((cut for cut in entry.cuts if cut <= kept), default=0)
    if held < kept:
        return "evicted"
    return "diverged" if n_common < entry.n_tokens else "new"
