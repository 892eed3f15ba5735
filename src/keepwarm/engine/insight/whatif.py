"""What another disk budget would have saved: recent look-ups, replayed.

A look-up is kept as digests of its blocks' keys, from which no token can be recovered.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from keepwarm.engine.admission import kv_bytes
from keepwarm.engine.jobs import Job
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, chain

MAX_BLOCKS = 100_000  # of all look-ups in the log
DIGEST_BYTES = 8
SCALES = (0.5, 1.0, 2.0, 4.0)


class LoggedLookup(NamedTuple):
    """One prompt and its answer, by whole blocks."""

    when: float
    blocks: Sequence[int]
    n_asked: int  # whole blocks of the prompt
    block_bytes: int


class BudgetOutcome(NamedTuple):
    """Tokens that would have been found under a budget; None is no limit."""

    max_bytes: int | None
    n_tokens: int


class WhatIf(NamedTuple):
    n_lookups: int
    since: float | None
    asked_tokens: int
    outcomes: tuple[BudgetOutcome, ...]


class LookupLog:
    """Recent look-ups, up to `max_blocks` blocks in total. Thread-safe."""

    def __init__(
        self, max_blocks: int = MAX_BLOCKS, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._lookups: deque[LoggedLookup] = deque()
        self._n_blocks = 0

    def add_job(self, job: Job) -> None:
        """Log a request that was looked up, if what it computes goes to disk."""
        if job.receipt is None or not job.request.policy.to_disk:
            return
        tokens = job.sequences[0].tokens if job.sequences else job.tokens
        restorer = job.lane.restorer
        block_bytes = kv_bytes(restorer.layout, BLOCK_TOKENS)
        self.add(restorer.namespace, tokens, len(job.tokens), block_bytes)

    def add(
        self, namespace: Namespace, tokens: Sequence[int], n_prompt: int, block_bytes: int
    ) -> None:
        """Log a conversation whose first `n_prompt` tokens were the prompt."""
        n_whole = len(tokens) // BLOCK_TOKENS
        refs = chain(namespace, tokens[: n_whole * BLOCK_TOKENS])
        blocks = array("Q", (int.from_bytes(ref.key[:DIGEST_BYTES]) for ref in refs))
        # The last prompt token is always fed, so the block that ends with it is never found whole.
        lookup = LoggedLookup(self._clock(), blocks, (n_prompt - 1) // BLOCK_TOKENS, block_bytes)
        if not n_whole:
            return
        with self._lock:
            self._lookups.append(lookup)
            self._n_blocks += n_whole
            while self._n_blocks > self._max_blocks:
                self._n_blocks -= len(self._lookups.popleft().blocks)

    def all(self) -> list[LoggedLookup]:
        """Oldest first."""
        with self._lock:
            return list(self._lookups)


def what_if(lookups: Sequence[LoggedLookup], max_bytes: int | None) -> WhatIf:
    """Replay the look-ups under this budget, under SCALES of it, and without a limit."""
    budgets = [] if max_bytes is None else [int(max_bytes * scale) for scale in SCALES]
    outcomes = [BudgetOutcome(budget, replay(lookups, budget)) for budget in [*budgets, None]]
    asked = sum(lookup.n_asked for lookup in lookups) * BLOCK_TOKENS
    return WhatIf(len(lookups), lookups[0].when if lookups else None, asked, tuple(outcomes))


def replay(lookups: Iterable[LoggedLookup], max_bytes: int | None) -> int:
    """Prompt tokens that would have been found with LRU eviction."""
    kept: OrderedDict[int, int] = OrderedDict()  # bytes by block, least recently used first
    n_bytes = n_found = 0
    for lookup in lookups:
        n_found += sum(1 for _ in takewhile(kept.__contains__, lookup.blocks[: lookup.n_asked]))
        for block in reversed(lookup.blocks):  # a block is evicted after its successors
            n_bytes += lookup.block_bytes - kept.pop(block, 0)
            kept[block] = lookup.block_bytes
        while max_bytes is not None and n_bytes > max_bytes:
            n_bytes -= kept.popitem(last=False)[1]
    return n_found * BLOCK_TOKENS
