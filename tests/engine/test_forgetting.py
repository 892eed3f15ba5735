"""What another process deletes on purpose is forgotten here: reused no more, written no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from keepwarm.agents.agent_store import AgentStore
from keepwarm.engine.engine import Engine
from keepwarm.prefix.policy import Policy
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.text.request import Request, Sampling, Started
from tests.kit.engines import ask, engine_on, held, tokens_of
from tests.kit.runs import prompt_of

LIMITS = DiskLimits(min_free_bytes=0)
PROMPT = prompt_of(300)
SAMPLING = Sampling(max_tokens=8)


each_kind = pytest.mark.parametrize("engine", ["llama", "gemma3_text", "falcon_h1"], indirect=True)


@pytest.fixture
def engine(request, models, tmp_path) -> Iterator[Engine]:
    with engine_on(models.of(getattr(request, "param", "llama")), tmp_path) as engine:
        yield engine


@pytest.fixture
def other(engine) -> Iterator[AgentStore]:
    """The same store, as another process opens it."""
    with AgentStore(engine.store.settings.store, LIMITS) as opened:
        yield opened


def answer(engine: Engine, prompt, n_tokens=3, **options):
    result = engine.submit(ask(prompt, n_tokens, **options)).result()
    engine.wait_until_saved()
    return result


def reused(engine: Engine, prompt, **options):
    return dict(answer(engine, prompt, 1, **options).receipt.reused)


@each_kind
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


def test_requests_of_which_nothing_is_written_are_forgotten_too(engine, other):
    """They are the agent's, and in no file of it."""
    answer(engine, PROMPT, agent="ada")
    answer(engine, prompt_of(600, seed=6), agent="ada", policy=Policy.EPHEMERAL)
    engine.live.clear()
    assert list(reused(engine, prompt_of(600, seed=6), policy=Policy.READ_ONLY)) == ["memory"]
    other.agents.delete("ada")
    assert reused(engine, prompt_of(600, seed=6)) == {}


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


class Gate:
    """Lets the writer write so many records; the next ones wait until it is open."""

    def __init__(self, engine: Engine, n_records: int, monkeypatch) -> None:
        self._disk, self._left = engine.store.on_disk.disk, n_records
        self._write, self._is_open = self._disk.write, threading.Event()
        self.reached = threading.Event()
        monkeypatch.setattr(self._disk, "write", self.write)

    def write(self, record):
        if not self._left:
            self.reached.set()
            assert self._is_open.wait(60)
        self._left -= 1
        return self._write(record)

    def open(self) -> None:
        self._left = -1
        self._is_open.set()


@pytest.mark.parametrize(
    ("engine", "n_written", "is_known"),
    [
        ("llama", 0, True),
        ("llama", 1, False),
        ("falcon_h1", 2, True),
    ],
    indirect=["engine"],
)
def test_the_queue_of_the_writer_is_not_written(engine, other, n_written, is_known, monkeypatch):
    """A turn was computed, and the rest of its records waits to be saved, when its agent is
    deleted: what they continue may be on disk, and in the queue no more. Of the record that is
    being written the writer, or before it another thread, learns that."""
    first = answer(engine, PROMPT, agent="ada")
    second = [*PROMPT, *tokens_of(first.choices[0]), *prompt_of(300, seed=2)]
    gate = Gate(engine, n_written, monkeypatch)
    engine.submit(ask(second, 3, agent="ada")).result()
    assert gate.reached.wait(60)
    other.agents.delete("ada")
    if is_known:
        engine.store.catch_up()
    before = engine.store.saver.stats().written_records
    gate.open()
    engine.wait_until_saved()
    assert engine.store.saver.stats().written_records == before
    assert list(other.disk.walk()) == []
    assert list(other.agents.all()) == []
    assert engine.live.stats.entries == 0


@pytest.mark.parametrize("agent", ["ada", None])
def test_a_request_that_runs_meanwhile_leaves_nothing(engine, other, agent):
    """It ends with its answer, and neither its blocks nor its agent come back; also where it goes
    on from the agent's text under no name."""
    first = answer(engine, PROMPT, agent="ada")
    second = [*PROMPT, *tokens_of(first.choices[0]), *prompt_of(300, seed=2)]
    running = engine.submit(ask(second, 40, agent=agent, policy=Policy.DURABLE))
    assert any(isinstance(event, Started) for event in running)
    with held(engine):
        other.agents.delete("ada")
        engine.store.catch_up()
    result = running.result()
    engine.wait_until_saved()
    assert result.usage.completion_tokens == 40
    assert not result.receipt.durable
    assert list(other.agents.all()) == []
    assert list(other.disk.walk()) == []
    assert (engine.live.stats.entries, n_in_memory(engine)) == (0, 0)
    assert reused(engine, second) == {}


def test_a_request_that_waits_for_a_prefix_deleted_meanwhile_computes_it(engine, other):
    shared = prompt_of(600, seed=5)
    answer(engine, PROMPT, agent="ada")
    engine._scheduler.slice_sizer.max_slice = 50

    def delete_once_one_waits():
        while not engine.stats().counters["waited_for_prefix"]:
            engine._scheduler.step()
        other.agents.delete("ada")
        engine.store.catch_up()

    with held(engine):
        leader = engine.submit(ask([*shared, 1], 3, agent="ada"))
        waiter = engine.submit(ask([*shared, 2, 3], 3))
        deleted = engine.call(delete_once_one_waits)
    deleted.result()
    assert waiter.result().receipt.cached_tokens == 0
    leader.result()


def test_another_branch_that_runs_meanwhile_leaves_nothing(engine, other):
    """Its blocks, of which some are written before it ends, continue none of the agent's."""
    answer(engine, PROMPT, agent="ada")
    running = engine.submit(ask(prompt_of(600, seed=5), 40, agent="ada"))
    assert any(isinstance(event, Started) for event in running)
    engine.store.flush()
    other.agents.delete("ada")
    running.result()
    engine.wait_until_saved()
    assert list(other.agents.all()) == []
    assert list(other.disk.walk()) == []
    assert reused(engine, prompt_of(600, seed=5)) == {}


def test_a_request_that_came_before_is_not_kept(engine, other):
    """It knew the conversation, and begins only when that is deleted."""
    answer(engine, PROMPT, agent="ada")
    waits = threading.Event()
    engine.call(waits.wait)
    early = engine.submit(ask(PROMPT, 3, agent="ada", policy=Policy.DURABLE))
    other.agents.delete("ada")
    waits.set()
    assert not early.result().receipt.durable
    engine.wait_until_saved()
    assert list(other.agents.all()) == []
    assert list(other.disk.walk()) == []
    assert reused(engine, PROMPT) == {}


def test_a_request_of_another_agent_is_recorded(engine, other):
    """It has the same beginning, which is deleted with the first agent; its turn is its own."""
    shared = prompt_of(600, seed=3)
    answer(engine, [*shared, *PROMPT], agent="ada")
    bobs = [*shared, *prompt_of(50, seed=4)]
    running = engine.submit(ask(bobs, 40, agent="bob"))
    assert any(isinstance(event, Started) for event in running)
    other.agents.delete("ada")
    running.result()
    engine.wait_until_saved()
    assert [agent.id for agent in other.agents.all()] == ["bob"]
    assert other.agents.show("bob").turns == (len(bobs) + 40,)
    answer(engine, bobs, 1, agent="bob")
    assert answer(engine, bobs, 1).receipt.recomputed == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_is_recorded_if_many_other_agents_are_deleted_meanwhile(engine, other, at_once):
    """Whether this process sees each deletion by itself or all of them together."""
    running = engine.submit(ask(PROMPT, 40, agent="bob"))
    assert any(isinstance(event, Started) for event in running)
    for number in range(200):
        other.disk.index.forgotten.add(f"agent-{number}", ())
        if not at_once:
            engine.store.catch_up()
    running.result()
    engine.wait_until_saved()
    assert other.agents.show("bob").turns == (len(PROMPT) + 40,)
    assert answer(engine, PROMPT, 1).receipt.recomputed == 1


def test_prompts_and_answers_are_forgotten(engine, other):
    """They are remembered beside the blocks: to splice answers in, and to explain misses."""
    question = [{"role": "user", "content": "What is a prefix?"}]
    said = engine.submit(Request(messages=question, agent="ada", sampling=SAMPLING)).result()
    engine.wait_until_saved()
    assert len(engine.preparer.splicer) == 1
    assert engine.preparer.token_cache.n_bytes > 0
    other.agents.delete("ada")
    engine.store.catch_up()
    assert len(engine.preparer.splicer) == 0
    assert engine.preparer.token_cache.n_bytes == 0
    told = [*question, {"role": "assistant", "content": said.choices[0].text}, *question]
    again = engine.submit(Request(messages=told, sampling=SAMPLING, explain=True)).result()
    assert again.receipt.miss is not None
    assert (again.receipt.spliced, again.receipt.miss.reason) == (0, "new")
    assert engine.ledger.misses() == []


def test_a_request_that_runs_meanwhile_is_not_remembered(engine, other):
    answer(engine, PROMPT, agent="ada")
    messages = [{"role": "user", "content": "Go on."}]
    running = engine.submit(Request(messages=messages, agent="ada", sampling=SAMPLING))
    assert any(isinstance(event, Started) for event in running)
    other.agents.delete("ada")
    engine.store.catch_up()
    running.result()
    engine.wait_until_saved()
    assert len(engine.preparer.splicer) == 0
