"""What an engine tells of itself: its requests, look-ups and speeds."""

from __future__ import annotations

import pytest

from keepwarm.engine.stats import record_of
from keepwarm.errors import Cancelled
from keepwarm.text.request import Delta, Request
from tests.kit.devices import M4_MAX, simulated
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of


def test_a_request_that_waits_and_how_it_ended(models, tmp_path):
    with simulated(M4_MAX, models.of("llama"), tmp_path) as sim:
        sent = [sim.send(40) for _ in range(2)]
        waiting = record_of(sent[0].job)
        assert (waiting.state, waiting.computed_tokens, waiting.error) == ("waiting", 0, "")
        error = Cancelled("Enough.")
        sim.scheduler.abort(sent[1].job, error)
        sim.run_until(lambda: sent[0].job.ended)
        ended = [record_of(sent[0].job), record_of(sent[1].job, error)]
        assert [one.state for one in ended] == ["done", "cancelled"]
        assert [one.error for one in ended] == ["", "Enough."]


def test_a_restore_beside_other_requests_is_no_time_that_was_waited(models, tmp_path):
    with simulated(M4_MAX, models.of("llama"), tmp_path) as sim:
        sim.learn()
        prompt = sim.prompt(32_000)
        sim.first_s(prompt)
        sim.lane.live.clear()
        rates, plan = sim.lane.restorer.rates, sim.lane.restorer.plan(prompt)
        load_s = plan.n_tokens / M4_MAX.load_tokens_per_s
        rates.load_bytes_per_s = plan.point.n_bytes / load_s
        sim.running(4)
        sent = sim.send(prompt)
        sim.run_until(lambda: sent.has_begun)
        phases = sent.job.phases_ms
        assert phases["restoring"] == pytest.approx(1000 * load_s, rel=0.1)
        assert phases["waiting"] < 100 < phases["restoring"]
        assert sum(phases.values()) == pytest.approx(1000 * sent.first_s, abs=1)


def test_a_look_up_tells_the_tier_of_every_token(models, tmp_path):
    """Of a model with states only the last record is read; it stands for all before it."""
    prompt = prompt_of(300)
    for tier in ("memory", "disk"):
        with engine_on(models.of("mamba"), tmp_path) as engine:
            if tier == "memory":
                engine.submit(ask(prompt, 1)).result()
                engine.wait_until_saved()
                engine.call(engine.live.clear).result()
            assert engine.lookup(Request(prompt=prompt)).warm == {tier: 299}


def test_several_answers_to_a_request_are_one_request(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        running = engine.submit(ask(prompt_of(20), 3000, n=3))
        next(event for event in running if isinstance(event, Delta))
        seen = engine.call(lambda: (engine.stats().decoding, len(engine._scheduler.rows))).result()
        assert seen == (1, 3)
        running.cancel()
        with pytest.raises(Cancelled):
            running.result()
        assert engine.requests()[-1].n_sequences == 3


def test_a_step_is_told_in_milliseconds(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        for _ in range(5):
            engine._scheduler.slice_sizer.record_step(0.2)
        assert engine.stats().step_ms == 200.0


def test_only_decode_steps_are_measured_as_such(models, tmp_path):
    with simulated(M4_MAX, models.of("llama"), tmp_path) as sim:
        sim.running(1)
        assert sim.scheduler.slice_sizer.step_s == pytest.approx(M4_MAX.step_seconds(1))
        sim.first_s(4096)
        assert sim.scheduler.slice_sizer.step_s == pytest.approx(M4_MAX.step_seconds(1))
