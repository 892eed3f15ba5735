"""An answer is sent before it is kept; `wait_until_saved`, `forget` and `drain` wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from keepwarm.engine.engine import Engine
from keepwarm.engine.jobs import RunningSequence
from keepwarm.records.record import Record
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import PutResult
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

LATE_S = 0.2


class Late(Engine):
    """Slow between the last event of an answer and keeping it, and slow to record the agent."""

    def _on_kept(self, sequence: RunningSequence) -> None:
        time.sleep(LATE_S)
        self._recorder._pool.submit(time.sleep, LATE_S)
        super()._on_kept(sequence)


@pytest.fixture
def engine(models, tmp_path) -> Iterator[Engine]:
    with engine_on(models.of("llama"), tmp_path, engine_class=Late) as engine:
        yield engine


def agents(engine: Engine) -> list[str]:
    return [agent.id for agent in engine.store.on_disk.agents.all()]


def test_settled_means_recorded_with_its_agent(engine):
    """The last answer is part of a fork, a rewind or an export that follows."""
    prompt = prompt_of(300)
    for turn in range(1, 3):
        choice = engine.submit(ask(prompt, 3, agent="ada")).result().choices[0]
        prompt = [*prompt, *tokens_of(choice)]
        engine.wait_until_saved()
        shown = engine.store.on_disk.agents.show("ada")
        assert (len(shown.turns), shown.n_tokens) == (turn, len(prompt))


def test_settled_means_on_disk(models, tmp_path, monkeypatch):
    """What belongs to no agent too, though the disk is slow."""
    put = DiskTier.put

    def put_late(tier: DiskTier, record: Record) -> PutResult:
        time.sleep(LATE_S)
        return put(tier, record)

    monkeypatch.setattr(DiskTier, "put", put_late)
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(300), 3)).result()
        engine.wait_until_saved()
        settled = list(engine.store.on_disk.disk.walk())
        engine.store.flush()
        assert list(engine.store.on_disk.disk.walk()) == settled != []


def test_a_forgotten_agent_does_not_come_back(engine):
    """Neither on disk nor in memory, though its last answer was not kept yet."""
    prompt = prompt_of(300)
    engine.submit(ask(prompt, 3, agent="ada")).result()
    assert engine.forget("ada") > 0
    engine.wait_until_saved()
    assert agents(engine) == []
    assert engine.live.stats.entries == 0
    assert engine.submit(ask(prompt, 1)).result().receipt.cached_tokens == 0


def test_drained_means_recorded(engine):
    engine.submit(ask(prompt_of(300), 3, agent="ada")).result()
    assert engine.drain(timeout_s=300)
    assert agents(engine) == ["ada"]


def test_wait_until_saved_on_its_own_thread_or_after_the_end_does_not_block(engine):
    engine.call(engine.wait_until_saved).result(timeout=300)
    engine.close()
    engine.wait_until_saved()


def test_call_on_its_own_thread_raises_instead_of_waiting_for_itself(engine):
    with pytest.raises(RuntimeError, match="on the engine's thread"):
        engine.call(lambda: engine.call(lambda: None).result()).result(timeout=300)
