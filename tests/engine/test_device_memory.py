"""Engines whose blocks leave the device and come back through slabs, as on CUDA."""

import threading
from pathlib import Path

import pytest

from keepwarm.kv.slabs import SlabPool
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Delta
from tests.kit.engines import Exam, Models, ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

SHORT, LONG = prompt_of(600, seed=4), prompt_of(1000, seed=5)


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch):
    monkeypatch.setattr(SlabPool, "if_cuda", classmethod(lambda cls: cls()))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1"])
def test_turns_and_restarts_are_exact(architecture: str, models: Models, tmp_path: Path) -> None:
    exam = Exam(models.module(architecture))
    with engine_on(models.of(architecture), tmp_path) as engine:
        first = engine.submit(ask(SHORT, 10, policy=Policy.DURABLE)).result().choices[0]
        exam.add(SHORT, first)
        turn = [*SHORT, *tokens_of(first), *prompt_of(50, seed=6)]
        engine.call(engine.live.clear).result()
        second = engine.submit(ask(turn, policy=Policy.DURABLE)).result()
        assert second.receipt.reused.get("memory", 0) >= len(SHORT)
        exam.add(turn, second.choices[0])
    with engine_on(models.of(architecture), tmp_path) as engine:
        third = engine.submit(ask([*turn, 1])).result()
        assert third.receipt.reused.get("disk", 0) >= len(SHORT)
        exam.add([*turn, 1], third.choices[0])
    exam.check()


def test_blocks_in_memory_wake_no_reader(models: Models, tmp_path: Path) -> None:
    before = set(threading.enumerate())  # readers of other tests' engines may be there
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(LONG)).result()
        engine.call(engine.live.clear).result()
        again = engine.submit(ask([*LONG, 1])).result()
        assert again.receipt.reused.get("memory", 0) >= 768
        started = set(threading.enumerate()) - before
        assert not [thread for thread in started if thread.name.startswith("keepwarm-reader")]


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_restore_in_pieces_beside_answers(tier: str, models: Models, tmp_path: Path) -> None:
    exam = Exam(models.module("llama"))
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(LONG, policy=Policy.DURABLE)).result()
        engine.call(engine.live.clear).result()
        if tier == "disk":
            engine.store.clear_memory()
        lane = engine.lane_of()
        lane.restorer.rates.load_bytes_per_s, lane.restorer.rates.prefill_tokens_per_s = 1e5, 1.0
        talking = engine.submit(ask(prompt_of(20), 3000))
        events = iter(talking)
        next(event for event in events if isinstance(event, Delta))
        restored = [engine.submit(ask([*LONG, last])) for last in (1, 2)]
        for last, answer in enumerate(restored, start=1):
            result = answer.result()
            assert result.receipt.reused.get(tier, 0) >= 768
            exam.add([*LONG, last], result.choices[0])
        next(event for event in events if isinstance(event, Delta))
        talking.cancel()
    exam.check()


def test_evicted_blocks_are_overwritten_only_after_the_last_use(
    models: Models, tmp_path: Path
) -> None:
    """A budget of a few blocks: every prompt evicts the ones before it, and their slabs go on."""
    exam = Exam(models.module("llama"))
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.store.memory.resize(1 << 20)
        prompts = [prompt_of(600, seed=seed) for seed in range(4)]
        for prompt in [*prompts, *prompts]:
            engine.call(engine.live.clear).result()
            result = engine.submit(ask(prompt)).result()
            exam.add(prompt, result.choices[0])
        assert result.receipt.cached_tokens == len(prompt) - 1
        assert engine.store.memory.stats().evicted
    exam.check()


@pytest.mark.parametrize("policy", [Policy.READ_WRITE, Policy.NO_STORE])
def test_the_pool_is_told_of_prompts_that_will_be_kept(
    policy: Policy, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(SlabPool, "will_take", lambda pool: told.append(pool.n_bytes))
    with engine_on(models.of("llama"), tmp_path) as engine:
        told.clear()
        engine.submit(ask(LONG, 1, policy=policy)).result()
        assert bool(told) == policy.writes
