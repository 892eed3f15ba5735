"""Measured speeds, to choose between loading and prefilling; kept between starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepwarm.cache.restore.costs import SliceCosts
from keepwarm.files import write_atomically
from keepwarm.prefix.blocks import Namespace


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
        return cls(**{**known, "slices": SliceCosts(known.get("slices", ()))})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "slices": self.slices.slices}


class RateBook:
    """The rates of every model, in a small file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rates: dict[str, Rates] = {}
        try:
            known = json.loads(path.read_text())
            self._rates = {name: Rates.from_json(rates) for name, rates in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return  # use defaults until something is measured

    def of(self, namespace: Namespace) -> Rates:
        return self._rates.setdefault(namespace.hex(), Rates())

    def save(self) -> None:
        measured = {name: rates.to_json() for name, rates in self._rates.items() if rates.measured}
        if not measured:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(measured))
        except OSError:
            return  # best effort
