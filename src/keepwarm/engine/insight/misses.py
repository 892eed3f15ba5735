"""Requests that recomputed tokens of an earlier prompt: where they differ from it, and the cost.

A few tokens around the difference are kept, with their tenant: the server shows them to no other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal, NamedTuple

from keepwarm.engine.jobs import Job
from keepwarm.prefix.blocks import pack, unpack
from keepwarm.prefix.recent import NearestPrompt, RecentPrompts

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


class Misses:
    """Written by the engine's thread, read by any."""

    def __init__(self, recent: RecentPrompts) -> None:
        self._recent = recent
        self._nearest: dict[int, NearestPrompt] = {}  # of requests that have not ended
        self._lock = threading.Lock()
        self._candidates: deque[MissCandidate] = deque(maxlen=MAX_CANDIDATES)
        self._found: deque[PrefixMiss] = deque(maxlen=MAX_MISSES)

    def add_request(self, job: Job) -> None:
        """Find the most similar earlier prompt, before this one is recorded."""
        if job.request.policy.reads and not job.request.embed:
            whose = (job.request.kv, job.request.tenant)
            self._nearest[job.number] = self._recent.nearest(whose, job.tokens)

    def end_request(self, job: Job) -> None:
        """Queue it if it may be a miss; `latest` does the comparison."""
        nearest = self._nearest.pop(job.number, None)
        if nearest is None or nearest.entry is None or job.receipt is None:
            return
        if job.receipt.recomputed < MIN_WASTED:
            return
        candidate = MissCandidate(
            job.number,
            job.request.tenant,
            job.request.agent,
            time.time(),
            pack(job.tokens),
            nearest.entry.packed,
            nearest.n_common,
            job.receipt.cached_tokens,
            len(job.tokens) / job.lane.restorer.rates.prefill_s(0, len(job.tokens)),
        )
        with self._lock:
            self._candidates.append(candidate)

    def clear(self) -> None:
        """Forget all misses, and what running requests are compared with: parts of prompts."""
        self._nearest.clear()
        with self._lock:
            self._candidates.clear()
            self._found.clear()

    def latest(self) -> list[PrefixMiss]:
        """Newest first."""
        with self._lock:
            candidates = list(self._candidates)
            self._candidates.clear()
            found = [find_miss(candidate) for candidate in candidates]
            self._found.extend(miss for miss in found if miss.is_significant)
            return list(self._found)[::-1]


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
