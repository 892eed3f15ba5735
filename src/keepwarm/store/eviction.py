"""What a block is worth, in seconds, so that recency and worth are one number and one order.

    priority = time of last use + HALF_LIFE_S * log2(uses that still count)

A use counts half after every HALF_LIFE_S, so the sum needs no ageing: it is carried from one use to
the next. A use of a block is a use of all its ancestors, so what many descend from is kept longest.
Blocks of one model save equally many seconds a byte; what differs is how often they do. Weighing
depth too, whose tokens are dearer to compute, cost 7 % more tokens on the traces, and was left out.
"""

from __future__ import annotations

from math import log2

HALF_LIFE_S = 20.0  # best of 10, 20, 30 and 45 on the traces, whose pauses are 10 s at the median
SUPERSEDED_S = -3600.0
SHORT_BRANCH = 8  # blocks; to be wrong about one costs no more than to compute these


def after_use(used: float, value: float, now: float) -> float:
    """The value of a block that is used now; it was `value` after the use before, at `used`."""
    halvings = (now - used - value) / HALF_LIFE_S
    return HALF_LIFE_S * log2(1 + 2 ** min(-halvings, 64))  # a clock set back is no large number
