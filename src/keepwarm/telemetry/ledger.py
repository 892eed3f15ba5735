"""The ledger: one record of every request, appended when it ends, with what was really done.

Counters, recent requests, latencies, the history and misses are views of it. It holds numbers and
names; of prompts only the few tokens by which a miss is shown.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from keepwarm.state_file import StateFile
from keepwarm.store.counts import TIERS, warm_tier
from keepwarm.telemetry.misses import (
    MAX_CANDIDATES,
    MAX_MISSES,
    MissCandidate,
    PrefixMiss,
    find_miss,
)
from keepwarm.text.request import Receipt, Usage

RequestState = Literal[
    "waiting", "prefilling", "decoding", "done", "cancelled", "failed", "refused"
]  # refused: it failed before the engine got it
Minutes: TypeAlias = dict[int, Counter[str]]  # amounts by the number of the minute
OUTCOMES = {
    "done": "finished",
    "cancelled": "cancelled",
    "failed": "failed",
    "refused": "refused",
}
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
# Counts since the start of the process. Tokens are counted where the model is called.
COUNTS = (
    "requests",  # that the engines got
    *OUTCOMES.values(),
    "prompt_tokens",  # reused or computed, of requests that ended and asked for reuse
    "prefilled_tokens",
    "rebuilt_tokens",  # prefilled again because a batch failed
    "audited_tokens",  # prefilled again to compare a restored cache with a cold one
    *("drafted_tokens", "accepted_tokens"),  # accepted: generated without a step of their own
    *("generated_tokens", "waited_for_prefix", "rebuilt_batches", "failed_saves"),
    *("audits", "drifts"),  # drifts: audits whose answer differed
    "audit_nats",  # by which audited answers diverged where blocks are rounded
    "saved_ms",  # as far as it is known
    "keeping_ms",  # of the engine's thread
)
MINUTES_KEPT = 24 * 60
MAX_TITLES = 10_000
LATENCY = "ttft_"
CLASSES_PER_DOUBLING = 4  # a percentile is at most 9 % off
MIN_MS = 1.0
BY_MINUTE = {"prefilled_tokens": "prefilled", "generated_tokens": "generated"}


@dataclass(frozen=True)
class RequestRecord:
    """One request: what was done for it, until now or until it ended."""

    number: int
    seconds: float  # from its first byte until now or its end
    tenant: str
    agent: str | None
    model: str
    state: RequestState
    prompt_tokens: int
    answer_tokens: int
    receipt: Receipt | None  # None while it waits; of one that was cut short, as far as it came
    computed_tokens: int = 0  # of the prompt, that the model was fed
    phases_ms: Mapping[str, float] = field(default_factory=dict)  # parts of `ttft_ms`, in order
    ttft_ms: float | None = None  # from its first byte to the first of its answer
    usage: Usage | None = None
    n_sequences: int = 1  # that were decoded together
    is_later_turn: bool = False
    asks_for_reuse: bool = True  # not an embedding, a warm-up, or one that reads nothing
    is_stored: bool = True  # what it computes
    error: str = ""
    status: int | None = None  # of HTTP, of one that failed
    ended: float | None = None  # seconds since the epoch
    request_id: str = ""

    @property
    def reused(self) -> Mapping[str, int]:
        """Tokens by tier."""
        return {} if self.receipt is None else self.receipt.reused

    @property
    def processed_tokens(self) -> int:
        """Prompt tokens that are in its cache: reused or computed."""
        return sum(self.reused.values()) + self.computed_tokens

    @property
    def is_warm(self) -> bool:
        return warm_tier(self.processed_tokens, self.reused) is not None

    @property
    def saved_ms(self) -> float | None:
        """None: not known."""
        is_read = self.receipt is not None and self.processed_tokens >= self.prompt_tokens
        return self.receipt.saved_ms if self.receipt and is_read else 0.0

    @property
    def is_answered(self) -> bool:
        return bool(self.usage and self.usage.completion_tokens)

    def amounts(self) -> dict[str, int]:
        """What it adds to the history of its minute."""
        is_timed = self.is_answered and self.ttft_ms is not None
        amounts = {
            **({**self.reused, "prompt": self.processed_tokens} if self.asks_for_reuse else {}),
            **({latency_name(self.ttft_ms or 0.0): 1} if is_timed else {}),
            "saved_ms": round(self.saved_ms or 0.0),
            "unknown_savings": int(self.saved_ms is None),
            OUTCOMES[self.state]: 1,
        }
        return {name: n for name, n in amounts.items() if n}


def latency_name(ms: float) -> str:
    """The class of a time to the first token: counts of classes add up over minutes."""
    return f"{LATENCY}{round(CLASSES_PER_DOUBLING * math.log2(max(MIN_MS, ms)))}"


def percentile_ms(amounts: Mapping[str, int], share: float) -> float | None:
    """The time that this share of the answers did not exceed; None without answers."""
    counts = sorted(
        (int(name.removeprefix(LATENCY)), n) for name, n in amounts.items() if _is_class(name)
    )
    wanted, passed = share * sum(n for _, n in counts), 0
    for number, n in counts:
        passed += n
        if passed >= wanted:
            return round(2 ** (number / CLASSES_PER_DOUBLING), 1)
    return None


def _is_class(name: str) -> bool:
    return name.startswith(LATENCY) and name.removeprefix(LATENCY).isdecimal()


class Distribution:
    """How many values are in each class; Prometheus calls it a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """How many values do not exceed each bound."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return [(name, float(sum(self._counts[: i + 1]))) for i, name in enumerate(names)]


class HistogramSample(NamedTuple):
    """One distribution as it is now, with the value of its label."""

    label: str
    buckets: list[tuple[str, float]]
    total: float


class Ledger:
    """What the engines of one process have done. They write to it; any thread reads.

    It has one lock, held for no longer than a sum.
    """

    def __init__(self, n_kept: int = 500, clock: Callable[[], float] = time.time) -> None:
        self.numbers = count(1)  # of requests
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._reused: Counter[str] = Counter(dict.fromkeys(TIERS, 0))
        self._records: deque[RequestRecord] = deque(maxlen=n_kept)
        self._minutes: Minutes = {}  # not in the history's file yet
        self._ttft = {"no": Distribution(TTFT_S), "yes": Distribution(TTFT_S)}  # by `is_warm`
        self._phases_s: dict[str, float] = {}  # of the times in `_ttft`
        self._token = Distribution(TOKEN_S)
        self._candidates: deque[MissCandidate] = deque(maxlen=MAX_CANDIDATES)
        self._misses: deque[PrefixMiss] = deque(maxlen=MAX_MISSES)
        self._n_forgotten = 0  # how often texts were forgotten
        self._titles: dict[str, tuple[object, str]] = {}  # of agents, each with its file's version

    def count(self, **amounts: float) -> None:
        """Add to counts that are not those of a request's end."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount
                if name in BY_MINUTE:
                    self._minute()[BY_MINUTE[name]] += int(amount)

    def append(self, record: RequestRecord, candidate: MissCandidate | None = None) -> None:
        """Book a request that has ended; `candidate` if it may be a miss."""
        with self._lock:
            self._records.append(record)
            self._counts[OUTCOMES[record.state]] += 1
            self._counts["saved_ms"] += record.saved_ms or 0.0
            if record.asks_for_reuse:
                self._counts["prompt_tokens"] += record.processed_tokens
                self._reused.update(record.reused)
            self._minute().update(record.amounts())
            self._time(record)
            if candidate is not None:
                self._candidates.append(candidate)

    def _time(self, record: RequestRecord) -> None:
        if record.usage is None:
            return
        if record.is_answered:
            self._ttft["yes" if record.is_warm else "no"].add(record.usage.ttft_ms / 1000)
            for name, ms in record.phases_ms.items():
                self._phases_s[name] = self._phases_s.get(name, 0.0) + ms / 1000
        if record.usage.tokens_per_second > 0:
            self._token.add(record.n_sequences / record.usage.tokens_per_second)

    def _minute(self) -> Counter[str]:
        number = int(self._clock() // 60)
        if number not in self._minutes:
            self._minutes[number] = Counter()
            while len(self._minutes) > MINUTES_KEPT:  # nobody saves them
                del self._minutes[next(iter(self._minutes))]
        return self._minutes[number]

    def records(self) -> list[RequestRecord]:
        """The last requests that ended, oldest first."""
        with self._lock:
            return list(self._records)

    def counters(self) -> dict[str, Any]:
        """Counts by name, and reused tokens by tier."""
        with self._lock:
            return {**self._counts, "reused_tokens": dict(self._reused)}

    def times_to_first_token(self) -> list[HistogramSample]:
        with self._lock:
            return [HistogramSample(warm, d.buckets(), d.total) for warm, d in self._ttft.items()]

    def phases_s(self) -> dict[str, float]:
        """The times to the first token of all answers, by part."""
        with self._lock:
            return dict(self._phases_s)

    def times_per_token(self) -> HistogramSample:
        with self._lock:
            return HistogramSample("", self._token.buckets(), self._token.total)

    # the history

    def minutes(self) -> Minutes:
        """Amounts that are not in the history's file yet."""
        with self._lock:
            return {number: amounts.copy() for number, amounts in self._minutes.items()}

    def drop_minutes(self, saved: Mapping[int, Counter[str]]) -> None:
        """These amounts are in the file; what was added since stays."""
        with self._lock:
            left = {number: n - saved.get(number, Counter()) for number, n in self._minutes.items()}
            self._minutes = {number: amounts for number, amounts in left.items() if amounts}

    # misses

    def misses(self) -> list[PrefixMiss]:
        """Requests that computed known tokens again, newest first. It compares whole prompts."""
        with self._lock:
            candidates, n_forgotten = list(self._candidates), self._n_forgotten
            self._candidates.clear()
        found = [miss for each in candidates if (miss := find_miss(each)).is_significant]
        with self._lock:
            if n_forgotten == self._n_forgotten:
                self._misses.extend(found)
            return list(self._misses)[::-1]

    def title_of(self, agent: str, version: object, read: Callable[[], str]) -> str:
        """What an agent is called, read again when its file has another version."""
        known, n_forgotten = self._titles.get(agent), self._n_forgotten
        if known is not None and known[0] == version:
            return known[1]
        title = read()
        with self._lock:
            if n_forgotten == self._n_forgotten:
                self._titles[agent] = version, title
                if len(self._titles) > MAX_TITLES:
                    del self._titles[next(iter(self._titles))]
        return title

    def forget_texts(self) -> None:
        """Parts of prompts, by which misses and agents are shown."""
        with self._lock:
            self._n_forgotten += 1
            self._titles.clear()
            self._candidates.clear()
            self._misses.clear()


# Tokens reused and computed, and times to the first token, by minute and by day, in a small file.
# Several servers may share the file: each adds its counts since its last write.

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
