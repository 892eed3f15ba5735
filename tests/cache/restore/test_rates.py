"""What a slice costs, learned from slices; and that it is remembered."""

from __future__ import annotations

import json
import random

import pytest

from keepwarm.cache.restore.rates import Rates, RatesFile, SliceCosts
from keepwarm.prefix.blocks import Namespace

NAME = Namespace(bytes(32))


def true_s(n_tokens: int, context: int = 0) -> float:
    """Nearly flat, then linear; plus the context."""
    return 0.03 + 1e-4 * n_tokens + 1e-9 * n_tokens * context


def learned(noise: float = 0.0) -> SliceCosts:
    costs, dice = SliceCosts(), random.Random(1)
    for n_tokens in (1, 16, 64, 256, 512, 1024, 2048):
        for i in range(8):
            seconds = true_s(n_tokens, 2048 * i) * (1 + noise * dice.random())
            costs.add(n_tokens, 2048 * i, seconds)
    return costs


@pytest.mark.parametrize(("n_tokens", "context"), [(16, 0), (512, 0), (700, 4096), (2048, 30_000)])
def test_a_curve_and_a_share_for_the_context_are_learned(n_tokens, context):
    assert learned().seconds(n_tokens, context) == pytest.approx(
        true_s(n_tokens, context), rel=0.05
    )
    rough = learned(noise=0.2).seconds(n_tokens, context)
    assert rough == pytest.approx(true_s(n_tokens, context), rel=0.35)


def test_near_contexts_are_outvoted_by_far_ones():
    """Slices at nearly the same place differ by noise, which looks like a steep share."""
    costs = SliceCosts()
    for context, seconds in ((3072, 0.068), (3584, 0.071), (4096, 0.074), (4608, 0.077)):
        costs.add(512, context, seconds)
    for context in (0, 12_288, 24_576):
        costs.add(2048, context, true_s(2048, context))
    assert costs.seconds(2048) == pytest.approx(true_s(2048), rel=0.05)


def test_single_tokens_say_nothing_of_what_a_context_costs_a_long_slice():
    """Measured on a GPU: 512 slices of 64 tokens were the way out of a share that was too high."""
    costs = SliceCosts([(2048, 0, 0.31), (1, 2599, 0.0107), (551, 2048, 0.093), (1, 299, 0.0099)])
    assert costs.seconds(2048, 30_000) == costs.seconds(2048)
    costs.add(2048, 4096, 0.313)
    assert costs.seconds(2048, 30_000) == pytest.approx(0.31 + 0.003 * 30_000 / 4096, rel=0.05)


def test_a_prompt_is_the_sum_of_its_slices():
    costs = learned()
    assert costs.prefill_s(0, 700) == pytest.approx(costs.seconds(700))
    slices = sum(true_s(2048, 2048 * i) for i in range(16))
    assert costs.prefill_s(0, 32_768) == pytest.approx(slices, rel=0.05)
    assert costs.prefill_s(16_384, 32_768) > costs.prefill_s(0, 16_384)


def test_a_disturbed_measurement_is_outvoted_or_bounded_by_its_neighbours():
    """A kernel that is compiled inside a slice takes half a minute."""
    alone = SliceCosts([(64, 0, 30.0), (16, 0, 0.02), (512, 0, 0.065)])
    assert alone.seconds(64) <= 0.065
    outvoted = learned()
    outvoted.add(512, 0, 30.0)
    assert outvoted.seconds(512) == pytest.approx(true_s(512), rel=0.05)
    last = SliceCosts([(16, 0, 0.02), (2048, 0, 30.0)])
    assert last.seconds(2048) <= 0.02 * 128  # no token costs more than in a short slice


def test_more_tokens_than_were_ever_measured_do_not_cost_less():
    """Even where the longest slices happened to be faster than shorter ones."""
    costs = SliceCosts([(1024, 0, 0.2)] * 8 + [(512, 0, 0.3)] * 8)
    assert costs.seconds(512) > costs.seconds(1024)
    assert costs.seconds(4096) >= costs.seconds(1024)


def test_a_machine_that_becomes_slower_is_noticed():
    costs = learned()
    for i in range(5):
        costs.add(512, 2048 * i, 3 * true_s(512, 2048 * i))
    assert costs.seconds(512) > 1.5 * true_s(512)


def test_a_slice_that_was_seen_is_what_the_next_one_costs():
    rates = Rates(load_bytes_per_s=1.0, prefill_tokens_per_s=1.0)
    assert rates.prefill_s(0, 512) == 512
    rates.saw_slice(512, 0, 0.1)
    assert rates.measured
    assert rates.prefill_s(0, 512) == pytest.approx(0.1)


def test_costs_are_remembered_between_starts(tmp_path):
    file = RatesFile(tmp_path)
    for timed in learned().slices:
        file.of(NAME).saw_slice(*timed)
    file.save()
    again = RatesFile(tmp_path).of(NAME)
    assert again.measured
    assert again.prefill_s(0, 5000) == file.of(NAME).prefill_s(0, 5000)


@pytest.mark.parametrize("slices", ["no list", [[0, 0, 1.0]], [[1, 2]], [["x", 0, 1.0]], 7])
def test_rates_that_make_no_sense_are_not_used(tmp_path, slices):
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {NAME.hex(): {"slices": slices}}}))
    assert RatesFile(tmp_path).of(NAME).load_bytes_per_s == Rates().load_bytes_per_s


def test_what_seemed_too_slow_to_load_is_tried_again():
    """Else a disk that was slow once would never be measured again."""
    rates = Rates(load_bytes_per_s=1e6)
    for _ in range(400):
        rates.declined_load()
    assert rates.load_bytes_per_s > 1e9


class DisturbedSeconds(float):
    """While they are looked at, the engine measures another slice."""

    def __sub__(self, other):
        self.costs.add(64, 0, 0.1)
        return float(self) - other


def test_costs_are_read_while_the_engine_adds_to_them():
    costs = SliceCosts([(64, 0, 0.1)])
    seconds = DisturbedSeconds(0.1)
    seconds.costs = costs
    costs.add(64, 0, seconds)
    assert costs.seconds(64) == 0.1
    assert len(costs.slices) > 2, "it was disturbed"
