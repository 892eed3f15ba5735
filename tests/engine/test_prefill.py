"""Prefill: where slices end, where checkpoints are kept, and how long slices may be."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.cache.restore.rates import SliceCosts
from keepwarm.engine.prefill import (
    FIRST_SLICE,
    MIN_SLICE,
    SHORT_SLICE,
    Prefill,
    SliceSizer,
    end_of_slice,
)
from tests.kit.compare import TOLERANCE
from tests.kit.models import LAYER_KINDS
from tests.kit.runs import FedCounter, cold, prompt_of


class PrefillRun:
    """A prefill run to its end, in slices of at most `at_most` tokens."""

    def __init__(self, module, n_tokens, at_most, *, n_done=0, **options):
        self.counter = FedCounter(module)
        self.ends: list[tuple[int, bool]] = []
        caches = make_prompt_cache(module)
        self.tokens = prompt_of(n_tokens)
        self.prefill = Prefill(self.counter, self.tokens, caches, n_done, **options)
        self.logits = None
        while self.logits is None:
            self.logits = self.prefill.feed(at_most)
            self.ends.append((self.prefill.n_done, self.prefill.is_at_point))


@pytest.mark.parametrize("architecture", [*LAYER_KINDS, "llama4", "deepseek_v41"])
@pytest.mark.parametrize("at_most", [7, 300])
def test_slices_change_nothing(tiny_model, architecture, at_most):
    """Whatever the slices, the logits after the prompt are those of a cold run."""
    module = tiny_model(architecture)
    n_tokens = 60 if at_most == 7 else 290
    read = PrefillRun(module, n_tokens, at_most, points=[n_tokens - 1])
    run = cold(module, read.tokens, 1)
    logprobs = read.logits[0] - read.logits[0].logsumexp()
    assert abs(logprobs - run.logprobs[0]).max().item() <= 1.7 * TOLERANCE
    assert read.counter.fed == n_tokens
    assert read.prefill.n_done == n_tokens


def test_rows_are_prefilled_in_the_longest_slices(tiny_model):
    read = PrefillRun(tiny_model("llama"), 700, 300)
    assert read.ends == [(300, False), (600, False), (699, False), (700, False)]


def test_the_last_token_goes_with_a_short_slice(tiny_model):
    """One forward pass less; after a long slice it is fed alone, to save logits."""
    assert PrefillRun(tiny_model("llama"), SHORT_SLICE, 300).counter.shapes == [(1, SHORT_SLICE)]
    longer = PrefillRun(tiny_model("llama"), SHORT_SLICE + 1, 300)
    assert longer.counter.shapes == [(1, SHORT_SLICE), (1, 1)]


def test_slices_of_states_and_windows_end_where_they_are_kept(tiny_model):
    """At points, and where the device wants it: the end of a block means nothing to a state."""
    read = PrefillRun(tiny_model("mamba2"), 1600, 600, points=[100, 700, 1599])
    expected = [(100, True), (700, True), (1300, False), (1599, True), (1600, False)]
    assert read.ends == expected


def test_a_point_that_is_added_during_prefill(tiny_model):
    """A request waits for the first 40 tokens: the slice ends there, with a checkpoint."""
    module = tiny_model("llama")
    prefill = Prefill(module, prompt_of(100), make_prompt_cache(module), 0)
    prefill.feed(20)
    assert not prefill.is_at_point
    prefill.add_point(40)
    prefill.add_point(10)  # already prefilled
    prefill.feed(100)
    assert (prefill.n_done, prefill.is_at_point) == (40, True)
    assert prefill.feed(100) is not None


@pytest.mark.parametrize(
    ("start", "n_tokens", "end"),
    [
        (0, 0, 1),  # some progress, always
        (0, 1, 1),
        (0, 64, 64),
        (100, 512, 512),  # whole blocks
        (100, 128, 228),  # none is completed
        (200, 128, 256),
        (5000, 2048, 6912),
        (7000, 800, 8000 - 1),  # a rest of a quarter more is taken along; then the last token
        (7950, 16, 7966),
        (7980, 16, 8000),
    ],
)
def test_where_slices_end(start, n_tokens, end):
    assert end_of_slice(start, n_tokens, 8000, whole_blocks=True) == end


# Milliseconds by tokens of a slice, as measured on an H200 with the shape of Llama-8B.
FLAT_THEN_STEEP = {1: 15, 16: 23, 128: 34, 256: 42, 512: 65, 1024: 121, 2048: 231}


def costs_of(milliseconds: dict[int, float]) -> SliceCosts:
    return SliceCosts([(n, 0, ms / 1000) for n, ms in milliseconds.items()])


def sizer_with(step_s: float, **options: float) -> SliceSizer:
    sizer = SliceSizer(**options)
    for _ in range(5):
        sizer.record_step(step_s)
    return sizer


def test_beside_answers_a_slice_is_the_shortest_that_is_cheap_enough():
    """Not the shortest of all, where that costs nearly as much as a long one."""
    costs, sizer = costs_of(FLAT_THEN_STEEP), sizer_with(0.02, max_slice=2048, gap_s=0.25)
    assert sizer.slice_tokens(costs, 0, decoding=True) == 1024
    assert sizer.slice_tokens(costs, 0, decoding=False) == 2048


def test_a_slice_is_no_longer_than_an_answer_may_wait():
    costs = costs_of({1: 50, 16: 140, 64: 540, 512: 4300})
    steps = sizer_with(0.05)
    n_tokens = steps.slice_tokens(costs, 0, decoding=True)
    assert n_tokens == 24
    assert costs.seconds(n_tokens) + 0.05 <= 8 * 0.05
    assert sizer_with(0.1).slice_tokens(costs, 0, decoding=True) == 64
    assert steps.slice_tokens(costs, 0, decoding=False) == 128  # within 1.5 s


def test_alone_a_slice_is_long_enough_to_be_cheap():
    """Two processor cores beside other work: every slice reads all weights, which takes 0.5 s."""
    costs = costs_of({n: 500 + 18 * n for n in (16, 32, 64, 128, 256, 512)})
    assert costs.seconds(48) < 1.5 < costs.seconds(64)
    assert SliceSizer().slice_tokens(costs, 0, decoding=False) == FIRST_SLICE
    slow = costs_of({n: 2 * (500 + 18 * n) for n in (16, 32, 64, 128, 256, 512)})
    n_tokens = SliceSizer().slice_tokens(slow, 0, decoding=False)
    assert n_tokens == 48
    assert slow.seconds(n_tokens) <= 2 * 1.5 < slow.seconds(64)


@pytest.mark.parametrize(
    ("rest", "n_tokens"), [(100, 100), (161, 161), (256, 256), (257, 128), (600, 128)]
)
def test_alone_the_last_part_of_a_prompt_is_not_divided(rest, n_tokens):
    """A turn of a conversation: a second slice would read all weights once more."""
    costs = costs_of({n: 100 + 10 * n for n in (16, 32, 64, 128, 256, 512)})
    assert sizer_with(0.05).slice_tokens(costs, 0, False, rest) == n_tokens
    assert sizer_with(0.05).slice_tokens(costs, 0, True, rest) < 100
    on_grid = sizer_with(0.05, on_grid=True)
    assert on_grid.slice_tokens(costs, 0, False, rest) == 128
    slow = costs_of({n: 200 + 20 * n for n in (16, 32, 64, 128, 256, 512)})
    assert slow.seconds(sizer_with(0.05).slice_tokens(slow, 0, False, rest)) <= 3


def test_a_long_context_makes_slices_shorter():
    slices = [
        (n, context, n / 1000 * (1 + context / 4096)) for n in (64, 128) for context in (0, 4096)
    ]
    costs, sizer = SliceCosts(slices), sizer_with(0.05)
    assert costs.seconds(128, 8192) == pytest.approx(3 * costs.seconds(128))
    assert sizer.slice_tokens(costs, 20_000, False) < sizer.slice_tokens(costs, 0, False)


def test_slices_grow_to_what_was_not_measured_by_at_most_twice():
    """A flat beginning promises much; it is tried step by step."""
    costs, sizer = costs_of({16: 30, 64: 30}), sizer_with(0.02, max_slice=2048, gap_s=0.25)
    tried = []
    for _ in range(5):
        tried.append(sizer.slice_tokens(costs, 0, decoding=True))
        costs.add(tried[-1], 0, 0.03 + tried[-1] / 8192)
    assert tried == [128, 256, 512, 1024, 1024]


@pytest.mark.parametrize(
    ("context", "n_tokens"), [(0, 1024), (1024, 1024), (2100, 972), (3000, 1096), (3071, 1025)]
)
def test_on_a_grid_slices_end_at_multiples_of_their_length(context, n_tokens):
    """A rest of less than a quarter is fed with the slice after it."""
    sizer = sizer_with(0.02, max_slice=2048, gap_s=0.25, on_grid=True)
    assert sizer.slice_tokens(costs_of(FLAT_THEN_STEEP), context, decoding=True) == n_tokens


def test_a_slice_that_a_graph_was_built_for_is_not_typical():
    costs, sizer = costs_of({512: 65}), SliceSizer(2048, on_grid=True)
    assert sizer.is_typical(costs, 1024, 0)  # the first of its length
    assert [sizer.is_typical(costs, 512, 4096) for _ in range(2)] == [False, True]
    assert SliceSizer().is_typical(costs, 512, 4096)


def test_a_slice_that_compiled_kernels_makes_no_other_shorter():
    """On a new machine the first one takes half a minute."""
    costs, sizer = SliceCosts(), SliceSizer(2048, on_grid=True)
    for context, seconds in ((0, 40.0), (128, 0.04)):
        n_tokens = sizer.slice_tokens(costs, context, decoding=False)
        assert n_tokens == 128
        if sizer.is_typical(costs, n_tokens, context):
            costs.add(n_tokens, context, seconds)
    assert sizer.slice_tokens(costs, 256, decoding=False) == 256


def test_the_first_slice_of_all_is_of_middling_length():
    assert SliceSizer().slice_tokens(SliceCosts(), 0, decoding=False) == FIRST_SLICE


def test_a_slow_slice_is_never_shorter_than_the_minimum():
    """However slow, a prompt goes on."""
    costs = costs_of({1: 9000, 512: 1e6})
    assert sizer_with(0.01).slice_tokens(costs, 0, decoding=True) == MIN_SLICE
    assert sizer_with(0.01).slice_tokens(costs, 0, decoding=False) == MIN_SLICE
