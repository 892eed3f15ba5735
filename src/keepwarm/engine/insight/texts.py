"""What the engine remembers of texts besides their KV state, and how it forgets them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from keepwarm.cache.restore.forgetting import Deletions
from keepwarm.engine.insight.misses import Misses
from keepwarm.engine.jobs import Job
from keepwarm.errors import Stopping
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text.prepare import Preparer

Post: TypeAlias = Callable[[Callable[[], None]], None]


class RememberedTexts:
    """Recent prompts and answers. All of them are forgotten when anything is deleted on purpose:
    they only save time, and answers are found again in stored blocks.
    """

    def __init__(
        self, recent: RecentPrompts, misses: Misses, preparer: Preparer, post: Post
    ) -> None:
        """`post` has something done on the engine's thread."""
        self._recent = recent
        self._misses = misses
        self._preparer = preparer
        self._post = post

    def remember(self, job: Job) -> None:
        """The answers, for the client's next turn, which sends them back as text."""
        for sequence in job.sequences if job.request.policy.writes else ():
            if sequence.capture.claim.is_forgotten:
                continue
            kept = [*job.cuts, len(job.tokens) - 1, len(sequence.tokens)]
            self._recent.remember((job.request.kv, job.request.tenant), sequence.tokens, kept)
            self._preparer.remember(job.prepared, sequence.tokens)

    def forget(self, deletions: Deletions) -> None:  # noqa: ARG002
        """From any thread."""
        self._preparer.forget()
        with suppress(Stopping):  # the engine is closed, and asks no more
            self._post(self._clear)

    def _clear(self) -> None:
        self._recent.clear()
        self._misses.clear()
