"""A session with the id of an agent in the store continues its conversation."""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, RepeatedToolCall
from keepwarm.models.load import load
from keepwarm.prefix.policy import Policy
from keepwarm.session import session as session_module
from keepwarm.session.session import Session
from keepwarm.text.request import KVOptions, Sampling
from tests.kit.engines import engine_on
from tests.kit.scripted import call, write_scripted
from tests.kit.waiting import no_collection

FEW = Sampling(max_tokens=8, temperature=0)


@pytest.fixture
def model(models):
    return models.of("llama", endless=False)


def known(session):
    """Tokens of the session's conversation so far."""
    return session.engine.store.on_disk.latest_turn(session.id).tokens


def test_after_a_restart(model, tmp_path):
    """Its messages are there, and none of its tokens is computed again."""
    with engine_on(model, tmp_path) as engine:
        session = Session(engine, id="ops", system="Be brief.", sampling=FEW)
        session.respond("Who is the fox?")
        second = session.respond("Why?")
        before = session.messages
        assert second.receipt.continued is None
    with engine_on(model, tmp_path) as engine:
        session = Session(engine, id="ops", sampling=FEW)
        assert session.messages == before
        assert (session.system, session.n_turns) == ("Be brief.", 2)
        n_known = len(known(session))
        for question in ("And the dog?", "Where?"):
            reply = session.respond(question)
            assert reply.receipt.continued in (n_known, n_known - 1)
            n_known = reply.usage.prompt_tokens + reply.usage.completion_tokens
        twin = Session(engine, system="Be brief.", messages=session.messages[:-2], sampling=FEW)
        assert twin.respond("Where?").text == reply.text
        assert session.n_turns == 4


def test_opened_before_its_first_turn_is_on_disk_it_waits_for_it(model, tmp_path):
    with engine_on(model, tmp_path) as engine:
        lets_go = threading.Event()
        engine._recorder._pool.submit(lets_go.wait)
        session = Session(engine, id="ops", sampling=FEW)
        session.respond("Who?")
        threading.Timer(0.3, lets_go.set).start()
        assert Session(engine, id="ops", sampling=FEW).messages == session.messages


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("goes_on", [True, False])
def test_rewound_it_is_opened_again_as_it_was_left(model, tmp_path, turn, goes_on):
    with engine_on(model, tmp_path) as engine:
        session = Session(engine, id="ops", sampling=FEW)
        for question in ("Who?", "Why?"):
            session.respond(question)
        session.rewind(turn)
        if goes_on:
            session.respond("What is the quick brown fox?")
        engine.wait_until_saved()
        assert Session(engine, id="ops", sampling=FEW).messages == session.messages
    with engine_on(model, tmp_path) as engine:
        assert Session(engine, id="ops", sampling=FEW).messages == session.messages


@pytest.mark.parametrize("other", [{"policy": Policy.READ_ONLY}, {"messages": [{}]}])
def test_who_only_reads_or_says_something_else_rewinds_no_agent(model, tmp_path, other):
    with engine_on(model, tmp_path) as engine:
        session = Session(engine, id="ops", sampling=FEW)
        session.respond("Who?")
        before = session.messages
        engine.wait_until_saved()
        if "messages" in other:
            other = {"messages": [{"role": "user", "content": "Why?"}, before[-1]]}
        Session(engine, id="ops", sampling=FEW, **other).rewind(0)
        assert Session(engine, id="ops", sampling=FEW).messages == before


def look(word: str) -> str:
    """Look."""
    return word


def stop(word: str) -> str:
    raise KeyboardInterrupt(word)


LOOK = call("look", word="a")
stop.__name__ = "look"


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_rewound_past_rounds_of_tools(tmp_path, turn):
    """An agent has a turn for each answer, a session for each question."""
    with scripted_engine(tmp_path, ["Zero.", LOOK, "Two.", "Three.", "Four."]) as engine:
        session = Session(engine, id="ops", system="Be brief.", tools=[look])
        for question in ("Who?", "Why?", "Where?"):
            session.respond(question)
        session.rewind(turn)
        assert Session(engine, id="ops", tools=[look]).messages == session.messages
        session.respond("When?")
        assert Session(engine, id="ops", tools=[look]).messages == session.messages


def close_early(session):
    stream = session.stream("Look!")
    next(stream)
    stream.close()


def aclose_early(session):
    async def talk():
        async with aclosing(session.stream("Look!")) as stream:
            await anext(stream)

    asyncio.run(talk())


def cancel_early(session):
    async def talk():
        async for _ in session.stream("Look!"):
            asyncio.current_task().cancel()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(talk())


def repeat(session):
    with pytest.raises(RepeatedToolCall):
        session.respond("Look!")


def interrupt(session):
    with pytest.raises(KeyboardInterrupt):
        session.respond("Look!")


LONG = "This is a long answer, of which little is read."
DISCARDED = [
    (close_early, look, [LONG]),
    (aclose_early, look, [LONG]),
    (cancel_early, look, [LONG]),
    (repeat, look, [LOOK, LOOK]),
    (interrupt, stop, [LOOK]),
]


@pytest.mark.parametrize("n_before", [0, 1])
@pytest.mark.parametrize(("fail", "tool", "answers"), DISCARDED)
def test_a_discarded_turn_is_not_the_agents(tmp_path, fail, tool, answers, n_before):
    """Opened again it has what the session has: no call that waits for a result."""
    with scripted_engine(tmp_path, [*["Zero."] * n_before, *answers]) as engine:
        session = Session(engine, id="ops", tools=[tool])
        for _ in range(n_before):
            session.respond("Who?")
        before = session.messages
        fail(session)
        opened = Session(engine, id="ops", tools=[tool])
        assert opened.messages == session.messages == before
        session.rewind(0)
        assert Session(engine, id="ops", tools=[tool]).messages == session.messages == []


def forked(session):
    return session.fork("eve")


def of_messages(session):
    return Session(session.engine, id="eve", system=session.system, messages=session.messages)


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("made", [forked, of_messages])
def test_rewound_past_its_first_request(tmp_path, made, turn):
    """Which had answers already: they are of no turn of its agent's."""
    with scripted_engine(tmp_path, ["Zero.", "One.", "Two.", "Three."]) as engine:
        first = Session(engine, system="Be brief.")
        for question in ("Who?", "Why?"):
            first.respond(question)
        session = made(first)
        session.respond("Where?")
        session.rewind(turn)
        opened = Session(engine, id="eve")
        assert opened.messages == session.messages == first.messages[: 2 * turn]
        assert opened.respond("When?").text == session.respond("When?").text
        assert Session(engine, id="eve").messages == session.messages


def test_a_rewind_that_is_interrupted_loses_nothing(tmp_path, monkeypatch):
    with scripted_engine(tmp_path, ["Zero.", "One.", "Two."]) as engine:
        first = Session(engine, system="Be brief.")
        for question in ("Who?", "Why?"):
            first.respond(question)
        fork = first.fork("eve")
        fork.respond("Where?")
        said = fork.messages
        monkeypatch.setattr(session_module, "before_question", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fork.rewind(1)
        assert Session(engine, id="eve").messages == said


def interrupted(*_):
    raise KeyboardInterrupt


def test_of_a_first_request_that_had_answers_a_discarded_turn_goes_alone(tmp_path):
    with scripted_engine(tmp_path, ["Zero.", LONG]) as engine:
        first = Session(engine, id="ops")
        first.respond("Who?")
        fork = first.fork("eve")
        close_early(fork)
        assert Session(engine, id="eve").messages == fork.messages == first.messages


@pytest.mark.parametrize("leave", [lambda session: session.rewind(1), close_early])
def test_an_answer_that_was_cut_stays_when_what_follows_is_dropped(tmp_path, leave):
    """It was other tokens, so its turn is no more the agent's."""
    with scripted_engine(tmp_path, ["Zero.", LONG]) as engine:
        session = Session(engine, id="ops")
        assert session.respond("Who?", sampling=Sampling(stop=("ero",))).text == "Z"
        before = session.messages
        if leave is not close_early:
            session.respond("Why?")
            engine.wait_until_saved()
            assert len(engine.store.on_disk.agents.show("ops").turns) == 1
        leave(session)
        opened = Session(engine, id="ops")
        assert opened.messages == session.messages == before
        assert opened.respond("Why?").text == LONG


def test_a_session_that_is_closed_discards_what_a_dropped_stream_left(tmp_path):
    with scripted_engine(tmp_path, [LONG]) as engine:
        with Session(engine, id="ops") as session:
            for _ in session.stream("Look!"):
                break
        assert Session(engine, id="ops").messages == []


def test_a_session_that_goes_with_its_stream_is_freed_at_once(tmp_path):
    with scripted_engine(tmp_path, ["Zero.", LONG]) as engine, no_collection():
        session = Session(engine, id="ops")
        session.respond("Who?")
        engine.wait_until_saved()
        stream, freed = session.stream("Why?"), weakref.ref(session)
        next(stream)
        del stream
        assert session.messages == freed().messages
        del session
        assert freed() is None


def test_a_stream_that_is_read_again_discards_nothing(tmp_path):
    """It is refused, and what was answered since it was closed stays the agent's."""
    with scripted_engine(tmp_path, ["Zero.", LONG]) as engine:
        session = Session(engine, id="ops")
        session.respond("Who?")
        stream = session.stream("Why?")
        next(stream)
        stream.close()
        session.respond("Why?")
        with pytest.raises(BadInput, match="read once"):
            asyncio.run(anext(stream))
        assert Session(engine, id="ops").messages == session.messages
        assert session.n_turns == 2


def test_a_turn_whose_discarding_was_interrupted_is_discarded_at_the_next_use(
    tmp_path, monkeypatch
):
    with scripted_engine(tmp_path, ["Zero.", LONG]) as engine:
        first = Session(engine, id="ops")
        first.respond("Who?")
        fork = first.fork("eve")
        with monkeypatch.context() as patched:
            patched.setattr(session_module, "before_question", interrupted)
            with pytest.raises(KeyboardInterrupt):
                close_early(fork)
        fork.close()
        assert Session(engine, id="eve").messages == fork.messages == first.messages


def test_a_discarded_turn_takes_no_other_sessions_along(model, tmp_path):
    with engine_on(model, tmp_path) as engine:
        first = Session(engine, id="ops", sampling=FEW)
        first.respond("Who?")
        second = Session(engine, id="ops", sampling=FEW)
        second.respond("Why?")
        with pytest.raises(BadInput):
            first.respond("Where?", sampling=Sampling(max_tokens=-1))
        first.rewind(0)
        assert Session(engine, id="ops", sampling=FEW).messages == second.messages


def test_rewound_forked_or_with_another_system_prompt_it_sends_its_messages(model, tmp_path):
    with engine_on(model, tmp_path) as engine:
        Session(engine, id="ops", system="Be brief.", sampling=FEW).respond("Who?")
        engine.wait_until_saved()
        session = Session(engine, id="ops", sampling=FEW)
        fork = session.fork("copy")
        assert fork.respond("Why?").receipt.continued
        assert session.respond("Why?").text == fork.messages[-1]["content"]
        session.rewind(1)
        assert session.respond("Why?").receipt.continued is None
        engine.wait_until_saved()
        other = Session(engine, id="copy", system="Be long.", sampling=FEW)
        assert other.messages == fork.messages
        assert other.respond("Where?").receipt.continued is None
        fresh = Session(engine, id="copy", kv=KVOptions(max_kv_size=64), sampling=FEW)
        assert fresh.messages == []  # its blocks are of another kind


def test_an_answer_cut_by_a_stop_string_is_sent_by_its_text(model, tmp_path):
    with engine_on(model, tmp_path) as engine:
        first = Session(engine, id="ops", sampling=FEW)
        first.respond("Who?")
        engine.wait_until_saved()
        whole = first.fork().respond("Why?").text
        session = Session(engine, id="ops", sampling=FEW)
        stop = whole[len(whole) // 2 :][:1]
        assert session.respond("Why?", sampling=replace(FEW, stop=(stop,))).text in whole[:-1]
        twin = Session(engine, messages=session.messages, sampling=FEW).respond("Where?")
        reply = session.respond("Where?")
        assert reply.usage.prompt_tokens == twin.usage.prompt_tokens
        assert reply.text == twin.text


def test_a_turn_that_fails_leaves_the_conversation_where_it_was(model, tmp_path):
    with engine_on(model, tmp_path) as engine:
        Session(engine, id="ops", sampling=FEW).respond("Who?")
        engine.wait_until_saved()
        session = Session(engine, id="ops", sampling=FEW)
        n_known = len(known(session))
        stream = session.stream("Why?")
        next(stream)
        stream.close()
        engine.wait_until_saved()
        reply = session.respond("Where?")
        assert reply.receipt.continued in (n_known, n_known - 1)
        assert [each["content"] for each in session.messages[::2]] == ["Who?", "Where?"]


def test_an_agent_whose_messages_were_not_kept(model, tmp_path):
    """As of an older Keepwarm: it goes on by its tokens, and cannot be rewound here."""
    with engine_on(model, tmp_path) as engine:
        Session(engine, id="ops", sampling=FEW).respond("Who?")
        engine.wait_until_saved()
        engine.store.on_disk.agents.turns.remove("ops")
        session = Session(engine, id="ops", sampling=FEW)
        assert session.messages == []
        n_known = len(known(session))
        assert session.prewarm() is not None
        assert session.respond("Why?").receipt.continued in (n_known, n_known - 1)
        assert session.respond("Where?").receipt.continued > n_known
        with pytest.raises(BadInput, match="not kept"):
            session.rewind(0)


def test_a_template_that_counts_answers_gets_the_kept_messages(scripted_engines):
    """Two processes: the second answers as the conversation's third turn."""
    with scripted_engines() as engine:
        session = Session(engine, id="ops")
        assert [session.respond("Hi").text for _ in range(2)] == ["one", "two"]
    with scripted_engines() as engine:
        assert Session(engine, id="ops").respond("Hi").text == "three"


@pytest.fixture
def scripted_engines(tmp_path):
    return partial(scripted_engine, tmp_path, ["one", "two", "three"])


@contextmanager
def scripted_engine(tmp_path, answers):
    path = write_scripted(tmp_path / "model", answers)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, model=str(path))
    model = load(settings.model, settings)
    with Store(settings=settings) as store, Engine(model, store, settings=settings) as engine:
        yield engine


def test_a_session_that_is_behind_discards_no_turn_of_another(model, tmp_path):
    """Its question is the same, and is refused."""
    with engine_on(model, tmp_path) as engine:
        behind = Session(engine, id="ops", sampling=FEW)
        behind.respond("Hi")
        Session(engine, id="ops", sampling=FEW).respond("Go on")
        said = Session(engine, id="ops").messages
        with pytest.raises(BadInput, match="max_tokens"):
            behind.respond("Go on", sampling=Sampling(max_tokens=-1))
        assert Session(engine, id="ops").messages == said

        async def refused() -> None:
            await behind.arespond("Go on", sampling=Sampling(max_tokens=-1))

        with pytest.raises(BadInput, match="max_tokens"):
            asyncio.run(refused())
        assert Session(engine, id="ops").messages == said
