"""An agent is continued with only the new messages, wherever its tokens come from."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest

import keepwarm
from keepwarm.agents.agent import Branch
from keepwarm.agents.texts import TurnFiles
from keepwarm.engine import scheduler
from keepwarm.engine.batch import Batch
from keepwarm.engine.engine import Engine
from keepwarm.errors import (
    BadInput,
    Cancelled,
    InsufficientResources,
    StoreFailed,
    TimedOut,
    UnknownAgent,
)
from keepwarm.prefix.blocks import BlockKey
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.turn import KeptTurn
from keepwarm.text.prompt_limits import HEAVY_MESSAGES
from keepwarm.text.request import Delta, KVOptions, Request, Result, Sampling
from keepwarm.text.sandbox.deadline import PrepareDeadline
from keepwarm.text.sandboxed import new_process
from tests.kit.checkpoints import write_checkpoint
from tests.kit.engines import engine_on, memory
from tests.kit.runs import FedCounter

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is the quick brown fox?"}
NEXT = {"role": "user", "content": "And the lazy dog?"}
LAST = {"role": "user", "content": "Why?"}
EIGHT = Sampling(max_tokens=8, temperature=0)


def ask(engine: Engine, *messages, agent="ops", **wishes) -> Result:
    request = Request(messages=messages, agent=agent, sampling=EIGHT, **wishes)
    return engine.submit(request).result()


def go_on(engine: Engine, *messages, **wishes) -> Result:
    return ask(engine, *messages, continues=True, **wishes)


def said(result: Result):
    return {"role": "assistant", "content": result.choices[0].text}


def ids(result: Result) -> list[int]:
    return [info.token for info in result.choices[0].tokens]


def prompt_of(engine: Engine, *messages, **wishes) -> list[int]:
    return engine.prepare(Request(messages=messages, agent="ops", **wishes)).tokens


@pytest.fixture(params=["llama", "gemma3_text", "mamba2"])
def model(models, request):
    return models.of(request.param, endless=False)


def test_a_turn_whose_predecessor_is_not_on_disk_in_time_is_refused(models, tmp_path):
    """With what to do; later it is there."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        lets_go = threading.Event()
        engine._recorder._pool.submit(lets_go.wait)
        ask(engine, SYSTEM, ASK)
        request = Request(messages=[NEXT], agent="ops", sampling=EIGHT, continues=True)
        with pytest.raises(TimedOut, match=r"than 1 s, most of it for the turn before to be on"):
            engine.submit(request, PrepareDeadline(1.0))
        lets_go.set()
        assert engine.submit(request, PrepareDeadline(60)).result().receipt.continued


def test_turns_with_only_what_is_new_are_those_of_the_whole_conversation(model, tmp_path):
    """By its id it is found with its tokens, after each turn anew."""
    with engine_on(model, tmp_path / "one") as engine:
        first = ask(engine, SYSTEM, ASK)
        second = go_on(engine, NEXT)
        n_known = first.usage.prompt_tokens + first.usage.completion_tokens
        assert second.receipt.continued in (n_known, n_known - 1)
        assert first.receipt.continued is None
        assert second.receipt.cached_tokens >= n_known - 1
        assert engine.stats().counts.later_prompt_tokens == second.usage.prompt_tokens
    with engine_on(model, tmp_path / "one") as engine:  # after a restart
        third = go_on(engine, LAST)
        assert third.receipt.reused.get("disk", 0) > n_known
        engine.wait_until_saved()
        assert len(engine.store.on_disk.agents.show("ops").turns) == 3
    with engine_on(model, tmp_path / "two") as engine:  # a client that sends everything
        talk = [SYSTEM, ASK]
        for result, question in ((first, NEXT), (second, LAST), (third, None)):
            answered = ask(engine, *talk)
            assert ids(answered) == ids(result)
            assert answered.usage.prompt_tokens == result.usage.prompt_tokens
            talk += [said(answered), question]


@pytest.fixture
def llama(models):
    return models.of("llama", endless=False)


def agents(engine):
    engine.wait_until_saved()
    return engine.store.on_disk.agents


def test_a_fork_and_a_rewound_agent_are_continued_from_where_they_are(llama, tmp_path):
    with engine_on(llama, tmp_path) as engine:
        first = ask(engine, ASK)
        second = go_on(engine, NEXT)
        agents(engine).fork("ops", "copy")
        agents(engine).rewind("ops", 1)
        again, forked = go_on(engine, LAST), go_on(engine, LAST, agent="copy")
        talk = [ASK, said(first), LAST]
        assert again.usage.prompt_tokens == len(prompt_of(engine, *talk))
        talk = [ASK, said(first), NEXT, said(second), LAST]
        assert forked.usage.prompt_tokens == len(prompt_of(engine, *talk))
        kept = agents(engine).turns
        for name, result in (("ops", again), ("copy", forked)):
            turn = engine.store.on_disk.latest_turn(name).turn
            assert turn is not None
            assert turn.messages[-1] == said(result)
        assert kept.find("ops", engine.store.on_disk.latest_turn("copy").tokens) is None


def test_an_agent_without_its_blocks_is_rendered_from_its_messages(llama, tmp_path):
    with engine_on(llama, tmp_path) as engine:
        first = ask(engine, SYSTEM, ASK)
        for key in agents(engine).show("ops").blocks:
            engine.store.on_disk.disk.delete_all([key])
        second = go_on(engine, NEXT)
        whole = prompt_of(engine, SYSTEM, ASK, said(first), NEXT)
        assert second.usage.prompt_tokens == len(whole)
        assert second.receipt.continued == 0
        agents(engine).turns.remove("ops")
        for key in agents(engine).show("ops").blocks:
            engine.store.on_disk.disk.delete_all([key])
        with pytest.raises(BadInput, match=r"'ops' cannot be continued .* evicted"):
            go_on(engine, LAST)


def test_who_cannot_be_continued(llama, tmp_path):
    with engine_on(llama, tmp_path) as engine:
        ask(engine, ASK, tenant="alice")
        agents(engine)
        with pytest.raises(UnknownAgent, match="no agent 'ops' with this model"):
            go_on(engine, NEXT, tenant="bob")
        with pytest.raises(UnknownAgent, match="and these KV options"):
            go_on(engine, NEXT, tenant="alice", kv=KVOptions(max_kv_size=64))
        with pytest.raises(UnknownAgent, match="no agent 'other'"):
            go_on(engine, NEXT, agent="other")
        for missing in ({"agent": None}, {"messages": None}):
            request = replace(Request(messages=[NEXT], agent="ops", continues=True), **missing)
            with pytest.raises(BadInput, match="needs an agent, and messages or a prompt"):
                engine.submit(request)
        assert go_on(engine, NEXT, tenant="alice").receipt.continued


def test_raw_text_continues_an_agent_by_its_id(model, tmp_path):
    """As the whole text does: without a second beginning, and without the end of the answer."""
    with engine_on(model, tmp_path) as engine:
        asked = Request(prompt="The quick brown fox", agent="ops", sampling=EIGHT)
        first = engine.submit(asked).result()
        stops = model.tokenizer.eos_token_ids
        known = [*engine.prepare(asked).tokens, *(one for one in ids(first) if one not in stops)]
        more = replace(asked, prompt=" and the lazy dog", continues=True)
        tokens = engine.prepare(more).tokens
        assert tokens[: len(known)] == known
        assert model.tokenizer.decode(tokens[len(known) :]) == " and the lazy dog"
        second = engine.submit(more).result()
        assert second.receipt.continued == len(known)
        assert second.receipt.cached_tokens >= len(known) - 1
        by_id = replace(more, prompt=[5, 6, 7])
        third = engine.prepare(by_id).tokens
        assert third[: len(tokens)] == tokens
        assert third[-3:] == [5, 6, 7]


def test_raw_text_of_an_agent_whose_blocks_are_gone_is_refused(llama, tmp_path):
    with engine_on(llama, tmp_path) as engine:
        asked = Request(prompt="The quick brown fox", agent="ops", sampling=EIGHT)
        engine.submit(asked).result()
        agents(engine)
        disk = engine.store.on_disk.disk
        disk.delete_all([stored.key for stored in disk.walk()])
        with pytest.raises(BadInput, match="only the new text, because its blocks were evicted"):
            engine.submit(replace(asked, continues=True))


def test_an_agent_that_was_only_created_begins_with_its_first_messages(llama, tmp_path):
    with engine_on(llama, tmp_path) as engine:
        agents(engine).create("ops", Branch(engine.lane_of().restorer.namespace))
        first = go_on(engine, SYSTEM, ASK)
        assert first.receipt.continued == 0
        assert first.usage.prompt_tokens == len(prompt_of(engine, SYSTEM, ASK))
        assert go_on(engine, NEXT).receipt.continued


def test_an_answer_that_was_cancelled_is_continued_as_far_as_it_came(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = engine.submit(Request(messages=[ASK], agent="ops"))
        events = [next(answer) for _ in range(5)]
        answer.cancel()
        with pytest.raises(Cancelled):
            answer.result()
        second = go_on(engine, NEXT)
        heard = "".join(event.text for event in events if isinstance(event, Delta))
        turn = engine.store.on_disk.latest_turn
        assert second.receipt.continued
        agents(engine)
        assert turn("ops").turn.messages[1]["content"].startswith(heard)


def test_a_turn_that_timed_out_and_is_asked_again_is_in_the_conversation_once(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        ask(engine, ASK)
        late = Request(messages=[NEXT], agent="ops", continues=True, timeout_s=0.5)
        with pytest.raises(TimedOut):
            engine.submit(replace(late, sampling=Sampling(max_tokens=3000, temperature=0))).result()
        second = go_on(engine, NEXT)
        assert second.receipt.continued
        agents(engine)
        messages = engine.store.on_disk.latest_turn("ops").turn.messages
        assert [each["role"] for each in messages] == ["user", "assistant"] * 2


def test_a_turn_that_outgrew_the_memory_and_is_asked_again_is_in_the_conversation_once(
    models, tmp_path, monkeypatch
):
    monkeypatch.setattr(scheduler, "LEASE_TOKENS", 50)
    with engine_on(models.of("llama"), tmp_path) as engine:
        ask(engine, ASK)
        long = Request(messages=[NEXT], agent="ops", continues=True)
        answer = engine.submit(replace(long, sampling=Sampling(max_tokens=3000, temperature=0)))
        next(event for event in answer if isinstance(event, Delta))
        engine.divide_memory(memory(batch_bytes=1))
        with pytest.raises(InsufficientResources):
            answer.result()
        engine.divide_memory(memory())
        assert go_on(engine, NEXT).receipt.continued
        agents(engine)
        messages = engine.store.on_disk.latest_turn("ops").turn.messages
        assert [each["role"] for each in messages] == ["user", "assistant"] * 2


def test_a_turn_whose_last_step_failed_is_continued(models, tmp_path, monkeypatch):
    """It was answered: only its caches are lost."""
    feed, failures = Batch.feed, ["once"]

    def fail_at_the_end(batch, *given):
        if failures and any(row.reason for row in batch.rows):
            raise RuntimeError(failures.pop())
        return feed(batch, *given)

    with engine_on(models.of("llama"), tmp_path) as engine:
        first = ask(engine, ASK)
        monkeypatch.setattr(Batch, "feed", fail_at_the_end)
        second = go_on(engine, NEXT)
        agents(engine)
        assert not failures
        assert engine.store.on_disk.latest_turn("ops").turn.messages[2:] == [NEXT, said(second)]
        talk = [ASK, said(first), NEXT, said(second), LAST]
        assert go_on(engine, LAST).usage.prompt_tokens == len(prompt_of(engine, *talk))


def test_an_answer_cut_by_a_stop_string_is_continued_by_its_text(llama, tmp_path):
    """The tokens that it was cut in were generated, and never said."""
    with engine_on(llama, tmp_path) as engine:
        whole = ask(engine, ASK, agent="other").choices[0].text
        stop = whole[len(whole) // 2 :][:1]
        cut = engine.submit(
            Request(messages=[ASK], agent="ops", sampling=replace(EIGHT, stop=(stop,)))
        ).result()
        assert whole.startswith(cut.choices[0].text + stop)
        second = go_on(engine, NEXT)
        assert second.usage.prompt_tokens == len(prompt_of(engine, ASK, said(cut), NEXT))


def test_messages_are_sealed_with_the_store_and_go_with_the_agent(llama, tmp_path):
    def files():
        return list((tmp_path / "store" / "messages").glob("*"))

    with engine_on(
        llama, tmp_path, environment={"KEEPWARM_ENCRYPTION_KEY": "a long enough secret"}
    ) as engine:
        ask(engine, ASK)
        agents(engine)
        (file,) = files()
        assert "ops" not in file.name
        assert b"quick" not in file.read_bytes()
        assert go_on(engine, NEXT).receipt.continued
        engine.forget("ops")
        assert not files()


def test_what_is_not_stored_is_not_kept(llama, tmp_path):
    with engine_on(llama, tmp_path) as engine:
        ask(engine, ASK, policy=Policy.EPHEMERAL)
        ask(engine, ASK, policy=Policy.NO_STORE)
        engine.wait_until_saved()
        assert not list((tmp_path / "store").glob("messages/*"))


def test_a_bundle_has_the_messages_with_it(llama, tmp_path):
    bundle = tmp_path / "ops.bundle"
    tools = [{"type": "function", "function": {"name": "look"}}]
    with engine_on(llama, tmp_path / "here") as engine:
        first = ask(engine, ASK, tools=tools)
        agents(engine)
        engine.store.on_disk.export_agent("ops", bundle)
    with engine_on(llama, tmp_path / "there") as engine:
        engine.store.on_disk.import_agent(bundle, engine.lane_of().identity, "guest")
        second = go_on(engine, NEXT, agent="guest")
        n_known = first.usage.prompt_tokens + first.usage.completion_tokens
        assert second.receipt.continued >= n_known - 1
        assert second.receipt.inexact == ("imported",)
        assert engine.store.on_disk.latest_turn("guest").turn.tools == tools
        agents(engine).turns.remove("guest")  # as from an older Keepwarm
        engine.clear()
        with pytest.raises(BadInput, match="cannot be continued"):
            go_on(engine, LAST, agent="guest", tools=tools)
        assert go_on(engine, LAST, agent="guest").receipt.continued


def test_many_new_messages_are_rendered_in_the_preparing_process(llama, tmp_path):
    many = [{"role": "user", "content": "a"}] * (HEAVY_MESSAGES + 1)
    isolated = partial(Engine, sandbox=new_process())
    with engine_on(llama, tmp_path, engine_class=isolated) as engine:
        first = ask(engine, ASK)
        second = go_on(engine, *many)
        whole = prompt_of(engine, ASK, said(first), *many)
        assert second.usage.prompt_tokens == len(whole)
        assert second.receipt.continued > first.usage.prompt_tokens


def test_a_side_request_does_not_divert_the_conversation(llama, tmp_path):
    title = {"role": "user", "content": "Write a title for this talk."}
    with engine_on(llama, tmp_path) as engine:
        first = ask(engine, SYSTEM, ASK)
        second = go_on(engine, NEXT)
        ask(engine, title)  # at once, under the same id
        third = go_on(engine, LAST)
        talk = [SYSTEM, ASK, said(first), NEXT, said(second), LAST]
        assert third.usage.prompt_tokens == len(prompt_of(engine, *talk))


def test_a_turn_that_is_rendered_anew_is_the_head(tmp_path):
    """The template moves the system prompt, so no token of the earlier turns is left."""
    moving = (
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' }}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    path = write_checkpoint(tmp_path / "model", template=moving)
    model = keepwarm.load(str(path))
    model = replace(model, module=FedCounter(model.module))
    with engine_on(model, tmp_path / "home") as engine:
        talk = [SYSTEM, ASK]
        ask(engine, *talk)
        for question in (NEXT, LAST, NEXT):
            agents(engine)
            kept = engine.store.on_disk.latest_turn("ops").turn
            assert [m for m in kept.messages if m["role"] != "assistant"] == talk
            go_on(engine, question)
            talk.append(question)


def test_a_turn_that_could_not_be_recorded_is_not_passed_over(llama, tmp_path, monkeypatch):
    with engine_on(llama, tmp_path) as engine:
        ask(engine, ASK)
        engine.wait_until_saved()
        on_disk = engine.store.on_disk.agents

        def fail(*_, **__):
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(on_disk, "advance", fail)
            go_on(engine, NEXT)
            with pytest.raises(StoreFailed, match="latest turn of agent 'ops'"):
                go_on(engine, LAST)
        ask(engine, ASK)  # recorded again
        assert go_on(engine, LAST).receipt.continued


def test_kept_messages_are_bounded_and_a_damaged_file_is_none(llama, tmp_path):
    """The oldest turns go first."""
    with engine_on(llama, tmp_path) as engine:
        book = TurnFiles(engine.store.on_disk.disk, max_bytes=2000)
        end = BlockKey(bytes(20))
        for number in range(8):
            message = {"role": "user", "content": f"{number}" * 300}
            book.keep("ops", [number], end, KeptTurn([message]))
        found = [bool(book.find("ops", [number])) for number in range(8)]
        assert found == sorted(found)
        assert 2 <= sum(found) <= 6
        (file,) = (tmp_path / "store" / "messages").glob("*")
        assert file.stat().st_size <= 2000
        for damage in (b"", b"{", b"[]", b'{"version": 9}', b'{"version": 1, "pool": 3}'):
            file.write_bytes(damage)
            assert book.find("ops", [7]) is None
        book.keep("ops", [9], end, KeptTurn([message]))
        assert book.find("ops", [9]) == KeptTurn([message], [])
