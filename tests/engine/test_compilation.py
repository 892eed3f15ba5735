"""What runs before the first request, where kernels are compiled at run time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.device import kernels
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.compilation import compile_kernels_if_needed
from tests.kit.engines import memory


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
