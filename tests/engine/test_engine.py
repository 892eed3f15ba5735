"""The engine's thread: the order of requests, how answers end, what callers may rely on."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import (
    BadInput,
    Busy,
    Cancelled,
    ContextTooLong,
    InsufficientResources,
    Stopping,
    TimedOut,
)
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import (
    Arrival,
    Delta,
    Done,
    Finished,
    KVOptions,
    Progress,
    Request,
    Started,
)
from tests.kit.engines import Exam, Models, ask, engine_on, held, memory, tokens_of
from tests.kit.runs import FedCounter, prompt_of

ALONE = ("llama4", "deepseek_v41")  # whose caches have no batched form


@pytest.fixture
def engine(models: Models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        yield engine


@pytest.fixture
def exam(models: Models) -> Exam:
    return Exam(models.module("llama"))


class Watched(FedCounter):
    """A model that notes when it was called, and takes its time for every token of a slice."""

    def __init__(self, model: Any, slow_s: float = 0.0) -> None:
        super().__init__(model)
        self.slow_s = slow_s

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        time.sleep(self.slow_s * inputs.shape[1])
        return super().__call__(inputs, *args, **kwargs)


# -- events ---------------------------------------------------------------------------------------


def test_events_come_in_order_and_end_once(engine):
    events = list(engine.submit(ask(prompt_of(100), 5)))
    kinds = [type(event) for event in events]
    assert kinds[0] is Started
    assert kinds[-1] is Done
    assert kinds[-2] is Finished
    n_progress = kinds.count(Progress)
    assert n_progress >= 1
    assert kinds[1 : 1 + n_progress] == [Progress] * n_progress
    assert all(kind is Delta for kind in kinds[1 + n_progress : -2])
    assert events[-1].usage.completion_tokens == 5
    assert events[-1].usage.prompt_tokens == 100


def test_an_answer_that_failed_has_ended():
    """Its reader waits for nothing more."""
    answer = Answer(lambda _: None)
    answer.put(Cancelled("It was cancelled."))
    answer.put(Stopping("And the engine ends."))
    with pytest.raises(Cancelled):
        next(answer)
    assert list(answer) == []


def test_the_text_is_what_the_tokenizer_decodes(engine, models):
    choice = engine.submit(ask(prompt_of(30), 30)).result().choices[0]
    assert choice.text == models.of("llama").tokenizer.decode(tokens_of(choice))
    assert choice.reason == "length"


def test_logprobs_are_those_of_a_cold_run(engine, exam):
    prompt = prompt_of(50)
    for _ in range(2):  # the second time from a cache
        exam.add(prompt, engine.submit(ask(prompt, 8, top_logprobs=20)).result().choices[0])
    exam.check()
    bare = engine.submit(ask(prompt, 2, top_logprobs=None)).result().choices[0]
    assert [info.logprob for info in bare.tokens] == [None, None]
    only_chosen = engine.submit(ask(prompt, 2, top_logprobs=0)).result().choices[0]
    assert [len(info.top) for info in only_chosen.tokens] == [0, 0]
    assert all(info.logprob is not None for info in only_chosen.tokens)


def test_a_stop_string_across_tokens(engine):
    """It ends the answer, is no part of it, and the text before it is whole."""
    prompt = prompt_of(40)
    text = engine.submit(ask(prompt, 30)).result().choices[0].text
    stop = text[9:13]
    choice = engine.submit(ask(prompt, 30, stop=(stop,))).result().choices[0]
    assert choice.reason == "stop"
    assert choice.stop == stop
    assert choice.text == text[: text.index(stop)]
    assert len(choice.tokens) < 30


def test_a_stop_token_ends_the_answer_and_is_in_the_cache(models, tmp_path):
    """The generated tokens, the stop token included, are cached for the next turn."""
    model = models.of("llama", endless=False)
    (eos,) = model.tokenizer.eos_token_ids
    with engine_on(model, tmp_path) as engine:
        prompt = prompt_of(40)
        result = engine.submit(ask(prompt, 30, logit_bias={eos: 100.0})).result()
        choice = result.choices[0]
        assert (tokens_of(choice), choice.text, choice.reason) == ([eos], "", "stop")
        again = engine.submit(ask([*prompt, eos, 7, 8], 1)).result()
        assert again.receipt.cached_tokens == 41


def test_several_answers_from_one_prefill(engine, exam):
    """n > 1: the prompt is prefilled once, each answer has its own draws."""
    prompt = prompt_of(200)
    result = engine.submit(ask(prompt, 6, n=3, temperature=1.5, seed=3)).result()
    assert engine.model.module.fed == 200 + 3 * 6
    answers = [tokens_of(choice) for choice in result.choices]
    assert len({tuple(answer) for answer in answers}) == 3
    again = engine.submit(ask(prompt, 6, n=3, temperature=1.5, seed=3)).result()
    assert [tokens_of(choice) for choice in again.choices] == answers
    greedy = engine.submit(ask(prompt, 6, n=2)).result()
    for choice in greedy.choices:
        exam.add(prompt, choice)
    exam.check()


def test_a_prompt_is_read_and_kept_without_an_answer(engine, exam):
    """`warm` feeds the prompt; the next use is fed one token."""
    prompt = prompt_of(300)
    result = engine.warm(Request(prompt=prompt)).result()
    assert result.choices == ()
    assert engine.model.module.fed == 300
    asked = engine.submit(ask(prompt, 4)).result()
    assert asked.receipt.cached_tokens == 299
    assert engine.model.module.fed == 300 + 1 + 4
    exam.add(prompt, asked.choices[0])
    exam.check()


def test_a_look_up_changes_nothing(engine):
    prompt = prompt_of(300)
    assert engine.lookup(Request(prompt=prompt)).warm == {}
    engine.submit(ask(prompt, 4)).result()
    for _ in range(2):
        found = engine.lookup(Request(prompt=[*prompt, 1, 2]))
        assert (found.prompt_tokens, found.warm) == (302, {"live": 300})
    assert engine.model.module.fed == 304


# -- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_asked_is_refused_at_once(engine):
    with pytest.raises(BadInput, match="empty"):
        engine.submit(Request(prompt=[]))
    with pytest.raises(ContextTooLong, match="reads at most"):
        engine.submit(ask([1] * 4096))
    with pytest.raises(BadInput, match="n is 0"):
        engine.submit(ask([1], n=0))
    with pytest.raises(BadInput, match="temperature is -0"):
        engine.submit(ask([1], temperature=-0.1))
    for no_ids in ([1.5], [1, None], ["fox"]):
        with pytest.raises(BadInput, match="whole numbers"):
            engine.submit(Request(prompt=no_ids))
    assert engine.stats().counters["requests"] == 0


def test_bad_kv_options_are_refused_without_the_engines_thread(engine, monkeypatch):
    """It may be in the middle of a long step."""
    monkeypatch.setattr(engine, "call", lambda _: pytest.fail("it waits for the thread"))
    with pytest.raises(BadInput, match="kv_bits is 3"):
        engine.submit(ask([1], kv=KVOptions(kv_bits=3)))


def test_the_queue_is_bounded(models, tmp_path):
    """Requests beyond the bound are refused at once; those within it are answered."""
    with engine_on(models.of("llama"), tmp_path, max_queue=5) as engine:
        answers = [engine.submit(ask(prompt_of(10, i), 300)) for i in range(5)]
        engine.call(lambda: None).result()  # all of them have come in
        with pytest.raises(Busy, match="5 requests"):
            engine.submit(ask([1, 2], 3))
        assert [len(answer.result().choices[0].tokens) for answer in answers] == [300] * 5
        engine.submit(ask([1, 2], 3)).result()


def test_what_was_cancelled_takes_no_places_in_the_queue(models, tmp_path):
    """While a long step keeps the engine from seeing it."""
    with engine_on(models.of("llama"), tmp_path, max_queue=4) as engine, held(engine):
        answers = [engine.submit(ask(prompt_of(10, i), 3)) for i in range(3)]
        for answer in answers * 2:
            answer.cancel()
        answers.append(engine.submit(ask(prompt_of(10, 3), 3)))
        with pytest.raises(Busy, match="4 requests"):
            engine.submit(ask([1, 2], 3))


def test_one_key_leaves_places_in_the_queue_to_others(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path, max_queue=8) as engine, held(engine):
        answers = [engine.submit(ask(prompt_of(10, i), 3, tenant="other")) for i in range(6)]
        with pytest.raises(Busy, match="6 requests of this API key already"):
            engine.submit(ask(prompt_of(10, 6), 3, tenant="other"))
        answers += [engine.submit(ask(prompt_of(10, i), 3, tenant="mine")) for i in (7, 8)]
        with pytest.raises(Busy, match="8 requests already"):
            engine.submit(ask(prompt_of(10, 9), 3, tenant="mine"))
    assert len(answers) == 8


def test_what_can_never_fit_is_refused_and_what_fits_later_waits(models, tmp_path):
    """The budget that an engine is made with holds: a row of llama takes 1,024 bytes a
    token here, in steps of 256."""
    budget = memory(batch_bytes=5 << 20)
    with engine_on(models.of("llama"), tmp_path, memory=budget) as engine:
        with pytest.raises(InsufficientResources):
            engine.submit(ask(prompt_of(3000), 1000)).result()
        with held(engine):
            answers = [engine.submit(ask(prompt_of(600, i), 120)) for i in range(4)]
        seen = max(engine.stats().decoding + engine.stats().prefilling for _ in range(50))
        assert [len(answer.result().choices[0].tokens) for answer in answers] == [120] * 4
        assert 1 <= seen < 4


@pytest.mark.parametrize(("n_long", "n_fit"), [(600, 2), (1900, 1)])
def test_a_key_does_not_wait_for_the_memory_of_another(models, tmp_path, exam, n_long, n_fit):
    """That has more long requests than fit, whose rows would make its own as long: its answer
    ends before any of them, and is the same as alone."""
    prompt, budget = prompt_of(20, 99), memory(batch_bytes=int(10.2 * 2**20))
    with engine_on(models.of("llama"), tmp_path, memory=budget) as engine:
        long = [engine.submit(ask(prompt_of(n_long, i), 600, tenant="other")) for i in range(4)]
        for answer in long[:n_fit]:
            for _ in range(4):  # steps, in which one more would begin if it fitted
                next(event for event in answer if isinstance(event, Delta))
        mine = engine.submit(ask(prompt, 16, tenant="mine")).result()
        assert engine.stats().counters["finished"] == 1
        exam.add(prompt, mine.choices[0])
        for answer in long[n_fit:]:
            answer.cancel()
        assert all(answer.result().choices[0].reason == "length" for answer in long[:n_fit])


@pytest.mark.parametrize(
    ("first", "n_answer", "second", "n_rows"), [(1900, 140, 20, 2.1), (20, 230, 1900, 2.2)]
)
def test_rows_for_which_padding_leaves_no_memory_have_batches_apart(
    models, tmp_path, exam, first, n_answer, second, n_rows
):
    """None waits for the other's end, and its answer is the same as alone."""
    budget = memory(batch_bytes=int(n_rows * 2048 * 2048))  # of the long one's
    with engine_on(models.of("llama"), tmp_path, memory=budget) as engine:
        running = engine.submit(ask(prompt_of(first, 1), n_answer))
        for _ in range(4):
            next(event for event in running if isinstance(event, Delta))
        prompt = prompt_of(second, 2)
        beside = engine.submit(ask(prompt, 16)).result()
        assert engine.stats().counters["finished"] == 1
        exam.add(prompt, beside.choices[0])
        assert running.result().choices[0].reason == "length"
    exam.check()


# -- time -----------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_wherever_it_is(models, tmp_path):
    model = models.of("llama")
    model = replace(model, module=Watched(model.module.model, slow_s=0.004))
    with engine_on(model, tmp_path) as engine:
        prompt = prompt_of(1000)
        with pytest.raises(TimedOut, match="a retry is faster"):
            engine.submit(ask(prompt, 5, timeout_s=2.0)).result()  # while it is read
        with pytest.raises(TimedOut):
            engine.submit(ask(prompt_of(10, 2), 2000, timeout_s=0.5)).result()  # while it speaks
        model.module.slow_s = 0
        assert engine.submit(ask(prompt, 1)).result().receipt.cached_tokens > 0


def test_a_deadline_counts_from_the_first_byte(engine):
    """As the server's own limit does: cut off by that, an answer would be a turn."""
    now = time.perf_counter()
    late = ask(prompt_of(20), 5, timeout_s=300, arrival=Arrival(now - 301, now))
    with pytest.raises(TimedOut):
        engine.submit(late).result()


def test_cancelling_keeps_what_was_computed(engine, exam):
    """Within a step: during prefill, and during decode."""
    engine._scheduler.slice_sizer.max_slice = 20  # so many that this thread may be late
    prompt = prompt_of(3000)
    answer = engine.submit(ask(prompt, 5))
    assert isinstance(next(answer), Started)
    read = max(next(answer).done for _ in range(2))
    answer.cancel()
    with pytest.raises(Cancelled):
        answer.result()
    engine._scheduler.slice_sizer.max_slice = 500
    known = engine.submit(ask(prompt[:2000], 3)).result()
    exam.add(prompt[:2000], known.choices[0])
    assert read <= known.receipt.cached_tokens < 1999

    speaking = engine.submit(ask(prompt_of(50, 1), 2000))
    said: list[int] = []
    for event in speaking:
        said += [info.token for info in event.tokens] if isinstance(event, Delta) else []
        if len(said) >= 20:
            break
    speaking.cancel()
    with pytest.raises(Cancelled):
        speaking.result()
    goes_on = [*prompt_of(50, 1), *said[:20], 3]
    again = engine.submit(ask(goes_on, 3)).result()
    assert again.receipt.cached_tokens == 70
    exam.add(goes_on, again.choices[0])
    exam.check()
    assert engine.stats().counters["cancelled"] == 2


def test_cancelling_twice_or_after_the_end_is_nothing(engine):
    answer = engine.submit(ask(prompt_of(10), 2))
    answer.result()
    answer.cancel()
    answer.cancel()
    assert engine.submit(ask(prompt_of(10), 2)).result()
    assert engine.stats().counters["cancelled"] == 0


# -- ends -----------------------------------------------------------------------------------------


def test_draining_lets_answers_finish(engine):
    answer = engine.submit(ask(prompt_of(30), 50))
    assert engine.drain(30)
    assert len(answer.result().choices[0].tokens) == 50
    with pytest.raises(Stopping):
        engine.submit(ask([1, 2]))


def test_draining_in_no_time_ends_them(engine):
    answer = engine.submit(ask(prompt_of(30), 3000))
    assert isinstance(next(answer), Started)
    assert not engine.drain(0)
    with pytest.raises(Stopping):
        answer.result()


def test_closing_ends_what_runs_and_loses_no_block(models, tmp_path):
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        waits = [engine.submit(ask(prompt_of(400, i), 3000)) for i in range(3)]
        for event in waits[0]:
            if isinstance(event, Delta):
                break
    for answer in waits:
        with pytest.raises(Stopping):
            answer.result()
    assert not engine.alive
    engine.close()
    with pytest.raises(Stopping):
        engine.submit(ask([1, 2]))
    with engine_on(model, tmp_path) as engine:
        assert engine.submit(ask(prompt_of(400), 1)).result().receipt.reused == {"disk": 399}


def test_what_keeping_takes_of_the_thread_is_counted(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        before = time.perf_counter()
        engine.submit(ask(prompt_of(600), 1)).result()
        engine.wait_until_saved()
        took_ms = 1000 * (time.perf_counter() - before)
        assert 0 < engine.stats().counters["keeping_ms"] < took_ms


def test_closing_while_a_durable_answer_is_written(models, tmp_path):
    """It gets its end, one way or the other."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = engine.submit(ask(prompt_of(600), 4, policy=Policy.DURABLE))
        for event in answer:
            if isinstance(event, Finished):
                break
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, answer).result(timeout=300)
    assert isinstance(rest[-1], Done)


# -- callers --------------------------------------------------------------------------------------


def test_many_threads_may_ask(engine, exam):

    def talk(i: int) -> list[tuple[list[int], Any]]:
        prompt, said = prompt_of(20 + i, i), []
        for turn in range(3):
            choice = engine.submit(ask(prompt, 4)).result().choices[0]
            said.append((prompt, choice))
            prompt = [*prompt, *tokens_of(choice), turn, i]
        return said

    with ThreadPoolExecutor(12) as pool:
        for said in pool.map(talk, range(12)):
            for prompt, choice in said:
                exam.add(prompt, choice)
    assert exam.check() == 12 * 3 * 4
    assert engine.stats().counters["finished"] == 36


def test_stats_may_be_read_at_any_time(engine):
    """From another thread, while everything changes."""
    answers = [engine.submit(ask(prompt_of(30, i), 30)) for i in range(8)]
    failures: list[Exception] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                engine.stats()
                len(engine._scheduler.jobs)
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for answer in answers:
        answer.result()
    done.set()
    thread.join()
    assert not failures
    stats = engine.stats()
    assert (stats.waiting, stats.prefilling, stats.decoding) == (0, 0, 0)


def test_coroutines_may_ask(engine, exam):
    """Events come to the loop they are awaited on, several at a time."""

    async def talk(i: int) -> None:
        prompt = prompt_of(30 + i, i)
        answer = engine.submit(ask(prompt, 6))
        if i % 2:
            result = await answer.wait()
        else:
            kinds = [type(event) async for event in answer]
            assert kinds[0] is Started
            assert kinds[-1] is Done
            result = await engine.submit(ask(prompt, 6)).wait()
        exam.add(prompt, result.choices[0])

    async def all_of_them() -> None:
        await asyncio.gather(*(talk(i) for i in range(6)))

    asyncio.run(all_of_them())
    exam.check()


def test_a_closed_event_loop_does_no_harm(engine):
    """The coroutine that awaited an event is gone with its loop; the engine goes on."""

    async def leave_early() -> Any:
        with held(engine):
            answer = engine.submit(ask(prompt_of(20), 40))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(answer), 0.05)
        return answer

    answer = asyncio.run(leave_early())
    assert list(answer)[-1].usage.completion_tokens == 40
    assert engine.alive


# -- caches that cannot be batched ----------------------------------------------------------------


@pytest.mark.parametrize("architecture", ALONE)
def test_what_has_no_batched_form_runs_alone_between_steps(models, tmp_path, architecture):
    """Nothing is refused that mlx-lm can run: they take turns, and each keeps its cache."""
    model, exam = models.of(architecture), Exam(models.module(architecture))
    with engine_on(model, tmp_path) as engine:
        prompts = [prompt_of(40 + 9 * i, i) for i in range(4)]
        for _ in range(2):
            fed = model.module.fed
            n_known = 0
            with held(engine):
                answers = [engine.submit(ask(prompt, 6)) for prompt in prompts]
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                result = answer.result()
                exam.add(prompt, result.choices[0])
                n_known += result.receipt.cached_tokens
                prompts[i] = [*prompt, *tokens_of(result.choices[0]), 5, i]
            n_prompt = sum(len(prompt) - 8 for prompt in prompts)
            assert model.module.fed - fed == n_prompt - n_known + 4 * 6
        assert n_known == sum(len(prompt) - 8 - 2 for prompt in prompts)
        assert max(rows for rows, _ in model.module.shapes) == 1
    exam.check()


# -- messages -------------------------------------------------------------------------------------


def test_an_engine_without_a_store_opens_that_of_the_settings(models, tmp_path, monkeypatch):
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))
    with Engine(models.of("llama")) as engine:
        engine.submit(ask(prompt_of(300), 2)).result()
    assert any((tmp_path / "store").rglob("*.safetensors"))
