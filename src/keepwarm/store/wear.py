"""How much was written today, by all processes together: an SSD has only so many writes in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from keepwarm.store.atomic import FILE_MODE, exclusive

DAYS_KEPT = 90


def today() -> str:
    return datetime.now(UTC).date().isoformat()


class Wear:
    """Bytes written by day, kept in a small file beside the blocks."""

    def __init__(
        self,
        root: Path,
        max_bytes_per_day: int | None = None,
        day: Callable[[], str] = today,
    ) -> None:
        self._path = root / "wear.json"
        self._lock = root / "tmp" / "wear"
        self._max_bytes_per_day = max_bytes_per_day
        self._day = day

    def allows(self, n_bytes: int) -> bool:
        """Whether so many more bytes fit into today's budget."""
        if self._max_bytes_per_day is None:
            return True
        return self.by_day().get(self._day(), 0) + n_bytes <= self._max_bytes_per_day

    def add(self, n_bytes: int) -> None:
        with exclusive(self._lock):
            days = self.by_day()
            days[self._day()] = days.get(self._day(), 0) + n_bytes
            kept = dict(sorted(days.items())[-DAYS_KEPT:])
            temp = self._path.with_suffix(".part")
            temp.touch(FILE_MODE)
            temp.write_text(json.dumps(kept))
            temp.replace(self._path)

    def by_day(self) -> dict[str, int]:
        """Bytes by ISO date; a lost or torn file counts as nothing written."""
        try:
            days = json.loads(self._path.read_text())
            return {str(day): int(n) for day, n in days.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
