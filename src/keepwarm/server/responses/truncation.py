"""`truncation: auto`: drops the oldest turns of a conversation that exceeds the context.

Drops large steps, counted from the start of the conversation: the next turns then drop the same
items, so their prompts share a prefix that is cached.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile

from keepwarm.server.http.scrub import SYSTEM_ROLES
from keepwarm.server.responses.shapes import Item

STEPS = 4  # a step is this fraction of the context


def truncate(
    items: Sequence[Item],
    count: Callable[[Sequence[Item]], int],
    n_context: int,
    max_tokens: int | None,
) -> list[Item]:
    """The items without the oldest turns; `count` gives the prompt tokens of some items.

    Leaves room for an answer. System messages at the start stay, and so does the last turn, even
    if it is too long.
    """
    step = max(1, n_context // STEPS)
    total, room = count(items), min(max_tokens or step, step)
    n_excess = -(-(total + room - n_context) // step) * step
    n_system, turns = _n_leading_system(items), _turn_starts(items)
    without = [[*items[:n_system], *items[begin:]] for begin in turns]
    found = bisect_left(without, True, key=lambda kept: total - count(kept) >= n_excess)
    return without[min(found, len(without) - 1)] if without else list(items)


def _n_leading_system(items: Sequence[Item]) -> int:
    """The number of system messages at the start."""
    return len(list(takewhile(lambda item: item.role in SYSTEM_ROLES, items)))


def _turn_starts(items: Sequence[Item]) -> list[int]:
    """Where turns begin, except the first; no tool call is separated from its result there."""
    return [index for index, item in enumerate(items) if item.role == "user"][1:]
