"""What prefilling and loading cost, as measured, to choose between them; kept between starts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, combinations, count
from math import log2
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from keepwarm.prefix.blocks import Namespace
from keepwarm.state_file import MACHINE, StateFile

LATEST = 5  # slices of each power of two that are remembered
ENOUGH = 3  # of them outvote a disturbed one
MIN_APART = 512  # tokens between two contexts that show what a longer one costs
LONG_SHARE = 8  # and their slices are no shorter than the longest one divided by this


class TimedSlice(NamedTuple):
    n_tokens: int
    context: int  # tokens before it
    seconds: float
    number: int  # the later, the higher

    def lever(self, other: TimedSlice) -> int:
        return self.n_tokens * abs(self.context - other.context)


class CurvePoint(NamedTuple):
    n_tokens: int
    seconds: float
    n_measured: int
    latest: int  # the number of its latest slice


class SliceCosts:
    """Seconds that a slice takes: a curve over its length, and a share for the context.

    The curve has a point for every power of two that was measured, and is linear between them. The
    share of the context is proportional to the tokens of the slice times those before it.
    """

    def __init__(self, slices: Iterable[Sequence[float]] = ()) -> None:
        self._latest: dict[int, tuple[TimedSlice, ...]] = {}  # by power of two
        self._numbers = count()
        self._curve: list[CurvePoint] | None = None  # None: not drawn
        self._context_s = 0.0
        for n_tokens, context, seconds in slices:
            self.add(int(n_tokens), int(context), float(seconds))

    def __bool__(self) -> bool:
        return bool(self._latest)

    @property
    def slices(self) -> list[tuple[int, int, float]]:
        """What it is learned from: tokens, context and seconds, the earliest first."""
        timed = sorted(chain(*self._latest.values()), key=lambda timed: timed.number)
        return [(one.n_tokens, one.context, one.seconds) for one in timed]

    @property
    def longest(self) -> int:
        return max((timed.n_tokens for timed in chain(*self._latest.values())), default=0)

    def knows(self, n_tokens: int) -> bool:
        """Whether a slice of about this length was measured."""
        return round(log2(n_tokens)) in self._latest

    def add(self, n_tokens: int, context: int, seconds: float) -> None:
        """On the engine's thread; others, which look at costs meanwhile, keep what they have."""
        power = round(log2(n_tokens))
        timed = TimedSlice(n_tokens, context, seconds, next(self._numbers))
        latest = (*self._latest.get(power, ()), timed)[-LATEST:]
        self._latest = {**self._latest, power: latest}
        self._curve = None

    def seconds(self, n_tokens: int, context: int = 0) -> float:
        """Of one slice; something must have been measured."""
        curve = self._drawn()
        return _on(curve, n_tokens) + self._context_s * n_tokens * context

    def prefill_s(self, start: int, end: int) -> float:
        """From one token of a prompt to another, in slices as long as any measured."""
        n_tokens, longest = end - start, self.longest
        n_whole, rest = divmod(n_tokens, longest)
        without_context = n_whole * self.seconds(longest) + (self.seconds(rest) if rest else 0.0)
        before = start + max(0, n_tokens - longest) / 2  # on average
        return without_context + self._context_s * n_tokens * before

    def _drawn(self) -> list[CurvePoint]:
        curve = self._curve
        if curve is None:
            self._context_s = _context_s(self._latest.values())
            points = [_point(latest, self._context_s) for latest in self._latest.values()]
            self._curve = curve = _corrected(sorted(points))
        return curve


def _context_s(groups: Iterable[Iterable[TimedSlice]]) -> float:
    """Seconds for each token of a slice and each before it, from slices of equal length.

    The median of what pairs show. The farther two contexts are apart, the more a pair counts: of
    near ones the difference is mostly noise. Short slices say nothing of long ones: a GPU reads the
    context for one token in the time for a thousand.
    """
    groups = list(groups)
    shortest = max((one.n_tokens for one in chain(*groups)), default=0) / LONG_SHARE
    slopes = sorted(
        ((a.seconds - b.seconds) / (a.n_tokens * (a.context - b.context)), a.lever(b))
        for group in groups
        for a, b in combinations(group, 2)
        if a.n_tokens == b.n_tokens >= shortest and abs(a.context - b.context) >= MIN_APART
    )
    half = sum(lever for _, lever in slopes) / 2
    below = accumulate(lever for _, lever in slopes)
    middle = next(
        (slope for (slope, _), so_far in zip(slopes, below, strict=True) if so_far >= half), 0.0
    )
    return max(0.0, middle)


def _point(latest: Sequence[TimedSlice], context_s: float) -> CurvePoint:
    """A slice of about this length without context."""
    seconds = median_low(t.seconds - context_s * t.n_tokens * t.context for t in latest)
    n_tokens = median_low(t.n_tokens for t in latest)
    return CurvePoint(n_tokens, max(seconds, 1e-6), len(latest), latest[-1].number)


def _corrected(points: list[CurvePoint]) -> list[CurvePoint]:
    """The same, but what was hardly measured, or before its neighbour, takes no more time than a
    longer slice, and no more for each token than a shorter one.

    Else what seems too slow would never be measured again.
    """
    for i in reversed(range(len(points) - 1)):
        points[i] = _at_most(points[i], points[i + 1].seconds, points[i + 1])
    for i in range(1, len(points)):
        shorter = points[i - 1]
        seconds = shorter.seconds * points[i].n_tokens / shorter.n_tokens
        points[i] = _at_most(points[i], seconds, shorter)
    return points


def _at_most(point: CurvePoint, seconds: float, neighbour: CurvePoint) -> CurvePoint:
    if point.n_measured >= ENOUGH and point.latest > neighbour.latest:
        return point
    return point._replace(seconds=min(point.seconds, seconds))


def _on(curve: Sequence[CurvePoint], n_tokens: int) -> float:
    """Below its first point in proportion, above its last on the line through the last two."""
    i = min(bisect_left(curve, n_tokens, key=lambda point: point.n_tokens), len(curve) - 1)
    more, above = curve[i][:2]
    fewer, below = curve[i - 1][:2] if i else (0, 0.0)
    slope = (above - below) / (more - fewer)
    return above + (max(slope, 0.0) if n_tokens > more else slope) * (n_tokens - more)


class PrefillTimes:
    """What prefilling a prompt took, now or when its blocks were computed, by place.

    Unknown where a block came from another machine. What lies behind the last place are answers:
    they were generated, and count nothing.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._seconds: list[float | None] = []

    def add(self, end: int, seconds: float | None) -> None:
        """Of the tokens from the last place to this one."""
        self._ends.append(end)
        self._seconds.append(seconds)

    def forget(self, end: int) -> None:
        """What the tokens before the last place took, if this is it."""
        if self._ends and self._ends[-1] == end:
            self._seconds[-1] = None

    def add_unknown(self, end: int) -> None:
        """Of all tokens up to this place that are not known."""
        if not self._ends or self._ends[-1] < end:
            self.add(end, None)

    def seconds(self, start: int, end: int) -> float | None:
        """As far as it is known; None if nothing is."""
        known, is_known = 0.0, True
        at = bisect_right(self._ends, start)
        begin = self._ends[at - 1] if at else 0
        for until, seconds in zip(self._ends[at:], self._seconds[at:], strict=True):
            if begin >= end:
                break
            if seconds is None:
                is_known = False
            else:
                known += seconds * (min(until, end) - max(begin, start)) / (until - begin)
            begin = until
        return known if known or is_known else None


@dataclass
class Rates:
    load_bytes_per_s: float = 2e9  # rather too high: what is never loaded is never measured
    prefill_tokens_per_s: float = 50.0  # until slices have been measured
    measured: bool = False  # else defaults
    slices: SliceCosts = field(default_factory=SliceCosts)

    def saw_load(self, n_bytes: int, seconds: float) -> None:
        self.load_bytes_per_s = 0.7 * self.load_bytes_per_s + 0.3 * n_bytes / max(seconds, 1e-6)

    def declined_load(self) -> None:
        """Loading seemed too slow; sooner or later it is tried again."""
        self.load_bytes_per_s *= 1.02

    def saw_slice(self, n_tokens: int, context: int, seconds: float) -> None:
        """`context`: the tokens before the slice."""
        self.slices.add(n_tokens, context, seconds)
        self.measured = True

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to prefill these tokens of a prompt, when nothing else runs."""
        if not self.slices:
            return (end - start) / self.prefill_tokens_per_s
        return self.slices.prefill_s(start, end)

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Rates:
        return cls(**{**known, "slices": SliceCosts(known["slices"])})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "slices": self.slices.slices}


class RatesFile:
    """The rates of every model, kept in the home directory."""

    def __init__(self, home: Path) -> None:
        self._file = StateFile(home / MACHINE, "rates", _rates_from_json, _rates_to_json)
        self._rates = self._file.read()

    def of(self, namespace: Namespace) -> Rates:
        """The one that was asked for last is saved last."""
        name = namespace.hex()
        self._rates[name] = self._rates.pop(name, Rates())
        return self._rates[name]

    def save(self) -> None:
        measured = {name: rates for name, rates in self._rates.items() if rates.measured}
        if not measured:
            return
        with suppress(OSError):  # they are measured again
            self._file.change(
                lambda kept: {n: r for n, r in kept.items() if n not in measured} | measured
            )


def _rates_from_json(kept: Mapping[str, Any]) -> dict[str, Rates]:
    return {name: Rates.from_json(rates) for name, rates in kept.items()}


def _rates_to_json(known: Mapping[str, Rates]) -> dict[str, Any]:
    return {name: rates.to_json() for name, rates in known.items()}
