"""Measured speeds, to choose between loading and prefilling; kept between starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm.cache.restore.costs import SliceCosts
from keepwarm.files import write_atomically
from keepwarm.prefix.blocks import Namespace


class LoadSize(NamedTuple):
    """What is loaded for a prompt of a model."""

    source: str  # the path or id of its weights
    token_bytes: float  # rows that every token adds
    point_bytes: int  # states and window rows, of the last tokens only

    def n_bytes(self, n_tokens: int) -> float:
        return self.token_bytes * n_tokens + self.point_bytes


@dataclass
class Rates:
    load_bytes_per_s: float = 2e9  # rather too high: what is never loaded is never measured
    prefill_tokens_per_s: float = 50.0  # until slices have been measured
    measured: bool = False  # else defaults
    slices: SliceCosts = field(default_factory=SliceCosts)
    size: LoadSize | None = None

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
        slices, size = SliceCosts(known.get("slices", ())), known.get("size")
        return cls(**{**known, "slices": slices, "size": LoadSize(*size) if size else None})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "slices": self.slices.slices}


class RateBook:
    """The rates of every model, in a small file."""

    @classmethod
    def of_home(cls, home: Path) -> RateBook:
        return cls(home / "rates.json")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rates: dict[str, Rates] = {}
        try:
            known = json.loads(path.read_text())
            self._rates = {name: Rates.from_json(rates) for name, rates in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return  # use defaults until something is measured

    def of(self, namespace: Namespace, size: LoadSize | None = None) -> Rates:
        """The one that was asked for last is saved last."""
        name = namespace.hex()
        rates = self._rates[name] = self._rates.pop(name, Rates())
        rates.size = size or rates.size
        return rates

    def latest(self, source: str) -> Rates | None:
        """The rates of a model as it was used last, if they were measured."""
        known = (r for r in self._rates.values() if r.measured and r.size)
        return next((r for r in reversed([*known]) if r.size and r.size.source == source), None)

    def save(self) -> None:
        measured = {name: rates.to_json() for name, rates in self._rates.items() if rates.measured}
        if not measured:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(measured))
        except OSError:
            return  # best effort
