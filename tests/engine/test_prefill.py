"""Prefill: where slices end, where checkpoints are kept, and how long slices may be."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.engine.prefill import SHORT_SLICE, Prefill, SliceSizer
from tests.kit.compare import TOLERANCE
from tests.kit.models import ARCHITECTURES
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
            self.ends.append((self.prefill.n_done, self.prefill.is_at_cut))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("at_most", [7, 300])
def test_slices_change_nothing(tiny_model, architecture, at_most):
    """Whatever the slices, the logits after the prompt are those of a cold run."""
    module = tiny_model(architecture)
    n_tokens = 60 if at_most == 7 else 290
    read = PrefillRun(module, n_tokens, at_most, needs_checkpoints=True)
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


def test_slices_of_states_and_windows_end_at_blocks_and_cuts(tiny_model):
    """They can be restored only there: at blocks, messages, and before the last token."""
    read = PrefillRun(tiny_model("mamba2"), 600, 400, cuts=[100, 300], needs_checkpoints=True)
    expected = [(100, True), (256, False), (300, True), (512, False), (599, True), (600, False)]
    assert read.ends == expected


def test_rows_ignore_cuts(tiny_model):
    """Rows can be restored at any token."""
    assert PrefillRun(tiny_model("llama"), 60, 400, cuts=[10, 30]).ends == [(60, False)]


def test_a_cut_that_is_added_during_prefill(tiny_model):
    """A request waits for the first 40 tokens: the slice ends there, with a checkpoint."""
    module = tiny_model("llama")
    prefill = Prefill(module, prompt_of(100), make_prompt_cache(module), 0)
    prefill.feed(20)
    assert not prefill.is_at_cut
    prefill.add_cut(40)
    prefill.add_cut(10)  # already prefilled
    prefill.feed(100)
    assert (prefill.n_done, prefill.is_at_cut) == (40, True)
    assert prefill.feed(100) is not None


def test_a_slice_takes_as_long_as_some_decode_steps():
    sizer = SliceSizer(max_slice=512, steps_per_slice=5)
    for _ in range(20):
        sizer.record_slice(100, 1.0)  # 10 ms a token
        sizer.record_step(0.04)
    assert sizer.slice_tokens(decoding=True) == pytest.approx(5 * 0.04 / 0.01, abs=1)
    assert sizer.slice_tokens(decoding=False) == pytest.approx(0.5 / 0.01, abs=1)


def test_a_slice_has_bounds():
    slow, fast = SliceSizer(token_s=10.0), SliceSizer(token_s=1e-9, max_slice=512)
    assert slow.slice_tokens(decoding=True) == 16
    assert fast.slice_tokens(decoding=False) == 512
    fast.record_slice(1, 100.0)  # one token measures the weights' bandwidth
    assert fast.slice_tokens(decoding=False) == 512
