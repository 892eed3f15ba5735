"""What follows an answer on disk, besides noting it."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from keepwarm.agents import agent_store
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.config import load
from keepwarm.engine import recorder
from keepwarm.prefix.blocks import chain
from keepwarm.text.request import Breakpoint, Request, Sampling
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until


def test_agents_past_their_retention_are_forgotten_after_an_answer(models, tmp_path, monkeypatch):
    """Expired agents are forgotten without a command, but not while a request of theirs runs."""
    monkeypatch.setattr(agent_store, "CONFIRM_S", 0.0)
    with engine_on(models.of("llama"), tmp_path) as engine:
        agents = engine.store.on_disk.agents
        for seed, name in enumerate(("old", "late", "kept")):
            engine.submit(ask(prompt_of(300, seed=seed), 2, agent=name)).result()
        engine.wait_until_saved()
        for name, retention_s in (("old", 60.0), ("late", agent_store.GRACE_S)):
            agents.update(name, retention_s=retention_s)
        old = agents.show("old")
        now = time.time() + 60 + agent_store.GRACE_S + 1
        agents._clock = lambda: now
        engine.store.on_disk._next_expiry = 0.0  # it is time
        engine.submit(ask(prompt_of(300, seed=9), 2, agent="new")).result()
        engine.wait_until_saved()
        assert [agent.id for agent in agents.all()] == ["kept", "late", "new"]
        assert not engine.store.on_disk.disk.have(old.blocks)


def test_an_agent_that_is_used_again_just_before_it_expires_is_kept(models, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_store, "CONFIRM_S", 0.0)
    with engine_on(models.of("llama"), tmp_path) as engine:
        agents = engine.store.on_disk.agents
        engine.submit(ask(prompt_of(300), 2, agent="ada")).result()
        engine.wait_until_saved()
        agents.update("ada", retention_s=60.0)
        now = time.time() + 60 + agent_store.GRACE_S + 1
        agents._clock = lambda: now
        due = engine.store.on_disk._long_expired()
        assert due == ["ada"]
        agents.update("ada", used=now)  # by another process
        monkeypatch.setattr(engine.store.on_disk, "_long_expired", lambda: due)
        engine.store.on_disk._next_expiry = 0.0
        engine.submit(ask(prompt_of(300, seed=9), 2, agent="eve")).result()
        engine.wait_until_saved()
        assert engine.store.on_disk._next_expiry > 0
        assert agents.show("ada").n_tokens


@pytest.mark.parametrize("n_tokens", [2, 0])
def test_breakpoints_are_pinned_and_no_agent_is_made_of_nobody(models, tmp_path, n_tokens):
    """Also those of a prompt that is only kept."""
    chat = [{"role": "user", "content": "Hello " * 60}]
    sampling = Sampling(max_tokens=n_tokens, temperature=0)
    with engine_on(models.of("llama"), tmp_path) as engine:
        for breakpoints in ((), (Breakpoint(0, 60.0),)):
            request = Request(messages=chat, sampling=sampling, breakpoints=breakpoints)
            engine.submit(request).result()
            engine.wait_until_saved()
            disk = engine.store.on_disk.disk
            owners = [disk.index.lookups.owners(block.key) for block in disk.walk()]
            assert any(owners) == bool(breakpoints)
        assert list(engine.store.on_disk.agents.all()) == []


def test_a_use_of_a_live_cache_is_noted_beside_the_engine(models, tmp_path, monkeypatch):
    """Hashing a long prompt takes milliseconds, in which no answer would go on."""
    touch, threads = Restorer.touch, []

    def touch_and_note(restorer, tokens, *keys):
        threads.append((threading.current_thread().name, len(tokens)))
        touch(restorer, tokens, *keys)

    monkeypatch.setattr(Restorer, "touch", touch_and_note)
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path) as engine:
        for _ in range(2):
            reused = engine.submit(ask(prompt, 2)).result().receipt.reused
        engine.wait_until_saved()
    assert reused == {"live": 299}
    assert threads == [("keepwarm-recorder_0", 299)]


def test_a_damaged_agent_file_is_named_once_until_it_is_mended(models, tmp_path, caplog):
    """Its answers go on; the log says which file, and what to do, but not at every turn."""
    with engine_on(models.of("llama"), tmp_path) as engine:

        def turns(n):
            caplog.clear()
            for seed in range(n):
                engine.submit(ask(prompt_of(40, seed=seed), 2, agent="a")).result()
                engine.wait_until_saved()
            return [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]

        assert turns(1) == []
        (path,) = tmp_path.rglob("agents/a.json")
        path.write_text("{")
        (warning,) = turns(3)
        assert warning.exc_info is None
        assert f"delete {path}" in warning.getMessage()
        path.unlink()
        assert turns(1) == []
        path.write_text("{")
        assert len(turns(2)) == 1


def test_a_turn_is_recorded_when_its_blocks_are_on_disk(models, tmp_path, monkeypatch):
    """A crash in between must not leave an agent without them."""
    were_there = []
    with engine_on(models.of("llama"), tmp_path) as engine, ExitStack() as busy:
        saver, on_disk = engine.store.saver, engine.store.on_disk
        advance, flush = on_disk.agents.advance, saver.flush

        def flush_at_last(*n_put):
            busy.close()  # only now the writer goes on
            flush(*n_put)

        def look_and_advance(agent, namespace, tokens, *args, **options):
            keys = [ref.key for ref in chain(namespace, tokens)]
            were_there.append(set(on_disk.disk.have(keys)) == set(keys))
            return advance(agent, namespace, tokens, *args, **options)

        monkeypatch.setattr(saver, "flush", flush_at_last)
        monkeypatch.setattr(on_disk.agents, "advance", look_and_advance)
        busy.enter_context(saver.restoring())
        engine.submit(ask(prompt_of(300), 2, agent="ada")).result()
        engine.wait_until_saved()
    assert were_there == [True]


class NewerTurn(dict):
    """While the recorder looks up a turn, the engine's thread notes the next one of that agent."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def get(self, agent_id):
        found = super().get(agent_id)
        noting = threading.Thread(target=self.note)
        noting.start()
        noting.join(0.5)  # with the lock it waits for the recorder
        return found


def test_unrecorded_turn_that_is_noted_beside_an_older_one_is_not_lost():
    older, newer = (SimpleNamespace(request=Request(agent="ada")) for _ in range(2))
    agents = Mock(advance=Mock(return_value=None))
    on_disk, saver = SimpleNamespace(agents=agents), SimpleNamespace(n_put=0)
    store = SimpleNamespace(on_disk=on_disk, settings=load({}), saver=saver)
    made = recorder.Recorder(store, Mock(), [])
    made._pool = Mock()
    sequence = Mock(job=newer, choice=0, tokens=[])
    made._unrecorded = NewerTurn(lambda: made.record_sequence(sequence))
    made._unrecorded["ada"] = older
    older.lane, older.tokens = Mock(), []
    made._advance_agent(Mock(), False, None, older, [])
    wait_until(lambda: made._unrecorded == {"ada": newer})
