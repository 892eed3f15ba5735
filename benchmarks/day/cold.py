"""Answers of the day beside those of a server that has stored nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.day.hosts import Host, RequestRecord, bench_request
from benchmarks.day.script import AFTER, Step
from benchmarks.requests.client import ReplyToken
from benchmarks.requests.targets import ServerProcess

TOP = 5  # logprobs of a cold run, by which ties are seen


@dataclass(frozen=True)
class ColdComparison:
    """An answer of the day beside the same request to a server that has stored nothing."""

    step: int
    kind: str
    warm: str
    cold: str
    verdict: str  # same, tie, differs, or not cold


def compare_with_cold(
    host: Host, cold: ServerProcess, steps: Sequence[Step], n_samples: int, tie: float
) -> list[ColdComparison]:
    """Some answers of the day beside those to the same requests with nothing reused."""
    requests = [request for step in steps for request in step.requests]
    positions = sample_positions(host.records, host.texts, n_samples)
    logprobs = {"logprobs": True, "top_logprobs": TOP}
    found = []
    cold.start()
    try:
        for position in positions:
            ask = bench_request(requests[position], host.stop_tokens)
            ask = replace(ask, policy="no-store", more={**ask.more, **logprobs})
            reply, record = cold.ask(ask), host.records[position]
            warm = host.texts[position]
            verdict = judge(warm, reply.text, reply.tokens, tie)
            verdict = "not cold" if reply.cached_tokens else verdict
            found.append(ColdComparison(record.step, record.kind, warm, reply.text, verdict))
    finally:
        cold.close()
        if cold.store is not None:
            shutil.rmtree(cold.store, ignore_errors=True)
    return found


def sample_positions(
    records: Sequence[RequestRecord], texts: Sequence[str], n_samples: int
) -> list[int]:
    """Places of answers that reused something, one of each kind, those after a restart or kill
    first, then evenly over the day.
    """
    usable = [
        position for position, record in enumerate(records) if record.n_cached and texts[position]
    ]
    kinds = {
        records[position].kind: position for position in usable
    }  # the last of each, the longest
    restarted = [kinds[kind] for kind in AFTER.values() if kind in kinds]
    every = max(1, len(usable) // max(1, n_samples))
    chosen = dict.fromkeys([*restarted, *kinds.values(), *usable[::every]])
    return sorted(list(chosen)[:n_samples])


def judge(warm: str, cold: str, tokens: Sequence[ReplyToken], tie: float) -> str:
    """Up to the first token at which the cold run had two that were as likely."""
    if warm == cold:
        return "same"
    n_common = next(
        (n for n, pair in enumerate(zip(warm, cold, strict=False)) if pair[0] != pair[1]),
        min(len(warm), len(cold)),
    )
    n_read = 0
    for token in tokens:
        n_read += len(token.text)
        if n_read > n_common:
            return "tie" if token.gap < tie else "differs"
        if token.gap < tie:
            return "tie"
    return "differs"
