"""CombinedAnswer answers as one: a text completion may ask with many prompts at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from keepwarm.engine.answer import collect
from keepwarm.errors import KeepwarmError
from keepwarm.server.host import ObservedAnswer
from keepwarm.server.http.sse import wait_for_start
from keepwarm.text.request import (
    Delta,
    Done,
    Event,
    Finished,
    Outcome,
    Receipt,
    Result,
    Started,
    ToolCalled,
    Usage,
)


class CombinedAnswer:
    """Events of all, as they come; choices are numbered through, the cost is summed up."""

    def __init__(self, answers: Sequence[ObservedAnswer], n: int) -> None:
        self._answers = answers
        self._n = n  # choices of each

    def cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()

    async def wait(self) -> Result:
        return collect([event async for event in self])

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Started once all have, Done once all are; the first error ends it."""
        plans = [await wait_for_start(answer) for answer in self._answers]
        yield Started(sum_receipts([plan.receipt for plan in plans]))
        queue: asyncio.Queue[Outcome] = asyncio.Queue()
        tasks = [asyncio.create_task(self._read(i, queue)) for i in range(len(self._answers))]
        done: list[Done] = []
        try:
            while len(done) < len(tasks):
                outcome = await queue.get()
                if isinstance(outcome, KeepwarmError):
                    raise outcome
                if isinstance(outcome, Done):
                    done.append(outcome)
                else:
                    yield outcome
        finally:
            for task in tasks:
                task.cancel()
        yield Done(_sum_usage(done), sum_receipts([each.receipt for each in done]))

    async def _read(self, number: int, queue: asyncio.Queue[Outcome]) -> None:
        try:
            async for event in self._answers[number]:
                queue.put_nowait(self._numbered(number, event))
        except KeepwarmError as error:
            queue.put_nowait(error)

    def _numbered(self, number: int, event: Event) -> Event:
        if isinstance(event, Delta | ToolCalled | Finished):
            return replace(event, choice=number * self._n + event.choice)
        return event


def sum_receipts(receipts: Sequence[Receipt]) -> Receipt:
    """One receipt for all; what is explained is the prompt of which most was computed."""
    durable = [receipt.durable for receipt in receipts]
    places = {place for receipt in receipts for place in receipt.reused}
    return Receipt(
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        reused={place: sum(r.reused.get(place, 0) for r in receipts) for place in sorted(places)},
        recomputed=sum(receipt.recomputed for receipt in receipts),
        saved_ms=sum(receipt.saved_ms for receipt in receipts),
        exact=all(receipt.exact for receipt in receipts),
        spliced=sum(receipt.spliced for receipt in receipts),
        miss=max(receipts, key=lambda receipt: receipt.recomputed).miss,
        durable=None if None in durable else all(durable),
    )


def _sum_usage(done: Sequence[Done]) -> Usage:
    usages = [each.usage for each in done]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        ttft_ms=min(usage.ttft_ms for usage in usages),
        tokens_per_second=sum(usage.tokens_per_second for usage in usages),
    )
