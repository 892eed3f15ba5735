"""Requests that do not fit wait or are refused; admitted ones take no more than estimated."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm import kv
from keepwarm.engine.admission import Admission, kv_bytes
from keepwarm.errors import InsufficientResources
from tests.kit.models import LAYER_KINDS
from tests.kit.runs import prefill, prompt_of

LIMIT = 1000


@pytest.fixture
def admission():
    return Admission(LIMIT)


# Bytes from a layout.


@pytest.mark.parametrize("name", [*LAYER_KINDS, "llama4", "deepseek_v41"])
def test_a_cache_takes_no_more_than_foretold(tiny_model, name):
    """Buffers with their room to grow, measured on the real caches."""
    model = tiny_model(name)
    layout = kv.probe(model, kv.make_caches(model))
    for n_tokens in (1, 100, 600):
        caches = prefill(model, kv.make_caches(model), prompt_of(n_tokens), step=256)
        taken = sum(a.nbytes for c in caches for a in arrays_of(c.state))
        assert taken <= kv_bytes(layout, n_tokens)
        if not any(leaf.has_variable_tensors for leaf in layout.leaves()):
            assert kv_bytes(layout, n_tokens) <= 4 * taken or n_tokens == 1


def arrays_of(state):
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from arrays_of(part)


def layout_of(tiny_model, name, **options):
    model = tiny_model(name)
    return kv.probe(model, kv.make_caches(model, **options))


def test_rows_count_windows_are_bounded_states_are_constant(tiny_model):
    rows, windows, states = (layout_of(tiny_model, n) for n in ("llama", "gemma3_text", "mamba2"))
    assert kv_bytes(rows, 2048) == 8 * kv_bytes(rows, 256)
    assert kv_bytes(rows, 1048) == 5 * kv_bytes(rows, 256), "by whole blocks"
    assert kv_bytes(rows, 256) == 256 * 2 * 2 * 2 * 64 * 4  # layers, K and V, heads, width, fp32
    assert kv_bytes(states, 100_000) == kv_bytes(states, 1)
    growth = kv_bytes(windows, 4096) - kv_bytes(windows, 2048)
    assert growth == 2048 * 2 * 2 * 16 * 4  # the one global layer of four


def test_options_change_what_is_needed(tiny_model):
    plain = layout_of(tiny_model, "qwen3")
    assert kv_bytes(layout_of(tiny_model, "qwen3", kv_bits=8), 1024) < kv_bytes(plain, 1024) / 3
    bounded = layout_of(tiny_model, "qwen3", max_kv_size=256)
    assert kv_bytes(bounded, 100_000) == kv_bytes(plain, 512)


# Which requests are admitted.


def test_a_request_that_could_never_run_is_refused_with_numbers(admission):
    with pytest.raises(
        InsufficientResources, match=r"needs 9\.8 KiB for its keys .* may take 1000 B; shorten"
    ):
        admission.reserve(5000)
    with pytest.raises(InsufficientResources):
        admission.reserve(501)
    assert admission.reserve(500) is not None


def test_one_that_runs_alone_needs_its_own_caches_only(admission):
    lease = admission.reserve(1000, batch=None)
    assert admission.used_bytes == 1000
    assert admission.reserve(1, batch=None) is None
    lease.release()
    assert admission.used_bytes == 0


def test_joining_counts_twice_until_it_is_done(admission):
    lease = admission.reserve(400)
    assert admission.used_bytes == 800
    assert admission.reserve(200) is None
    lease.end_joining()
    assert admission.used_bytes == 400
    assert admission.reserve(200) is not None


def test_in_a_batch_every_row_is_as_long_as_the_longest(admission):
    """A short request beside a long one costs a long row, as long as there is room for these."""
    admission.reserve(400).end_joining()
    admission.reserve(10).end_joining()
    assert admission.used_bytes == 2 * 400
    apart = [admission.reserve(10) for _ in range(2)]
    assert [lease.batch for lease in apart] == [("batch", "", 4)] * 2
    assert admission.used_bytes == 2 * 400 + 2 * (10 + 10)


def test_a_long_request_beside_short_ones_does_not_wait_for_their_end(admission):
    for _ in range(4):
        admission.reserve(10).end_joining()
    long = admission.reserve(300)
    assert (long.batch, admission.used_bytes) == (("batch", "", 9), 40 + 2 * 300)
    long.end_joining()
    assert admission.reserve(20).batch == "batch", "the first ones' batch is as it was"
    assert admission.reserve(280).batch == ("batch", "", 9)


def test_several_answers_are_as_many_rows(admission):
    """They come from one prefill, so one cache joins."""
    lease = admission.reserve(100, n_rows=4)
    assert admission.used_bytes == 4 * 100 + 100
    lease.end_joining()
    admission.reserve(150).end_joining()
    assert admission.used_bytes == 5 * 150
    with pytest.raises(InsufficientResources):
        admission.reserve(100, n_rows=10)


def test_batches_do_not_pad_each_other(admission):
    admission.reserve(400, batch="plain").end_joining()
    admission.reserve(10, batch="quantised").end_joining()
    admission.reserve(10, batch=None)
    assert admission.used_bytes == 420


def test_a_lease_is_released_once(admission):
    first, second = admission.reserve(100), admission.reserve(100)
    for _ in range(3):
        first.release()
    assert admission.used_bytes == 200
    second.release()
    assert admission.used_bytes == 0


def test_an_answer_may_grow_while_there_is_room(admission):
    first, second = admission.reserve(200), admission.reserve(100)
    first.end_joining()
    second.end_joining()
    assert second.grow(300)
    assert admission.used_bytes == 600
    assert not first.grow(701), "apart too: 1,001"
    assert (first.n_bytes, first.batch, admission.used_bytes) == (200, "batch", 600)
    assert first.grow(100)  # it has that already
    assert first.n_bytes == 200
    assert first.grow(501), "in a batch apart, because two padded rows are 1,002"
    assert (first.batch, second.batch) == (("batch", "", 9), "batch")
    assert admission.used_bytes == 801


def test_requests_of_one_key_leave_memory_to_others(admission):
    """Also as they grow. One that is its key's only one may take all; without keys nothing is
    left."""
    first, second = (admission.reserve(300, caller="other") for _ in range(2))
    assert first is not None
    assert second is None, "one row, and two caches that join, are 900 of 750"
    first.end_joining()
    assert admission.reserve(300, caller="other") is None
    second = admission.reserve(100, caller="other")
    second.end_joining()
    mine = admission.reserve(100, batch=None, caller="mine")
    assert not second.grow(451), "751 of 750"
    mine.release()
    assert second.grow(451), "nobody else is there"
    second.release()
    assert first.grow(1000)
    first.release()
    for _ in range(3):
        admission.reserve(200).end_joining()
    assert admission.reserve(200) is not None


def test_a_short_request_beside_another_keys_long_one_joins_a_batch_of_its_own_key(admission):
    """Where its row would be as long as the long one; what is as long as that waits."""
    admission.reserve(450, caller="other").end_joining()
    assert admission.reserve(450, caller="other") is None
    mine = admission.reserve(150, caller="mine")
    assert (mine.batch, admission.used_bytes) == (("batch", "mine", 8), 450 + 2 * 150)
    mine.end_joining()
    theirs = admission.reserve(140, caller="other")
    assert (theirs.batch, admission.used_bytes) == (("batch", "other", 8), 450 + 150 + 2 * 140)


@given(st.lists(st.tuples(st.sampled_from("rjgx"), st.integers(1, 700)), max_size=40))
def test_the_budget_is_never_passed(steps):
    """Whatever comes, joins, grows and leaves; and at the end nothing is left over."""
    admission, leases = Admission(LIMIT), []
    for step, n in steps:
        if step == "r":
            try:
                lease = admission.reserve(n, caller=("", "one", "two")[n % 3])
            except InsufficientResources:
                assert 2 * n > LIMIT
                continue
            leases += [lease] if lease else []
        elif leases and step == "j":
            leases[n % len(leases)].end_joining()
        elif leases and step == "g":
            leases[n % len(leases)].grow(n)
        elif leases:
            leases.pop(n % len(leases)).release()
        assert admission.used_bytes <= LIMIT
    for lease in leases:
        lease.release()
    assert admission.used_bytes == 0
    assert admission.reserve(LIMIT // 2) is not None
