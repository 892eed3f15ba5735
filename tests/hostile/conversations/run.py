"""One architecture's life: engines that come and go over a store, and what they are asked."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.zoo.findings import DRIFT
from benchmarks.zoo.trials import drift_of

from keepwarm.cache.store import Budgets
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, Cancelled, KeepwarmError
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Choice, Request, Result
from tests.hostile.conversations.damage import copy_running, damage_closed, damage_records
from tests.hostile.conversations.forest import Asked, Forest
from tests.kit.compare import TOLERANCE
from tests.kit.engines import Exam, Models, ask, engine_on, held, memory, tokens_of
from tests.kit.models import ARCHITECTURES

POLICIES = (*[Policy.READ_WRITE] * 6, *Policy)
AGENTS = ("ada", "bob", "cleo")
SIZES = (1, 1, 1, 2, 3, 4)  # requests at once
ROOMS: dict[str, dict[str, Any]] = {
    "plenty": {"budgets": Budgets(min_free_disk_bytes=0)},
    "no live caches": {
        "budgets": Budgets(min_free_disk_bytes=0),
        "memory": memory(live_bytes=1),
    },
    "disk only": {
        "budgets": Budgets(memory_bytes=0, min_free_disk_bytes=0),
        "memory": memory(live_bytes=1),
    },
    "next to none": {
        "budgets": Budgets(memory_bytes=60_000, disk_bytes=400_000, min_free_disk_bytes=0),
        "memory": memory(live_bytes=200_000),
    },
}


@dataclass
class Report:
    """What was asked, what happened meanwhile, and whatever was not right."""

    requests: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)  # prompt tokens by tier
    events: Counter[str] = field(default_factory=Counter)
    store: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    @property
    def n_requests(self) -> int:
        return sum(self.requests.values())

    def as_json(self) -> dict[str, Any]:
        counts = {name: c for name, c in vars(self).items() if isinstance(c, Counter)}
        sorted_counts = {name: dict(sorted(count.items())) for name, count in counts.items()}
        return {**sorted_counts, "differences": self.differences}


class Life:
    """Random requests to one model, compared with cold runs of it."""

    def __init__(self, model: Model, module: Any, folder: Path, seed: int) -> None:
        self._model, self._module = model, module
        self._folder, self._n_homes = folder, 0
        self._chance = Random(f"{seed} {model.name}")
        self._forest = Forest(self._chance)
        self.report = Report()

    @property
    def _home(self) -> Path:
        return self._folder / f"home-{self._n_homes}"

    def run(self, n_requests: int) -> Report:
        while self.report.n_requests < n_requests:
            room = self._chance.choice(list(ROOMS))
            self.report.events[f"room: {room}"] += 1
            with engine_on(self._model, self._home, tries_padding=True, **ROOMS[room]) as engine:
                self._live(engine, n_requests)
                old = self._end(engine)
            if old:
                shutil.rmtree(old)
            if self._chance.random() < 0.5:
                self.report.events[damage_closed(self._chance, self._home)] += 1
        return self.report

    def _live(self, engine: Engine, n_requests: int) -> None:
        for _ in range(self._chance.randint(3, 9)):
            if self.report.n_requests >= n_requests:
                break
            self._happen(engine)
            left = n_requests - self.report.n_requests
            self._ask(engine, min(self._chance.choice(SIZES), left))

    def _end(self, engine: Engine) -> Path | None:
        """Close, or crash: then the next engine finds the files as they are; the old home."""
        for tier in engine.stats().tiers.values():
            self.report.store["evicted"] += tier.evicted
            self.report.store["refused"] += tier.refused
            self.report.store["quarantined"] += tier.quarantined
        self.report.store["failed saves"] += engine.stats().counters["failed_saves"]
        if self._chance.random() < 0.7:
            self.report.events["restarts"] += 1
            return None
        self.report.events["crashes"] += 1
        old = self._home
        self._n_homes += 1
        copy_running(old, self._home)
        return old

    def _happen(self, engine: Engine) -> None:
        what = self._chance.random()
        if what < 0.2:
            engine.wait_until_saved()
            self.report.events[damage_records(self._chance, self._home)] += 1
        if 0.1 < what < 0.3:
            engine.clear()
            self.report.events["memory cleared"] += 1
        elif what > 0.95:
            with suppress(BadInput):  # there is none, or its file is damaged
                engine.forget(self._chance.choice(AGENTS))
                self.report.events["agents forgotten"] += 1

    # requests

    def _ask(self, engine: Engine, n: int) -> None:
        asked = [self._forest.next() for _ in range(n)]
        requests = [self._request(each) for each in asked]
        if self._chance.random() < 0.5:
            with held(engine):
                answers = [engine.submit(request) for request in requests]
        else:
            answers = [engine.submit(request) for request in requests]
        if self._chance.random() < 0.15:
            self._chance.choice(answers).cancel()
        self.report.events["requests at once"] += n > 1
        ends = [_end_of(answer) for answer in answers]  # only then is the model free for cold runs
        for each, answer, end in zip(asked, answers, ends, strict=True):
            self._judge(each, answer, end)

    def _request(self, asked: Asked) -> Request:
        agent = self._chance.choice(AGENTS) if self._chance.random() < 0.3 else None
        policy = self._chance.choice(POLICIES)
        n_tokens = self._chance.randint(1, 8)
        request = ask(asked.tokens, n_tokens, policy=policy, agent=agent)
        return replace(request, prompt=None, messages=asked.messages) if asked.messages else request

    def _judge(self, asked: Asked, answer: Answer, end: Result | KeepwarmError) -> None:
        self.report.requests[asked.kind] += 1
        try:
            if isinstance(end, KeepwarmError):
                raise end
            self._compare(asked, answer, end)
        except Cancelled:
            self.report.answers["cancelled"] += 1
        except (KeepwarmError, AssertionError) as error:
            self.report.answers["different"] += 1
            self.report.differences.append(f"{self._describe(asked)}: {error}")

    def _compare(self, asked: Asked, answer: Answer, result: Result) -> None:
        assert answer.prepared is not None
        choice, receipt = result.choices[0], result.receipt
        prompt = answer.prepared.tokens
        for tier, n_tokens in receipt.reused.items():
            self.report.reused[tier] += n_tokens
        self.report.reused["computed"] += receipt.recomputed
        assert receipt.cached_tokens + receipt.recomputed == len(prompt)
        try:
            self._examine(prompt, choice, TOLERANCE)
        except AssertionError:  # then it may be no farther than mlx-lm is from itself
            whole = [*prompt, *tokens_of(choice)]
            self._examine(prompt, choice, DRIFT * drift_of(self._module, whole, len(prompt)))
            self.report.answers["drifted"] += 1
        else:
            self.report.answers["equal"] += 1
        self._forest.heard(asked, tokens_of(choice), choice.text)

    def _examine(self, prompt: list[int], choice: Choice, tolerance: float) -> None:
        exam = Exam(self._module, tolerance)
        exam.add(prompt, choice)
        exam.check()

    def _describe(self, asked: Asked) -> str:
        return f"{self._model.name}, request {self.report.n_requests}, {asked.kind}"


def _end_of(answer: Answer) -> Result | KeepwarmError:
    try:
        return answer.result()
    except KeepwarmError as error:
        return error


def shares(n_requests: int) -> dict[str, int]:
    """As many requests to every architecture of the kit."""
    each, more = divmod(n_requests, len(ARCHITECTURES))
    return {name: each + (number < more) for number, name in enumerate(ARCHITECTURES)}


def life_of(name: str, models: Models, folder: Path, seed: int) -> Life:
    return Life(models.of(name), models.module(name), folder, seed)
