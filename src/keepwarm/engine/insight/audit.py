"""Audits: a share of the answers that started from a cache is computed again without one.

The same prompt, the same choice of tokens, nothing reused. Where the tokens differ, the cache
drifted, or, on devices whose sums depend on how a prompt is sliced, rounding did: it is counted
and shown, and whoever looks at it can tell which.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from keepwarm.cache.policy import Policy
from keepwarm.engine.answer import Answer
from keepwarm.engine.jobs import Job, Sequence
from keepwarm.text.request import Delta, Done, Finished, Outcome, Request, ToolCalled

LAST_OF_ALL = -1_000_000  # a priority


class Recomputed(Answer):
    """Gathers the tokens of an audit and compares them when they are all there."""

    def __init__(self, expected: list[int], tell: Callable[[bool], None]) -> None:
        super().__init__(cancel=_nothing)
        self._expected = expected
        self._tell = tell
        self._tokens: list[int] = []

    def put(self, outcome: Outcome) -> None:
        if isinstance(outcome, Delta | ToolCalled | Finished):
            self._tokens += [info.token for info in outcome.tokens]
        elif isinstance(outcome, Done):
            self._tell(self._tokens == self._expected)


def _nothing(answer: Answer) -> None:
    """Nobody cancels an audit."""


class Auditor:
    def __init__(self, share: float, seed: int | None = None) -> None:
        """`share` of the answers that can be repeated: 0 none, 1 all of them."""
        self._share = share
        self._random = random.Random(seed)  # noqa: S311, it picks samples

    def wants(self, sequence: Sequence) -> bool:
        """Only answers that started from a cache, and whose tokens can be had again."""
        job, sampling = sequence.job, sequence.job.request.sampling
        repeatable = sampling.temperature == 0 or sampling.seed is not None
        warm = job.receipt is not None and job.receipt.cached_tokens > 0
        if job.audit or sequence.choice or not (repeatable and warm):
            return False
        return self._random.random() < self._share

    def job(self, sequence: Sequence, tell: Callable[[bool], None]) -> Job:
        """The same request once more, cold and behind everybody else."""
        old = sequence.job
        request: Request = replace(
            old.request,
            policy=Policy.NO_STORE,
            priority=LAST_OF_ALL,
            n=1,
            timeout_s=None,
            agent=None,
        )
        expected = sequence.tokens[len(old.tokens) :]
        prepared = replace(old.prepared, request=request)
        return Job(request, prepared, Recomputed(expected, tell), audit=True)
