"""Engines of two models in one process: one store, one device, memory divided."""

import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest

from keepwarm import config
from keepwarm.cache.restore.rates import SliceCosts
from keepwarm.cache.store import Budgets, Store
from keepwarm.concurrency import DeviceLock
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from keepwarm.errors import InsufficientResources
from keepwarm.telemetry.ledger import Ledger
from tests.kit.engines import Exam, FixedRates, TrustingVerdicts, ask, held, memory
from tests.kit.runs import prompt_of

NAMES = ("llama", "mamba2")


class LoggedLock(DeviceLock):
    """Notes who computed each time, and whether another waited when it ended."""

    def __init__(self):
        super().__init__()
        self.log = []

    @contextmanager
    def take(self):
        with super().take():
            yield
            self.log.append((threading.get_ident(), self.others_wait()))


@pytest.fixture
def pair(models, tmp_path):
    """Two engines on one store."""
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    device, ledger = LoggedLock(), Ledger()
    with Store(budgets=Budgets(min_free_disk_bytes=0), settings=settings) as store:
        options = {"settings": settings, "device": device, "ledger": ledger}
        chosen = EngineConfig(memory=memory())
        with (
            Engine(models.of(NAMES[0]), store, chosen, **options) as one,
            Engine(models.of(NAMES[1]), store, chosen, **options) as two,
        ):
            for engine in (one, two):
                engine._lanes.padding = TrustingVerdicts(tmp_path)
                engine.lane_of().restorer.rates = FixedRates()
                engine._scheduler.slice_sizer.max_slice = 32
            yield one, two


def test_both_answer_at_once_in_turns_and_each_finds_its_own_blocks(pair, models):
    """The same tokens to both: neither waits for more than a step of the other."""
    prompt, exams = prompt_of(400), [Exam(models.module(name)) for name in NAMES]
    for engine in pair:
        engine._scheduler.slice_sizer.max_slice = 4  # so many that one of them may come late
    for is_warm in (False, True):
        with held(pair[0]), held(pair[1]):
            answers = [engine.submit(ask(prompt)) for engine in pair]
        for answer, exam in zip(answers, exams, strict=True):
            result = answer.result()
            exam.add(prompt, result.choices[0])
            assert result.receipt.cached_tokens == (len(prompt) - 1 if is_warm else 0)
    for exam in exams:
        exam.check()
    log = pair[0]._device.log
    after_a_wait = [(one, two) for (one, waited), (two, _) in pairwise(log) if waited]
    assert len(after_a_wait) > 10
    assert all(one != two for one, two in after_a_wait)


def test_two_engines_book_into_one_ledger(pair):
    for engine in pair:
        engine.submit(ask(prompt_of(20), 1)).result()
    records = pair[0].ledger.records()
    assert [one.number for one in records] == [1, 2]
    assert len({one.model for one in records}) == 2
    assert pair[0].stats().counters["finished"] == pair[1].stats().counters["finished"] == 2


def test_slices_are_short_while_another_engine_waits(pair):
    engine = pair[0]
    sizer, lane, device = engine._scheduler.slice_sizer, engine.lane_of(), engine._device
    sizer.max_slice = 512
    lane.restorer.rates.slices = SliceCosts([(512, 0, 1.0)])  # alone a slice may take 1.5 s
    assert engine._scheduler._slice_tokens(lane, 0, 4000) == 512
    device._waiting.append(threading.Event())
    n_tokens = engine._scheduler._slice_tokens(lane, 0, 4000)
    device._waiting.clear()
    assert n_tokens < 256


def test_memory_is_divided_and_what_does_not_fit_goes(pair):
    engine = pair[0]
    engine.submit(ask(prompt_of(300))).result()
    engine.wait_until_saved()
    n_bytes = engine.live.stats.n_bytes
    assert n_bytes > 0
    before = engine.store.tier_stats()["memory"].max_bytes
    engine.divide_memory(memory(live_bytes=n_bytes - 1, batch_bytes=1000))
    assert engine.live.stats.n_bytes == 0
    assert engine.store.tier_stats()["memory"].max_bytes == before
    with pytest.raises(InsufficientResources, match="all requests together may take"):
        engine.submit(ask(prompt_of(300))).result()
    assert pair[1].submit(ask(prompt_of(300))).result().choices[0].tokens
