"""A streamed answer: the engine puts events in, one reader takes them out.

The reader may be a thread (`for`) or a coroutine on any loop (`async for`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Self, TypeAlias, TypeVar

from keepwarm.errors import EngineFailed, KeepwarmError
from keepwarm.telemetry.ledger import RequestRecord
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Embedded,
    Event,
    Finished,
    Outcome,
    Receipt,
    Result,
    Scored,
    ToolCalled,
    Usage,
)

Wake: TypeAlias = Callable[[], None]
N = TypeVar("N")


class Answer(Iterator[Event], AsyncIterator[Event]):
    """What `Engine.submit` returns. Iterate once over its events; ends after `Done`, or raises the
    error."""

    def __init__(
        self, cancel: Callable[[Answer], None], prepared: PreparedRequest | None = None
    ) -> None:
        self.prepared = prepared  # the request as tokens
        self.record: RequestRecord | None = None  # what was done, before its last event comes
        self._cancel = cancel
        self._outcomes: deque[Outcome] = deque()
        self._changed = threading.Condition()
        self._wake: Wake | None = None  # wakes the coroutine that waits
        self._ended = False  # the reader has seen the last event

    def put(self, outcome: Outcome) -> None:
        """For the engine's thread."""
        with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """Ask the engine to stop, which takes at most a step. What was computed is kept."""
        self._cancel(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        with self._changed:
            self._changed.wait_for(lambda: self._outcomes)
        return self._unwrap(self._outcomes.popleft())  # there is one reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        while True:
            with self._changed:
                if self._outcomes:
                    return self._unwrap(self._outcomes.popleft())
                woken = self._register_wake()
            await woken.wait()

    def result(self) -> Result:
        """Wait for the whole answer; a caller that stops waiting cancels it."""
        try:
            return collect(self)
        except BaseException:  # Ctrl-C
            self.cancel()
            raise

    async def wait(self) -> Result:
        """`result` as a coroutine."""
        try:
            return collect([event async for event in self])
        except BaseException:
            self.cancel()
            raise

    def _register_wake(self) -> asyncio.Event:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so no coroutine waits
                loop.call_soon_threadsafe(woken.set)

        self._wake = wake
        return woken

    def _unwrap(self, outcome: Outcome) -> Event:
        if isinstance(outcome, KeepwarmError):
            self._ended = True
            try:
                raise outcome
            finally:
                del outcome  # its traceback refers to this frame, and would keep the answer alive
        self._ended = isinstance(outcome, Done)
        return outcome


def collect(events: Iterator[Event] | list[Event]) -> Result:
    """All events of an answer as one value."""
    by_choice: dict[int, list[Event]] = {}
    done: Done | None = None
    scored, vector = {}, None
    for event in events:
        if isinstance(event, Delta | ToolCalled | Finished):
            by_choice.setdefault(event.choice, []).append(event)
        elif isinstance(event, Scored):
            scored[event.choice] = event.tokens
        elif isinstance(event, Embedded):
            vector = event.vector
        elif isinstance(event, Done):
            done = event
    if done is None:
        raise EngineFailed("The response stopped unexpectedly; retry.")
    choices = tuple(_choice(by_choice[number]) for number in sorted(by_choice))
    return Result(choices, done.usage, done.receipt, scored, vector)


def _choice(events: list[Event]) -> Choice:
    deltas = [event for event in events if isinstance(event, Delta)]
    parts = [event for event in events if isinstance(event, Delta | ToolCalled | Finished)]
    finished = next(event for event in events if isinstance(event, Finished))
    return Choice(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(event.call for event in events if isinstance(event, ToolCalled)),
        reason=finished.reason,
        stop=finished.stop,
        tokens=tuple(info for part in parts for info in part.tokens),
    )


def sum_receipts(receipts: Sequence[Receipt]) -> Receipt:
    """One receipt for several prompts.

    Its miss is that of the prompt that computed the most, its phases those of the first token.
    """
    durable = [receipt.durable for receipt in receipts]
    saved = _given(receipt.saved_ms for receipt in receipts)
    timed = [receipt.phases_ms for receipt in receipts if receipt.phases_ms]
    tiers = sorted({tier for receipt in receipts for tier in receipt.reused})
    return Receipt(
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        reused={tier: sum(r.reused.get(tier, 0) for r in receipts) for tier in tiers},
        recomputed=sum(receipt.recomputed for receipt in receipts),
        saved_ms=round(sum(saved), 1) if saved else None,
        inexact=tuple(dict.fromkeys(reason for r in receipts for reason in r.inexact)),
        lossy_tokens=sum(_given(receipt.lossy_tokens for receipt in receipts)) or None,
        spliced=sum(receipt.spliced for receipt in receipts),
        scrubbed=tuple(dict.fromkeys(rule for r in receipts for rule in r.scrubbed)),
        reordered=tuple(dict.fromkeys(part for r in receipts for part in r.reordered)),
        unread=tuple(dict.fromkeys(kind for r in receipts for kind in r.unread)),
        ignored_fields=tuple(dict.fromkeys(name for r in receipts for name in r.ignored_fields)),
        miss=max(receipts, key=lambda receipt: receipt.recomputed).miss,
        repeated_calls=tuple(call for r in receipts for call in r.repeated_calls),
        durable=None if None in durable else all(durable),
        shared=sum(shared) if (shared := _given(r.shared for r in receipts)) else None,
        continued=sum(continued) if (continued := _given(r.continued for r in receipts)) else None,
        scored=sum(scored) if (scored := _given(r.scored for r in receipts)) else None,
        phases_ms=min(timed, key=lambda phases: sum(phases.values()), default=None),
        speculation=_summed(_given(receipt.speculation for receipt in receipts)),
    )


def _summed(counts: Sequence[Mapping[str, int]]) -> Mapping[str, int] | None:
    return {name: sum(each[name] for each in counts) for name in counts[0]} if counts else None


def _given(values: Iterable[N | None]) -> list[N]:
    return [value for value in values if value is not None]


def sum_usages(usages: Sequence[Usage]) -> Usage:
    """One usage for several answers: TTFT of the first, decode speed of the last."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        ttft_ms=usages[0].ttft_ms,
        tokens_per_second=usages[-1].tokens_per_second,
    )
