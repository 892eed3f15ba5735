"""Tokens reused and computed, and times to the first token, by minute and by day, in a small file.

Several servers may share the file: each adds its counts since its last write.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeAlias

from keepwarm.state_file import StateFile
from keepwarm.telemetry.ledger import MINUTES_KEPT, Ledger, Minutes

LOG = logging.getLogger(__name__)

DAYS_KEPT = 400

Amounts: TypeAlias = Mapping[str, int]
Series: TypeAlias = Mapping[str, Amounts]  # by the ISO name of a minute or a day, in UTC


@dataclass(frozen=True)
class Timeline:
    minutes: Series = field(default_factory=dict)
    days: Series = field(default_factory=dict)
    total: Amounts = field(default_factory=dict)

    def plus(self, other: Timeline) -> Timeline:
        return Timeline(
            _sum(self.minutes, other.minutes, MINUTES_KEPT),
            _sum(self.days, other.days, DAYS_KEPT),
            _added(self.total, other.total),
        )

    def until(self, when: float) -> Timeline:
        """Without what was counted while the clock was ahead; it would displace what is new."""
        minute, day = minute_name(when), day_name(when)
        return Timeline(
            {name: n for name, n in self.minutes.items() if name <= minute},
            {name: n for name, n in self.days.items() if name <= day},
            self.total,
        )

    @classmethod
    def of_minutes(cls, minutes: Minutes) -> Self:
        """Amounts by the number of the minute since the epoch."""
        days: dict[str, Counter[str]] = {}
        for number, amounts in minutes.items():
            days.setdefault(day_name(60 * number), Counter()).update(amounts)
        named = {minute_name(60 * number): amounts for number, amounts in minutes.items()}
        return cls(named, days, sum(minutes.values(), Counter()))

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Self:
        if not kept:
            return cls()
        return cls(_series(kept["minutes"]), _series(kept["days"]), _amounts(kept["total"]))


def minute_name(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%MZ")


def day_name(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).date().isoformat()


def _sum(a: Series, b: Series, n_kept: int) -> Series:
    names = sorted(a.keys() | b.keys())[-n_kept:]
    return {name: _added(a.get(name, {}), b.get(name, {})) for name in names}


def _added(a: Amounts, b: Amounts) -> Amounts:
    return {name: a.get(name, 0) + b.get(name, 0) for name in a.keys() | b.keys()}


def _series(read: Mapping[str, Mapping[str, int]]) -> Series:
    return {str(name): _amounts(amounts) for name, amounts in read.items()}


def _amounts(read: Mapping[str, int]) -> Amounts:
    return {str(name): int(amount) for name, amount in read.items()}


class History:
    """The file, and what the ledger has since it was last saved."""

    def __init__(self, path: Path, unsaved: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._file = StateFile(path, "timeline", Timeline.of_json, asdict)
        self._unsaved = unsaved
        self._clock = clock
        self._saved = self._file.read()

    @property
    def timeline(self) -> Timeline:
        unsaved = Timeline.of_minutes(self._unsaved.minutes())
        return self._saved.until(self._clock()).plus(unsaved)

    def today(self) -> Amounts:
        return self.timeline.days.get(day_name(self._clock()), {})

    def save(self) -> None:
        """Add unsaved counts to the file; on an error they stay in memory."""
        if minutes := self._unsaved.minutes():
            try:
                self._saved = self._write(Timeline.of_minutes(minutes))
                self._unsaved.drop_minutes(minutes)
            except OSError as error:
                LOG.warning("the history could not be written: %s", error)

    def _write(self, unsaved: Timeline) -> Timeline:
        return self._file.change(lambda saved: saved.until(self._clock()).plus(unsaved))
