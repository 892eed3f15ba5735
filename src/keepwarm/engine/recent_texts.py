"""What the engine remembers of texts besides their KV state, and how it forgets them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from keepwarm.cache.restore.forgetting import Deletions
from keepwarm.engine.jobs import Job
from keepwarm.errors import Stopping
from keepwarm.prefix.blocks import pack
from keepwarm.prefix.recent import NearestPrompt, RecentPrompts
from keepwarm.telemetry.ledger import Ledger
from keepwarm.telemetry.misses import MIN_WASTED, MissCandidate
from keepwarm.text.prepare import Preparer

Post: TypeAlias = Callable[[Callable[[], None]], None]


class RecentTexts:
    """Recent prompts and answers, and the prompts that running requests may have missed.

    All of them are forgotten when anything is deleted on purpose: they only save time, and
    answers are found again in stored blocks. All but `forget` is for the engine's thread.
    """

    def __init__(
        self, recent: RecentPrompts, ledger: Ledger, preparer: Preparer, post: Post
    ) -> None:
        """`post` has something done on the engine's thread."""
        self._recent = recent
        self._ledger = ledger
        self._preparer = preparer
        self._post = post
        self._nearest: dict[int, NearestPrompt] = {}  # of requests that have not ended

    def add_request(self, job: Job) -> None:
        """Find the most similar earlier prompt, before this one is remembered."""
        if job.request.policy.reads and not job.request.embed:
            whose = (job.request.kv, job.request.tenant)
            self._nearest[job.number] = self._recent.nearest(whose, job.tokens)

    def remember(self, job: Job) -> None:
        """The answers, for the client's next turn, which sends them back as text."""
        for sequence in job.sequences if job.request.policy.writes else ():
            if sequence.capture.claim.is_forgotten:
                continue
            kept = [*job.cuts, len(job.tokens) - 1, len(sequence.tokens)]
            self._recent.remember((job.request.kv, job.request.tenant), sequence.tokens, kept)
            self._preparer.remember(job.prepared, sequence.tokens)

    def candidate(self, job: Job) -> MissCandidate | None:
        """A request that ended, if it may have computed known tokens again."""
        nearest = self._nearest.pop(job.number, None)
        if nearest is None or nearest.entry is None or job.receipt is None:
            return None
        if job.n_prefilled < MIN_WASTED:
            return None
        return MissCandidate(
            job.number,
            job.request.tenant,
            job.request.agent,
            job.lane.model.name,
            time.time(),
            pack(job.tokens),
            nearest.entry.packed,
            nearest.n_common,
            job.receipt.cached_tokens,
            len(job.tokens) / job.lane.restorer.rates.prefill_s(0, len(job.tokens)),
        )

    def forget(self, deletions: Deletions) -> None:  # noqa: ARG002
        """From any thread."""
        self._preparer.forget()
        with suppress(Stopping):  # the engine is closed, and asks no more
            self._post(self._clear)

    def _clear(self) -> None:
        self._recent.clear()
        self._nearest.clear()
        self._ledger.forget_texts()
