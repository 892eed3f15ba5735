"""Measured speeds, to choose between loading and prefilling; kept between starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from keepwarm.files import write_atomically
from keepwarm.prefix.blocks import Namespace


@dataclass
class Rates:
    load_bytes_per_s: float = 5e8
    prefill_tokens_per_s: float = 50.0
    measured: bool = False  # else defaults

    def saw_load(self, n_bytes: int, seconds: float) -> None:
        self.load_bytes_per_s = _blend(self.load_bytes_per_s, n_bytes, seconds)

    def saw_prefill(self, n_tokens: int, seconds: float) -> None:
        if not self.measured:
            self.prefill_tokens_per_s, self.measured = n_tokens / max(seconds, 1e-6), True
        self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, n_tokens, seconds)


class RateBook:
    """The rates of every model, in a small file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rates: dict[str, Rates] = {}
        try:
            known = json.loads(path.read_text())
            self._rates = {name: Rates(**rates) for name, rates in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return  # use defaults until something is measured

    def of(self, namespace: Namespace) -> Rates:
        return self._rates.setdefault(namespace.hex(), Rates())

    def save(self) -> None:
        measured = {name: asdict(rates) for name, rates in self._rates.items() if rates.measured}
        if not measured:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(measured))
        except OSError:
            return  # best effort


def _blend(rate: float, amount: float, seconds: float) -> float:
    return 0.7 * rate + 0.3 * amount / max(seconds, 1e-6)
