"""Engines with a shared tier, and how soon they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from keepwarm import config
from keepwarm.cache.store import Budgets, Store
from keepwarm.engine.engine import Engine
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.remote.tier import RemoteTier
from keepwarm.text.request import Delta, Receipt, Request, Sampling


@contextmanager
def engine_at(model: Model, home: Path, remote: str = "") -> Iterator[Engine]:
    settings = config.load({"KEEPWARM_HOME": str(home), "KEEPWARM_REMOTE": remote})
    budgets = Budgets(min_free_disk_bytes=0)
    with Store(budgets=budgets, settings=settings) as store, Engine(model, store) as engine:
        yield engine


def tier_of(engine: Engine) -> RemoteTier:
    (tier,) = engine.lane_of().restorer.tiers.shared
    assert isinstance(tier, RemoteTier)
    return tier


def first_ms(
    engine: Engine, prompt: Sequence[int], policy: Policy = Policy.READ_WRITE
) -> tuple[float, Receipt]:
    """Until the first token, and what was reused."""
    sampling = Sampling(max_tokens=1, temperature=0)
    began = time.perf_counter()
    answer = engine.submit(Request(prompt=list(prompt), sampling=sampling, policy=policy))
    for event in answer:
        if isinstance(event, Delta):
            break
    seconds = time.perf_counter() - began
    return 1000 * seconds, answer.result().receipt
