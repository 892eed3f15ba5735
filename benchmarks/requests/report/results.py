"""The results of a benchmark run: samples, ratios, notes, and their JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from keepwarm.errors import BadInput

FORMAT = 1
Better: TypeAlias = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Series:
    """All samples of one measurement on one target."""

    workload: str
    target: str
    what: str
    unit: str  # s, tokens, bytes, tokens/s, ms, answers
    samples: tuple[float, ...]
    x: float | None = None  # prompt tokens, turn or number of streams
    how: str = ""  # conditions
    better: Better = "lower"

    @property
    def key(self) -> tuple[str, str, str, float | None]:
        return self.workload, self.target, self.what, self.x

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        return spread(self.samples, self.median)


@dataclass(frozen=True)
class Claim:
    """A ratio within one run and its goal. `samples` are the ratios pair by pair."""

    workload: str
    target: str
    what: str
    value: float  # of the medians
    samples: tuple[float, ...]
    wanted: float | None = None  # None: no goal
    at_least: bool = True

    @property
    def key(self) -> tuple[str, str, str, None]:
        return self.workload, self.target, self.what, None

    @property
    def spread(self) -> float:
        return spread(self.samples, self.value)

    @property
    def holds(self) -> bool | None:
        if self.wanted is None:
            return None
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    @property
    def bound(self) -> str:
        return "" if self.wanted is None else f"{'≥' if self.at_least else '≤'} {self.wanted:g}"


@dataclass(frozen=True)
class Note:
    """What was skipped or failed, and why."""

    workload: str
    target: str
    text: str


Record: TypeAlias = Series | Claim | Note


@dataclass(frozen=True)
class Results:
    command: str
    date: str
    model: str
    samples: int
    machine: Mapping[str, Any]
    targets: Mapping[str, str]  # name → what it is
    records: Sequence[Record]

    @property
    def series(self) -> list[Series]:
        return [record for record in self.records if isinstance(record, Series)]

    @property
    def claims(self) -> list[Claim]:
        return [record for record in self.records if isinstance(record, Claim)]

    @property
    def notes(self) -> list[Note]:
        return [record for record in self.records if isinstance(record, Note)]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(record.workload for record in self.records))

    def of(self, workload: str, *what: str) -> list[Series]:
        found = [series for series in self.series if series.workload == workload]
        return [series for series in found if not what or series.what in what]

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")

    def as_json(self) -> dict[str, Any]:
        head = {name: value for name, value in vars(self).items() if name != "records"}
        return {
            "format": FORMAT,
            **head,
            "series": [asdict(s) | _rounded(median=s.median, spread=s.spread) for s in self.series],
            "claims": [
                asdict(c) | _rounded(spread=c.spread) | {"holds": c.holds} for c in self.claims
            ],
            "notes": [asdict(note) for note in self.notes],
        }

    @classmethod
    def read(cls, file: Path) -> Results:
        try:
            found = json.loads(file.read_text())
            if found["format"] != FORMAT:
                raise BadInput(f"{file} is from another version of this benchmark; run it again.")
            return cls._parsed(found)
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{file} is not a results file of python -m benchmarks.requests.") from (
                error
            )

    @classmethod
    def _parsed(cls, found: Mapping[str, Any]) -> Results:
        records: list[Record] = [_parse(Series, fields) for fields in found["series"]]
        records += [_parse(Claim, fields) for fields in found["claims"]]
        records += [_parse(Note, fields) for fields in found["notes"]]
        names = ("command", "date", "model", "samples", "machine", "targets")
        return cls(**{name: found[name] for name in names}, records=records)


def _rounded(**values: float) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}


def _parse(kind: Any, fields: Mapping[str, Any]) -> Any:
    known = {name: fields[name] for name in kind.__dataclass_fields__}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})


def spread(samples: Sequence[float], middle: float) -> float:
    """(highest - lowest) ÷ middle."""
    return (max(samples) - min(samples)) / abs(middle) if middle else 0.0


def percentile(values: Iterable[float], part: float) -> float:
    """A percentile, `part` from 0 to 1; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
