"""How answers end: while the engine closes, when they must be on disk, when they outgrow memory."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from keepwarm.cache.restore.restorer import Restorer
from keepwarm.engine import scheduler
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.engine.jobs import Job, RunningSequence
from keepwarm.engine.lane import Lane
from keepwarm.engine.recorder import divergence
from keepwarm.errors import Cancelled, InsufficientResources, Stopping, StoreFailed
from keepwarm.prefix.blocks import chain
from keepwarm.prefix.policy import Policy
from keepwarm.store.disk.disk import DiskTier
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import Delta, KVOptions, Request, TokenInfo, TopLogprob
from tests.kit.engines import Exam, ask, engine_on, held, memory, tokens_of
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until

PATIENCE_S = 300


# -- closing --------------------------------------------------------------------------------------


class Slow(Engine):
    """An engine that takes until `ready` to look at a request."""

    ready: threading.Event | None = None
    looking = threading.Event()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        prepare = self._preparation.prepare

        def prepare_late(*given: Any) -> tuple[PreparedRequest, Lane]:
            if self.ready is not None:
                self.looking.set()
                assert self.ready.wait(PATIENCE_S)
            return prepare(*given)

        self._preparation.prepare = prepare_late


@pytest.mark.parametrize("step", [(Ledger, "append"), (Job, "_final")])
def test_an_answer_ends_though_its_end_cannot_be_recorded(
    models, tmp_path, monkeypatch, caplog, step
):
    with engine_on(models.of("llama"), tmp_path) as engine:
        monkeypatch.delattr(*step)
        assert engine.submit(ask(prompt_of(20))).result().choices[0].tokens
        if step == (Job, "_final"):
            assert engine.stats().counters["finished"] == 1
    assert "the end of a request could not be recorded" in caplog.text


def test_a_request_during_close_is_refused_at_once(models, tmp_path):
    """Submitted before `close`, prepared after it: the engine would never answer."""
    with (
        engine_on(models.of("llama"), tmp_path, engine_class=Slow) as engine,
        ThreadPoolExecutor(2) as pool,
    ):
        engine.ready, written = threading.Event(), threading.Event()
        asked = pool.submit(engine.submit, ask(prompt_of(30), 50))
        assert engine.looking.wait(PATIENCE_S)
        engine._recorder._pool.submit(written.wait)  # something is still to be on disk
        closing = pool.submit(engine.close)
        while engine._accepting:
            time.sleep(0.001)
        engine.call(lambda: None).result(PATIENCE_S)  # all that ran has been ended
        engine.ready.set()
        refused = asked.exception(PATIENCE_S)
        written.set()
        closing.result(PATIENCE_S)
    assert isinstance(refused, Stopping)


def test_closing_twice(models, tmp_path):
    """The second caller returns when the first has closed everything."""
    for _ in range(5):
        with engine_on(models.of("llama"), tmp_path) as engine, ThreadPoolExecutor(4) as pool:
            for closed in [pool.submit(engine.close) for _ in range(4)]:
                closed.result(PATIENCE_S)
            assert not engine.alive


def test_an_engine_ends_though_the_drive_of_its_store_is_gone(models, tmp_path, monkeypatch):
    """On macOS, where drives are flushed. Who asks whether all is saved is told."""

    def fail(_):
        raise StoreFailed("The store could not flush its drive; look at its disk.")

    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(20))).result()
        with monkeypatch.context() as gone:
            gone.setattr(DiskTier, "flush", fail)
            with pytest.raises(StoreFailed):
                engine.wait_until_saved()
            assert engine.drain(PATIENCE_S)
            engine.close()
        assert not engine.alive


@pytest.mark.linux
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_engine_is_refused_to_forked_processes(models, tmp_path):
    """They have no thread of it, and would wait for ever."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        (here, there), request = multiprocessing.Pipe(), ask(prompt_of(20))

        def work() -> None:
            for asked in (lambda: engine.submit(request).result(), lambda: engine.call(int)):
                with pytest.raises(Stopping) as refused:
                    asked()
                there.send(str(refused.value))

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        try:
            for _ in range(2):
                assert here.poll(60)
                assert "in each process" in here.recv()
        finally:
            child.kill()
            child.join()


def test_closing_does_not_wait_for_a_trial(models, tmp_path):
    """Which may take minutes, and which nobody waits for."""

    class Endless:
        is_decided, ended = False, 0.0

        def step(self) -> None:
            if self.ended:
                self.is_decided = time.monotonic() > self.ended

    trial: Any = Endless()
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.call(lambda: setattr(engine._scheduler, "_untried", trial)).result()
        trial.ended = time.monotonic() + 10  # else a failing test would never end
    assert not trial.is_decided


@pytest.mark.parametrize("look", [Engine.wait_until_saved, Engine.close])
def test_who_asks_whether_all_is_saved_while_the_engine_closes_gets_no_bare_error(
    models, tmp_path, look
):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine._recorder.close()
        look(engine)
        with pytest.raises(Stopping, match="shutting down"):
            engine._recorder.wait_until_done()


class Talker(threading.Thread):
    """Submits until it is refused; `outcome` is the error."""

    def __init__(self, say: Callable[[], object]) -> None:
        super().__init__(daemon=True)  # one that hangs must not hold up the end of the test
        self.outcome = "nothing"
        self._say = say
        self.start()

    def run(self) -> None:
        while True:
            try:
                self._say()
            except Cancelled:
                continue
            except Exception as error:
                self.outcome = type(error).__name__
                return


def test_many_ask_while_the_engine_closes(models, tmp_path):
    """Each is answered or refused, and none hangs."""
    outcomes: list[str] = []
    for round_ in range(4):
        with engine_on(models.of("llama"), tmp_path) as engine:
            talkers = [Talker(say) for say in sayings(engine) for _ in range(2)]
            for _ in range(10 * round_):
                engine.call(lambda: None).result(PATIENCE_S)
        for talker in talkers:
            talker.join(PATIENCE_S)
            outcomes.append(talker.outcome)
    assert set(outcomes) == {"Stopping"}


def sayings(engine: Engine) -> list[Callable[[], object]]:
    numbers = count()

    def answered() -> None:
        engine.submit(ask(prompt_of(9, next(numbers)), 3)).result()

    def cancelled() -> None:
        answer = engine.submit(ask(prompt_of(300, next(numbers)), 50))
        answer.cancel()
        answer.result()

    def looked_up() -> None:
        engine.lookup(ask(prompt_of(9, next(numbers))))

    return [answered, cancelled, looked_up, lambda: engine.call(lambda: None).result()]


# -- on disk --------------------------------------------------------------------------------------


def busy_disk(engine: Engine) -> threading.Timer:
    """The writer pauses until the timer ends."""
    busy = ExitStack()
    busy.enter_context(engine.store.saver.restoring())
    pause = threading.Timer(0.3, busy.close)
    pause.start()
    return pause


class SlowDisk(Engine):
    """The disk is slow after the first of several answers was kept."""

    def _on_kept(self, sequence: RunningSequence) -> None:
        super()._on_kept(sequence)
        if sequence.choice == 0:
            self._recorder.wait_until_done()
            self.pause = busy_disk(self)


def on_disk(engine: Engine, tokens: list[int]) -> bool:
    restorer = engine.lane_of().restorer
    keys = [ref.key for ref in chain(restorer.namespace, tokens)]
    return set(keys) <= set(engine.store.on_disk.disk.have(keys))


def test_durable_means_every_answer(models, tmp_path):
    """Several answers end in one step: `Done` comes when all of them are on disk."""
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path, engine_class=SlowDisk) as engine:
        request = ask(prompt, 5, n=3, temperature=1.5, seed=1, policy=Policy.DURABLE)
        result = engine.submit(request).result()
        answers = [[*prompt, *tokens_of(choice)] for choice in result.choices]
        assert [on_disk(engine, tokens) for tokens in answers] == [True] * 3
        assert engine.stats().counters["finished"] == 1
        engine.pause.join()


def test_durable_means_a_prompt_without_an_answer_too(models, tmp_path):
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path) as engine:
        pause = busy_disk(engine)
        engine.warm(Request(prompt=prompt, policy=Policy.DURABLE)).result()
        assert on_disk(engine, prompt)
        pause.join()


# -- cut short ------------------------------------------------------------------------------------


def test_an_answer_that_was_cut_short_is_not_audited(models, tmp_path):
    """Recomputed it would be longer, which is not a drift."""
    with engine_on(models.of("llama"), tmp_path, audit_share=1.0) as engine:
        prompt = prompt_of(100)
        engine.submit(ask(prompt, 4)).result()
        answer = engine.submit(ask(prompt, 3000))
        next(event for event in answer if isinstance(event, Delta))
        answer.cancel()
        with pytest.raises(Cancelled):
            answer.result()
        engine.submit(ask(prompt, 4)).result()
        while engine.stats().counters["audits"] == 0 or engine._scheduler.jobs:
            time.sleep(0.01)
        counters = engine.stats().counters
        assert (counters["audits"], counters["drifts"]) == (1, 0)


# -- audits ---------------------------------------------------------------------------------------


def spoil(engine: Engine, prompt: list[int]) -> None:
    """Replace the live cache of a prompt by another one."""
    namespace = engine.lane_of().restorer.namespace
    taken = engine.live.take(namespace, prompt)
    assert taken is not None
    for cache in taken.caches:
        cache.values = -3 * cache.values
    engine.live.clear()
    engine.live.put(namespace, prompt[: taken.n_tokens], taken.caches)


def audited(engine: Engine, n_audits: int) -> tuple[int, int]:
    """The numbers of audits and drifts, once there were enough audits."""
    while engine.stats().counters["audits"] < n_audits:
        time.sleep(0.01)
    counters = engine.stats().counters
    return counters["audits"], counters["drifts"]


@pytest.mark.parametrize("at_rest", ["exact", "q8"])
def test_a_cache_that_has_changed_is_found_out(models, tmp_path, at_rest):
    """Also where other tokens are no fault: there by how much the likeliest ones diverge."""
    prompt, kv = prompt_of(100), KVOptions(at_rest=at_rest)
    with engine_on(models.of("llama"), tmp_path, audit_share=1.0, kv=kv) as engine:
        engine.submit(ask(prompt, 8)).result()
        first = engine.submit(ask(prompt, 8)).result()
        assert audited(engine, 1) == (1, 0)
        engine.call(lambda: spoil(engine, prompt)).result()
        second = engine.submit(ask(prompt, 8)).result()
        assert second.receipt.reused == {"live": 99}
        assert tokens_of(second.choices[0]) != tokens_of(first.choices[0])
        assert audited(engine, 2) == (2, 1)


def shown(token: int, **probabilities: float) -> TokenInfo:
    """A token and the likeliest ones, such as `t3=0.5`."""
    top = [TopLogprob(int(name[1:]), math.log(p)) for name, p in probabilities.items()]
    return TokenInfo(token, None, tuple(top))


def test_answers_diverge_up_to_the_first_token_that_differs():
    exact = [shown(1, t1=0.5, t2=0.25), shown(2, t2=0.5, t3=0.25)]
    assert divergence(exact, exact) == 0
    other = [shown(1, t1=0.25, t2=0.25), shown(2, t2=0.5, t3=0.25)]
    assert divergence(exact, other) == pytest.approx(0.5 * math.log(2) / 2)
    parted = [shown(7, t1=0.25, t2=0.25), shown(2, t9=1.0)]
    assert divergence(exact, parted) == pytest.approx(0.5 * math.log(2))
    unlike = [shown(7, t7=0.9, t8=0.1)]
    assert divergence(exact, unlike) == pytest.approx(0.5 * math.log(5) + 0.25 * math.log(2.5))
    assert divergence(exact, [shown(1)]) == 0, "nothing is known of it"


def test_only_what_was_answered_counts_as_an_answer_that_a_client_goes_on_from(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path, audit_share=1.0) as engine:
        cancelled = engine.submit(ask(prompt_of(20), 2000))
        next(cancelled)
        cancelled.cancel()
        with pytest.raises(Cancelled):
            cancelled.result()
        engine.wait_until_saved()
        ends = engine._scheduler._ends
        assert not ends._last
        for _ in range(2):  # the second is warm, so it is audited
            engine.submit(ask(prompt_of(40), 2)).result()
        answered = dict(ends._last)
        assert answered
        wait_until(lambda: engine.stats().counters["audits"] == 1)
        assert ends._last == answered


def test_an_audit_asks_the_store_for_nothing_on_the_engines_thread(models, tmp_path, monkeypatch):
    """An answer is told by its caller which deletions it knows of; an audit by its answer."""
    known, opened = [], Restorer.open

    def watched(restorer, tokens, policy, agent, since, times):
        known.append(since)
        return opened(restorer, tokens, policy, agent, since, times)

    monkeypatch.setattr(Restorer, "open", watched)
    with engine_on(models.of("llama"), tmp_path, audit_share=1.0) as engine:
        for _ in range(2):
            engine.submit(ask(prompt_of(40), 2)).result()
        wait_until(lambda: engine.stats().counters["audits"] == 1)
    assert None not in known


def test_a_cold_answer_is_not_audited(models, tmp_path):
    """Nor one that was drawn by chance."""
    with engine_on(models.of("llama"), tmp_path, audit_share=1.0) as engine:
        for temperature in (0, 1.0):
            engine.submit(ask(prompt_of(40), 2, temperature=temperature)).result()
            engine.wait_until_saved()
            while engine._scheduler.jobs:
                time.sleep(0.01)
        assert engine.stats().counters["audits"] == 0


NEVER: Any = SimpleNamespace(ended=False, prefill=SimpleNamespace(n_done=0))


class Unhurried(Engine):
    """Audits are queued and never run."""

    def _on_kept(self, sequence: RunningSequence) -> None:
        super()._on_kept(sequence)
        for job in [job for job in self._scheduler.jobs if job.audit]:
            job.waits_for, job.wait_until = NEVER, 1


def test_audits_do_not_count_against_the_queue(models, tmp_path):
    """One at a time, not counted as waiting, and abandoned by `drain`."""
    with engine_on(
        models.of("llama"), tmp_path, engine_class=Unhurried, audit_share=1.0, max_queue=2
    ) as engine:
        for _ in range(5):
            engine.submit(ask(prompt_of(40), 3)).result()
        engine.call(lambda: None).result()
        assert [job.audit for job in engine._scheduler.jobs] == [True]
        assert engine.drain(PATIENCE_S)
        assert engine.stats().counters["audits"] == 0


# -- room for long answers ------------------------------------------------------------------------

ROW = 2048  # bytes that a token takes here, counted in steps of 256 tokens
ROOM = 256  # tokens that are counted for an answer before it has begun


def used_bytes(engine: Engine) -> int:
    return engine.call(lambda: engine._admission.used_bytes).result()


def listen(answer: Answer, said: list[int]) -> None:
    for event in answer:
        if isinstance(event, Delta):
            said += [info.token for info in event.tokens]


def next_delta(answer):
    return next(event for event in answer if isinstance(event, Delta))


def test_a_long_answer_is_counted_as_it_grows(models, tmp_path, monkeypatch):
    """Memory is reserved for some tokens at first, later for at most what is left."""
    monkeypatch.setattr(scheduler, "LEASE_TOKENS", ROOM)
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = engine.submit(ask(prompt_of(256), ROOM + 50, top_logprobs=None))
        next_delta(answer)
        assert used_bytes(engine) == ROW * (256 + ROOM)
        n_tokens = 1
        while n_tokens <= ROOM:
            n_tokens += len(next(answer).tokens)
        assert used_bytes(engine) == ROW * (256 + ROOM + 256)
        assert answer.result().choices[0].reason == "length"
        assert used_bytes(engine) == 0


def test_an_answer_that_outgrows_the_memory_ends_alone(models, tmp_path, monkeypatch):
    """The error says why, the tokens are kept; the other sequence and the engine go on."""
    monkeypatch.setattr(scheduler, "LEASE_TOKENS", 200)
    long, short = prompt_of(50, 1), prompt_of(50, 2)
    with engine_on(models.of("llama"), tmp_path, memory=memory()) as engine:
        with held(engine):
            outgrows = engine.submit(ask(long, 3000, top_logprobs=None))
            neighbour = engine.submit(ask(short, 205, top_logprobs=None))
        next_delta(neighbour)
        said = [info.token for info in next_delta(outgrows).tokens]
        engine.divide_memory(memory(batch_bytes=ROW * (256 + 511)))  # another model loads
        with pytest.raises(InsufficientResources, match=r"200 tokens .* memory"):
            listen(outgrows, said)
        choice = neighbour.result().choices[0]
        assert (len(choice.tokens), choice.reason) == (204, "length"), "and the one that was read"
        assert used_bytes(engine) == 0
        assert engine.stats().counters["failed"] == 1
        rest = engine.submit(ask([*long, *said, 1], 4)).result()
        assert rest.receipt.cached_tokens == len(long) + len(said)


def test_an_answer_for_which_padding_leaves_no_memory_goes_on_in_a_batch_apart(
    models, tmp_path, monkeypatch
):
    """Two answers to one prompt; the short ones' rows would be as long as theirs."""
    monkeypatch.setattr(scheduler, "LEASE_TOKENS", 150)
    n_batches, move = list[int](), scheduler.Scheduler._move

    def watched(self, job):
        move(self, job)
        n_batches.append(len(self._batches))

    monkeypatch.setattr(scheduler.Scheduler, "_move", watched)
    exam, long = Exam(models.module("llama")), ask(prompt_of(50, 1), 350, n=2)
    short = [ask(prompt_of(50, seed), 200) for seed in (2, 3)]
    budget = memory(batch_bytes=6 * ROW * 256)  # four rows of 512 are 8
    with engine_on(models.of("llama"), tmp_path, memory=budget) as engine:
        with held(engine):
            answers = [engine.submit(request) for request in (long, *short)]
        results = [answer.result() for answer in answers]
        assert used_bytes(engine) == 0
    assert n_batches == [2]
    for request, result in zip((long, *short), results, strict=True):
        for choice in result.choices:
            assert choice.reason == "length"
            exam.add(request.prompt, choice)
    assert exam.check() == 2 * 350 + 2 * 200


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_windows_and_states_go_on_in_a_batch_apart(name, models, tmp_path, monkeypatch):
    extend = scheduler.Intake.extend_lease

    def apart(self, row):
        extend(self, row)
        if row.n_tokens == 20 and len(row.tokens) < 100:
            row.job.lease.move_apart()
        return row.n_tokens == 20

    monkeypatch.setattr(scheduler.Intake, "extend_lease", apart)
    exam = Exam(models.module(name))
    requests = [ask(prompt_of(n, n), 40) for n in (300, 30, 310)]
    with engine_on(models.of(name), tmp_path) as engine:
        with held(engine):
            answers = [engine.submit(request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            exam.add(request.prompt, answer.result().choices[0])
        assert engine.stats().counters["rebuilt_batches"] == 0
    assert exam.check() == 3 * 40


@pytest.mark.parametrize(("policy", "n_fed"), [(Policy.READ_WRITE, 3), (Policy.NO_STORE, 2)])
def test_the_last_token_is_fed_only_if_the_answer_is_kept(models, tmp_path, policy, n_fed):
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        engine.submit(ask(prompt_of(20), 1)).result()  # makes the lane
        before = model.module.decoded
        engine.submit(ask(prompt_of(20, 1), 3, policy=policy)).result()
        assert model.module.decoded - before == n_fed


def test_beside_a_kept_answer_one_that_is_not_kept_ends_alike(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        with held(engine):
            kept = engine.submit(ask(prompt_of(20), 3))
            other = engine.submit(ask(prompt_of(20, 1), 3, policy=Policy.NO_STORE))
        said, unkept = (tokens_of(answer.result().choices[0]) for answer in (kept, other))
        assert (len(said), len(unkept)) == (3, 3)
        again = engine.submit(ask([*prompt_of(20), *said, 1], 1)).result()
        assert again.receipt.cached_tokens == 23
