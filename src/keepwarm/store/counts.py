"""Where the prompt tokens of all requests to a store were found: what its hit rate is made of.

A request asks for the tokens of its prompt. Each is found live, in memory, on disk or in a
shared tier, or is computed. Hits, misses and rates follow from these counts and from nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from keepwarm.files import write_atomically
from keepwarm.store.atomic import SharedLock

LOG = logging.getLogger(__name__)

FILE = "counts.json"
TIERS = ("live", "memory", "disk")
ALL_TIERS = (*TIERS, "shared")  # shown only where there is one


@dataclass(frozen=True)
class PromptCounts:
    requests: int = 0
    prompt_tokens: int = 0  # asked
    reused: Mapping[str, int] = field(default_factory=dict)  # tokens found, by tier
    hits: Mapping[str, int] = field(default_factory=dict)  # requests that found some, by tier
    later_prompt_tokens: int = 0  # of requests from the second turn of a conversation on
    later_reused_tokens: int = 0

    @classmethod
    def of_request(
        cls, prompt_tokens: int, reused: Mapping[str, int], *, is_later_turn: bool
    ) -> Self:
        n_reused = sum(reused.values())
        found = {tier: n for tier, n in reused.items() if n}
        later = (prompt_tokens, n_reused) if is_later_turn else (0, 0)
        return cls(1, prompt_tokens, found, dict.fromkeys(found, 1), *later)

    def plus(self, other: PromptCounts) -> PromptCounts:
        return PromptCounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            _sum(self.reused, other.reused),
            _sum(self.hits, other.hits),
            self.later_prompt_tokens + other.later_prompt_tokens,
            self.later_reused_tokens + other.later_reused_tokens,
        )

    @property
    def computed(self) -> int:
        """Prompt tokens that were found nowhere."""
        return self.prompt_tokens - sum(self.reused.values())

    @property
    def misses(self) -> dict[str, int]:
        """Requests that found nothing in a tier."""
        return {tier: self.requests - n_hits for tier, n_hits in _by_tier(self.hits).items()}

    @property
    def hit_rate(self) -> float | None:
        """Prompt tokens reused ÷ prompt tokens, over all requests; None before the first."""
        return _share(sum(self.reused.values()), self.prompt_tokens)

    @property
    def hit_rate_from_turn_2(self) -> float | None:
        """The same over the requests that continue a conversation."""
        return _share(self.later_reused_tokens, self.later_prompt_tokens)

    def figures(self) -> dict[str, Any]:
        """As metrics, dashboard, command line and API show them."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "reused": _by_tier(self.reused),
            "computed": self.computed,
            "hits": _by_tier(self.hits),
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "hit_rate_from_turn_2": self.hit_rate_from_turn_2,
        }

    @classmethod
    def read(cls, path: Path) -> Self:
        """A missing or damaged file counts as empty."""
        try:
            known = json.loads(path.read_text())
            return cls(
                int(known["requests"]),
                int(known["prompt_tokens"]),
                {str(tier): int(n) for tier, n in known["reused"].items()},
                {str(tier): int(n) for tier, n in known["hits"].items()},
                int(known["later_prompt_tokens"]),
                int(known["later_reused_tokens"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()


def _by_tier(found: Mapping[str, int]) -> dict[str, int]:
    return {**dict.fromkeys(TIERS, 0), **found}


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(a) + Counter(b))


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


class CountBook:
    """The counts of all processes on a store, in a small file beside the blocks. Thread-safe."""

    def __init__(self, root: Path | None) -> None:
        """Without a directory they last as long as the process."""
        self._path = None if root is None else root / FILE
        self._shared = None if root is None else SharedLock(root / "tmp" / "counts")
        self._adding = threading.Lock()  # held for no longer than a sum: the engine's thread adds
        self._filing = threading.Lock()
        self._unsaved = PromptCounts()

    def add(self, counts: PromptCounts) -> None:
        with self._adding:
            self._unsaved = self._unsaved.plus(counts)

    def total(self) -> PromptCounts:
        """What all processes have saved, and what this one has not saved yet."""
        with self._filing:
            saved = PromptCounts() if self._path is None else PromptCounts.read(self._path)
            return saved.plus(self._unsaved)

    def save(self) -> None:
        """Add what is new to the file; after an error it stays in memory until the next time."""
        if self._path is None or self._shared is None or not self._unsaved.requests:
            return
        try:
            with self._shared.hold(), self._filing:  # readers do not wait for other processes
                self._add_to(self._path)
        except OSError as error:
            LOG.warning("the counts of the store could not be written: %s", error)

    def _add_to(self, path: Path) -> None:
        with self._adding:
            unsaved, self._unsaved = self._unsaved, PromptCounts()
        try:
            write_atomically(path, json.dumps(asdict(PromptCounts.read(path).plus(unsaved))))
        except OSError:
            self.add(unsaved)
            raise
