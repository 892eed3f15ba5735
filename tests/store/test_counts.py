"""The counts of a store: what all processes have asked of it, and what follows from that."""

import errno
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from keepwarm.agents.agent_store import AgentStore
from keepwarm.files import SharedLock
from keepwarm.prefix.policy import Policy
from keepwarm.store.counts import CountsFile, PromptCounts, warm_tier
from keepwarm.text.request import Request, Sampling
from tests.engine.test_embedding import embed, model_of
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of

N = 600
FIRST = PromptCounts.of_request(100, {}, is_later_turn=False)
WARM = PromptCounts.of_request(100, {"live": 90, "disk": 0}, is_later_turn=True)
STORED = PromptCounts.of_request(200, {"memory": 50, "disk": 100}, is_later_turn=True)


def test_everything_follows_from_the_counts():
    total = FIRST.plus(WARM).plus(STORED)
    assert total.figures() == {
        "requests": 3,
        "prompt_tokens": 400,
        "reused": {"live": 90, "memory": 50, "disk": 100},
        "computed": 160,
        "hits": {"live": 1, "memory": 0, "disk": 1},
        "misses": {"live": 2, "memory": 3, "disk": 2},
        "hit_rate": 0.6,
        "hit_rate_from_turn_2": 0.8,
    }
    assert PromptCounts().hit_rate is None
    assert FIRST.hit_rate == 0
    assert FIRST.hit_rate_from_turn_2 is None


@pytest.mark.parametrize(
    ("reused", "tier"),
    [
        ({}, None),
        ({"memory": 4}, None),
        ({"memory": 50}, None),
        ({"memory": 51}, "memory"),
        ({"memory": 30, "disk": 31}, "disk"),
    ],
)
def test_warm_is_more_reused_than_computed(reused, tier):
    """The four tokens that begin every prompt of a template warm nothing."""
    assert warm_tier(100, reused) == tier
    hits = PromptCounts.of_request(100, reused, is_later_turn=False).hits
    assert hits == ({} if tier is None else {tier: 1})


def test_what_asks_for_no_reuse_is_in_no_hit_rate(models, tmp_path):
    """Embeddings, warm-ups and requests that read nothing; the charts leave them out too."""
    prompt = prompt_of(40)
    with engine_on(model_of(models, "qwen3"), tmp_path) as engine:
        engine.submit(ask(prompt)).result()
        before, minutes = engine.stats().counts, engine.ledger.minutes()
        engine.submit(ask(prompt, 0)).result()
        engine.submit(ask(prompt, policy=Policy.NO_STORE)).result()
        embed(engine, prompt).result()
        assert engine.stats().counts == before
        assert engine.stats().counters["prompt_tokens"] == before.prompt_tokens, "of this process"
        assert before.prompt_tokens == 40
        assert sum_of("prompt", engine.ledger.minutes()) == sum_of("prompt", minutes) == 40
        engine.submit(ask(prompt)).result()
        assert engine.stats().counts.hit_rate == round(39 / 80, 4), "the control"


def sum_of(name, minutes):
    return sum(amounts[name] for amounts in minutes.values())


def test_a_hand_made_sequence(models, tmp_path):
    """One prompt from every tier, then a conversation; counted by hand."""
    prompt = prompt_of(N)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt)).result()
        engine.submit(ask(prompt)).result()
        engine.wait_until_saved()
        engine.call(engine.live.clear).result()
        engine.submit(ask(prompt)).result()
        engine.wait_until_saved()
        engine.clear()
        engine.submit(ask(prompt)).result()
        counts = engine.stats().counts
        assert counts.figures() == {
            "requests": 4,
            "prompt_tokens": 4 * N,
            "reused": {"live": N - 1, "memory": N - 1, "disk": N - 1},
            "computed": N + 3,
            "hits": {"live": 1, "memory": 1, "disk": 1},
            "misses": {"live": 3, "memory": 3, "disk": 3},
            "hit_rate": round(3 * (N - 1) / (4 * N), 4),
            "hit_rate_from_turn_2": None,
        }
        turn = Request(messages=[*chat, chat[0]], sampling=Sampling(max_tokens=2, temperature=0))
        cold = engine.submit(turn).result().receipt
        warm = engine.submit(turn).result().receipt
        assert warm.cached_tokens == cold.prompt_tokens - 1
        later = engine.stats().counts
        share = (cold.cached_tokens + warm.cached_tokens) / (2 * cold.prompt_tokens)
        assert later.hit_rate_from_turn_2 == round(share, 4) > 0
        assert later.hit_rate != later.hit_rate_from_turn_2
    with AgentStore(tmp_path / "store") as store:
        assert store.counts.total() == later, "it survives the process"
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt)).result()
        again = engine.stats().counts
    assert again.requests == later.requests + 1
    assert again.reused["disk"] == later.reused["disk"] + N - 1


def test_audits_and_refused_requests_are_not_counted(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path, audit_share=1.0) as engine:
        for _ in range(2):
            engine.submit(ask(prompt_of(40))).result()
        while engine.stats().counters["audits"] < 1:
            engine.wait_until_saved()
        assert engine.stats().counts.requests == 2


def count_often(root):
    counts = CountsFile(root)
    for _ in range(50):
        counts.add(WARM)
        counts.save()


def test_counts_of_several_writers_are_all_kept(tmp_path):
    """Each adds to what the others have saved, as processes do."""
    AgentStore(tmp_path).close()
    with ThreadPoolExecutor(3) as writers:
        list(writers.map(count_often, [tmp_path] * 3))
    total = CountsFile(tmp_path).total()
    assert (total.requests, total.reused, total.hits) == (150, {"live": 150 * 90}, {"live": 150})


@pytest.mark.parametrize("content", ["", "[]", "{", '{"requests": 1}', '{"reused": 3}', "null"])
def test_a_damaged_file_counts_as_empty(tmp_path, content):
    AgentStore(tmp_path).close()
    (tmp_path / "state.json").write_text(f'{{"prompts": {content}}}')
    counts = CountsFile(tmp_path)
    assert counts.total() == PromptCounts()
    counts.add(WARM)
    counts.save()
    assert CountsFile(tmp_path).total() == WARM


def test_what_cannot_be_saved_is_saved_later(tmp_path, caplog, monkeypatch):
    """Another process holds the lock for too long."""
    monkeypatch.setattr("keepwarm.files.LOCK_WAIT_S", 0.05)
    AgentStore(tmp_path).close()
    counts = CountsFile(tmp_path)
    counts.add(WARM)
    with SharedLock(tmp_path / "tmp" / "state").hold():
        counts.save()
        assert "could not be written" in caplog.text
        assert counts.total() == WARM
    counts.add(FIRST)
    counts.save()
    assert CountsFile(tmp_path).total() == WARM.plus(FIRST) == counts.total()


def test_counts_that_cannot_be_read_now_are_not_begun_anew(tmp_path, caplog, monkeypatch):
    AgentStore(tmp_path).close()
    counts = CountsFile(tmp_path)
    counts.add(WARM)
    counts.save()
    counts.add(FIRST)
    with monkeypatch.context() as failing:
        fail_once(failing)
        counts.save()
    assert "could not be written: [Errno 5] the disk fails" in caplog.text
    assert CountsFile(tmp_path).total() == WARM
    counts.save()
    assert CountsFile(tmp_path).total() == WARM.plus(FIRST) == counts.total()


def fail_once(monkeypatch):
    """The next file that is read."""
    read_text, fails = Path.read_text, iter([True])

    def read(path):
        if next(fails, False):
            raise OSError(errno.EIO, "the disk fails")
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)


def test_without_a_directory_they_last_as_long_as_the_process():
    counts = CountsFile(None)
    counts.add(WARM)
    counts.save()
    assert counts.total() == replace(WARM)


def test_clearing_is_no_eviction(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(N))).result()
        engine.wait_until_saved()
        assert engine.stats().tiers["memory"].blocks
        engine.clear()
        stats = engine.stats()
        assert not stats.tiers["memory"].blocks
        assert (stats.tiers["memory"].evicted, stats.live.evicted) == (0, 0)
        engine.submit(ask(prompt_of(N))).result()
        engine.wait_until_saved()
        engine.store.memory.resize(0)
        assert engine.stats().tiers["memory"].evicted, "the control: a smaller budget evicts"
