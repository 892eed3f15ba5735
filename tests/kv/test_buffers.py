"""Uninitialized arrays, and arrays in host bytes."""

from itertools import islice

import mlx.core as mx
import numpy as np
import pytest

from keepwarm.errors import CacheMismatch
from keepwarm.kv import buffers
from keepwarm.kv.assembly import RowAllocation, allocate_rows
from keepwarm.kv.buffers import NAMES, FileArray, from_buffer, uninitialized_arrays
from keepwarm.kv.layout import TensorSpec


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (1, 2, 0, 4), (1, 8, 3000, 128)], ids=str)
def test_what_is_written_is_what_mlx_reads(dtype, shape):
    other = ((1, 2, 5, 64), mx.float32)
    first, (array, memory), last = uninitialized_arrays([other, (shape, dtype), other])
    assert (array.shape, array.dtype) == (shape, dtype)
    for neighbour in (first, last):
        neighbour.memory[...] = 7
    memory[...] = 1
    words = mx.view(array, mx.uint16) if dtype == mx.bfloat16 else array
    assert mx.all(words == 1).item()
    assert all(mx.all(neighbour.array == 7).item() for neighbour in (first, last))


def test_nothing_wanted_is_nothing_made():
    assert uninitialized_arrays([]) == []


def test_memory_is_not_touched_before_it_is_used():
    """The reason for it: 400 MB would otherwise be filled, page by page, in one thread."""
    import psutil

    before = psutil.Process().memory_info().rss
    (made,) = uninitialized_arrays([((1, 8, 100_000, 256), mx.bfloat16)])
    assert made.array.nbytes > 400e6
    assert psutil.Process().memory_info().rss - before < 50e6


def test_a_dtype_that_no_file_has_is_refused():
    with pytest.raises(CacheMismatch, match="the dtype"):
        uninitialized_arrays([((1,), mx.complex64)])


def test_the_room_after_the_rows_is_zeros():
    """A prompt cache saved by mlx-lm holds the room too: no old memory may be in it."""
    spec = TensorSpec((1, 2, None, 64), mx.float32)
    (used,) = allocate_rows([RowAllocation(spec, 512)])
    used.write(0, mx.ones((1, 2, 512, 64)))
    del used
    (buffer,) = allocate_rows([RowAllocation(spec, 256, n_spare=256)])
    buffer.write(0, mx.ones((1, 2, 256, 64)))
    array = buffer.array
    assert mx.all(array[..., :256, :] == 1).item()
    assert mx.all(array[..., 256:, :] == 0).item()


def test_a_copy_outlives_the_bytes_it_was_made_from():
    lent = bytearray(np.arange(8, dtype=np.float32).tobytes())
    array = from_buffer("F32", (2, 4), memoryview(lent))
    copy = array.copy()
    lent[:] = bytes(len(lent))
    assert copy.to_mx().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mx.all(array.to_mx() == 0).item()


class Source:
    """Bytes as a file would give them."""

    def __init__(self, data):
        self.data = memoryview(data)
        self.n_pieces = []

    def read_into(self, pieces):
        rest = iter(bytes(self.data))
        for piece in pieces:
            memory = memoryview(piece).cast("B")
            memory[:] = bytes(islice(rest, len(memory)))
        assert next(rest, None) is None
        self.n_pieces.append(len(pieces))


@pytest.mark.parametrize(
    ("shape", "n_pieces"),
    [
        ((1, 2, 9, 4), [2]),  # rows among others, in one piece for every head
        ((1, 2, 20, 4), [1]),  # all that there is
        ((1, 1, 9, 4), [1]),
        ((1, 5, 9, 4), []),  # more pieces than one call takes
        ((2, 2, 9, 4), []),
        ((1, 2, 0, 4), []),
    ],
    ids=str,
)
def test_bytes_of_a_file_go_straight_to_where_they_belong(shape, n_pieces, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_PIECES", 4)
    allocations = np.random.default_rng(0).random(shape, np.float32)
    source = Source(allocations.tobytes())
    whole = np.zeros((*shape[:2], 20, shape[3]), np.float32)
    FileArray("F32", shape, source).write_to(whole[:, :, : shape[2]])
    assert source.n_pieces == n_pieces
    assert np.array_equal(whole[:, :, : shape[2]], allocations)
    assert not whole[:, :, shape[2] :].any()
