"""Places, turns and memory of requests, step by step on a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from keepwarm.engine.admission import kv_bytes
from keepwarm.engine.scheduler import LEASE_TOKENS, MAX_PREFILLS, KeyRotation
from tests.kit.devices import M4_MAX, Simulation, simulated
from tests.kit.engines import ask, engine_on
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


def test_one_token_that_is_known_is_used(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask([5, 6, 7], 2)).result()
        engine.wait_until_saved()
        assert engine.submit(ask([5, 9, 9], 2)).result().receipt.reused == {"live": 1}
        engine.call(engine.live.clear).result()
        assert engine.submit(ask([5, 8, 8], 2)).result().receipt.reused == {"memory": 1}


def test_a_live_cache_belongs_to_its_agent(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(20), 2, agent="ada")).result()
        engine.wait_until_saved()
        assert engine.call(lambda: engine.live.release_owned("ada")).result()
        assert engine.live.stats.n_bytes == 0
