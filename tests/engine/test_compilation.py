"""What runs before the first request and while idle, where kernels are compiled at run time."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.concurrency import DeviceLock
from keepwarm.device import kernels
from keepwarm.engine import compilation
from keepwarm.engine import engine as engine_module
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.compilation import compile_kernels_if_needed
from tests.kit.engines import ask, engine_on, memory
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until


@pytest.fixture
def store(tmp_path):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, store=tmp_path / "store")
    with Store(settings=settings) as store:
        yield store


@pytest.fixture
def model(models):
    return replace(models.of("llama"), n_context=640)  # prompts are cut to it


def compiled(model, store):
    said = []
    compile_kernels_if_needed(model, store, EngineConfig(memory()), store.settings, said.append)
    return said


def test_trial_requests_leave_rates_and_nothing_else(model, store, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "are_compiled", lambda: True)
    said = compiled(model, store)
    assert said == [f"compiling kernels, {number} of 9" for number in range(1, 10)]
    assert [use.blocks for use in store.tier_stats().values()] == [0, 0]
    rates = store.attach(model.module, model.path).restorer.rates
    assert rates.slices.knows(256)
    assert "failed" not in caplog.text


def test_they_run_only_where_kernels_are_compiled(model, store, monkeypatch):
    monkeypatch.setattr(kernels, "are_compiled", lambda: False)
    assert compiled(model, store) == []


class StandInTrials:
    """Each waits until it is allowed to end."""

    def __init__(self, n_all=3, error=None):
        self.n_all = self.n_left = n_all
        self.threads, self.savers, self.compilers = [], [], []
        self.may_end = threading.Semaphore(0)
        self._error = error

    def run_next(self):
        self.n_left -= 1
        self.threads.append(threading.current_thread().name)
        assert self.may_end.acquire(timeout=60)
        if self._error:
            raise self._error

    def save(self):
        self.savers.append(threading.current_thread().name)

    def compile_known(self):
        self.compilers.append(threading.current_thread().name)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_S", 0.0)


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
        trials.may_end.release(2)
        wait_until(lambda: not trials.n_left)
        assert engine.submit(ask(prompt_of(20), 2)).result()
        assert not trials.savers
    assert trials.threads == ["keepwarm-engine"] * 3
    assert trials.savers == [threading.current_thread().name]


def test_kernels_that_are_in_use_already_are_compiled_before_the_first_request(
    model, store, monkeypatch
):
    monkeypatch.setattr(kernels, "are_compiled", lambda: True)
    monkeypatch.setattr(compilation.TrialRequests, "__init__", no_requests)
    trials = StandInTrials(n_all=0)
    compiled(replace(model, trials=trials), store)
    assert trials.compilers == ["keepwarm-engine"]


def no_requests(own, _):
    own.all = ()


def test_nothing_is_measured_while_another_engine_computes(model, tmp_path, at_once, monkeypatch):
    asked = []
    monkeypatch.setattr(DeviceLock, "others_ran", lambda _: asked.append(1) or len(asked) < 3)
    trials = StandInTrials(n_all=1)
    trials.may_end.release()
    with engine_on(replace(model, trials=trials), tmp_path):
        wait_until(lambda: trials.threads)
    assert len(asked) == 3


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


def test_a_trial_that_fails_is_logged_and_the_engine_goes_on(model, tmp_path, at_once, caplog):
    trials = StandInTrials(error=RuntimeError("no memory"))
    trials.may_end.release(3)
    with engine_on(replace(model, trials=trials), tmp_path) as engine:
        wait_until(lambda: not trials.n_left)
        assert engine.submit(ask(prompt_of(20), 2)).result()
    assert "no memory" in caplog.text
