"""Requests that computed again what an earlier one had: where they part from it, and the cost.

The places are kept as a few tokens on each side; whose they are is kept too, for the server to
show them to nobody else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal, NamedTuple

from keepwarm.engine.jobs import Job
from keepwarm.prefix.blocks import pack, unpack
from keepwarm.prefix.recent import NearestPrompt, RecentPrompts

MIN_WASTED = 32  # tokens computed again that are worth a word
MIN_SHARE = 4  # and at least a fourth of all that was computed
PHRASE = 8  # tokens in a row that are no coincidence
BEFORE, AFTER = 24, 48  # tokens shown around the place
N_UNREAD, N_KEPT = 64, 100

MissReason = Literal["changed", "not kept"]


class MissCandidate(NamedTuple):
    """A prompt and the most similar earlier one, packed; not yet looked into."""

    number: int
    tenant: str
    agent: str | None
    when: float
    prompt: bytes
    earlier: bytes
    n_common: int
    restored: int
    tokens_per_s: float


class Miss(NamedTuple):
    """A request that computed tokens again."""

    number: int
    tenant: str
    agent: str | None
    when: float
    prompt_tokens: int
    restored: int
    position: int  # the first token that could not be used
    wasted: int  # tokens that an earlier prompt had too
    seconds: float  # what they cost
    reason: MissReason
    before: tuple[int, ...]  # the tokens up to the place
    earlier: tuple[int, ...]  # those after it in the earlier prompt
    now: tuple[int, ...]  # and in this one

    @property
    def is_significant(self) -> bool:
        """Some phrases are in every prompt; a good part of what was computed must be known."""
        computed = self.prompt_tokens - self.restored
        return self.wasted >= max(MIN_WASTED, computed // MIN_SHARE)


class Misses:
    """Told of requests by the engine's thread, asked by any."""

    def __init__(self, recent: RecentPrompts) -> None:
        self._recent = recent
        self._nearest: dict[int, NearestPrompt] = {}  # of requests that have not ended
        self._lock = threading.Lock()
        self._unread: deque[MissCandidate] = deque(maxlen=N_UNREAD)
        self._found: deque[Miss] = deque(maxlen=N_KEPT)

    def arrived(self, job: Job) -> None:
        """Find its predecessor, before it is one itself."""
        if job.request.policy.reads:
            whose = (job.request.kv, job.request.tenant)
            self._nearest[job.number] = self._recent.nearest(whose, job.tokens)

    def ended(self, job: Job) -> None:
        """Put it aside if it may have been a miss; looking into it is for whoever asks."""
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
            job.home.manager.rates.prefill_tokens_per_s,
        )
        with self._lock:
            self._unread.append(candidate)

    def latest(self) -> list[Miss]:
        """The latest first."""
        with self._lock:
            candidates = [self._unread.popleft() for _ in range(len(self._unread))]
            found = [find_miss(candidate) for candidate in candidates]
            self._found.extend(miss for miss in found if miss.is_significant)
            return list(self._found)[::-1]


def find_miss(candidate: MissCandidate) -> Miss:
    """How much of a prompt was computed again, and where that began."""
    n_prompt = len(candidate.prompt) // 4
    lost = max(0, min(candidate.n_common, n_prompt - 1) - candidate.restored)
    wasted = lost + _after_the_place(candidate)
    place = candidate.restored if lost >= MIN_WASTED else candidate.n_common
    return Miss(
        candidate.number,
        candidate.tenant,
        candidate.agent,
        candidate.when,
        n_prompt,
        candidate.restored,
        place,
        wasted,
        wasted / candidate.tokens_per_s,
        "not kept" if lost >= MIN_WASTED else "changed",
        _tokens(candidate.prompt, max(0, place - BEFORE), place),
        _tokens(candidate.earlier, place, place + AFTER),
        _tokens(candidate.prompt, place, place + AFTER),
    )


def _after_the_place(candidate: MissCandidate) -> int:
    """Tokens of the earlier prompt that come again after both have parted.

    Where a good deal more was restored than the two share, some other prompt was nearer.
    """
    if candidate.restored >= candidate.n_common + MIN_WASTED:
        return 0
    start = max(candidate.n_common, candidate.restored)
    return repeated(candidate.prompt[4 * start :], candidate.earlier[4 * candidate.n_common :])


def repeated(now: bytes, earlier: bytes) -> int:
    """How many tokens of a packed sequence stand in another too, wherever; by whole phrases."""
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
