"""Time saved is what prefilling took when it was computed, less the restore; never an estimate."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import count

from keepwarm.cache.restore.rates import PrefillTimes, SliceCosts
from keepwarm.engine.answer import sum_receipts
from keepwarm.engine.stats import record_of
from keepwarm.telemetry.ledger import Ledger
from tests.kit.devices import H200, M1, simulated
from tests.kit.engines import ask, engine_on
from tests.kit.models import VOCABULARY
from tests.kit.runs import prompt_of

ANSWER = [VOCABULARY // 2] * 40  # of the simulated model


def sent(sim, prompt, n_answer=1):
    one = sim.send(prompt, n_answer)
    sim.run_until(lambda: one.job.ended)
    sim.lane.live.clear()
    return one.job


def prefill_ms(*jobs):
    return sum(job.phases_ms["prefilling"] for job in jobs)


def test_it_is_what_the_prompt_took_and_not_what_others_take_now(models, tmp_path):
    with simulated(M1, models.of("llama"), tmp_path) as sim:
        prompt = sim.prompt(3000)
        cold = sent(sim, prompt)
        sim.lane.restorer.rates.slices = SliceCosts([(512, 0, 1000.0)])  # a busy machine's
        warm = sent(sim, prompt)
        assert cold.receipt.saved_ms == 0.0
        assert warm.receipt.cached_tokens == 2999
        last = 1000 * M1.step_seconds(1)  # the last token is computed anew
        known = prefill_ms(cold) - last - warm.phases_ms["restoring"]
        assert 0.99 * known < warm.receipt.saved_ms <= known


def test_what_compiling_kernels_took_is_not_saved_again(models, tmp_path):
    """On CUDA the first slice of about its length may have waited for them."""
    with simulated(H200, models.of("llama"), tmp_path) as sim:
        first, second = sent(sim, 100), sent(sim, 100)
        assert sent(sim, first.tokens).receipt.saved_ms is None
        assert sent(sim, second.tokens).receipt.saved_ms > 0


def test_every_turn_adds_what_it_computed_and_answers_add_nothing(models, tmp_path):
    with simulated(M1, models.of("llama"), tmp_path) as sim:
        first = sent(sim, 300, 40)
        second = sent(sim, [*first.tokens, *ANSWER, *sim.prompt(400)], 40)
        third = sent(sim, [*second.tokens, *ANSWER, *sim.prompt(30)])
        assert second.receipt.cached_tokens == 340
        assert third.receipt.cached_tokens == 780
        known = prefill_ms(first, second) - third.phases_ms["restoring"]
        assert 0.95 * known < third.receipt.saved_ms <= known


def test_of_another_machine_it_is_unknown_and_no_sum_counts_it(models, tmp_path):
    with simulated(M1, models.of("llama"), tmp_path) as sim:
        cold = sent(sim, 600)
        sim.lane.restorer.machine = "another"
        warm = sent(sim, cold.tokens)
        assert warm.receipt.cached_tokens == 599
        assert warm.receipt.saved_ms is None
        assert sum_receipts([warm.receipt]).saved_ms is None
        assert sum_receipts([warm.receipt, cold.receipt]).saved_ms == 0.0
        ledger, record = Ledger(), record_of(warm)
        ledger.append(record)
        assert ledger.counters()["saved_ms"] == 0.0
        assert record.amounts()["unknown_savings"] == 1
        assert "unknown_savings" not in record_of(cold).amounts()


def test_it_survives_a_restart_with_the_blocks(models, tmp_path):
    """A clock that goes on by a second at each look: a slice takes two, a restore from then on
    one."""
    prompt, model = prompt_of(600), models.of("llama")
    with engine_on(model, tmp_path) as engine:
        seconds = count()
        engine._scheduler._intake._clock = lambda: float(next(seconds))
        engine.submit(ask(prompt, 1)).result()
        engine.wait_until_saved()
        store, lived_s = engine.store.settings.store, next(seconds)
    with closing(sqlite3.connect(store / "index.sqlite")) as index:
        took = index.execute("SELECT sum(prefill_s), count(DISTINCT machine) FROM blocks")
        took_s, n_machines = took.fetchone()
    assert 0 < took_s < lived_s, "no more than the server's life"
    assert n_machines == 1
    known = 1000 * (took_s - 1)
    assert 0.98 * known < warm_again(model, tmp_path, prompt) <= known
    with closing(sqlite3.connect(store / "index.sqlite")) as index, index:
        index.execute("UPDATE blocks SET machine = 'another'")
    assert warm_again(model, tmp_path, prompt) is None


def warm_again(model, home, prompt):
    with engine_on(model, home) as engine:
        seconds = count()
        engine._scheduler._intake._clock = lambda: float(next(seconds))
        receipt = engine.submit(ask(prompt, 1)).result().receipt
        assert receipt.reused == {"disk": 599}
        return receipt.saved_ms


def test_what_is_known_of_a_part_is_a_share_of_it():
    times = PrefillTimes()
    times.add(100, 2.0)
    times.add(150, None)
    times.add(250, 1.0)
    assert times.seconds(0, 100) == 2.0
    assert times.seconds(50, 100) == 1.0
    assert times.seconds(100, 150) is None
    assert times.seconds(75, 175) == 0.75, "as far as is known"
    assert times.seconds(200, 1000) == 0.5, "answers take none"
    assert times.seconds(300, 400) == 0.0
    assert PrefillTimes().seconds(0, 0) == 0.0
