"""What was seen of the model types, and the file that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

EXACT = {"float32": 1e-4, "bfloat16": 0.01}  # |Δlogprob|
EXACT_IN_BATCH = 5  # times that: a fast BLAS adds in another order there
DRIFT = 2.0  # times what two slicings of plain mlx-lm differ by
APART_8_BIT = 0.05  # a value at the edge of a step may round either way
BATCHED = "three at once"
QUANTISED = "8 bit"  # how the names of its trials begin
UNTOLD = "drifts too far to tell"  # another token would move it less
NOTHING: tuple[Any, ...] = ("", None, {})


@dataclass(frozen=True)
class Padding:
    """How far padded and unpadded rows are from single ones: the trial of `cache.padding_trial`."""

    shares: bool
    padded: float
    unpadded: float
    n_tokens: int


@dataclass
class Findings:
    """What was seen of one type in one dtype. Reuse is in tokens, of so many as prompts share."""

    name: str
    dtype: str
    caches: str = ""
    drift: float = 0.0  # of plain mlx-lm, between two slicings of one prompt
    control: float = 0.0  # |Δlogprob| if one token in the middle of the prompt is another
    apart: dict[str, float] = field(default_factory=dict)  # |Δlogprob| to a cold run, by trial
    reused: dict[str, tuple[int, int]] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)  # why not more was reused
    batched: bool | None = None
    alone: str = ""  # why its sequences share no batch
    n_rows: int = 0  # of the widest batch; the padding trial has two
    padding: Padding | None = None
    quantised: str = ""  # "yes", or "refused"
    left_out: str = ""  # why it cannot run here
    crash: str = ""  # an error that is no finding

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.dtype

    @property
    def wrong(self) -> list[str]:
        """Trials whose answers are not those of a cold run, nor as near as mlx-lm is to itself."""
        return self._beyond(max(EXACT[self.dtype], DRIFT * self.drift))

    @property
    def inexact(self) -> list[str]:
        return self._beyond(EXACT[self.dtype])

    def _beyond(self, limit: float) -> list[str]:
        allowed = {BATCHED: limit * EXACT_IN_BATCH}
        allowed |= {trial: max(APART_8_BIT, limit) for trial in self.apart if QUANTISED in trial}
        return [t for t, apart in self.apart.items() if not apart <= allowed.get(t, limit)]

    @property
    def verdict(self) -> str:
        if self.left_out:
            return f"not run: {self.left_out}"
        if self.crash:
            return f"CRASH: {self.crash}"
        if self.wrong:
            return f"WRONG: {', '.join(self.wrong)}"
        if self.inexact:
            return "drifts" if DRIFT * self.drift < self.control < inf else UNTOLD
        return "exact" if self.control > EXACT[self.dtype] else "BLIND: no error would be seen"

    @property
    def is_bad(self) -> bool:
        return self.verdict.split(":")[0] in ("CRASH", "WRONG", "BLIND")


@dataclass
class Results:
    """A run over many types; it may be made of pieces."""

    command: str
    date: str
    machine: dict[str, Any]
    findings: list[Findings] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        known = json.loads(path.read_text())
        return cls(**known | {"findings": [_finding(one) for one in known["findings"]]})

    def write(self, path: Path) -> None:
        """One line for each finding, so that a later run shows as a small difference."""
        ordered = sorted(self.findings, key=lambda one: (one.name, one.dtype != "float32"))
        lines = ",\n".join(f"  {json.dumps(_plain(one))}" for one in ordered)
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "findings"}
        text = json.dumps(head, indent=1).removesuffix("\n}")
        path.write_text(f'{text},\n "findings": [\n{lines}\n ]\n}}\n')

    def put(self, new: Findings) -> None:
        kept = [one for one in self.findings if one.key != new.key]
        self.findings = [*kept, new]

    @property
    def known(self) -> set[tuple[str, str]]:
        return {one.key for one in self.findings}

    def of(self, dtype: str) -> list[Findings]:
        return [one for one in self.findings if one.dtype == dtype]


def _plain(one: Findings) -> dict[str, Any]:
    """Without what is empty, and with three digits."""
    return {key: _rounded(value) for key, value in asdict(one).items() if value not in NOTHING}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value


def _finding(known: dict[str, Any]) -> Findings:
    padding = known.get("padding")
    reused = {trial: tuple(counts) for trial, counts in known.get("reused", {}).items()}
    return Findings(**known | {"reused": reused, "padding": padding and Padding(**padding)})
