"""Several answers as one: a text completion may have several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from keepwarm.engine.answer import sum_receipts, sum_usages
from keepwarm.errors import KeepwarmError
from keepwarm.server.host import ObservedAnswer
from keepwarm.server.http.sse import wait_for_start
from keepwarm.text.request import (
    Delta,
    Done,
    Event,
    Finished,
    Outcome,
    Scored,
    Started,
    ToolCallDelta,
    ToolCalled,
)


class CombinedAnswer:
    """Events of all answers as they arrive; choices are renumbered, usages and receipts summed."""

    def __init__(self, answers: Sequence[ObservedAnswer], n: int) -> None:
        self._answers = answers
        self._n = n  # choices per answer

    def cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Started and Done come when every answer has them; the first error ends the stream."""
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
        yield Done(
            sum_usages([each.usage for each in done]), sum_receipts([each.receipt for each in done])
        )

    async def _read(self, number: int, queue: asyncio.Queue[Outcome]) -> None:
        try:
            async for event in self._answers[number]:
                queue.put_nowait(self._numbered(number, event))
        except KeepwarmError as error:
            queue.put_nowait(error)

    def _numbered(self, number: int, event: Event) -> Event:
        if isinstance(event, Scored | Delta | ToolCallDelta | ToolCalled | Finished):
            return replace(event, choice=number * self._n + event.choice)
        return event
