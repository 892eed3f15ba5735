"""Requests that recomputed tokens of an earlier prompt: where they differ from it, and the cost.

A few tokens around the difference are kept, with their tenant: the server shows them to no other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from keepwarm.prefix.blocks import unpack

MIN_WASTED = 32  # fewer recomputed tokens are not reported
MIN_SHARE = 4  # nor fewer than a fourth of all computed tokens
PHRASE = 8  # equal tokens in a row that are not a coincidence
BEFORE, AFTER = 24, 48  # tokens shown around the difference
MAX_CANDIDATES, MAX_MISSES = 64, 100

MissReason = Literal["changed", "not kept"]


class MissCandidate(NamedTuple):
    """A prompt and the most similar earlier one, packed; not yet compared."""

    number: int
    tenant: str
    agent: str | None
    model: str
    when: float
    prompt: bytes
    earlier: bytes
    n_common: int
    restored: int
    tokens_per_s: float


class PrefixMiss(NamedTuple):
    """A request that recomputed tokens of an earlier prompt."""

    number: int
    tenant: str
    agent: str | None
    model: str
    when: float
    prompt_tokens: int
    restored: int
    position: int  # of the first token that could not be reused
    wasted: int  # computed tokens that the earlier prompt had too
    seconds: float  # to compute them
    reason: MissReason
    before: tuple[int, ...]  # tokens up to the difference
    earlier: tuple[int, ...]  # tokens after it in the earlier prompt
    now: tuple[int, ...]  # and in this prompt

    @property
    def is_significant(self) -> bool:
        """Whether enough of what was computed was known: some phrases are in every prompt."""
        computed = self.prompt_tokens - self.restored
        return self.wasted >= max(MIN_WASTED, computed // MIN_SHARE)


def find_miss(candidate: MissCandidate) -> PrefixMiss:
    """How much of a prompt was recomputed, and from which position."""
    n_prompt = len(candidate.prompt) // 4
    lost = max(0, min(candidate.n_common, n_prompt - 1) - candidate.restored)
    wasted = lost + _repeated_later(candidate)
    is_kept = lost < MIN_WASTED
    seen = candidate.n_common if is_kept else candidate.restored  # where the two texts are shown
    return PrefixMiss(
        candidate.number,
        candidate.tenant,
        candidate.agent,
        candidate.model,
        candidate.when,
        n_prompt,
        candidate.restored,
        max(seen, candidate.restored),  # before a restart another prompt was more similar
        wasted,
        wasted / candidate.tokens_per_s,
        "changed" if is_kept else "not kept",
        _tokens(candidate.prompt, max(0, seen - BEFORE), seen),
        _tokens(candidate.earlier, seen, seen + AFTER),
        _tokens(candidate.prompt, seen, seen + AFTER),
    )


def _repeated_later(candidate: MissCandidate) -> int:
    """Tokens of the earlier prompt that come again after the first difference.

    If clearly more was restored than the two share, another prompt was more similar.
    """
    if candidate.restored >= candidate.n_common + MIN_WASTED:
        return 0
    start = max(candidate.n_common, candidate.restored)
    return n_repeated(candidate.prompt[4 * start :], candidate.earlier[4 * candidate.n_common :])


def n_repeated(now: bytes, earlier: bytes) -> int:
    """How many tokens of one packed sequence are anywhere in another, in whole phrases."""
    size = 4 * PHRASE
    known = {earlier[at : at + size] for at in range(0, len(earlier) - size + 1, 4)}
    at = n = 0
    while at + size <= len(now):
        hit = now[at : at + size] in known
        n += PHRASE * hit
        at += size if hit else 4
    return n


def _tokens(packed: bytes, start: int, end: int) -> tuple[int, ...]:
    return tuple(unpack(packed[4 * start : 4 * end]))
