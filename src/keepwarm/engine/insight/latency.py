"""Times as counts by class, which add up over minutes; percentiles come from the counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

PREFIX = "ttft_"
CLASSES_PER_DOUBLING = 4  # a percentile is at most 9 % off
MIN_MS = 1.0


def latency_name(ms: float) -> str:
    """The class of a time to the first token."""
    return f"{PREFIX}{round(CLASSES_PER_DOUBLING * math.log2(max(MIN_MS, ms)))}"


def percentile_ms(amounts: Mapping[str, int], share: float) -> float | None:
    """The time that this share of the answers did not exceed; None without answers."""
    counts = sorted(
        (int(name.removeprefix(PREFIX)), n) for name, n in amounts.items() if _is_class(name)
    )
    wanted, passed = share * sum(n for _, n in counts), 0
    for number, n in counts:
        passed += n
        if passed >= wanted:
            return round(2 ** (number / CLASSES_PER_DOUBLING), 1)
    return None


def _is_class(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()
