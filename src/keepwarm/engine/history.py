"""What was spared and what was computed, by minute and by day; a small file keeps it for good."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepwarm.engine.stats import Stats
from keepwarm.store.atomic import FILE_MODE, exclusive

LOG = logging.getLogger(__name__)

MINUTES_KEPT = 24 * 60
DAYS_KEPT = 400
SAVE_EVERY_S = 60.0
PLACES = ("live", "memory", "disk")


def amounts_of(stats: Stats) -> Counter[str]:
    """Everything that only grows, since the engine started."""
    counters = stats.counters
    found: Counter[str] = Counter(counters["reused_tokens"])
    found["prompt"] = counters["prompt_tokens"]
    found["prefilled"] = counters["prefilled_tokens"]
    found["generated"] = counters["generated_tokens"]
    found["saved_ms"] = round(counters["saved_ms"])
    found["written_bytes"] = stats.writes.written_bytes
    return found


@dataclass
class Book:
    """Amounts by minute and by day since the epoch, and all together."""

    minutes: dict[int, Counter[str]] = field(default_factory=dict)
    days: dict[str, Counter[str]] = field(default_factory=dict)
    total: Counter[str] = field(default_factory=Counter)

    def add(self, when: float, amounts: Counter[str]) -> None:
        self._add(int(when // 60), day_of(when), amounts)

    def _add(self, minute: int, day: str, amounts: Counter[str]) -> None:
        self.minutes.setdefault(minute, Counter()).update(amounts)
        self.days.setdefault(day, Counter()).update(amounts)
        self.total.update(amounts)
        self.minutes = _last(self.minutes, MINUTES_KEPT)
        self.days = _last(self.days, DAYS_KEPT)

    def plus(self, other: Book) -> Book:
        both = Book(total=self.total + other.total)
        both.minutes = _last(_sum(self.minutes, other.minutes), MINUTES_KEPT)
        both.days = _last(_sum(self.days, other.days), DAYS_KEPT)
        return both

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Book:
        fields = json.loads(text)
        return cls(
            {int(minute): _counter(amounts) for minute, amounts in fields["minutes"].items()},
            {str(day): _counter(amounts) for day, amounts in fields["days"].items()},
            _counter(fields["total"]),
        )


def day_of(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).date().isoformat()


def _counter(amounts: dict[str, Any]) -> Counter[str]:
    return Counter({str(name): int(amount) for name, amount in amounts.items()})


def _sum[K](a: dict[K, Counter[str]], b: dict[K, Counter[str]]) -> dict[K, Counter[str]]:
    return {key: a.get(key, Counter()) + b.get(key, Counter()) for key in a.keys() | b.keys()}


def _last[K](amounts: dict[K, Counter[str]], n: int) -> dict[K, Counter[str]]:
    return amounts


class History:
    pass
