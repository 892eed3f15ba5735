"""Recent prompts, from which a miss is explained, and what comes next may be guessed.

Tokens are held packed, four bytes each, and compared as bytes: never by length, never by a hash.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from keepwarm.prefix.blocks import as_text, common_tokens_beyond, pack, unpack

SIMILAR_TOKENS = 16  # fewer may be just the start of the chat template


@dataclass(frozen=True)
class RememberedPrompt:
    """An earlier prompt, with its answer if there was one."""

    packed: bytes
    cuts: tuple[int, ...]
    n_computed: int  # of its tokens; not all, if it was cut short

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // 4

    @property
    def n_bytes(self) -> int:
        """What it takes at most: its tokens twice, once `text` was asked for."""
        return 2 * len(self.packed)

    @cached_property
    def text(self) -> str:
        """Its tokens as characters."""
        return as_text(unpack(self.packed))


class NearestPrompt(NamedTuple):
    """The most similar earlier prompt, and how many tokens agree; None and 0 if there is none."""

    n_common: int
    entry: RememberedPrompt | None

    @property
    def n_computed(self) -> int:
        """How many of these were computed."""
        return 0 if self.entry is None else min(self.n_common, self.entry.n_computed)

    @property
    def goes_on(self) -> bool:
        """Whether the earlier prompt has more, other tokens."""
        return self.entry is not None and self.n_common < self.entry.n_tokens


class StoredPrefix(NamedTuple):
    """What a store has of a prompt, whoever put it there, whether or not it can be restored."""

    n_tokens: int = 0  # leading ones, of some stored prompt
    goes_on: bool = False  # that prompt, with other tokens
    only_at_points: bool = False  # a prompt is restored at restore points alone
    has_rows: bool = True  # of every token; else only states


NOTHING_STORED = StoredPrefix()
Reason: TypeAlias = Literal["new", "diverged", "evicted", "not computed", "no checkpoint"]


class MissExplanation(NamedTuple):
    """Why a prompt was not restored further.

    new             no similar prompt was seen, or all that was similar was restored
    diverged        an earlier prompt was the same up to `nearest` and then differed
    evicted         an earlier prompt was the same for longer, but is no longer stored
    not computed    an earlier prompt was the same, and was cut short at `nearest`
    no checkpoint   `nearest` tokens are stored, and most of the rest would be spared by a
                    checkpoint there
    """

    reason: Reason
    nearest: int


MAX_PROMPTS = 1024  # each request is compared with all of them


class RecentPrompts:
    """Recent prompts, bounded in bytes and number; the least recent are dropped.

    `owner` separates namespaces and tenants: a miss is never explained by another tenant's prompt.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._numbers = count()
        self._owners: dict[int, Hashable] = {}  # of all prompts, the least recent first
        self._seen: dict[Hashable, dict[int, RememberedPrompt]] = {}  # by owner and number

    def __len__(self) -> int:
        return len(self._owners)

    def remember(
        self,
        owner: Hashable,
        tokens: Sequence[int],
        cuts: Sequence[int] = (),
        n_computed: int | None = None,
    ) -> None:
        """Add a prompt, in place of shorter ones that it continues; all of it was computed, or
        `n_computed` tokens."""
        n_computed = len(tokens) if n_computed is None else n_computed
        entry = RememberedPrompt(pack(tokens), tuple(cuts), n_computed)
        for number, earlier in list(self._seen.get(owner, {}).items()):
            if entry.packed.startswith(earlier.packed):
                self._drop(number)
        number = next(self._numbers)
        self._owners[number] = owner
        self._seen.setdefault(owner, {})[number] = entry
        self._n_bytes += entry.n_bytes
        while self._n_bytes > self._max_bytes or len(self) > MAX_PROMPTS:
            self._drop(next(iter(self._owners)))

    def clear(self) -> None:
        self._owners.clear()
        self._seen.clear()
        self._n_bytes = 0

    def latest(self, owner: Hashable) -> Iterator[str]:
        """An owner's prompts as characters, the latest first."""
        return (entry.text for entry in self._latest(owner))

    def nearest(self, owner: Hashable, tokens: Sequence[int]) -> NearestPrompt:
        packed, best = pack(tokens), NearestPrompt(0, None)
        for entry in self._latest(owner):
            if n_common := common_tokens_beyond(entry.packed, packed, best.n_common):
                best = NearestPrompt(n_common, entry)
        return best

    def explain(
        self,
        owner: Hashable,
        tokens: Sequence[int],
        restored: int,
        stored: StoredPrefix = NOTHING_STORED,
    ) -> MissExplanation | None:
        """Why no more than `restored` tokens were restored; None if that is all that can be.

        What is stored tells of prompts before a restart; what
        is remembered, of those that are not stored.
        Call it before the prompt itself is remembered.
        """
        if restored >= len(tokens) - 1:
            return None
        found = self.nearest(owner, tokens)
        reason = _reason(len(tokens), restored, stored, found)
        return MissExplanation(reason, max(found.n_computed, stored.n_tokens))

    def _latest(self, owner: Hashable) -> Iterator[RememberedPrompt]:
        return reversed(self._seen.get(owner, {}).values())

    def _drop(self, number: int) -> None:
        owner = self._owners.pop(number)
        self._n_bytes -= self._seen[owner].pop(number).n_bytes
        if not self._seen[owner]:
            del self._seen[owner]


def _reason(n_prompt: int, restored: int, stored: StoredPrefix, found: NearestPrompt) -> Reason:
    limit = n_prompt - 1
    n_known = min(max(found.n_common, stored.n_tokens), limit)
    if n_known < min(SIMILAR_TOKENS, limit):
        return "new"
    if max(restored, stored.n_tokens) < _n_kept(found, limit, stored.has_rows):
        return "evicted"
    n_stored = min(stored.n_tokens, limit)
    if stored.only_at_points and n_stored - restored > limit - n_stored:
        return "no checkpoint"
    if min(found.n_common, limit) > max(found.n_computed, stored.n_tokens):
        return "not computed"
    goes_on = found.goes_on if found.n_common >= stored.n_tokens else stored.goes_on
    return "diverged" if goes_on else "new"


def _n_kept(found: NearestPrompt, limit: int, has_rows: bool) -> int:
    """Tokens that could be restored when the earlier prompt ended; with states alone, at a cut."""
    n_kept = min(found.n_computed, limit)
    if has_rows or found.entry is None:
        return n_kept
    return max((cut for cut in found.entry.cuts if cut <= n_kept), default=0)
