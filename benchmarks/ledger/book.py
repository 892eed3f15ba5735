"""What clients know of their requests, and what follows for all of them together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIERS = ("live", "memory", "disk")


@dataclass
class Sent:
    """One request with a prompt, as its client knows it."""

    id: str
    key: str  # its name
    api: str  # as metrics name it
    path: str
    prompts: Sequence[Sequence[int]] = ()  # tokens; none of one that is refused
    agent: str = ""
    later: bool = False  # the prompt holds an earlier answer
    asks: bool = True  # an answer, for which stored tokens may be reused
    status: int = 0
    outcome: str = "finished"
    n_answer: int = 0  # tokens that were seen
    max_answer: int = 0  # that may have been generated
    reused: dict[str, int] | None = field(
        default_factory=dict
    )  # by tier; None: no receipt was read
    seconds: float = 0.0
    jobs: list[Mapping[str, Any]] = field(default_factory=list)  # its records, once compared

    @property
    def n_prompt(self) -> int:
        return sum(map(len, self.prompts))


class Book:
    """All requests to one store; `life` is the number of the server process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lives: list[list[Sent]] = []
        self.calls: Counter[tuple[str, str]] = Counter()  # by API and outcome, of this life
        self.known: dict[str, list[Sequence[int]]] = {}  # prompts and answers by key
        self.agents: dict[tuple[str, str], list[int]] = {}  # tokens at the end of each turn
        self.kinds: set[str] = set()
        self.evicted: dict[int, int] = {}  # blocks by life
        self.differences: list[str] = []

    def begin_life(self) -> None:
        self.lives.append([])
        self.calls.clear()

    @property
    def life(self) -> list[Sent]:
        return self.lives[-1]

    @property
    def all(self) -> list[Sent]:
        return [sent for life in self.lives for sent in life]

    def call(self, api: str, status: int) -> None:
        outcome = "cancelled" if status == 499 else "ok" if status < 400 else "refused"
        with self._lock:
            self.calls[api, outcome] += 1

    def add(self, sent: Sent) -> None:
        with self._lock:
            self.life.append(sent)

    def know(self, key: str, *sequences: Sequence[int]) -> None:
        with self._lock:
            self.known.setdefault(key, []).extend(sequences)

    def differ(self, where: str, expected: object, got: object) -> None:
        with self._lock:
            self.differences.append(f"{where}: {expected} by the ledger, {got} shown")

    def n_known(self, sent: Sent) -> int:
        """The most that can have been reused: what its key's other prompts begin with, but for the
        last token of a prompt.
        """
        found = 0
        for prompt in sent.prompts:
            others = (each for each in self.known[sent.key] if each is not prompt)
            common = max((common_prefix(prompt, each) for each in others), default=0)
            found += min(common, len(prompt) - 1)
        return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        n += 1
    return n


@dataclass(frozen=True)
class Totals:
    """What requests add up to."""

    outcomes: Mapping[str, int]
    computed: int
    generated: int
    first_tokens: Mapping[str, int]  # answers by whether they were warm

    @classmethod
    def of(cls, requests: Sequence[Sent]) -> Totals:
        jobs = [job for sent in requests for job in sent.jobs]
        answered = [job for job in jobs if job["state"] == "done" and job["answer_tokens"]]
        warm = Counter("yes" if is_warm(job) else "no" for job in answered)
        outcomes = Counter(sent.outcome for sent in requests for _ in sent.jobs)
        return cls(
            {name: outcomes[name] for name in ("finished", "cancelled", "failed", "refused")},
            sum(job["prefilled"] for job in jobs),
            sum(job["answer_tokens"] for job in jobs),
            {name: warm[name] for name in ("yes", "no")},
        )


def store_figures(requests: Sequence[Sent]) -> dict[str, Any]:
    """As all processes on a store count them together."""
    asked = [(sent, job) for sent in requests if sent.asks for job in sent.jobs if job["receipt"]]
    jobs = [job for _, job in asked]
    later = [job for sent, job in asked if sent.later]
    hits = Counter(tier for job in jobs if is_warm(job) for tier in largest(job))
    return {
        "requests": len(jobs),
        "prompt_tokens": sum(map(n_prompt_of, jobs)),
        "reused": tokens_by_tier(jobs),
        "computed": sum(job["prefilled"] for job in jobs),
        "hits": {tier: hits[tier] for tier in TIERS},
        "misses": {tier: len(jobs) - hits[tier] for tier in TIERS},
        "hit_rate": share(jobs),
        "hit_rate_from_turn_2": share(later),
    }


def is_warm(job: Mapping[str, Any]) -> bool:
    return n_reused_of(job) > int(job["prefilled"])


def largest(job: Mapping[str, Any]) -> Iterator[str]:
    yield max(job["receipt"]["reused"].items(), key=lambda item: item[1])[0]


def n_reused_of(job: Mapping[str, Any]) -> int:
    return sum(job["receipt"]["reused"].values()) if job["receipt"] else 0


def n_prompt_of(job: Mapping[str, Any]) -> int:
    return n_reused_of(job) + int(job["prefilled"])


def tokens_by_tier(jobs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for job in jobs:
        found.update(job["receipt"]["reused"] if job["receipt"] else {})
    return {tier: found[tier] for tier in TIERS}


def share(jobs: Sequence[Mapping[str, Any]]) -> float | None:
    n_prompt = sum(map(n_prompt_of, jobs))
    return round(sum(map(n_reused_of, jobs)) / n_prompt, 4) if n_prompt else None
