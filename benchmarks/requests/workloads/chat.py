"""One chat prompt in five situations, as published comparisons of MLX servers use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.requests.client import TimedReply
from benchmarks.requests.prompts import system, user, with_answer
from benchmarks.requests.report.results import Record
from benchmarks.requests.run import WorkloadRun
from benchmarks.requests.targets import disk_bytes

COLD, REPEAT, OTHER = "cold", "exact repeat", "other agent, same system prompt"
SECOND, RESTARTED = "turn 2", "after a restart"
HOW = {
    COLD: "a cold prompt, from request to first text",
    REPEAT: "the identical prompt, right after its answer",
    OTHER: "a new question after the same system prompt",
    SECOND: "the prompt, its answer and 16 new tokens, right after",
    RESTARTED: "identical prompt to a restarted process; files may be in the page cache",
}


class ChatSample(NamedTuple):
    replies: dict[str, TimedReply]
    n_shared: int  # tokens of the system prompt
    disk_bytes: int  # growth of the store

    @property
    def live_tokens(self) -> int:
        """Tokens of both conversations at the end."""
        ends = (self.replies[SECOND], self.replies[OTHER])
        return sum(reply.prompt_tokens + reply.completion_tokens for reply in ends)


def run(run: WorkloadRun) -> Iterator[Record]:
    samples = [_sample(run) for _ in run.samples("chat")]
    yield from _firsts(run, samples)
    if run.target.store is not None:
        yield from _disk(run, samples)


def _sample(run: WorkloadRun) -> ChatSample:
    sizes, before = run.sizes, _size(run)
    shared = run.text(sizes.chat_shared - run.template_tokens // 2)
    question, other = (
        run.text(sizes.chat - sizes.chat_shared - run.template_tokens // 2) for _ in range(2)
    )
    messages = [system(shared), user(question)]
    replies = {COLD: run.ask(messages), REPEAT: run.ask(messages)}
    replies[OTHER] = run.ask([system(shared), user(other)])
    replies[SECOND] = run.ask(with_answer(messages, replies[COLD].text, run.text(16)))
    run.target.settle()
    grown = _size(run) - before
    if run.target.restart_method:
        run.restart()
        replies[RESTARTED] = run.ask(messages)
    return ChatSample(replies, run.prompts.count(shared), grown)


def _size(run: WorkloadRun) -> int:
    return 0 if run.target.store is None else disk_bytes(run.target.store)


def _firsts(run: WorkloadRun, samples: list[ChatSample]) -> Iterator[Record]:
    found = {}
    for what in samples[0].replies:
        replies = [sample.replies[what] for sample in samples]
        found[what] = run.series(what, "s", [r.ttft_s for r in replies], how=HOW[what])
        yield found[what]
        cached = [reply.cached_tokens for reply in replies]
        yield run.series(f"cached, {what}", "tokens", cached, how=HOW[what], better="higher")
    for what in list(found)[1:]:
        yield run.ratio(f"{what} ÷ cold", found[what], found[COLD], at_least=False)


def _disk(run: WorkloadRun, samples: list[ChatSample]) -> Iterator[Record]:
    grown = [sample.disk_bytes for sample in samples]
    yield run.series("disk for four requests", "bytes", grown, how="growth, index included")
    if run.kv_bytes is None:
        return
    live = [sample.live_tokens * run.kv_bytes for sample in samples]
    once = [n - v.n_shared * run.kv_bytes for n, v in zip(live, samples, strict=True)]
    parts = [grew / n for grew, n in zip(grown, live, strict=True)]
    yield run.claim("disk ÷ live KV of both conversations", parts, 1.05, at_least=False)
    distinct = [grew / n for grew, n in zip(grown, once, strict=True)]
    yield run.claim("disk ÷ KV of distinct tokens", distinct, at_least=False)
