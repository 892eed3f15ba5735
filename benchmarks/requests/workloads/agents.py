"""Agents with one system prompt, one after another and all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.requests.client import Message, TimedReply
from benchmarks.requests.prompts import system, user
from benchmarks.requests.report.results import Record
from benchmarks.requests.run import WorkloadRun, ask_together
from benchmarks.requests.targets import disk_bytes
from keepwarm.prefix.blocks import BLOCK_TOKENS

ROUNDING = 1.02
PREFILLS = "times the shared prompt is prefilled"


class Round(NamedTuple):
    """One request of every agent."""

    replies: list[TimedReply]
    n_shared: int  # tokens
    disk_bytes: int  # growth of the store

    @property
    def prefills(self) -> float:
        """How often the shared prompt was prefilled; its length is the most that was reused."""
        common = max(self.n_shared, *(reply.cached_tokens for reply in self.replies))
        return sum(common - reply.cached_tokens for reply in self.replies) / common

    @property
    def distinct_tokens(self) -> int:
        own = sum(r.prompt_tokens - self.n_shared + r.completion_tokens for r in self.replies)
        return self.n_shared + own


def run(run: WorkloadRun) -> Iterator[Record]:
    for how, ask_all in (("one after another", _in_turn), ("all at once", ask_together)):
        rounds = [_round(run, ask_all) for _ in run.samples(how)]
        yield from _records(run, how, rounds)
    yield from _memory(run)


def _in_turn(asks: Sequence[Callable[[], TimedReply]]) -> list[TimedReply]:
    return [ask() for ask in asks]


def _round(
    run: WorkloadRun, ask_all: Callable[[Sequence[Callable[[], TimedReply]]], list[TimedReply]]
) -> Round:
    shared = run.text(run.sizes.shared)
    prompts: list[list[Message]] = [
        [system(shared), user(run.text(run.sizes.own))] for _ in range(run.sizes.n_agents)
    ]
    before = _on_disk(run)
    replies = ask_all([partial(run.ask, messages) for messages in prompts])
    return Round(replies, run.prompts.count(shared), _on_disk(run) - before)


def _on_disk(run: WorkloadRun) -> int:
    if run.target.store is None:
        return 0
    run.target.settle()
    return disk_bytes(run.target.store)


def _records(run: WorkloadRun, how: str, rounds: Sequence[Round]) -> Iterator[Record]:
    n_agents = run.sizes.n_agents
    firsts = [r.ttft_s for found in rounds for r in found.replies]
    yield run.series(f"TTFT, {how}", "s", firsts, how=f"all {n_agents} agents of all rounds")
    recomputed = [sum(r.recomputed for r in found.replies) for found in rounds]
    yield run.series(f"recomputed, {how}", "tokens", recomputed, how="all agents together")
    prefills = [found.prefills for found in rounds]
    yield run.claim(f"{PREFILLS}, {how}", prefills, ROUNDING, at_least=False)
    if run.target.store is None:
        return
    grown = [found.disk_bytes for found in rounds]
    yield run.series(f"disk, {how}", "bytes", grown, how="growth of the store, index included")
    if run.kv_bytes is not None:
        allowed = [_allowed(found, run.kv_bytes) for found in rounds]
        parts = [grew / limit for grew, limit in zip(grown, allowed, strict=True)]
        yield run.claim(f"disk ÷ distinct tokens and tails, {how}", parts, 1, at_least=False)


def _allowed(found: Round, kv_bytes: int) -> float:
    """KV bytes of every distinct token once, and of a tail per agent."""
    tails = len(found.replies) * (BLOCK_TOKENS - 1)
    return kv_bytes * (found.distinct_tokens * ROUNDING + tails)


def _memory(run: WorkloadRun) -> Iterator[Record]:
    """Bytes by tier and of live caches, as the target reports them."""
    how = "total at the end of the workload"
    for tier, n_bytes in run.target.held_bytes().items():
        yield run.series(tier, "bytes", [n_bytes], how=how)
