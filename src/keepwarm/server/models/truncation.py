"""`truncation: auto`: drops the oldest turns of a conversation that exceeds the context.

Drops large steps, counted from the start of the conversation: the next turns then drop the same
items, so their prompts share a prefix that is cached.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol, TypeVar

from keepwarm.errors import ContextTooLong
from keepwarm.text.request import SYSTEM_ROLES, Request

if TYPE_CHECKING:
    from keepwarm.engine.engine import Engine
    from keepwarm.server.http.permits import PrepareSlot
    from keepwarm.server.models.host import EngineHost, ObservedAnswer
    from keepwarm.text.sandbox.deadline import PrepareDeadline

STEPS = 4  # a step is this fraction of the context
MAX_STARTS = 256  # turns to begin with that are tried: of more, every second, fourth, …


class HasRole(Protocol):
    """What a conversation consists of: items of a response, or messages."""

    @property
    def role(self) -> str | None: ...


Entry = TypeVar("Entry", bound=HasRole)


async def submit_shortened(
    host: EngineHost,
    slot: PrepareSlot,
    request: Request,
    build: Callable[[Sequence[Entry]], Request],
    droppable: Sequence[Entry],
) -> tuple[ObservedAnswer, int]:
    """The answer, and how many items were dropped because the context is too short for them."""
    try:
        return await host.submit(request, slot), 0
    except ContextTooLong:
        if not droppable:
            raise
    shortened, n_dropped = await slot.run(_shortened, host.engine, build, droppable)
    return await host.submit(shortened, slot), n_dropped


def _shortened(
    engine: Engine,
    build: Callable[[Sequence[Entry]], Request],
    items: Sequence[Entry],
    deadline: PrepareDeadline,
) -> tuple[Request, int]:
    def count(some: Sequence[Entry]) -> int:
        return engine.count_tokens(build(some), deadline)

    kept = truncate(items, count, engine.model.n_context, build(items).sampling.max_tokens)
    return build(kept), len(items) - len(kept)


def truncate(
    items: Sequence[Entry],
    count: Callable[[Sequence[Entry]], int],
    n_context: int,
    max_tokens: int | None,
) -> list[Entry]:
    """The items without the oldest turns; `count` gives the prompt tokens of some items.

    Leaves room for an answer. System messages at the start stay, and so does the last turn, even
    if it is too long.
    """
    step = max(1, n_context // STEPS)
    total, room = count(items), min(max_tokens or step, step)
    n_excess = -(-(total + room - n_context) // step) * step
    system, starts = items[: _n_leading_system(items)], _turn_starts(items)

    def without(begin: int) -> list[Entry]:
        return [*system, *items[begin:]]

    found = bisect_left(starts, True, key=lambda begin: total - count(without(begin)) >= n_excess)
    return without(starts[min(found, len(starts) - 1)]) if starts else list(items)


def _n_leading_system(items: Sequence[HasRole]) -> int:
    """The number of system messages at the start."""
    return len(list(takewhile(lambda item: item.role in SYSTEM_ROLES, items)))


def _turn_starts(items: Sequence[HasRole]) -> list[int]:
    """Where turns begin, except the first; no tool call is separated from its result there.

    Of very many only some, the last among them: each one that is tried is a rendered prompt.
    """
    starts = [index for index, item in enumerate(items) if item.role == "user"][1:]
    stride = 1 << (len(starts) // MAX_STARTS).bit_length()
    return [*starts[:-1:stride], *starts[-1:]]
