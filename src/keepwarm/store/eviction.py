"""What a block is worth, in seconds, so that recency and worth are one number and one order.

    priority = time of last use + HALF_LIFE_S * log2(uses that still count)

A use counts half after every HALF_LIFE_S, so the sum needs no ageing: it is carried from one use to
the next. A use of a block is a use of all its ancestors, so what many descend from is kept longest.
Blocks of one model save about equally many seconds a byte; what differs is how often they do. That
deep tokens are dearer to compute is left out: with it 3 to 7 % more tokens were prefilled on the
traces (docs/results/traces.md), counted in tokens and not in seconds.
"""

from __future__ import annotations

from math import log2

HALF_LIFE_S = 20.0  # chosen among 10, 20 and 30 on the traces, where pauses are 10 s at the median
SUPERSEDED_S = -3600.0  # before everything of the last hour
SHORT_BRANCH = 8  # blocks; to be wrong about one costs no more than to compute these


def after_use(used: float, value: float, now: float) -> float:
    """The value of a block that is used now; it was `value` after the use before, at `used`."""
    halvings = (now - used - value) / HALF_LIFE_S
    return HALF_LIFE_S * log2(1 + 2 ** min(-halvings, 64))  # a clock set back is no large number
