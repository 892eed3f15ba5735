"""Bytes written per day by all processes: an SSD endures only so many writes, and a network has
other users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from keepwarm.state_file import store_file

DAYS_KEPT = 90


def today() -> str:
    return datetime.now(UTC).date().isoformat()


class WriteBudget:
    """Bytes written by day, in the store's state file."""

    def __init__(
        self,
        root: Path,
        max_bytes_per_day: int | None = None,
        day: Callable[[], str] = today,
        name: str = "written",
    ) -> None:
        self._file = store_file(root, name, _days)
        self._max_bytes_per_day = max_bytes_per_day
        self._day = day

    def take(self, n_bytes: int) -> bool:
        """Count bytes as written today; False, and not counted, if they exceed the budget.

        Atomic among all processes, so that together they stay within it.
        """
        limit = self._max_bytes_per_day
        try:
            with self._file.lock.hold():
                days = self._file.read_to_change()
                written = days.get(self._day(), 0) + n_bytes
                fits = limit is None or written <= limit
                if fits:
                    self._write(days, written)
                return fits
        except OSError:
            if limit is None:
                return True  # blocks are worth more than their count
            raise

    def give_back(self, n_bytes: int) -> None:
        """Uncount bytes that were taken but not written."""
        with suppress(OSError), self._file.lock.hold():
            days = self._file.read_to_change()
            self._write(days, max(0, days.get(self._day(), 0) - n_bytes))

    def _write(self, days: Mapping[str, int], written: int) -> None:
        today = self._day()
        kept = {day: n for day, n in days.items() if day < today} | {today: written}
        self._file.write(dict(sorted(kept.items())[-DAYS_KEPT:]))

    def by_day(self) -> dict[str, int]:
        """Bytes by ISO date; empty if the file is lost or damaged."""
        return self._file.read()


def _days(kept: Mapping[str, int]) -> dict[str, int]:
    return {str(day): int(n) for day, n in kept.items()}
