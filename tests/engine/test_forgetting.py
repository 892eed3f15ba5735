"""What another process deletes on purpose is forgotten here: reused no more, written no more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from keepwarm.cache.disk_store import DiskStore
from keepwarm.cache.policy import Policy
from keepwarm.engine.engine import Engine
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.text.request import Started
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

LIMITS = DiskLimits(min_free_bytes=0)
PROMPT = prompt_of(300)


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_next"])
def engine(request, models, tmp_path) -> Iterator[Engine]:
    with engine_on(models.of(request.param), tmp_path) as engine:
        yield engine


@pytest.fixture
def other(engine) -> Iterator[DiskStore]:
    """The same store, as another process opens it."""
    with DiskStore(engine.store.settings.store, LIMITS) as opened:
        yield opened


def answer(engine: Engine, prompt, n_tokens=3, **options):
    result = engine.submit(ask(prompt, n_tokens, **options)).result()
    engine.settle()
    return result


def reused(engine: Engine, prompt, **options):
    return dict(answer(engine, prompt, 1, **options).receipt.reused)


def test_a_durable_request_right_after_finds_nothing(engine, other):
    """Neither a live cache nor blocks in memory; and it writes only what it computes itself."""
    first = answer(engine, PROMPT, agent="ada")
    second = [*PROMPT, *tokens_of(first.choices[0]), *prompt_of(200, seed=2)]
    answer(engine, second, agent="ada")
    assert reused(engine, second)
    assert other.agents.delete("ada") > 0
    kept = answer(engine, PROMPT, 1, policy=Policy.DURABLE)
    assert (kept.receipt.cached_tokens, kept.receipt.durable) == (0, True)
    assert max(b.number * 256 + b.n_tokens for b in other.disk.walk()) <= len(PROMPT) + 1
    assert list(other.agents.all()) == []


def test_what_other_agents_use_stays_warm(engine, other):
    shared = prompt_of(600, seed=3)
    answer(engine, [*shared, *PROMPT], agent="ada")
    answer(engine, [*shared, *prompt_of(50, seed=4)], agent="bob")
    other.agents.delete("ada")
    again = answer(engine, [*shared, *prompt_of(50, seed=4)], 1).receipt
    assert again.recomputed == 1
    assert answer(engine, [*shared, *PROMPT], 1).receipt.cached_tokens <= len(shared)


def test_an_idle_process_forgets_too(engine, other):
    """The writer thread looks at intervals; nothing here asks it to."""
    answer(engine, PROMPT, agent="ada")
    assert (engine.live.stats.entries, n_in_memory(engine)) > (0, 0)
    other.agents.delete("ada")
    deadline = time.monotonic() + 60
    while engine.live.stats.entries or n_in_memory(engine):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def n_in_memory(engine: Engine) -> int:
    return engine.store.tier_stats()["memory"].blocks


def test_the_queue_of_the_writer_is_not_written(engine, other):
    """A turn was computed and waits to be saved, when its agent is deleted."""
    first = answer(engine, PROMPT, agent="ada")
    second = [*PROMPT, *tokens_of(first.choices[0]), *prompt_of(300, seed=2)]
    with engine.store.saver.restoring():  # saves wait
        engine.submit(ask(second, 3, agent="ada")).result()
        engine.call(lambda: None).result()
        assert engine.store.saver.queued.stats().blocks > 0
        other.agents.delete("ada")
    engine.settle()
    assert list(other.disk.walk()) == []
    assert list(other.agents.all()) == []
    assert engine.live.stats.entries == 0


def test_a_request_that_runs_meanwhile_leaves_nothing(engine, other):
    """It ends with its answer, and neither its blocks nor its agent come back."""
    first = answer(engine, PROMPT, agent="ada")
    second = [*PROMPT, *tokens_of(first.choices[0]), *prompt_of(300, seed=2)]
    running = engine.submit(ask(second, 40, agent="ada", policy=Policy.DURABLE))
    assert any(isinstance(event, Started) for event in running)
    other.agents.delete("ada")
    result = running.result()
    engine.settle()
    assert result.usage.completion_tokens == 40
    assert not result.receipt.durable
    assert list(other.agents.all()) == []
    assert list(other.disk.walk()) == []
    assert reused(engine, second) == {}


def test_a_new_conversation_under_the_old_name_is_kept(engine, other):
    answer(engine, PROMPT, agent="ada")
    other.agents.delete("ada")
    result = answer(engine, PROMPT, agent="ada", policy=Policy.DURABLE)
    assert result.receipt.durable
    assert other.agents.show("ada").n_tokens >= len(PROMPT)
    assert reused(engine, PROMPT)


def test_a_process_that_is_far_behind_forgets_everything(engine, other):
    answer(engine, PROMPT, agent="ada")
    other.disk.forget_all()
    assert reused(engine, PROMPT).keys() <= {"disk"}
