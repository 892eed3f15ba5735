"""Tokens reused and computed, by minute and by day, in a small file.

Several servers may share the file: each adds its counts since its last write.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeAlias

from keepwarm.engine.insight.latency import latency_name
from keepwarm.engine.insight.stats import Stats
from keepwarm.files import write_atomically
from keepwarm.store.atomic import exclusive

LOG = logging.getLogger(__name__)

MINUTES_KEPT = 24 * 60
DAYS_KEPT = 400
OBSERVE_EVERY_S = 5.0
SAVE_EVERY_S = 60.0

Amounts: TypeAlias = Mapping[str, int]
Series: TypeAlias = Mapping[str, Amounts]  # by the ISO name of a minute or a day, in UTC


def amounts_of(stats: Stats) -> Amounts:
    """All counts that only grow while an engine runs; in tokens unless the name has a unit."""
    counters = stats.counters
    return {
        **counters["reused_tokens"],  # by tier
        "prompt": counters["prompt_tokens"],
        "prefilled": counters["prefilled_tokens"],
        "generated": counters["generated_tokens"],
        "finished": counters["finished"],
        "cancelled": counters["cancelled"],
        "failed": counters["failed"],
        "saved_ms": round(counters["saved_ms"]),
        "written_bytes": stats.writes.written_bytes,
    }


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
    def entry(cls, when: float, amounts: Amounts) -> Self:
        minute, day = minute_name(when), day_name(when)
        return cls({minute: amounts}, {day: amounts}, amounts)

    @classmethod
    def read(cls, path: Path) -> Self:
        """A missing or damaged file counts as empty."""
        try:
            read = json.loads(path.read_text())
            return cls(_series(read["minutes"]), _series(read["days"]), _amounts(read["total"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()


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
    """Adds up the differences between snapshots. Thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: Amounts = {}
        self._saved = Timeline.read(path)
        self._unsaved = Timeline()

    def observe(self, stats: Stats) -> None:
        """Add what has happened since the last snapshot."""
        now = amounts_of(stats)
        with self._lock:
            more = {name: _since(amount, self._seen.get(name, 0)) for name, amount in now.items()}
            self._seen = now
            if any(more.values()):
                entry = Timeline.entry(self._clock(), {k: n for k, n in more.items() if n})
                self._unsaved = self._unsaved.plus(entry)

    def add_latency(self, ttft_ms: float) -> None:
        """Count the time to the first token of an answer."""
        with self._lock:
            entry = Timeline.entry(self._clock(), {latency_name(ttft_ms): 1})
            self._unsaved = self._unsaved.plus(entry)

    @property
    def timeline(self) -> Timeline:
        with self._lock:
            return self._saved.until(self._clock()).plus(self._unsaved)

    def today(self) -> Amounts:
        return self.timeline.days.get(day_name(self._clock()), {})

    def save(self) -> None:
        """Add unsaved counts to the file; on an error they stay in memory."""
        with self._lock:
            if not self._unsaved.total:
                return
            try:
                self._write()
            except OSError as error:
                LOG.warning("the history could not be written: %s", error)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(self._path.with_suffix(".lock")):
            saved = Timeline.read(self._path).until(self._clock())
            timeline = saved.plus(self._unsaved)
            write_atomically(self._path, json.dumps(asdict(timeline), separators=(",", ":")))
        self._saved, self._unsaved = timeline, Timeline()


def _since(now: int, before: int) -> int:
    """How much a count has grown; a smaller one comes from a new engine."""
    return now - before if now >= before else now


@contextmanager
def recording(history: History, snapshot: Callable[[], Stats | None]) -> Iterator[None]:
    """Within the context, observe snapshots every few seconds; None: no engine is loaded."""
    stopped = threading.Event()

    def observe() -> None:
        try:
            if (stats := snapshot()) is not None:
                history.observe(stats)
        except Exception:
            LOG.exception("the engine's statistics could not be read")

    def run() -> None:
        saved = time.monotonic()
        while not stopped.wait(OBSERVE_EVERY_S):
            observe()
            if time.monotonic() - saved > SAVE_EVERY_S:
                history.save()
                saved = time.monotonic()

    thread = threading.Thread(target=run, name="keepwarm-history", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        observe()
        history.save()
