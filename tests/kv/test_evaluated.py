"""Joined blocks are arrays that any thread may use at once."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from keepwarm.kv.assembly import concatenate_cache_blocks


def elsewhere(array):
    """The sum of an array, computed by another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: array.sum().item()).result()


def lazy(n_tokens):
    return mx.ones((1, 2, n_tokens, 4)) * 3


def test_blocks_are_joined_along_the_tokens_and_evaluated():
    """Also where the blocks were not."""
    keys, values = concatenate_cache_blocks([lazy(5), lazy(2)], [lazy(5), lazy(2)])
    assert keys.shape == values.shape == (1, 2, 7, 4)
    assert elsewhere(keys) == elsewhere(values) == 3 * 2 * 7 * 4


def test_a_lazy_array_is_seen():
    """Control: what was not evaluated belongs to the thread that made it."""
    with pytest.raises(RuntimeError, match="no Stream"):
        elsewhere(mx.concatenate([lazy(5), lazy(2)], axis=2))
