"""Batches of sliding windows: rings, padding, masks, and what may be pushed out."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.batch import empty_batch, extend, extract, filter_rows, finalize, merge, prepare
from keepwarm.kv.codec import copy_caches, encode
from keepwarm.kv.padding import LeftPadding, RightPadding

WINDOW = 8


def labelled(*rows):
    """K and V whose rows carry these numbers, one list a sequence."""
    k = mx.array([list(row) for row in rows], mx.float32)[:, None, :, None]
    return k, -k


def window(*numbers, size=WINDOW):
    """A window that was fed these numbers in one slice."""
    cache = RotatingKVCache(size)
    if numbers:
        cache.update_and_fetch(*labelled(numbers))
    return cache


def held(cache):
    """What a single window still holds, oldest first, by the codec."""
    keys = encode(cache).tensors["keys"]
    return [int(x) for x in keys[0, 0, :, 0].tolist()]


def rows_of(batch):
    return [held(extract(batch, i)[0]) for i in range(batch[0].offset.shape[0])]


def sight(cache, *rows, **how):
    """Feed these rows; answer the numbers that each query of each row could see."""
    n = len(rows[0])
    mask = cache.make_mask(n, **how)
    keys, _ = cache.update_and_fetch(*labelled(*rows))
    found = keys[:, 0, :, 0].tolist()
    mask = mx.broadcast_to(mask, (len(rows), 1, n, len(found[0])))[:, 0].tolist()
    return [
        [sorted(int(x) for x, seen in zip(row, query, strict=True) if seen) for query in queries]
        for row, queries in zip(found, mask, strict=True)
    ]


def test_batch_rotating_temporal_order():
    """A rotated ring is saved and extracted oldest first."""
    batch = merge([[window(1, 2, 3)], [window(*range(11, 18))]])
    for step in range(4):
        batch[0].update_and_fetch(*labelled([30 + step], [40 + step]))
    assert batch[0].rotated
    assert [int(x) for x in batch[0].keys[1, 0, :, 0].tolist()] == [41, 42, 43, 14, 15, 16, 17, 40]
    expected = [[1, 2, 3, 30, 31, 32, 33], [14, 15, 16, 17, 40, 41, 42, 43]]
    assert rows_of(batch) == expected
    assert [extract(batch, i)[0].offset for i in range(2)] == [7, 11]
    assert rows_of(copy_caches(batch)) == expected
    assert rows_of(merge([extract(batch, 1), extract(batch, 0)])) == expected[::-1]
    extend(batch, merge([[window(51, 52)]]))
    assert rows_of(batch) == [*expected, [51, 52]]
    batch[0].update_and_fetch(*labelled([60], [70], [80]))
    assert rows_of(batch) == [expected[0] + [60], [*expected[1][1:], 70], [51, 52, 80]]


def test_batch_rotating_with_padding():
    """Window 2048, left padding [0, 5, 2], chunks, then decode."""
    size, padding, total = 2048, (0, 5, 2), 2500
    batch = empty_batch([RotatingKVCache(size)], 3)
    prepare(batch, LeftPadding(padding))
    (cache,) = batch
    tokens = [[-1] * n + list(range(total - n)) for n in padding]
    for start in range(0, total, 500):
        chunk = [row[start : start + 500] for row in tokens]
        cache.update_and_fetch(*labelled(*chunk))
    assert cache.offset.tolist() == [total - n for n in padding]
    for step in range(3):
        cache.update_and_fetch(*labelled(*([total + step] for _ in padding)))
    for row, n in enumerate(padding):
        (single,) = extract(batch, row)
        fed = [*range(total - n), *range(total, total + 3)]
        assert held(single) == fed[-size:]
        assert (single.offset, single.max_size, single.size()) == (len(fed), size, size)


def test_batch_rotating_masking():
    """A query sees its window, never padding, also when rotated."""
    batch = merge([[window(1)], [window(*range(11, 18))]])
    (cache,) = batch
    assert sight(cache, [2], [18]) == [[[1, 2]], [[*range(11, 19)]]]
    assert sight(cache, [3], [19]) == [[[1, 2, 3]], [[*range(12, 20)]]]
    assert cache.rotated
    prepare(batch, RightPadding((3, 3)))
    seen = sight(cache, [4, 5, 6], [20, 21, 22])
    assert seen[0] == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert seen[1] == [[*range(n - 7, n + 1)] for n in (20, 21, 22)]


def test_a_window_may_be_asked_for_less_than_it_holds():
    """`window_size` below `max_size`, while growing, on a rotated ring and for a slice."""
    batch = merge([[window(1, 2)], [window(*range(11, 18))]])
    (cache,) = batch
    for n in range(3, 9):
        seen = sight(cache, [n], [15 + n], window_size=4)
        assert seen == [[[*range(max(1, n - 3), n + 1)]], [[*range(12 + n, 16 + n)]]]
    prepare(batch, RightPadding((2, 2)))
    seen = sight(cache, [9, 10], [24, 25], window_size=4)
    assert seen == [[[6, 7, 8, 9], [7, 8, 9, 10]], [[21, 22, 23, 24], [22, 23, 24, 25]]]


def test_batch_rotating_right_padding_protection():
    """Padding behind a short row pushes none of its tokens out."""
    batch = merge([[window(*range(1, 9))], [window(*range(11, 19))], [window(21)]])
    prepare(batch, RightPadding((1, 6, 2)))
    batch[0].update_and_fetch(
        *labelled([9, -1, -1, -1, -1, -1], [19, 20, 21, 22, 23, 24], [22, 23, -1, -1, -1, -1])
    )
    finalize(batch)
    assert rows_of(batch) == [[*range(2, 10)], [*range(17, 25)], [21, 22, 23]]
    assert batch[0].offset.tolist() == [9, 14, 3]
    assert sight(batch[0], [10], [25], [24])[0] == [[*range(3, 11)]]
    assert rows_of(batch) == [[*range(3, 11)], [*range(18, 26)], [21, 22, 23, 24]]


def test_a_row_without_new_tokens_is_kept_out_of_a_padded_slice():
    """mlx-lm would push one of its tokens out for padding; it steps aside instead."""
    batch = merge([[window(*range(1, 9))], [window(11)]])
    with pytest.raises(UnsupportedCache, match=r"Layer 0: .* a row has no tokens; filter that row"):
        prepare(batch, RightPadding((0, 2)))
    aside = extract(batch, 0)
    filter_rows(batch, [1])
    batch[0].update_and_fetch(*labelled([12, 13]))
    extend(batch, merge([aside]))
    assert rows_of(batch) == [[11, 12, 13], [*range(1, 9)]]


def test_defect_a_row_without_new_tokens_takes_padding_into_its_window():
    """What mlx-lm does; when this fails, the refusal above can be deleted."""
    (cache,) = merge([[window(*range(1, 9))], [window(11)]])
    cache.prepare(lengths=[0, 2], right_padding=[2, 0])
    cache.update_and_fetch(*labelled([-1, -1], [12, 13]))
    cache.finalize()
    assert held(cache.extract(0)) == [-1, *range(2, 9)]


def test_defect_a_slice_after_a_turned_ring_hides_a_token():
    """mlx-lm's mask forgets that ordering the ring drops a row; `prepare` orders it first."""
    (cache,) = merge([[window(1)], [window(*range(11, 19))]])
    cache.update_and_fetch(*labelled([2], [19]))
    assert sight(cache, [3, 4], [20, 21])[0] == [[2, 3], [2, 3, 4]]


def test_a_padded_slice_of_one_token_is_refused():
    """Loudly, by mlx-lm, before anything is written."""
    batch = merge([[window(1)], [window(2)]])
    prepare(batch, RightPadding((3, 1)))
    batch[0].update_and_fetch(*labelled([3, 4], [5, -1]))
    with pytest.raises(RuntimeError, match="finalize"):
        batch[0].update_and_fetch(*labelled([6], [-1]))


def test_windows_shorter_than_the_longest_slice_are_cut_when_decoding_begins():
    """Memory is bounded by the window again after one token."""
    batch = merge([[window(*range(20))], [window(*range(30, 35))]])
    assert type(batch[0]) is BatchRotatingKVCache
    assert batch[0].keys.shape[2] == WINDOW
    prepare(batch, RightPadding((20, 20)))
    batch[0].update_and_fetch(*labelled(range(20, 40), range(35, 55)))
    assert batch[0].keys.shape[2] == WINDOW - 1 + 20
    batch[0].update_and_fetch(*labelled([40], [55]))
    assert batch[0].keys.shape[2] == WINDOW
    assert rows_of(batch) == [[*range(33, 41)], [*range(48, 56)]]
