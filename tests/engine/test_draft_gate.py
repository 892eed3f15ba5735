"""When drafts are fed: where they pay, and never so that they lose more than they may."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.rows import STRIDE, KnownText

from keepwarm.engine import batch as batches
from keepwarm.engine.drafts import (
    CREDIT_SHARE,
    MAX_CREDIT,
    MAX_DRAFT,
    MAX_SEARCHING,
    MIN_MATCH,
    SEARCHING_SHARE,
    WIDTHS,
    BatchSize,
    DraftGate,
    Proposal,
)
from keepwarm.kv.rows import STEP
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.recent import RecentPrompts
from tests.kit.devices import H200, VirtualClock, simulated
from tests.kit.models import VOCABULARY


@pytest.fixture
def gate():
    gate = DraftGate(RecentPrompts())
    cost(gate, 1, 0.010)
    return gate


def cost(gate, width, seconds, n_rows=1):
    for _ in range(3):
        gate.costs.saw(BatchSize(n_rows, 0), width, seconds)


def hits(gate, n_right, n_all):
    for place in range(MAX_DRAFT):
        for i in range(n_all):
            gate.rates.count(MIN_MATCH, place, i < n_right)


ONE_ROW = BatchSize(1, 0)
DRAFT = Proposal(MIN_MATCH, list(range(MAX_DRAFT)))


def test_a_width_that_was_never_tried_is_tried(gate):
    assert gate.width([DRAFT], ONE_ROW) == 2
    cost(gate, 2, 0.011)
    assert gate.width([DRAFT], ONE_ROW) == 3
    cost(gate, 3, 0.030)
    assert gate.width([DRAFT], ONE_ROW) == 4


def test_drafts_that_cost_more_than_they_give_are_not_fed(gate):
    hits(gate, 1, 10)
    for width in (2, 3, 4, 5, 8, 16):
        cost(gate, width, 0.010 * (1 + 0.3 * width))
    assert gate.width([DRAFT], ONE_ROW) == 1


def test_drafts_that_pay_are_as_long_as_pays_most(gate):
    hits(gate, 9, 10)
    for width in (2, 3, 4, 5):
        cost(gate, width, 0.011)
    for width in (8, 16):
        cost(gate, width, 0.050)
    assert gate.width([DRAFT], ONE_ROW) == 5


def test_rows_without_drafts_do_not_wait_long_for_others(gate):
    hits(gate, 100, 100)
    for n_rows in (1, 2):
        cost(gate, 1, 0.010, n_rows)
        cost(gate, 2, 0.014, n_rows)
        for width in (3, 4, 5, 8, 16):
            cost(gate, width, 0.016, n_rows)
    assert gate.width([DRAFT, DRAFT], BatchSize(2, 0)) == 16
    assert gate.width([DRAFT, None], BatchSize(2, 0)) == 2


def test_drafts_that_are_never_right_cost_little_in_the_end(gate):
    """On a device where a step of n tokens costs n plain ones."""
    n_steps, lost = 5000, 0.0
    for _ in range(n_steps):
        width = gate.width([DRAFT], ONE_ROW)
        gate.saw_step(ONE_ROW, width, 0, 0.010 * width)
        lost += width - 1
    assert 3 < lost < MAX_CREDIT + CREDIT_SHARE * n_steps + 1


@pytest.mark.parametrize("replays", [False, True], ids=["rows", "states"])
def test_drafts_lose_no_more_than_they_may_wherever_they_mislead(gate, replays):
    """They are right as often as they can be while that is learned, and then never again."""
    hits(gate, 100, 100)
    lost, least, most = 0.0, 0.0, 0.0
    for i in range(4000):
        width = gate.width([DRAFT], ONE_ROW)
        n_right = width - 1 if i < 60 else 0
        n_again = 1 + n_right if replays and n_right < width - 1 else 0
        n_plain = 0.7 * (width + n_again) if width > 1 else 1.0
        gate.saw_step(ONE_ROW, width, n_right, 0.010 * n_plain, n_again)
        hits(gate, 1, 1)  # as if each draft that is not fed were right
        lost += n_plain - 1 - n_right - CREDIT_SHARE
        least = min(least, lost)
        most = max(most, lost - least)
    assert MAX_CREDIT - 3 < most <= MAX_CREDIT + 3


def test_a_step_that_could_lose_more_than_is_left_is_not_fed(gate):
    hits(gate, 100, 100)
    for width in (2, 3, 4, 5, 8, 16):
        cost(gate, width, 0.010 * (1 + 0.2 * width))
    fed = []
    for _ in range(6):
        fed.append(gate.width([DRAFT], ONE_ROW))
        gate.saw_step(ONE_ROW, 8, 0, 0.026)
    assert fed == [16, 16, 16, 16, 8, 1]  # 16 may lose 3.2 plain steps; 8.0, 6.4, 4.8 … are left


def test_what_a_state_computes_again_counts(gate):
    gate.saw_step(ONE_ROW, 2, 0, 0.030, n_again=1)
    assert gate._credit == pytest.approx(MAX_CREDIT - 2 + CREDIT_SHARE)


def test_searching_takes_no_more_than_its_share(gate):
    """Whether it finds something or not, unless it pays; while the host would wait for the device
    it costs nothing.
    """
    n_steps, n_searched = 4000, 0
    for _ in range(n_steps):
        if gate.may_search(ONE_ROW):
            gate.searched(ONE_ROW, 0.001)
            n_searched += 1
        gate.saw_step(ONE_ROW, 1, 0, 0.010)
    assert MAX_SEARCHING < 0.1 * n_searched <= MAX_SEARCHING + SEARCHING_SHARE * n_steps + 0.1
    gate.saw_step(ONE_ROW, 1, 0, 0.010)
    for _ in range(100):
        gate.searched(ONE_ROW, 0.009, spare_s=0.009)
    for _ in range(30):
        gate.saw_end_ahead(ONE_ROW, 0.0, False)
    assert gate.may_search(ONE_ROW)
    gate.searched(ONE_ROW, 0.006)
    assert not gate.may_search(ONE_ROW)
    gate.saw_step(ONE_ROW, 2, 1, 0.012)
    assert gate.may_search(ONE_ROW)


def test_slow_first_steps_of_a_width_do_not_turn_drafts_off(gate):
    """As on CUDA, where each new shape takes longer once."""
    hits(gate, 100, 100)
    fed = []
    for _ in range(30):
        width = gate.width([DRAFT], ONE_ROW)
        first = 0.0 if width in fed else 5.0
        fed.append(width)
        gate.saw_step(ONE_ROW, width, width - 1, first + 0.020)
    assert fed == [2, 2, 3, 3, 4, 4, 5, 5, 8, 8, *[16] * 20]


def test_nothing_is_searched_or_fed_before_a_plain_step_was_measured():
    gate = DraftGate(RecentPrompts())
    assert gate.width([DRAFT], ONE_ROW) == 1
    assert not gate.may_search(ONE_ROW)
    cost(gate, 1, 0.010)
    assert gate.may_search(ONE_ROW)


# About an H200, Llama-8B (docs/results/decode.md): milliseconds of a step with one and with four
# rows, by tokens a row, where one token runs ahead; and what the first step of a shape takes.
STEP_MS = {
    1: {1: 4.8, 2: 10.7, 4: 12.4, 7: 19.9, 8: 9.5, 16: 10.0},
    4: {1: 14.2, 2: 16.0, 4: 16.9, 8: 25.7, 16: 55.0},
}
FIRST_MS = 55, 150
N_ANSWER = 512


class PlansShapes:
    """A model whose next token is known, and whose steps take what they take on an H200."""

    layers = (None,)

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._dice = np.random.default_rng(0)
        self._shapes: set[tuple[int, ...]] = set()
        self.first_s = 0.0  # what first steps took

    def __call__(self, inputs, cache):
        n_rows, width = inputs.shape
        if width <= 1 + MAX_DRAFT and n_rows in STEP_MS:
            times = STEP_MS[n_rows]
            self._clock.now += np.interp(width, list(times), list(times.values())) / 1000
        rows = mx.zeros((n_rows, 1, width, 1))
        cache[0].update_and_fetch(rows, rows)
        shape = n_rows, width, int(mx.max(mx.array(cache[0].offset)).item()) // STEP
        if shape not in self._shapes and width > 1:
            self._shapes.add(shape)
            first_s = self._dice.uniform(*FIRST_MS) / 1000
            self.first_s, self._clock.now = self.first_s + first_s, self._clock.now + first_s
        following = (inputs.astype(mx.int32) + STRIDE) % VOCABULARY
        return (mx.arange(VOCABULARY) == following[..., None]).astype(mx.float32)


def known_text(right, prompt, _others):
    following = [(prompt[-1] + STRIDE * i) % VOCABULARY for i in range(1, N_ANSWER + 1)]
    return KnownText(following, right)


def answered(sim, n_rows, gate):
    """Seconds of answers that are decoded together, and what drafts did for each."""
    sim.lane = replace(sim.lane, gate=gate)
    began = sim.clock.now
    sent = [sim.send(100, N_ANSWER, Policy.NO_STORE) for _ in range(n_rows)]
    sim.run_until(lambda: all(one.job.ended for one in sent))
    counts = [one.answer.events[-1][1].receipt.speculation for one in sent]
    return sim.clock.now - began, counts


@pytest.fixture
def sim(models, tmp_path, monkeypatch):
    """It runs ahead."""
    monkeypatch.setattr(batches, "works_beside_host", lambda: True)
    with simulated(H200, models.of("llama"), tmp_path) as sim:
        sim.module = PlansShapes(sim.clock)
        sharing = SimpleNamespace(can_batch=True, is_decided=True, allowed=True, own_ends=True)
        model = replace(sim.lane.model, module=sim.module)
        sim.lane = replace(sim.lane, model=model, sharing=sharing)
        yield sim


def compared(sim, n_rows, right, n_answers=1):
    """Without drafts, and with them after some answers."""
    gate = DraftGate(RecentPrompts())
    gate.source = partial(known_text, right)
    plain_s, _ = answered(sim, n_rows, None)
    for _ in range(n_answers):
        sim.module.first_s = 0.0
        drafted_s, counts = answered(sim, n_rows, gate)
    return plain_s, drafted_s - sim.module.first_s, counts


@pytest.mark.parametrize(
    ("n_rows", "right", "n_answers", "times"), [(1, 0.8, 3, 1.3), (4, 0.6, 1, 1.6)]
)
def test_drafting_begins_where_each_new_shape_is_slow_at_first(
    n_rows, right, n_answers, times, sim
):
    """On CUDA. It pays after that; one row takes longer to find the width that does."""
    plain_s, drafted_s, counts = compared(sim, n_rows, right, n_answers)
    assert all(one["accepted"] > 0.35 * one["steps"] for one in counts)
    assert plain_s > times * drafted_s


@pytest.mark.parametrize("n_rows", [1, 4])
def test_drafts_that_are_never_right_cost_first_steps_and_what_they_may(n_rows, sim):
    plain_s, drafted_s, counts = compared(sim, n_rows, 0.0)
    assert all(one["drafted"] > one["accepted"] == 0 for one in counts)
    assert drafted_s < (1 + CREDIT_SHARE) * plain_s + (MAX_CREDIT + 1) * plain_s / N_ANSWER
    assert sim.module.first_s < 2 * len(WIDTHS) * FIRST_MS[1] / 1000
