"""Batch operations one by one, and everything that a batch refuses."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from keepwarm.errors import BadInput, CacheMismatch, UnsupportedCache
from keepwarm.kv.batch import (
    LeftPadding,
    RightPadding,
    TwoSidedPadding,
    batch_size,
    can_batch,
    empty_batch,
    extend,
    extract,
    filter_rows,
    finalize,
    merge,
    prepare,
    trim,
)
from keepwarm.kv.buffers import dynamic_roll
from keepwarm.kv.codec import encode
from keepwarm.kv.kinds import is_empty, token_count
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache


def labelled(*rows):
    """K and V whose rows carry these numbers, one list a sequence."""
    k = mx.array(rows, mx.float32)[:, None, :, None]
    return k, -k


def kv(*numbers):
    cache = KVCache()
    if numbers:
        cache.update_and_fetch(*labelled(numbers))
    return cache


def filled(cache, n, dtype=mx.float32, values=None, heads=2, width=64, n_batch=1):
    shape = (n_batch, heads, n, width)
    k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i in (0, 1))
    cache.update_and_fetch(k.astype(dtype), v.astype(values or dtype))
    return cache


def arrays(*shapes, dtype=mx.float32):
    cache = ArraysCache(len(shapes))
    for i, shape in enumerate(shapes):
        cache[i] = None if shape is None else mx.ones((1, *shape), dtype)
    return cache


def held(cache):
    keys, values = cache.keys_and_values()
    assert mx.array_equal(keys, -values)
    return [int(x) for x in keys[0, 0, :, 0].tolist()]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32, mx.uint8, mx.int64])
@pytest.mark.parametrize("width", [3, 4, 8])
@pytest.mark.parametrize("shifts", [(7, -2), (0, 0), (13, -15)])
def test_dynamic_roll_moves_each_row_by_its_own_shift(dtype, width, shifts):
    """Rows of whole 8-byte words are rolled as such; the values are the same."""
    x = mx.arange(2 * 3 * 10 * width).reshape(2, 3, 10, width).astype(dtype)
    rolled = dynamic_roll(x, mx.array(shifts)[:, None], axis=2)
    assert rolled.dtype == dtype
    for row, shift in enumerate(shifts):
        assert mx.array_equal(rolled[row], mx.roll(x[row], shift, axis=1))


def test_dynamic_roll_of_the_last_axis_moves_single_numbers():
    x = mx.arange(8).reshape(2, 4)
    assert dynamic_roll(x, mx.array([1, -2]), axis=1).tolist() == [[3, 0, 1, 2], [6, 7, 4, 5]]


def test_dynamic_roll_refuses_shifts_that_do_not_fit():
    """mlx-lm would broadcast them over heads or fail without a word about shifts."""
    with pytest.raises(CacheMismatch, match="axes of shifts is 1, expected 2"):
        dynamic_roll(mx.zeros((2, 1, 4, 1)), mx.array([1, 2]), axis=2)


def rows_of(batch):
    return [held(extract(batch, i)[0]) for i in range(batch_size(batch))]


def test_left_padding_is_masked_and_left_out_of_every_row():
    """Prompts of 3, 1 and 4 tokens."""
    batch = empty_batch([KVCache()], 3)
    prepare(batch, LeftPadding((1, 3, 0)))
    (cache,) = batch
    mask = cache.make_mask(4)
    cache.update_and_fetch(*labelled([-1, 1, 3, 5], [-1, -1, -1, 7], [2, 6, 8, 9]))
    assert cache.offset.tolist() == [3, 1, 4]
    assert mask[:, 0, 3].tolist() == [
        [False, True, True, True],
        [False, False, False, True],
        [True, True, True, True],
    ]
    assert rows_of(batch) == [[1, 3, 5], [7], [2, 6, 8, 9]]
    with pytest.raises(UnsupportedCache, match="Layer 0: left padding can only be added to an emp"):
        prepare(batch, LeftPadding((0, 0, 1)))


def test_right_padding_becomes_left_and_what_came_before_stays_put():
    batch = merge([[kv(1)], [kv(2)], [kv(3)]])
    prepare(batch, RightPadding((3, 2, 1)))
    batch[0].update_and_fetch(*labelled([11, 12, 13], [21, 22, -1], [31, -1, -1]))
    finalize(batch)
    assert batch[0].left_padding.tolist() == [0, 1, 2]
    assert rows_of(batch) == [[1, 11, 12, 13], [2, 21, 22], [3, 31]]


def test_rows_are_merged_extended_filtered_and_extracted_with_their_own_tokens():
    """Of any lengths, empty ones too; donors and batch do not change each other."""
    donors = [[kv(1, 2)], [kv()], [kv(3, 4, 5)]]
    batch = merge(donors)
    assert type(batch[0]) is BatchKVCache
    extend(batch, merge([[kv(6, 7, 8, 9)], [kv(10)]]))
    assert batch[0].offset.tolist() == [2, 0, 3, 4, 1]
    batch[0].update_and_fetch(*labelled([11], [12], [13], [14], [15]))
    assert rows_of(batch) == [[1, 2, 11], [12], [3, 4, 5, 13], [6, 7, 8, 9, 14], [10, 15]]
    filter_rows(batch, [2, 0, 0])
    assert batch[0].left_padding.tolist() == [0, 1, 1], "padding that all have goes too"
    (row,) = extract(batch, 1)
    assert (type(row), row.offset, row.keys.shape) == (KVCache, 3, (1, 1, 3, 1))
    row.update_and_fetch(*labelled([16]))
    batch[0].update_and_fetch(*labelled([17], [18], [19]))
    assert held(row) == [1, 2, 11, 16]
    assert rows_of(batch) == [[3, 4, 5, 13, 17], [1, 2, 11, 18], [1, 2, 11, 19]]
    assert [held(donors[i][0]) for i in (0, 2)] == [[1, 2], [3, 4, 5]]
    assert token_count(donors[1]) is None


@pytest.mark.parametrize(
    "fresh",
    [
        KVCache(),
        RotatingKVCache(8),
        ArraysCache(2),
        QuantKVCache(32, 4),
        CacheList(ArraysCache(3), KVCache()),
    ],
)
def test_a_row_of_an_empty_batch_is_a_fresh_cache(fresh):
    """mlx-lm raises TypeError there."""
    batch = empty_batch([fresh], 3)
    assert batch_size(batch) == 3
    (row,) = extract(batch, 2)
    assert type(row) is type(fresh)
    assert is_empty(row)
    for name in ("max_size", "keep", "group_size", "bits"):
        assert getattr(row, name, None) == getattr(fresh, name, None)


def test_a_trimmed_row_joins_with_the_tokens_it_still_has():
    """The rows of forgotten tokens are still in the donor's buffer."""
    donor = [kv(1, 2, 3, 4)]
    trim(donor, 2)
    assert held(extract(merge([donor, [kv(5, 6, 7)]]), 0)[0]) == [1, 2]


def window(size, **how):
    return filled(RotatingKVCache(size, **how), 3)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (filled(KVCache(), 3), filled(KVCache(), 3, dtype=mx.bfloat16), "of keys is .*bfloat16"),
        (filled(KVCache(), 3), filled(KVCache(), 3, heads=1), "of keys is .*1, 64.*2, 64"),
        (filled(KVCache(), 3), filled(KVCache(), 3, width=32), "of keys is .*2, 32.*2, 64"),
        (window(8), window(9), "the max_size is 9, expected 8"),
        (window(8), window(8, keep=4), "the keep is 4, expected 0"),
        (QuantKVCache(32), QuantKVCache(64), "the group_size is 64, expected 32"),
        (QuantKVCache(32, 4), QuantKVCache(32, 8), "the bits is 8, expected 4"),
        (kv(1), RotatingKVCache(8), "the class is RotatingKVCache, expected KVC"),
        (kv(1), QuantKVCache(), "the class is QuantizedKVCache, expected KVC"),
        (arrays((2,)), arrays((3,)), r"\(dtype, shape\) of state0 is .*\(3,\).*\(2,\)"),
        (arrays((2,)), arrays((2,), dtype=mx.float16), r"\(dtype, shape\) of state0 is .*float16"),
        (arrays((2,)), arrays((2,), (2,)), "the size is 2, expected 1"),
        (arrays((2,)), ArraysCache(1), "the state is empty, expected filled"),
        (ArraysCache(1), arrays((2,)), "the state is filled, expected empty"),
    ],
)
def test_neighbours_that_differ_are_refused_by_layer(first, second, message):
    """mlx-lm takes the first row's dtype for all, loses `keep`, and says nothing."""
    rows = [[CacheList(kv(1), cache)] for cache in (first, second)]
    with pytest.raises(CacheMismatch, match=rf"Row 1, layer 0\.1: .*{message}"):
        merge(rows)
    if can_batch(rows[1]):
        with pytest.raises(CacheMismatch, match=r"Row 1, layer 0\.1: "):
            extend(merge(rows[:1]), merge(rows[1:]))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (ChunkedKVCache(8), "ChunkedKVCache cannot join a batch: this class has no batched form"),
        (ConcatenateKVCache(), "ConcatenateKVCache cannot join a batch: this class has no"),
        (RotatingKVCache(8, keep=4), "RotatingKVCache .* would lose its first 4 tokens"),
        (filled(KVCache(), 2, values=mx.float16), "convert its values to the dtype of its keys"),
        (arrays((2,), None), "some of its arrays are missing"),
        (arrays(None, (2,)), "some of its arrays are missing"),
        (BatchKVCache([0]), "BatchKVCache cannot join a batch: it is already a batch"),
        (merge([[arrays((2,))], [arrays((2,))]])[0], "ArraysCache .* it is already a batch"),
        (filled(KVCache(), 2, n_batch=2), "KVCache cannot join a batch: it holds several seq"),
        (filled(RotatingKVCache(8), 2, n_batch=3), "RotatingKVCache .* it holds several sequences"),
    ],
)
def test_what_cannot_join_a_batch_is_refused_by_name(cache, message):
    """What mlx-lm would lose, turn or drop in silence."""
    assert not can_batch([kv(1), cache])
    with pytest.raises(UnsupportedCache, match=f"Row 0, layer 1: .*{message}"):
        merge([[kv(1), cache], [kv(1), cache]])


def test_what_can_join_a_batch():
    fresh = [KVCache(), RotatingKVCache(8), QuantKVCache(), ArraysCache(2)]
    assert can_batch([*fresh, CacheList(*fresh)])
    assert not can_batch([CacheList(KVCache(), ChunkedKVCache(8))])


def test_batches_of_different_models_do_not_join():
    with pytest.raises(CacheMismatch, match="Row 1: the number of layers is 2, expected 1"):
        merge([[kv(1)], [kv(1), kv(1)]])
    with pytest.raises(CacheMismatch, match="Row 1: the number of layers is 1, expected 2"):
        extend(merge([[kv(1), kv(1)]]), merge([[kv(1)]]))
    with pytest.raises(CacheMismatch, match="Row 1, layer 0: the class is KVCache"):
        extend(merge([[kv(1)]]), [kv(1)])
    with pytest.raises(UnsupportedCache, match="at least one sequence"):
        merge([])


def test_rows_that_are_not_there_are_refused():
    batch = merge([[kv(1)], [kv(2)]])
    for wanted in ([], [2], [0, -1]):
        with pytest.raises(CacheMismatch, match="some of 0 to 1"):
            filter_rows(batch, wanted)
    for row in (2, -1):
        with pytest.raises(CacheMismatch, match="one of 0 to 1"):
            extract(batch, row)
    with pytest.raises(CacheMismatch, match="The padding: the number of rows is 3, expected 2"):
        prepare(batch, RightPadding((1, 2, 3)))
    with pytest.raises(CacheMismatch, match="The padding: the number of rows is 1, expected 2"):
        prepare(empty_batch([KVCache()], 2), LeftPadding((1,)))
    assert [held(extract(batch, i)[0]) for i in range(2)] == [[1], [2]]


@pytest.mark.parametrize("fresh", [KVCache(), RotatingKVCache(8), ArraysCache(1), QuantKVCache(32)])
def test_between_prepare_and_finalize_a_batch_can_only_be_fed(fresh):
    """Its padding stands on the right, and every other operation would take it for real."""
    batch, other = empty_batch([fresh], 2), empty_batch([fresh], 2)
    prepare(batch, RightPadding((2, 1)))
    for operation in (
        lambda: filter_rows(batch, [0]),
        lambda: extend(batch, other),
        lambda: extend(other, batch),
        lambda: extract(batch, 0),
    ):
        with pytest.raises(UnsupportedCache, match="between prepare and finalize"):
            operation()
    with pytest.raises(UnsupportedCache, match="No tokens were run since prepare"):
        finalize(batch)


@pytest.mark.parametrize("fresh", [KVCache(), RotatingKVCache(8), ArraysCache(1), QuantKVCache(32)])
def test_rows_do_not_leave_or_join_before_announced_left_padding_was_fed(fresh):
    """mlx-lm's common end would become negative."""
    batch = empty_batch([fresh], 2)
    prepare(batch, LeftPadding((1, 3)))
    for operation in (
        lambda: filter_rows(batch, [0]),
        lambda: extend(batch, empty_batch([fresh], 1)),
        lambda: extend(empty_batch([fresh], 1), batch),
    ):
        with pytest.raises(UnsupportedCache, match="Layer 0: feed the left-padded slice first"):
            operation()


@pytest.mark.parametrize("make", [list, tuple, iter, mx.array, np.array])
def test_rows_are_kept_by_any_list_or_array(make):
    batch = merge([[kv(1)], [kv(2)], [kv(3, 4)]])
    filter_rows(batch, make([0, 2, 2]))
    assert [held(extract(batch, i)[0]) for i in range(3)] == [[1], [3, 4], [3, 4]]


@pytest.mark.parametrize(
    "keep", [[0.0], [True, False], mx.array([0.5]), np.array([True, False]), mx.array(0), [[0]]]
)
def test_rows_are_kept_by_whole_numbers_only(keep):
    batch = merge([[kv(1)], [kv(2)]])
    with pytest.raises(BadInput, match="The rows to keep must be a list of whole numbers, not"):
        filter_rows(batch, keep)


@pytest.mark.parametrize("padding", [LeftPadding, RightPadding])
def test_padding_counts_tokens(padding):
    """An array is as good as a tuple."""
    assert padding([1, 0]) == padding(mx.array([1, 0])) == padding(np.array([1, 0]))
    for wrong in ([0, -1], mx.array([0, -1])):
        with pytest.raises(BadInput, match=r"Padd.* cannot be negative, but are \[0, -1\]"):
            padding(wrong)
    with pytest.raises(BadInput, match=r"Padd.* are missing; give one for each row"):
        padding(())
    for wrong in ([0, 0.5], mx.array([0, 0.5]), [True], 3):
        with pytest.raises(BadInput, match="must be a list of whole numbers, not"):
            padding(wrong)


def test_padding_on_both_sides_must_agree():
    """A row of padding alone is a row without tokens."""
    none = TwoSidedPadding(LeftPadding((2, 0)), RightPadding((2, 4)))
    batch = empty_batch([KVCache()], 2)
    prepare(batch, none)
    filled(batch[0], 4, n_batch=2)
    finalize(batch)
    assert batch[0].offset.tolist() == [0, 4]
    with pytest.raises(BadInput, match="Row 1 has 3 tokens of left padding and a length of 2"):
        TwoSidedPadding(LeftPadding((0, 3)), RightPadding((4, 2)))
    with pytest.raises(CacheMismatch, match="Right padding: the number of rows is 1, expected 2"):
        TwoSidedPadding(LeftPadding((0, 1)), RightPadding((4,)))


ROW_CACHES = [KVCache(), RotatingKVCache(8), QuantKVCache(32)]


@pytest.mark.parametrize("fresh", ROW_CACHES)
@pytest.mark.parametrize("filled_before", [True, False])
def test_a_slice_is_as_wide_as_announced(fresh, filled_before):
    """mlx-lm would take padding for tokens, or tokens for padding."""
    for padding in (RightPadding((3, 1)), RightPadding((3, 3))):
        for n_fed in (2, 4, 0):
            batch = empty_batch([fresh], 2)
            if filled_before:
                filled(batch[0], 2, n_batch=2)
            prepare(batch, padding)
            if n_fed:
                filled(batch[0], n_fed, n_batch=2)
            said = (
                f"{n_fed} tokens a row since prepare, which announced 3; build"
                if n_fed
                else "no tokens"
            )
            with pytest.raises(UnsupportedCache, match=f"got {said}|No tokens were run"):
                finalize(batch)


@pytest.mark.parametrize("fresh", ROW_CACHES)
def test_a_left_padded_slice_is_not_shorter_than_its_padding(fresh):
    batch = empty_batch([fresh], 2)
    prepare(batch, LeftPadding((3, 0)))
    filled(batch[0], 2, n_batch=2)
    with pytest.raises(
        UnsupportedCache, match=r"got 2 tokens a row .* announced at least 3; build"
    ):
        finalize(batch)


@pytest.mark.parametrize("fresh", ROW_CACHES)
@pytest.mark.parametrize("padding", [LeftPadding((1, 0)), RightPadding((2, 2))])
def test_a_batch_is_prepared_once_for_a_slice(fresh, padding):
    """mlx-lm adds the left padding of both calls."""
    batch = empty_batch([fresh], 2)
    prepare(batch, padding)
    with pytest.raises(UnsupportedCache, match="Layer 0 is prepared already; run the padded"):
        prepare(batch, padding)
    filled(batch[0], 2, n_batch=2)
    finalize(batch)
    prepare(batch, RightPadding((2, 1)))
    with pytest.raises(UnsupportedCache, match="between prepare and finalize"):
        prepare(batch, RightPadding((2, 1)))


def test_rows_that_leave_or_join_end_an_announcement():
    """Left padding needs no finalize, and who calls it later is not told of a wrong slice."""
    batch = empty_batch([KVCache()], 2)
    prepare(batch, LeftPadding((3, 1)))
    filled(batch[0], 4, n_batch=2)
    filter_rows(batch, [0])
    extend(batch, merge([[filled(KVCache(), 5)]]))
    finalize(batch)
    assert batch[0].offset.tolist() == [1, 5]


@pytest.mark.parametrize("cls", [KVCache, ConcatenateKVCache, QuantKVCache])
def test_trim_forgets_for_good(cls):
    """The next token stands where the forgotten ones stood."""
    cache, straight = filled(cls(), 10), cls()
    trim([cache], 4)
    assert cache.offset == 6
    filled(straight, 6)
    for c in (cache, straight):
        keys, _ = filled(c, 1).keys_and_values()
        rows = keys if isinstance(keys, mx.array) else keys[0]
        assert rows.shape[2] == 7
    assert token_count([cache]) == 7


def test_trim_changes_all_layers_or_none():
    """mlx-lm answers 0 instead; a full window, a state and a slid chunk cannot forget."""
    chunked = ChunkedKVCache(4)
    filled(chunked, 6).maybe_trim_front()
    for stubborn, n in [
        (filled(RotatingKVCache(8), 9), 2),
        (filled(RotatingKVCache(16, keep=4), 9), 2),
        (arrays((2,)), 2),
        (chunked, 2),
        (kv(1, 2), 3),
    ]:
        first = kv(1, 2, 3, 4)
        with pytest.raises(UnsupportedCache, match=f"Layer 1: .* cannot forget {n} tokens"):
            trim([first, stubborn], n)
        assert first.offset == 4
    young = [kv(1, 2, 3), filled(RotatingKVCache(8), 3), CacheList(kv(1, 2, 3))]
    trim(young, 2)
    assert token_count(young) == 1


@pytest.mark.parametrize(("n", "why"), [(-1, "cannot be negative"), (1.5, "whole numbers")])
def test_trim_counts_tokens(n, why):
    """mlx-lm would move the offset past the rows."""
    caches = [kv(1, 2, 3)]
    with pytest.raises(BadInput, match=f"The tokens to forget .*{why}"):
        trim(caches, n)
    assert token_count(caches) == 3


def test_trim_is_for_single_sequences():
    with pytest.raises(UnsupportedCache, match="Layer 0 is a batch; extract a row and trim that"):
        trim(merge([[kv(1, 2)], [kv(3)]]), 1)


def test_a_quantised_row_joins_as_what_it_is():
    """Mlx-lm's own class too, which has no merge."""
    batch = merge([[filled(QuantizedKVCache(), 3)], [filled(QuantKVCache(), 5)]])
    assert type(batch[0]) is BatchQuantizedKVCache
    assert batch[0].offset.tolist() == [3, 5]


# Windows: what a padded slice may not push out, and what mlx-lm's mask gets wrong.


def ring(*numbers):
    """A window of eight that was fed these numbers in one slice."""
    cache = RotatingKVCache(8)
    cache.update_and_fetch(*labelled(numbers))
    return cache


def in_window(cache):
    """What a single window still holds, oldest first."""
    return [int(x) for x in encode(cache).tensors["keys"][0, 0, :, 0].tolist()]


def test_a_row_without_new_tokens_is_kept_out_of_a_padded_slice_of_a_window():
    """mlx-lm would push one of its tokens out for padding; it steps aside instead."""
    batch = merge([[ring(*range(1, 9))], [ring(11)]])
    with pytest.raises(UnsupportedCache, match=r"Layer 0: .* a row has no tokens; filter that row"):
        prepare(batch, RightPadding((0, 2)))
    aside = extract(batch, 0)
    filter_rows(batch, [1])
    batch[0].update_and_fetch(*labelled([12, 13]))
    extend(batch, merge([aside]))
    assert [in_window(extract(batch, i)[0]) for i in range(2)] == [[11, 12, 13], [*range(1, 9)]]


def test_defect_a_row_without_new_tokens_takes_padding_into_its_window():
    """What mlx-lm does; when this fails, the refusal above can be deleted."""
    (cache,) = merge([[ring(*range(1, 9))], [ring(11)]])
    cache.prepare(lengths=[0, 2], right_padding=[2, 0])
    cache.update_and_fetch(*labelled([-1, -1], [12, 13]))
    cache.finalize()
    assert in_window(cache.extract(0)) == [-1, *range(2, 9)]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_slice_after_a_turned_ring_sees_all_of_a_short_row_only_if_prepared(prepared):
    """mlx-lm's mask forgets that ordering the ring drops a row; `prepare` orders it first."""
    batch = merge([[ring(1)], [ring(*range(11, 19))]])
    (cache,) = batch
    cache.update_and_fetch(*labelled([2], [19]))
    if prepared:
        prepare(batch, RightPadding((2, 2)))
    mask = cache.make_mask(2)[0, 0, 1].tolist()
    keys, _ = cache.update_and_fetch(*labelled([3, 4], [20, 21]))
    seen = [int(x) for x, shown in zip(keys[0, 0, :, 0].tolist(), mask, strict=True) if shown]
    assert sorted(seen) == ([1, 2, 3, 4] if prepared else [2, 3, 4])
