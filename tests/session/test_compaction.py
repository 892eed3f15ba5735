"""A conversation is replaced by its summary, which costs only its own tokens."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

import keepwarm
from keepwarm.errors import BadInput, Busy
from keepwarm.prefix.policy import Policy
from keepwarm.session.compaction import INSTRUCTION, Compaction
from keepwarm.session.session import Session
from keepwarm.text.request import Request, Sampling
from tests.kit.engines import engine_on
from tests.kit.runs import FedCounter
from tests.kit.scripted import call, write_scripted

SYSTEM = "You answer in one sentence, in the words of the question. " * 4
FEW = Sampling(max_tokens=8, temperature=0)
MANY = Sampling(max_tokens=200, temperature=0)


@pytest.fixture
def engine(models, tmp_path):
    with engine_on(models.of("llama", endless=False), tmp_path) as engine:
        yield engine


def said(result):
    return {"role": "assistant", "content": result.choices[0].text}


def encoded(engine, text):
    return len(engine.model.tokenizer.encode(text, add_special_tokens=False))


def test_a_session_goes_on_from_its_summary(engine):
    session = Session(engine, id="ops", system=SYSTEM, sampling=FEW)
    for number in range(4):
        last = session.respond(f"What is the quick brown fox number {number}?")
    known = last.usage.prompt_tokens + last.usage.completion_tokens
    made = session.compact(max_tokens=12)
    (left,) = [len(packed) // 4 for _, packed in engine.live.held()]
    assert left == made.n_tokens, "the cache of what was replaced is gone"
    template = 40  # tokens that it writes around a message, at most
    assert made.receipt.cached_tokens >= known - 1
    assert made.receipt.recomputed < encoded(engine, INSTRUCTION) + template
    assert made.n_tokens < made.n_before
    assert [each["content"] for each in session.messages] == [INSTRUCTION, made.summary]
    assert session.n_turns == 1

    reply = session.respond("Why?")
    assert reply.receipt.cached_tokens >= made.n_tokens - 1
    assert reply.receipt.recomputed < template
    assert session.n_turns == 2


def test_an_agent_goes_on_from_its_summary(engine):
    session = Session(engine, id="ops", system=SYSTEM, sampling=FEW)
    session.respond("What is the quick brown fox?")
    session.respond("And the lazy dog?")
    engine.wait_until_saved()
    before = engine.store.on_disk.agents.show("ops")
    work = Compaction.of_agent(engine, Request(agent="ops"), "Sum up.", 12)
    result = engine.submit(work.request).result()
    assert result.receipt.continued
    engine.wait_until_saved()
    assert engine.store.on_disk.agents.show("ops") == before, "the question is no turn of its"
    work.warm(result).result()
    made = work.finish(result)
    asked = Request(messages=[{"role": "user", "content": "Why?"}], agent="ops", sampling=FEW)
    again = engine.submit(replace(asked, continues=True)).result()
    assert made.n_tokens - again.receipt.continued in (0, 1)
    assert again.receipt.cached_tokens >= made.n_tokens - 1
    engine.wait_until_saved()
    turn = engine.store.on_disk.latest_turn("ops").turn
    said = [each["content"] for each in turn.messages]
    assert said[:4] == [SYSTEM, "Sum up.", made.summary, "Why?"]
    assert Session(engine, id="ops").system == SYSTEM


def test_a_compaction_writes_no_more_than_its_session(engine, tmp_path):
    """Nothing of ephemeral turns is written, nor is their summary the stored agent's past."""

    def blocks():
        engine.wait_until_saved()
        return set(tmp_path.rglob("*.safetensors"))

    nameless = Session(engine, system=SYSTEM, policy=Policy.EPHEMERAL, sampling=FEW)
    nameless.respond("What is the quick brown fox?")
    nameless.compact(max_tokens=12)
    assert not blocks()
    Session(engine, id="ops", system=SYSTEM, sampling=FEW).respond("Who?")
    stored = blocks()
    before = engine.store.on_disk.latest_turn("ops").turn
    private = Session(engine, id="ops", policy=Policy.EPHEMERAL, sampling=FEW)
    private.respond("What is the quick brown fox?")
    private.compact(max_tokens=12)
    assert blocks() == stored
    assert engine.store.on_disk.latest_turn("ops").turn == before


def test_no_message_of_an_ephemeral_agent_is_written(engine, tmp_path):
    """It goes on from its summary all the same, until the process ends."""
    Session(engine, id="ops", system=SYSTEM, sampling=FEW).respond("Who?")
    engine.wait_until_saved()
    agents = engine.store.on_disk.agents
    agents.fork_all("ops", ["eve"], ephemeral=True)
    past = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    session = Session(engine, id="eve", messages=past, system=SYSTEM, sampling=FEW)
    session.respond("What is the quick brown fox?")
    made = session.compact(max_tokens=12)
    assert not list(tmp_path.rglob("eve*"))
    assert agents.show("eve").n_tokens == made.n_tokens


def test_a_compaction_keeps_nothing_if_its_session_keeps_nothing(engine):
    session = Session(engine, system=SYSTEM, policy=Policy.READ_ONLY, sampling=FEW)
    session.respond("What is the quick brown fox?")
    session.compact(max_tokens=12)
    engine.wait_until_saved()
    assert (engine.live.stats.entries, engine.store.memory.stats().blocks) == (0, 0)


def test_a_turn_that_ends_during_a_compaction_is_not_lost(engine):
    Session(engine, id="ops", sampling=FEW).respond("What is the quick brown fox?")
    engine.wait_until_saved()
    work = Compaction.of_agent(engine, Request(agent="ops"), "Sum up.", 12)
    result = engine.submit(work.request).result()
    question = {"role": "user", "content": "And the lazy dog?"}
    asked = Request(messages=[question], agent="ops", sampling=FEW, continues=True)
    engine.submit(asked).result()
    work.warm(result).result()
    with pytest.raises(Busy, match="gone on while"):
        work.finish(result)
    assert question in engine.store.on_disk.latest_turn("ops").turn.messages


def drop(session):
    stream = session.stream("Why?", sampling=MANY)
    for _ in range(4):
        next(stream)
    del stream
    gc.collect()


def adrop(session):
    async def talk():
        stream = session.stream("Why?", sampling=MANY)
        for _ in range(4):
            await anext(stream)
        del stream
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(talk())


@pytest.mark.parametrize("leave", [drop, adrop])
def test_what_a_dropped_stream_left_with_the_agent_is_discarded_at_the_next_use(
    models, tmp_path, leave
):
    """Unless another session has gone on from there."""
    with engine_on(models.of("llama", endless=True), tmp_path) as engine:
        session = Session(engine, id="ops", sampling=FEW)
        session.respond("Who?")
        leave(session)
        engine.wait_until_saved()
        assert len(Session(engine, id="ops").messages) == 4, "the collector may not wait"
        session.compact(max_tokens=4)
        assert Session(engine, id="ops").messages == session.messages
        leave(session)
        session.rewind(0)
        assert Session(engine, id="ops").messages == session.messages == []

        session.respond("Who?")
        leave(session)
        other = Session(engine, id="ops", sampling=FEW)
        other.respond("Where?")
        with pytest.raises(Busy, match="in another session"):
            session.compact(max_tokens=4)
        assert Session(engine, id="ops").messages == other.messages


def test_turns_of_another_session_are_not_lost(engine, monkeypatch):
    """Which has opened the same agent; where nothing is stored, nothing is lost."""
    first = Session(engine, id="ops", sampling=FEW)
    first.respond("What is the quick brown fox?")
    engine.wait_until_saved()
    private = Session(engine, id="ops", policy=Policy.EPHEMERAL, sampling=FEW)
    Session(engine, id="ops", sampling=FEW).respond("And the lazy dog?")
    engine.wait_until_saved()
    before = engine.store.on_disk.latest_turn("ops").turn
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", lambda _: pytest.fail("it costs nothing"))
        with pytest.raises(Busy, match="in another session"):
            first.compact(max_tokens=12)
    assert first.n_turns == 1
    private.compact(max_tokens=12)
    assert engine.store.on_disk.latest_turn("ops").turn == before
    assert len(before.messages) == 4
    Session(engine, id="ops", sampling=FEW).compact(max_tokens=12)


def test_nor_are_those_with_an_agent_whose_first_request_had_answers(engine):
    first = Session(engine, sampling=FEW)
    first.respond("What is the quick brown fox?")
    fork = first.fork("eve")
    fork.respond("Why?")
    other = Session(engine, id="eve", sampling=FEW)
    other.respond("And the lazy dog?")
    with pytest.raises(Busy, match="in another session"):
        fork.compact(max_tokens=12)
    assert Session(engine, id="eve").messages == other.messages


def test_who_cannot_be_compacted_stays_as_he_is(engine):
    session = Session(engine, id="ops", sampling=FEW)
    session.respond("Who?")
    engine.wait_until_saved()
    before = engine.store.on_disk.agents.show("ops")
    engine.store.on_disk.agents.turns.remove("ops")
    with pytest.raises(BadInput, match="'ops' cannot be compacted"):
        Compaction.of_agent(engine, Request(agent="ops"), None, None)
    work = Compaction(engine, Request(messages=(), agent="ops"), [], "Sum up.", 4)
    silent = engine.submit(
        replace(work.request, sampling=Sampling(max_tokens=1, temperature=0))
    ).result()
    choice = replace(silent.choices[0], text=" ")
    with pytest.raises(BadInput, match="no summary"):
        work.warm(replace(silent, choices=(choice,)))
    assert engine.store.on_disk.agents.show("ops") == before


def test_a_session_whose_messages_were_not_kept_is_not_compacted(engine):
    """It would go on without its system prompt."""
    Session(engine, id="ops", system=SYSTEM, sampling=FEW).respond("Who?")
    engine.wait_until_saved()
    engine.store.on_disk.agents.turns.remove("ops")
    with pytest.raises(BadInput, match="were not kept"):
        Session(engine, id="ops", sampling=FEW).compact(max_tokens=12)


def test_a_summary_cannot_be_a_call_of_a_tool(tmp_path, monkeypatch):
    """The tools are in the prompt, as before; they may not be called."""
    asked = []
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    path = write_scripted(tmp_path / "model", ["It is quick.", call("look")])
    model = keepwarm.load(str(path))
    model = replace(model, module=FedCounter(model.module))
    with engine_on(model, tmp_path / "home") as engine:
        session = Session(engine, id="ops", tools=[look])
        session.respond("What is the quick brown fox?")
        submit = engine.submit
        monkeypatch.setattr(
            engine, "submit", lambda request, *more: asked.append(request) or submit(request, *more)
        )
        with pytest.raises(BadInput, match="wrote no summary"):
            session.compact("Sum up.")
    assert [(each.tools, each.tool_choice.mode) for each in asked] == [([look], "none")]


SUMMARY = "The fox is quick and brown; the dog is lazy.\nNext: whom does the fox jump over?"


def test_a_client_that_compacts_by_itself_is_told_so(tmp_path):
    """It asks for a summary, then begins anew with the summary in a message of its own."""
    path = write_scripted(tmp_path / "model", ["It is quick.", SUMMARY])
    model = keepwarm.load(str(path))
    model = replace(model, module=FedCounter(model.module))
    with engine_on(model, tmp_path / "home") as engine:

        def ask(*messages, agent="ops", tenant=""):
            request = Request(messages=messages, agent=agent, tenant=tenant, explain=True)
            return engine.submit(request).result()

        talk = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "What is the quick brown fox?"},
        ]
        first = ask(*talk)
        talk += [said(first), {"role": "user", "content": "Sum up."}]
        second = ask(*talk)
        assert second.choices[0].text == SUMMARY
        fresh = [talk[0], {"role": "user", "content": f"So far:\n{SUMMARY}\nGo on."}]
        other = [talk[0], {"role": "user", "content": "What is the lazy dog?"}]
        assert ask(*other).receipt.miss.reason == "diverged"  # control
        ask(*talk)
        quoted = {"role": "user", "content": f"Eve has:\n{SUMMARY}"}
        assert ask(talk[0], quoted, agent="eve").receipt.miss.reason == "diverged"
        ask(*talk, tenant="bob", agent="bob")
        assert ask(*fresh, tenant="bob").receipt.miss.reason != "compacted"  # another agent's
        third = ask(*fresh)
        assert third.receipt.miss.reason == "compacted"
        fresh += [said(third), {"role": "user", "content": "Why?"}]
        again = ask(*fresh)
        known = third.usage.prompt_tokens + third.usage.completion_tokens
        assert again.receipt.cached_tokens >= known - 1  # the next turn starts warm
        assert again.receipt.miss.reason == "new"
