"""What runs while an engine is idle: trial requests and measurements, where kernels are compiled at
run time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.concurrency import DeviceLock
from keepwarm.device import kernels
from keepwarm.engine import compilation
from keepwarm.engine import engine as engine_module
from keepwarm.engine.compilation import TRIALS, TrialRequests
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput
from keepwarm.server.models.host import start_engine
from tests.kit.engines import ask, engine_on, memory
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until


@pytest.fixture
def model(models):
    return replace(models.of("llama"), n_context=640)  # prompts are cut to it


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_S", 0.0)
    monkeypatch.setattr(engine_module, "FIRST_IDLE_S", 0.0)


def trials_of(engine):
    return TrialRequests(engine.model, engine.store, engine.config, engine.store.settings)


def give(engine, work):
    """Have an engine do this first while it is idle."""
    engine.call(lambda: engine.idle_work.insert(0, work)).result()
    return work


def test_trial_requests_leave_rates_and_nothing_else(model, tmp_path, caplog, monkeypatch):
    kept = []
    monkeypatch.setattr(kernels, "keep", lambda _: kept.append(threading.current_thread().name))
    with engine_on(model, tmp_path, fixed_rates=False) as engine:
        before = engine.stats()
        trials = trials_of(engine)
        assert trials.n_left == trials.n_all == len(TRIALS)
        assert list(trials.run())
        assert not trials.n_left
        assert engine.stats() == before
        assert not engine.requests()
        assert engine.lane_of().restorer.rates.slices.knows(256)
    assert "failed" not in caplog.text
    assert len(kept) == 1 + len(TRIALS), "what requests compiled, and each: it may be killed"
    assert set(kept[1:]) == {"keepwarm-engine"}, "between steps, which may compile"


def test_trials_can_be_given_up_before_and_after_their_engine_is_opened(
    model, tmp_path, monkeypatch
):
    opened = []

    class Opened(Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            opened.append(self)

    monkeypatch.setattr(compilation, "Engine", Opened)
    with engine_on(model, tmp_path) as engine, closing(trials_of(engine).run()) as steps:
        next(steps)
        assert not opened
        next(steps)
        assert opened
        assert not opened[0].requests()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_server_is_ready_before_the_first_trial(model, tmp_path, monkeypatch, is_compiled):
    monkeypatch.setattr(kernels, "are_compiled", lambda: is_compiled)
    monkeypatch.setattr(engine_module, "IDLE_S", 60.0)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, store=tmp_path / "store")
    with Store(settings=settings) as store:
        engine = start_engine(model, store, settings, memory=memory())
        try:
            assert [work.n_left for work in engine.idle_work] == [len(TRIALS)] * is_compiled
            assert engine.submit(ask(prompt_of(20), 2)).result()
            assert [work.n_left for work in engine.idle_work] == [len(TRIALS)] * is_compiled
        finally:
            engine.close()


class SteppedTrial:
    """A trial request that takes a step for every release."""

    def __init__(self):
        self.steps, self.n_begun = threading.Semaphore(0), 0

    def __call__(self, client):
        self.n_begun += 1
        for event in compilation.twice(client, 300):
            assert self.steps.acquire(timeout=60)
            yield event


def test_a_request_that_comes_in_the_middle_is_not_behind_the_trials(
    model, tmp_path, at_once, monkeypatch
):
    """It waits for one step, and the trial is begun anew afterwards."""
    trial = SteppedTrial()
    monkeypatch.setattr(compilation, "TRIALS", (trial,))
    with engine_on(model, tmp_path) as engine:
        trials = give(engine, trials_of(engine))
        trial.steps.release(2)
        wait_until(lambda: trial.n_begun == 1)
        answer = engine.submit(ask(prompt_of(20), 2, timeout_s=50))
        trial.steps.release()
        assert len(answer.result().choices[0].tokens) == 2
        assert trials.n_left == 1
        wait_until(lambda: trial.n_begun == 2)
        trial.steps.release(100)
        wait_until(lambda: not trials.n_left)
        assert [record.prompt_tokens for record in engine.requests()] == [20]


def test_another_engine_that_waits_has_the_trial_given_up(model, tmp_path, at_once, monkeypatch):
    trial = SteppedTrial()
    monkeypatch.setattr(compilation, "TRIALS", (trial,))
    with engine_on(model, tmp_path) as engine:
        trials = give(engine, trials_of(engine))
        wait_until(lambda: trial.n_begun == 1)
        ran = threading.Event()

        def compute():
            with engine._device.take():
                ran.set()

        other = threading.Thread(target=compute)
        other.start()
        wait_until(engine._device.others_wait)
        assert not ran.is_set()
        trial.steps.release()
        other.join()
        assert trials.n_left == 1
        trial.steps.release(100)
        wait_until(lambda: not trials.n_left)


def test_what_a_model_cannot_do_is_left_to_requests(model, tmp_path, monkeypatch, caplog):
    def refused(_):
        yield
        raise BadInput("This model cannot do that.")

    monkeypatch.setattr(compilation, "TRIALS", (refused, TRIALS[1]))
    with engine_on(model, tmp_path) as engine:
        trials = trials_of(engine)
        list(trials.run())
        assert not trials.n_left
    assert "This model cannot do that." in caplog.text


class StandInTrials:
    """Each waits until it is allowed to end."""

    def __init__(self, n_all=3, error=None):
        self.n_all = self.n_left = n_all
        self.threads, self.savers = [], []
        self.may_end = threading.Semaphore(0)
        self._error = error

    def run(self):
        while self.n_left:
            self.n_left -= 1
            self.threads.append(threading.current_thread().name)
            assert self.may_end.acquire(timeout=60)
            if self._error:
                raise self._error
            yield

    def save(self):
        self.savers.append(threading.current_thread().name)


def test_what_nobody_waits_for_is_compiled_while_idle_and_a_request_waits_for_one(
    model, tmp_path, at_once
):
    trials = StandInTrials()
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        wait_until(lambda: trials.threads)
        answer = engine.submit(ask(prompt_of(20), 2))
        trials.may_end.release()
        assert len(answer.result().choices[0].tokens) == 2
        wait_until(lambda: len(trials.threads) == 2)
        assert not trials.savers
        trials.may_end.release(2)
        wait_until(lambda: trials.savers)
        assert engine.submit(ask(prompt_of(20), 2)).result()
    assert trials.threads == ["keepwarm-engine"] * 3
    assert trials.savers == ["keepwarm-engine", threading.current_thread().name]


def test_nothing_is_measured_while_another_engine_computes(model, tmp_path, at_once, monkeypatch):
    asked = []
    monkeypatch.setattr(DeviceLock, "others_ran", lambda _: asked.append(1) or len(asked) < 3)
    trials = StandInTrials(n_all=1)
    trials.may_end.release()
    with engine_on(replace(model, trials=trials), tmp_path):
        wait_until(lambda: trials.threads)
    assert len(asked) == 3


def test_an_engine_without_work_takes_no_turn(model, tmp_path):
    device = DeviceLock()
    with engine_on(model, tmp_path, engine_class=partial(Engine, device=device)) as engine:
        for _ in range(3):
            engine.call(lambda: None).result()
        assert not device._turns.total()


def test_a_closing_engine_keeps_kernels_while_no_other_compiles(model, tmp_path):
    device, trials = DeviceLock(), StandInTrials()
    shared = partial(Engine, device=device)
    with engine_on(replace(model, trials=trials), tmp_path, engine_class=shared) as engine:
        closing = threading.Thread(target=engine.close)
        with device.take():
            closing.start()
            wait_until(device.others_wait)
            assert not trials.savers
        closing.join(60)
        assert trials.savers


def test_idle_engines_do_not_keep_each_other_from_their_work(model, tmp_path, at_once):
    shared, works = partial(Engine, device=DeviceLock()), [StandInTrials(20), StandInTrials(20)]
    for work in works:
        work.may_end.release(20)
    with (
        engine_on(replace(model, trials=works[0]), tmp_path / "one", engine_class=shared),
        engine_on(replace(model, trials=works[1]), tmp_path / "other", engine_class=shared),
    ):
        wait_until(lambda: all(work.savers for work in works))
    assert [len(work.threads) for work in works] == [20, 20], "none was given up"


LOOKED_S = 0.3  # in which idle work would begin


def test_before_the_first_request_idle_work_begins_later(model, tmp_path, at_once, monkeypatch):
    monkeypatch.setattr(engine_module, "FIRST_IDLE_S", 3600.0)
    trials = StandInTrials()
    trials.may_end.release(3)
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        time.sleep(LOOKED_S)
        assert not trials.threads
        assert engine.submit(ask(prompt_of(20), 2)).result()
        wait_until(lambda: trials.savers)


def test_without_any_request_idle_work_begins_too(model, tmp_path, at_once, monkeypatch):
    monkeypatch.setattr(engine_module, "FIRST_IDLE_S", LOOKED_S)
    trials = StandInTrials()
    trials.may_end.release(3)
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        wait_until(lambda: trials.savers)
        assert time.monotonic() - engine._began >= LOOKED_S


class SlowPreparation:
    """Requests are made ready when they are let through."""

    def __init__(self, engine, monkeypatch):
        self._make_ready = engine._preparation.make_ready
        self.begun, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(engine._preparation, "make_ready", self)

    def __call__(self, *asked):
        self.begun.set()
        assert self.may_end.wait(60)
        return self._make_ready(*asked)


@pytest.mark.parametrize("is_begun", [False, True])
def test_while_a_request_is_being_prepared_idle_work_neither_begins_nor_goes_on(
    model, tmp_path, at_once, monkeypatch, is_begun
):
    trials = StandInTrials()
    with engine_on(model, tmp_path) as engine, ThreadPoolExecutor(1) as client:
        if is_begun:
            give(engine, trials)
            wait_until(lambda: trials.threads)
        preparation = SlowPreparation(engine, monkeypatch)
        answer = client.submit(engine.submit, ask(prompt_of(20), 2))
        assert preparation.begun.wait(60)
        if not is_begun:
            give(engine, trials)
        trials.may_end.release(3)
        time.sleep(LOOKED_S)
        assert len(trials.threads) == is_begun
        preparation.may_end.set()
        assert len(answer.result().result().choices[0].tokens) == 2
        wait_until(lambda: trials.savers)


def test_an_engine_that_takes_no_more_requests_measures_nothing(model, tmp_path, at_once):
    trials = StandInTrials()
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        wait_until(lambda: trials.threads)
        engine._refuse_more()
        trials.may_end.release(3)
        assert engine.drain(60)
    assert len(trials.threads) == 1


def test_a_request_that_is_there_goes_first(model, tmp_path, monkeypatch):
    """Only an engine that was idle for some time begins."""
    monkeypatch.setattr(engine_module, "IDLE_S", 3600.0)
    trials = StandInTrials()
    trials.may_end.release(3)
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        for _ in range(2):
            engine.submit(ask(prompt_of(20), 2)).result()
    assert not trials.threads


def test_work_that_fails_is_logged_and_left_and_the_engine_goes_on(
    model, tmp_path, at_once, caplog
):
    trials = StandInTrials(error=RuntimeError("no memory"))
    trials.may_end.release(3)
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        wait_until(lambda: not engine.idle_work)
        assert engine.submit(ask(prompt_of(20), 2)).result()
    assert "no memory" in caplog.text
