"""`truncation: auto`: a conversation longer than the context loses its oldest turns.

Much is left out at once, and counted from the beginning: the turns that follow leave out the same,
so their prompts begin alike and are warm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile

from keepwarm.server.http.scrub import SYSTEM_ROLES
from keepwarm.server.responses.shapes import Item

STEPS = 4  # of the context, each left out as a whole


def shortened(
    items: Sequence[Item],
    count: Callable[[Sequence[Item]], int],
    n_context: int,
    max_tokens: int | None,
) -> list[Item]:
    """The items without the oldest turns, with room for an answer; `count` is of their prompt.

    What is told at the beginning stays, and so does the last turn, which may still be too long.
    """
    step = max(1, n_context // STEPS)
    total, room = count(items), min(max_tokens or step, step)
    too_many = -(-(total + room - n_context) // step) * step
    told, turns = _told(items), _turns(items)
    without = [[*items[:told], *items[begin:]] for begin in turns]
    found = bisect_left(without, True, key=lambda kept: total - count(kept) >= too_many)
    return without[min(found, len(without) - 1)] if without else list(items)


def _told(items: Sequence[Item]) -> int:
    """How many system messages stand at the beginning."""
    return len(list(takewhile(lambda item: item.role in SYSTEM_ROLES, items)))


def _turns(items: Sequence[Item]) -> list[int]:
    """Where turns begin, but for the first: no call is parted there from what it gave back."""
    return [index for index, item in enumerate(items) if item.role == "user"][1:]
