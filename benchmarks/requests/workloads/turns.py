"""Conversations: six turns, and recorded turns of coding agents scaled down."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from benchmarks.requests import recorded
from benchmarks.requests.client import Message, TimedReply
from benchmarks.requests.prompts import system, user, with_answer
from benchmarks.requests.report.results import Note, Record
from benchmarks.requests.run import WorkloadRun

HOW = "from turn 2 on: the conversation so far and a new question"
RESTARTED = "restart: conversation of six turns"
NEW = "tokens in neither the previous prompt nor its answer"


class PipelineSample(NamedTuple):
    """The replies of one conversation with the cache on, and off if the target allows it."""

    on: list[TimedReply]
    off: list[TimedReply]


def pipeline(run: WorkloadRun) -> Iterator[Record]:
    samples = [_sample(run) for _ in run.samples("conversation")]
    yield from _turn_series(run, samples)
    on = [sum(reply.total_s for reply in sample.on) for sample in samples]
    yield run.series("whole conversation", "s", on, how=f"{run.sizes.turns} turns with answers")
    what = "recomputed ÷ new tokens from turn 2"
    yield run.claim(what, [_ratio(sample.on) for sample in samples], 1.02, at_least=False)
    yield run.claim("hit rate from turn 2", [_hit_rate(sample.on) for sample in samples], 0.8)
    if run.target.is_ours:
        yield from _against_off(run, samples, on)


def _against_off(
    run: WorkloadRun, samples: Sequence[PipelineSample], on: Sequence[float]
) -> Iterator[Record]:
    off = [sum(reply.total_s for reply in sample.off) for sample in samples]
    yield run.series("whole conversation, cache off", "s", off, how="policy no-store")
    saved = [1 - a / b for a, b in zip(on, off, strict=True)]
    yield run.claim("time saved against cache off", saved, 0.6)
    n_compared = [len(_comparable(sample)) for sample in samples]
    how = f"of {run.sizes.turns} turns, those with equally long prompts"
    yield run.series("answers compared", "answers", n_compared, how=how, better="")
    differing = [sum(a.text != b.text for a, b in _comparable(sample)) for sample in samples]
    what, n_differing = "answers that differ from cache off", float(sum(differing))
    yield run.claim(what, differing, 0, at_least=False, value=n_differing)


def _sample(run: WorkloadRun) -> PipelineSample:
    """All turns with the cache on, then the same prompts with it off."""
    messages, prompts, on = run.fresh(run.sizes.first_turn), [], []
    for _ in range(run.sizes.turns):
        prompts.append(messages)
        on.append(run.ask(messages))
        messages = with_answer(messages, on[-1].text, run.text(run.sizes.next_turn))
    if not run.target.is_ours:  # it has no cache policy
        return PipelineSample(on, [])
    run.show_status("the same with the cache off")
    return PipelineSample(on, [run.ask(prompt, policy="no-store") for prompt in prompts])


def restart(run: WorkloadRun) -> Iterator[Record]:
    """A long conversation's last prompt, asked again by the first client after a restart."""
    if not run.target.restart_method:
        yield Note(run.workload, run.target.name, "cannot be restarted by the bench")
        return
    messages = long_conversation(run)
    at_once = [after_restart(run, messages) for _ in run.samples("restart")]
    n_characters = run.sizes.restarted
    how = f"prompt of {n_characters:,} characters, right after ready; files in the page cache"
    first = run.series(RESTARTED, "s", [reply.ttft_s for reply in at_once], how=how)
    yield first
    cached = [reply.cached_tokens for reply in at_once]
    yield run.series(f"cached, {RESTARTED}", "tokens", cached, how=how, better="higher")
    if run.target.is_ours:
        waited = run.sizes.later_s
        later = [after_restart(run, messages, waited).ttft_s for _ in run.samples("later")]
        settled = run.series("restart, later", "s", later, how=f"the same {waited:g} s later")
        yield settled
        yield run.ratio("right after ready ÷ later", first, settled, 1.3, at_least=False)


def long_conversation(run: WorkloadRun) -> list[Message]:
    """The last prompt of six turns."""
    n_characters = run.sizes.restarted // run.sizes.turns
    messages = [user(run.prompts.long_text(n_characters, next(run.seeds)))]
    for _ in range(run.sizes.turns - 1):
        question = run.prompts.long_text(n_characters, next(run.seeds))
        messages = with_answer(messages, run.ask(messages).text, question)
    run.ask(messages)
    return messages


def after_restart(run: WorkloadRun, messages: Sequence[Message], wait_s: float = 0.0) -> TimedReply:
    """Asked by the first client; of a server that is ready before its model, by the second."""
    run.target.settle()
    run.target.kill()
    if run.target.is_ours:
        run.target.launch()
    else:
        run.target.start()
    time.sleep(wait_s)
    return run.ask(messages)


def _new_tokens(sample: Sequence[TimedReply]) -> list[int]:
    """For each turn, the tokens in neither the previous prompt nor its answer."""
    known = [0, *(reply.prompt_tokens + reply.completion_tokens for reply in sample)]
    return [reply.prompt_tokens - n for reply, n in zip(sample, known, strict=False)]


def _ratio(sample: Sequence[TimedReply]) -> float:
    return sum(reply.recomputed for reply in sample[1:]) / sum(_new_tokens(sample)[1:])


def _hit_rate(sample: Sequence[TimedReply]) -> float:
    return sum(r.cached_tokens for r in sample[1:]) / sum(r.prompt_tokens for r in sample[1:])


def _comparable(sample: PipelineSample) -> list[tuple[TimedReply, TimedReply]]:
    """Turns whose prompts have equally many tokens: with the cache on, an answer sent back keeps
    the tokens it was generated as; with it off, its text is tokenised again.
    """
    pairs = zip(sample.on, sample.off, strict=True)
    return [(a, b) for a, b in pairs if a.prompt_tokens == b.prompt_tokens]


def _turn_series(run: WorkloadRun, samples: Sequence[PipelineSample]) -> Iterator[Record]:
    news = [_new_tokens(sample.on) for sample in samples]
    for turn in range(run.sizes.turns):
        replies, x = [sample.on[turn] for sample in samples], turn + 1
        new = [of_sample[turn] for of_sample in news]
        yield run.series("recomputed", "tokens", [r.recomputed for r in replies], x=x, how=HOW)
        yield run.series("new", "tokens", new, x=x, how=NEW, better="")
        yield run.series("TTFT", "s", [r.ttft_s for r in replies], x=x, how=HOW)


def trace(run: WorkloadRun) -> Iterator[Record]:
    """Requests of coding agents, interleaved by their timestamps, without the pauses."""
    sizes = run.sizes
    conversations = [
        recorded.RecordedConversation(conversation.turns[: sizes.n_requests])
        for conversation in recorded.load(sizes.conversations, sizes.divisor)
    ]
    history: dict[int, list[str]] = {}
    replies, new, seed = [], 0, next(run.seeds)
    asked = list(islice(recorded.requests(conversations), sizes.conversations * sizes.n_requests))
    for number, request in enumerate(asked):
        run.show_status(f"request {number + 1} of {len(asked)}")
        before = history.get(request.conversation, [])[: request.n_common]
        fresh = run.prompts.draw(request.n_input - len(before), f"{seed} {number}")
        history[request.conversation] = [*before, *fresh]
        new += run.prompts.count(" ".join(fresh))
        messages = [system("."), user(" ".join(history[request.conversation]))]
        replies.append(run.ask(messages, min(request.n_output, sizes.answer)))
    yield from _trace_records(run, replies, new)


def _trace_records(run: WorkloadRun, replies: Sequence[TimedReply], new: int) -> Iterator[Record]:
    how = f"lengths divided by {run.sizes.divisor}; one pass, every request is a sample"
    recomputed = run.series("recomputed", "tokens", [sum(r.recomputed for r in replies)], how=how)
    needed = run.series("new", "tokens", [new], how="what an ideal cache computes", better="")
    yield from (recomputed, needed)
    yield run.series("TTFT", "s", [reply.ttft_s for reply in replies], how=how)
    yield run.ratio("recomputed ÷ new tokens", recomputed, needed, at_least=False)
    n_prompt = sum(reply.prompt_tokens for reply in replies)
    yield run.claim("hit rate", [1 - recomputed.median / n_prompt])
