"""Sessions: only new tokens are prefilled, one answer at a time, caches are freed with it."""

from __future__ import annotations

import asyncio
import gc
import re
import runpy
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import keepwarm
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, Busy, Cancelled, UnknownAgent
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.session.gate import Gate
from keepwarm.session.session import Reply, Session, forget
from keepwarm.text.request import Delta, Request, Sampling
from tests.kit.checkpoints import write_checkpoint
from tests.kit.engines import Models, engine_on
from tests.kit.runs import FedCounter
from tests.kit.scripted import MAX_ANSWERS, write_scripted
from tests.kit.waiting import no_collection

SYSTEM = "You answer in one sentence, and you answer in the words of the question. " * 4
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
SHORT = Sampling(max_tokens=4, temperature=0)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Model:
    answers = [f"This is answer {number}." for number in range(MAX_ANSWERS - 1)]
    answers.append("\n\n")  # a token that merges with the line break before a question
    return keepwarm.load(str(write_scripted(tmp_path_factory.mktemp("scripted"), answers)))


@pytest.fixture
def counted(scripted) -> Model:
    return replace(scripted, module=FedCounter(scripted.module))


@pytest.fixture
def engine(counted, tmp_path) -> Iterator[Engine]:
    with engine_on(counted, tmp_path) as engine:
        yield engine


def n_live(engine: Engine) -> int:
    engine.wait_until_saved()
    return engine.live.stats.entries


def read(session: Session, question: str, *, streamed: bool) -> Reply:
    if not streamed:
        return session.respond(question)
    stream = session.stream(question)
    text = "".join(event.text for event in stream if isinstance(event, Delta))
    assert text == stream.reply.text
    return stream.reply


# Turns.


def test_later_turns_prefill_only_new_tokens(engine):
    """Whether an answer is streamed or not, and
    counted where the model is called."""
    session = Session(engine, system=SYSTEM, tools=[TOOL], id="ada")
    first = session.respond("What is a fox?")
    assert first.text == "This is answer 0."
    assert first.receipt.cached_tokens == 0
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    for number in range(1, 6):
        before = engine.model.module.fed
        reply = read(session, f"And number {number}?", streamed=number % 2 == 1)
        assert reply.text == f"This is answer {number}."
        assert reply.usage.cached_tokens == known
        new = reply.usage.prompt_tokens - known + reply.usage.completion_tokens
        assert engine.model.module.fed - before == new
        known = reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert session.n_turns == 6


def test_options_can_be_named_for_one_question(engine):
    session = Session(engine)
    assert session.respond("Hi", sampling=Sampling(max_tokens=1, temperature=0)).reason == "length"
    assert session.respond("Hi").reason == "stop"


def test_a_turn_that_is_not_read_to_its_end_leaves_no_messages(engine):
    session = Session(engine)
    session.respond("Hi")
    said = session.messages
    stream = session.stream("And?")
    next(stream)
    with pytest.raises(BadInput, match="not complete yet"):
        _ = stream.reply
    stream.close()
    assert session.messages == said
    assert session.respond("And?").text == "This is answer 1."


def test_a_turn_that_fails_leaves_no_messages(engine):
    session = Session(engine)
    with pytest.raises(BadInput, match="max_tokens"):
        session.respond("Hi", sampling=Sampling(max_tokens=-1))
    assert session.messages == []
    assert session.respond("Hi").text == "This is answer 0."


def test_a_stream_is_read_once(engine):
    """In one of the two ways."""
    session = Session(engine)
    stream = session.stream("Hi")
    assert list(stream)
    said = session.messages

    async def read_again() -> None:
        async for _ in stream:
            pytest.fail("it was read")

    with pytest.raises(BadInput, match="read once"):
        asyncio.run(read_again())
    assert (session.messages, session.n_turns) == (said, 1)
    assert session.respond("And?").text == "This is answer 1."


@pytest.mark.parametrize("results", [{}, {"call": "sun"}])
def test_results_that_no_call_waits_for_are_refused(engine, results):
    session = Session(engine)
    with pytest.raises(BadInput, match="No tool call waits"):
        session.respond(results)
    assert session.messages == []


def test_without_tokens_there_is_no_answer(engine):
    session = Session(engine, sampling=Sampling(max_tokens=0))
    with pytest.raises(BadInput, match="use `prewarm`"):
        session.respond("Hi")
    assert session.respond("Hi", sampling=SHORT).text


HALF = "\udcff"  # of a character


def test_half_a_character_is_refused(engine):
    with pytest.raises(BadInput, match="lone surrogate"):
        Session(engine, system=HALF)
    with pytest.raises(BadInput, match="lone surrogate"):
        Session(engine, messages=[{"role": "user", "content": HALF}])
    session = Session(engine)
    with pytest.raises(BadInput, match="lone surrogate"):
        session.respond(HALF)
    assert session.respond("Hi").text == "This is answer 0."


def test_an_abandoned_stream_frees_the_session(engine):
    session = Session(engine, busy="refuse")
    next(session.stream("Hi"))
    gc.collect()
    assert session.respond("Hi").text == "This is answer 0."


def test_rewinding_drops_turns_and_keeps_the_common_prefix(engine):
    """The turn is asked again from the same tokens."""
    session = Session(engine, system=SYSTEM)
    replies = [session.respond(text) for text in ("one", "two", "three")]
    session.rewind(1)
    assert [message["content"] for message in session.messages] == ["one", "This is answer 0."]
    again = session.respond("TWO")
    assert n_live(engine) == 1, "the cache of the dropped turns is gone"
    assert again.text == "This is answer 1."
    first = replies[0].usage
    assert again.usage.cached_tokens >= first.prompt_tokens + first.completion_tokens
    session.rewind(0)
    assert (session.messages, session.n_turns) == ([], 0)
    with pytest.raises(BadInput, match="there is no turn 1"):
        session.rewind(1)


def test_a_fork_shares_the_messages_so_far_and_continues_alone(engine):
    session = Session(engine, system=SYSTEM, tools=[TOOL], id="ada")
    first = session.respond("What is a fox?").usage
    fork = session.fork("eve")
    assert (fork.id, fork.messages) == ("eve", session.messages)
    known = first.prompt_tokens + first.completion_tokens
    assert fork.respond("And a dog?").usage.cached_tokens == known
    assert session.respond("And a tree?").usage.cached_tokens >= known
    assert fork.messages[2]["content"] == "And a dog?"
    assert session.messages[2]["content"] == "And a tree?"
    assert fork.fork().id not in ("ada", "eve")


def test_a_fork_of_nothing_is_nothing_whatever_its_id_held(engine):
    Session(engine, system="Be long.", id="taken").respond("What is a fox?")
    engine.wait_until_saved()
    fork = Session(engine, id="empty").fork("taken")
    assert (fork.messages, fork.n_turns, fork.system) == ([], 0, None)
    fork.respond("And a dog?")
    assert (len(fork.messages), fork.n_turns) == (2, 1)


def test_of_an_imported_agent_only_forks_with_a_name_are_written(engine, tmp_path):
    """All find its blocks."""
    first = Session(engine, id="ops", system=SYSTEM, sampling=SHORT)
    first.respond("What is a fox?")
    engine.wait_until_saved()
    on_disk, bundle = engine.store.on_disk, tmp_path / "ops.bundle"
    on_disk.export_agent("ops", bundle)
    on_disk.import_agent(bundle, engine.lane_of().identity, "guest")
    session = Session(engine, id="guest", sampling=SHORT)
    forks = [session.fork(), *session.forks(["eve", None], ephemeral=True), session.fork("bob")]
    durable = Session(engine, id="guest", policy=Policy.DURABLE, sampling=SHORT).fork()
    for fork in (*forks, durable):
        assert "imported" in fork.respond("And a dog?").receipt.inexact
    engine.wait_until_saved()
    written = {path.stem for path in (tmp_path / "store" / "agents").iterdir()}
    assert written == {"ops", "guest", "bob", durable.id}


# Before the first question.

STARTS = ("Hi", "\n\nHi", " Hi", "", "7", "<|im_end|>", "é", "\tx")


def test_what_is_warmed_begins_every_first_request(engine):
    """With tools, and whatever the question begins with."""
    session = Session(engine, system=SYSTEM, tools=[TOOL])
    receipt = session.prewarm()
    assert receipt.recomputed == receipt.prompt_tokens > 100
    system = {"role": "system", "content": SYSTEM}
    for text in STARTS:
        request = Request(messages=[system, {"role": "user", "content": text}], tools=[TOOL])
        assert sum(engine.lookup(request).warm.values()) >= receipt.prompt_tokens, text
    other = Request(messages=[system, {"role": "user", "content": "Hi"}])
    assert sum(engine.lookup(other).warm.values()) < receipt.prompt_tokens


@pytest.mark.parametrize(
    ("architecture", "streamed"),
    [("llama", True), ("gemma3_text", False), ("qwen3_next", True), ("mamba2", False)],
)
def test_the_first_turn_prefills_only_the_question(
    models: Models, tmp_path, architecture, streamed
):
    """Token for token, for every kind of layer."""
    model = models.of(architecture)
    with engine_on(model, tmp_path) as engine:
        session = Session(engine, system="Be brief.", tools=[TOOL], sampling=SHORT)
        n_warm = session.prewarm().prompt_tokens
        before = model.module.fed
        reply = read(session, "What is it?", streamed=streamed)
        assert reply.receipt.reused == {"live": n_warm}
        new = reply.usage.prompt_tokens - n_warm
        assert 0 < new < 40
        assert model.module.fed - before == new + 4


def test_a_conversation_with_a_past_is_warmed_with_it(counted, tmp_path):
    with engine_on(counted, tmp_path) as engine:
        session = Session(engine, system=SYSTEM)
        session.respond("What is a fox?")
        said = session.messages
    with engine_on(counted, tmp_path / "another") as engine:
        session = Session(engine, system=SYSTEM, messages=said)
        n_tokens = session.prewarm().prompt_tokens
        assert session.respond("And a dog?").usage.cached_tokens == n_tokens


def test_warming_tells_what_is_wrong(engine):
    """No error is swallowed, no option ignored."""
    with pytest.raises(BadInput, match="max_tokens"):
        Session(engine, sampling=Sampling(max_tokens=-1)).prewarm()


# Freeing caches.


def test_caches_are_freed_with_their_session(engine):
    """When the object is collected, and only its own."""
    ada, eve = Session(engine, system="Ada is here."), Session(engine, system="Eve is here.")
    ada.respond("Hi")
    eve.respond("Hi")
    assert n_live(engine) == 2
    del ada
    assert n_live(engine) == 1
    assert eve.respond("Hi again").receipt.reused.keys() == {"live"}


def test_a_session_may_be_collected_on_the_engines_thread(engine, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with no_collection():
        session = Session(engine)
        session.respond("Hi")
        assert n_live(engine) == 1
        session.itself = session  # a cycle, which only the collector frees
        del session
        engine.call(gc.collect).result()
        assert (n_live(engine), unraisable) == (0, [])


def test_a_closed_session_answers_no_more(engine):
    with Session(engine) as session:
        session.respond("Hi")
    assert n_live(engine) == 0
    session.close()
    with pytest.raises(BadInput, match="closed"):
        session.respond("Hi")
    with pytest.raises(BadInput, match="closed"):
        session.prewarm()
    with pytest.raises(BadInput, match="closed"):
        asyncio.run(session.aprewarm())
    with pytest.raises(BadInput, match="closed"):
        session.compact()
    assert n_live(engine) == 0
    assert len(session.messages) == 2


def test_a_session_may_outlive_its_engine(scripted, tmp_path):
    with engine_on(replace(scripted, module=FedCounter(scripted.module)), tmp_path) as engine:
        session = Session(engine)
    session.close()


def test_ids_are_checked_at_once(engine):
    with pytest.raises(BadInput, match="not an agent id"):
        Session(engine, id="../etc")


def test_forget_of_one_conversation_keeps_all_others(engine):
    """In memory, and on disk if asked."""
    sessions = {
        name: Session(engine, system=f"{name} is here.", id=name) for name in ("conv1", "conv10")
    }
    for session in sessions.values():
        session.prewarm()
        session.respond("Hi")
    agents = engine.store.on_disk.agents
    engine.wait_until_saved()  # agents are recorded in the background
    forget(engine, "conv1")
    assert n_live(engine) == 1
    assert [agent.id for agent in agents.all()] == ["conv1", "conv10"]
    forget(engine, "conv1", on_disk=True)
    with pytest.raises(UnknownAgent):
        agents.show("conv1")
    assert [agent.id for agent in agents.all()] == ["conv10"]
    forget(engine, "conv1", on_disk=True)
    assert sessions["conv10"].respond("And?").receipt.reused.keys() == {"live"}


def test_forget_takes_what_only_memory_has(engine):
    """Of an agent that has no file."""
    memory = engine.store.memory
    Session(engine, system=SYSTEM, id="ada", policy=Policy.EPHEMERAL).respond("Hi")
    engine.wait_until_saved()
    n_blocks = memory.stats().blocks
    forget(engine, "ada")
    assert (n_live(engine), memory.stats().blocks) == (0, n_blocks)
    assert n_blocks > 0
    forget(engine, "ada", on_disk=True)
    assert memory.stats().blocks == 0


# One at a time.


def test_a_second_caller_waits(engine):
    """In the order of arrival, each after the turn before."""
    session = Session(engine)
    stream = session.stream("first")
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(session.respond, "second")
        list(stream)
        assert second.result(300).text == "This is answer 1."
    questions = [m["content"] for m in session.messages if m["role"] == "user"]
    assert questions == ["first", "second"]


def test_or_a_second_caller_is_refused(engine):
    session = Session(engine, busy="refuse")
    stream = session.stream("first")
    next(stream)
    with ThreadPoolExecutor(1) as pool, pytest.raises(Busy, match="already answering"):
        pool.submit(session.respond, "second").result(300)
    list(stream)
    assert session.respond("second").text == "This is answer 1."


def test_a_caller_that_would_wait_for_itself_is_refused(engine):
    """A queue would never end here."""
    session = Session(engine, busy="queue")
    for _ in session.stream("first"):
        with pytest.raises(Busy):
            session.respond("second")
        with pytest.raises(Busy):
            session.rewind(0)
    assert session.n_turns == 1


def test_a_call_that_stops_the_loop_it_waits_for_is_refused():
    """Of two coroutines the second calls without `await`, while a third waits its turn."""
    gate, held = Gate("queue"), []

    async def hold() -> None:
        async with gate.ahold():
            held.append(len(held))
            await asyncio.sleep(0)

    async def call() -> None:
        with gate.hold():
            held.append("never")

    async def talk() -> None:
        results = await asyncio.gather(hold(), hold(), call(), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), type(None), Busy]

    asyncio.run(talk())
    with gate.hold(), pytest.raises(Busy):  # this thread would run the loop and hold it up
        asyncio.run(hold())
    assert held == [0, 1]


def test_a_call_waits_for_another_threads_loop():
    gate, held, released = Gate("queue"), threading.Event(), threading.Event()

    async def hold() -> None:
        async with gate.ahold():
            held.set()
            await asyncio.sleep(0.1)
            released.set()

    async def call() -> None:
        with gate.hold():
            assert released.is_set()

    other = threading.Thread(target=lambda: asyncio.run(hold()))
    other.start()
    held.wait()
    asyncio.run(call())
    other.join()


# Coroutines.


def test_the_same_for_coroutines(engine):
    """One rule for all paths."""

    async def talk() -> None:
        session = Session(engine, system=SYSTEM, tools=[TOOL])
        n_warm = (await session.aprewarm()).prompt_tokens
        stream = session.stream("What is a fox?")
        text = "".join([event.text async for event in stream if isinstance(event, Delta)])
        assert text == stream.reply.text == "This is answer 0."
        assert stream.reply.usage.cached_tokens == n_warm
        known = stream.reply.usage.prompt_tokens + stream.reply.usage.completion_tokens
        second = await session.arespond("And a dog?")
        assert second.usage.cached_tokens == known
        both = await asyncio.gather(*(session.arespond(text) for text in ("three", "four")))
        assert [reply.text for reply in both] == ["This is answer 2.", "This is answer 3."]

    asyncio.run(talk())


def test_a_cancelled_coroutine_is_not_waited_for(engine):
    async def talk() -> None:
        session = Session(engine)
        async with aclosing(session.stream("first")) as stream:
            await anext(stream)
            waiting = asyncio.create_task(session.arespond("second"))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(Busy):
                await session.arespond("of the same task")
        assert session.messages == []
        assert (await session.arespond("third")).text == "This is answer 0."

    asyncio.run(talk())


@pytest.mark.parametrize("ask", [lambda each: each.arespond("Why?"), Session.aprewarm])
def test_what_a_cancelled_coroutine_was_about_to_ask_is_cancelled(engine, monkeypatch, ask):
    """Its thread submits it all the same."""
    submit, answers = engine.submit, []
    begun, is_cancelled = threading.Event(), threading.Event()

    def held(*asked: Any) -> Answer:
        begun.set()
        assert is_cancelled.wait(300)
        engine.call(is_submitted.wait)  # nothing is computed before
        answers.append(submit(*asked))
        return answers[0]

    is_submitted = threading.Event()
    monkeypatch.setattr(engine, "submit", held)

    async def talk() -> None:
        asking = asyncio.create_task(ask(Session(engine, system=SYSTEM)))
        await asyncio.to_thread(begun.wait, 300)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        is_cancelled.set()

    asyncio.run(talk())  # until its threads have ended
    is_submitted.set()
    with pytest.raises(Cancelled):
        answers[0].result()


def test_a_cancelled_prewarming_is_cancelled_in_the_engine(engine, monkeypatch):
    warm, answers = engine.warm, []
    is_submitted = threading.Event()

    def held(*asked: Any) -> Answer:
        engine.call(is_submitted.wait)
        answers.append(warm(*asked))
        return answers[0]

    monkeypatch.setattr(engine, "warm", held)

    async def talk() -> None:
        warming = asyncio.create_task(Session(engine, system=SYSTEM).aprewarm())
        while not answers:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # it waits for the answer
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming

    asyncio.run(talk())
    is_submitted.set()
    with pytest.raises(Cancelled):
        answers[0].result()


def test_the_gate_is_handed_on_if_its_next_holder_is_cancelled():
    """The one race of the gate, step by step."""

    async def race() -> None:
        gate = Gate("queue")
        first = gate.hold()
        first.__enter__()

        async def second() -> None:
            async with gate.ahold():
                pytest.fail("it was cancelled")

        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        first.__exit__(
            None, None, None
        )  # the second caller holds the gate, but has not been scheduled
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(300), gate.ahold():
            pass

    asyncio.run(race())


def test_the_example_is_true(tmp_path, monkeypatch, capsys):
    """Run twice: later turns hit the cache, and the second time the first turn does too."""
    checkpoint = write_checkpoint(tmp_path / "model")
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["session.py", str(checkpoint)])
    warm = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "session.py"), run_name="__main__")
        said = capsys.readouterr().out
        found = re.findall(r"^  (\d+) of (\d+) tokens were warm$", said, re.MULTILINE)
        warm.append([(int(known), int(n_tokens)) for known, n_tokens in found])
    for turns in warm:
        assert len(turns) == 3
        assert all(0 < known < n_tokens for known, n_tokens in turns)
    assert warm[1][0][0] == warm[1][0][1] - 1 > warm[0][0][0]
