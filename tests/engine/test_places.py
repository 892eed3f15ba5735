"""Places, turns and memory of requests, step by step on a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from keepwarm.engine.admission import kv_bytes
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.engine.scheduler import (
    LEASE_TOKENS,
    MAX_EXTRA_PREFILLS,
    MAX_PREFILLS,
    KeyRotation,
)
from keepwarm.text.request import Started
from tests.kit.devices import M4_MAX, Simulation, simulated
from tests.kit.engines import Exam, ask, engine_on, held
from tests.kit.runs import prompt_of

LONG = 8192


@pytest.fixture
def sim(models, tmp_path) -> Iterator[Simulation]:
    with simulated(M4_MAX, models.of("llama"), tmp_path) as simulation:
        yield simulation


def steps(sim: Simulation, n: int) -> None:
    for _ in range(n):
        sim.scheduler.step()


def test_one_key_leaves_a_place_to_another(sim):
    for _ in range(MAX_PREFILLS + 1):
        sim.send(LONG, tenant="one")
    steps(sim, MAX_PREFILLS + 1)
    sim.send(LONG, tenant="other")
    steps(sim, 1)
    tenants = Counter(task.job.request.tenant for task in sim.scheduler.prefilling)
    assert tenants == {"one": MAX_PREFILLS - 1, "other": 1}


def test_the_prompts_of_a_key_take_turns(sim):
    both = [sim.send(LONG) for _ in range(2)]
    steps(sim, 6)
    done = {task.job.number: task.prefill.n_done for task in sim.scheduler.prefilling}
    assert all(done[sent.job.number] for sent in both)


def test_the_key_whose_turn_is_longest_ago_is_first(sim):
    jobs = {tenant: sim.send(16, tenant=tenant).job for tenant in "abc"}
    rotation = KeyRotation()
    for tenant in "ab":
        rotation.serve(jobs[tenant])
    assert rotation.order(jobs.values()) == [jobs["c"], jobs["a"], jobs["b"]]


def test_memory_for_joining_is_given_back(sim):
    """While it joins a row is there twice."""
    sim.running(1)
    n_bytes = kv_bytes(sim.lane.restorer.layout, 16 + LEASE_TOKENS)
    assert sim.scheduler._intake._admission.used_bytes == n_bytes


def test_one_live_token_is_used_and_stored_ones_from_sixteen_on(models, tmp_path):
    first = [*range(5, 25)]
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(first, 2)).result()
        engine.wait_until_saved()
        assert engine.submit(ask([5, 9, 9], 2)).result().receipt.reused == {"live": 1}
        for n_known, reused in ((15, {}), (16, {"memory": 16})):
            engine.call(engine.live.clear).result()
            prompt = [*first[:n_known], 90 + n_known]
            assert engine.submit(ask(prompt, 2)).result().receipt.reused == reused


def test_a_live_cache_belongs_to_its_agent(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(20), 2, agent="ada")).result()
        engine.wait_until_saved()
        assert engine.call(lambda: engine.live.release_owned("ada")).result()
        assert engine.live.stats.n_bytes == 0


# On a real engine: which requests start while MAX_PREFILLS prompts are already being prefilled.

SLICE = 64
SLICES = 10 * SLICE  # tokens


@pytest.fixture(params=["llama", "mamba2"])
def engine(models, tmp_path, request) -> Iterator[Engine]:
    with engine_on(models.of(request.param), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = SLICE
        yield engine


def long_prompts(n: int, n_tokens: int = SLICES) -> list[list[int]]:
    return [prompt_of(n_tokens, seed=100 + i) for i in range(n)]


def warmed(engine: Engine, seed: int) -> list[int]:
    """A prompt of which all but the last token is cached."""
    prompt = prompt_of(300, seed)
    engine.submit(ask(prompt, 1)).result()
    return prompt


def first_tokens(answers: Sequence[Answer]) -> list[float]:
    return [answer.result().usage.ttft_ms for answer in answers]


def test_a_warm_request_does_not_wait_for_cold_ones(engine, models):
    """One token to feed need not wait until a long prompt is prefilled."""
    exam = Exam(models.module(engine.model.name))
    prompt = warmed(engine, seed=1)
    with held(engine):
        cold = [engine.submit(ask(long, 2)) for long in long_prompts(MAX_PREFILLS + 1)]
        warm = engine.submit(ask(prompt, 2))
    result = warm.result()
    exam.add(prompt, result.choices[0])
    assert result.receipt.cached_tokens == len(prompt) - 1
    assert result.usage.ttft_ms < min(first_tokens(cold))
    exam.check()


def test_an_urgent_request_does_not_wait_for_them(engine):
    """It has a long prompt, but a higher priority than all that are prefilled."""
    with held(engine):
        longer = long_prompts(MAX_PREFILLS + 1, 5 * SLICES)  # this thread may be late
        plain = [engine.submit(ask(long, 2)) for long in longer]
    assert isinstance(next(plain[MAX_PREFILLS - 1]), Started)  # all places are taken
    urgent = engine.submit(ask(prompt_of(SLICES, seed=99), 2, priority=1, agent="urgent"))
    urgent.result()
    assert engine.requests()[0].agent == "urgent"  # the first that ended
    for answer in plain:
        answer.cancel()


def test_extra_prefills_are_limited(engine):
    """Even an urgent request waits once all extra prefills are taken."""
    engine._scheduler.slice_sizer.max_slice = 16
    answers = []
    for number in range(MAX_PREFILLS + MAX_EXTRA_PREFILLS):
        prompt = prompt_of(3000, seed=number)
        answers.append(engine.submit(ask(prompt, 1, priority=max(0, number - MAX_PREFILLS + 1))))
        assert isinstance(next(answers[-1]), Started)
    answers.append(engine.submit(ask(prompt_of(20), 1, priority=MAX_EXTRA_PREFILLS + 1)))
    for _ in range(3):
        engine.call(lambda: None).result()
    stats = engine.stats()
    for answer in answers:
        answer.cancel()
    assert (stats.prefilling, stats.waiting) == (MAX_PREFILLS + MAX_EXTRA_PREFILLS, 1)
