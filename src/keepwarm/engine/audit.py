"""Audits: a share of the answers that started from a cache is computed again without one.

Same prompt, same sampling, nothing reused. If the tokens differ, the cache is wrong, or, on devices
whose sums depend on how a prompt is sliced, rounding differs. Either is counted as a drift.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from keepwarm.engine.answer import Answer
from keepwarm.engine.jobs import Job, RunningSequence
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Delta, Done, Finished, Outcome, Request, ToolCalled

AUDIT_PRIORITY = -1_000_000  # after all requests of clients


class AuditAnswer(Answer):
    """Collects the tokens of an audit and compares them at its end."""

    def __init__(self, expected: list[int], report: Callable[[bool], None]) -> None:
        super().__init__(cancel=_nothing)
        self._expected = expected
        self._report = report
        self._tokens: list[int] = []

    def put(self, outcome: Outcome) -> None:
        if isinstance(outcome, Delta | ToolCalled | Finished):
            self._tokens += [info.token for info in outcome.tokens]
        elif isinstance(outcome, Done):
            self._report(self._tokens == self._expected)


def _nothing(answer: Answer) -> None:
    """An audit is never cancelled by a client."""


class Auditor:
    def __init__(self, share: float, seed: int | None = None) -> None:
        """`share` of the repeatable answers: 0 none, 1 all."""
        self._share = share
        self._random = random.Random(seed)  # noqa: S311, it picks samples

    def wants(self, sequence: RunningSequence) -> bool:
        """Whether to audit it: a sample of the warm answers with repeatable sampling."""
        job, sampling = sequence.job, sequence.job.request.sampling
        is_repeatable = sampling.temperature == 0 or sampling.seed is not None
        is_warm = job.receipt is not None and job.receipt.cached_tokens > 0
        if job.audit or sequence.choice or not (is_repeatable and is_warm):
            return False
        return self._random.random() < self._share

    def job(self, sequence: RunningSequence, report: Callable[[bool], None]) -> Job:
        """The same request again, cold and with the lowest priority."""
        old = sequence.job
        request: Request = replace(
            old.request,
            policy=Policy.NO_STORE,
            priority=AUDIT_PRIORITY,
            n=1,
            timeout_s=None,
            agent=None,
        )
        expected = sequence.tokens[len(old.tokens) :]
        prepared = replace(old.prepared, request=request)
        return Job(request, prepared, old.lane, AuditAnswer(expected, report), audit=True)
