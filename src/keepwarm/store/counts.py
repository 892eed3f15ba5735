"""Where the prompt tokens of all requests to a store were found: what its hit rate is made of.

A request asks for the tokens of its prompt. Each is found live, in memory, on disk or in a
shared tier, or is computed. Hits, misses and rates follow from these counts and from nothing else.
Embeddings, warm-ups and requests that read nothing are not counted: they ask for no reuse.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Self

from keepwarm.state_file import store_file

LOG = logging.getLogger(__name__)

TIERS = ("live", "memory", "disk")
ALL_TIERS = (*TIERS, "shared")  # shown only where there is one


def warm_tier(prompt_tokens: int, reused: Mapping[str, int]) -> str | None:
    """The tier that most of a warm request's prompt came from; None if the request is cold.

    Warm is: more reused than computed. The only definition.
    """
    n_reused = sum(reused.values())
    is_warm = n_reused > prompt_tokens - n_reused
    return max(reused, key=lambda tier: reused[tier]) if is_warm else None


@dataclass(frozen=True)
class PromptCounts:
    requests: int = 0
    prompt_tokens: int = 0  # asked
    reused: Mapping[str, int] = field(default_factory=dict)  # tokens found, by tier
    hits: Mapping[str, int] = field(default_factory=dict)  # warm requests, by `warm_tier`
    later_prompt_tokens: int = 0  # of requests from the second turn of a conversation on
    later_reused_tokens: int = 0

    @classmethod
    def of_request(
        cls, prompt_tokens: int, reused: Mapping[str, int], *, is_later_turn: bool
    ) -> Self:
        n_reused = sum(reused.values())
        found = {tier: n for tier, n in reused.items() if n}
        warm = warm_tier(prompt_tokens, reused)
        later = (prompt_tokens, n_reused) if is_later_turn else (0, 0)
        return cls(1, prompt_tokens, found, {} if warm is None else {warm: 1}, *later)

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
        """Requests that are no hits of a tier."""
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
    def of_json(cls, kept: Mapping[str, Any]) -> Self:
        if not kept:
            return cls()
        return cls(
            int(kept["requests"]),
            int(kept["prompt_tokens"]),
            {str(tier): int(n) for tier, n in kept["reused"].items()},
            {str(tier): int(n) for tier, n in kept["hits"].items()},
            int(kept["later_prompt_tokens"]),
            int(kept["later_reused_tokens"]),
        )


def _by_tier(found: Mapping[str, int]) -> dict[str, int]:
    return {**dict.fromkeys(TIERS, 0), **found}


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(a) + Counter(b))


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


class CountsFile:
    """The counts of all processes on a store, in its state file. Thread-safe."""

    def __init__(self, root: Path | None) -> None:
        """Without a directory they last as long as the process."""
        self._file = None
        if root is not None:
            self._file = store_file(root, "prompts", PromptCounts.of_json, asdict)
        self._filing = threading.Lock()
        self._unsaved: list[PromptCounts] = []  # appended to without a lock, by the engine's thread

    def add(self, counts: PromptCounts) -> None:
        self._unsaved.append(counts)

    def total(self) -> PromptCounts:
        """What all processes have saved, and what this one has not saved yet."""
        with self._filing:
            saved = PromptCounts() if self._file is None else self._file.read()
            return _total([saved, *self._unsaved])

    def save(self) -> None:
        """Add what is new to the file; after an error it stays in memory until the next time."""
        if not self._unsaved:
            return
        try:
            # Readers do not wait for other processes, so the second lock is taken last.
            with self._file.lock.hold() if self._file else nullcontext(), self._filing:
                self._save()
        except OSError as error:
            LOG.warning("the counts of the store could not be written: %s", error)

    def _save(self) -> None:
        n = len(self._unsaved)  # more may come meanwhile
        unsaved = self._unsaved[:n]
        if self._file is None:
            self._unsaved[:n] = [_total(unsaved)]
        else:
            self._file.write(_total([self._file.read_to_change(), *unsaved]))
            del self._unsaved[:n]


def _total(counts: Iterable[PromptCounts]) -> PromptCounts:
    return reduce(PromptCounts.plus, counts)
