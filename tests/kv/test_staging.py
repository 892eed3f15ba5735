"""Rows that take the way through staging arrive as they were; on this device too."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from keepwarm import kv
from keepwarm.cache.restore.records import block_of, records_of
from keepwarm.errors import BadRecord
from keepwarm.kv.buffers import FileArray, HostArray
from keepwarm.kv.layout import TensorSpec
from keepwarm.kv.staging import DeviceRows, Staging
from keepwarm.prefix.blocks import Namespace, chain
from tests.kit.models import ARCHITECTURES
from tests.kit.runs import prefill, prompt_of

NAMESPACE = Namespace(bytes(32))
SPEC = TensorSpec((1, 2, None, 8), mx.float32)


def rows_of(n_rows: int, seed: int) -> HostArray:
    words = np.random.default_rng(seed).random((1, 2, n_rows, 8), dtype=np.float32)
    return HostArray(words, mx.float32)


def target_of(n_rows: int, staging: Staging) -> DeviceRows:
    zeros = mx.zeros(SPEC.with_rows(n_rows))
    mx.eval(zeros)
    return DeviceRows(SPEC, zeros, staging)


def test_threads_write_beside_each_other():
    staging = Staging()
    target = target_of(64 * 16 + 8, staging)
    pieces = [rows_of(16, seed) for seed in range(64)]

    def write(number: int) -> None:
        target.write(number * 16, pieces[number])
        staging.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(64)))
    wanted = np.concatenate([piece.words for piece in pieces], axis=2)
    assert np.array_equal(np.asarray(target.array)[:, :, : 64 * 16], wanted)
    assert not np.asarray(target.array)[:, :, 64 * 16 :].any()


def test_a_full_slot_is_emptied_and_a_larger_tensor_goes_by_itself():
    staging = Staging(slot_bytes=4096)
    target = target_of(1024, staging)
    pieces = [rows_of(n_rows, n_rows) for n_rows in (40, 40, 200, 30)]
    at = 0
    for piece in pieces:
        target.write(at, piece)
        at += piece.shape[2]
    staging.flush()
    wanted = np.concatenate([piece.words for piece in pieces], axis=2)
    assert np.array_equal(np.asarray(target.array)[:, :, :at], wanted)


class Bytes:
    """Where an array comes from, as a file would be."""

    def __init__(self, rows: HostArray, fails: bool = False) -> None:
        self.data = memoryview(rows.words.tobytes())
        self.fails = fails
        self.n_direct = 0

    def read_into(self, pieces: list[np.ndarray]) -> None:
        (memory,) = pieces
        memoryview(memory).cast("B")[:] = self.data
        self.n_direct += 1
        if self.fails:
            raise BadRecord("its bytes are others")


def test_bytes_of_a_file_go_straight_into_the_slot():
    """And where they turn out to be bad, nothing of them is copied on."""
    staging = Staging(slot_bytes=4096)
    target = target_of(64, staging)
    good, bad, last = (rows_of(16, seed) for seed in range(3))
    sources = [Bytes(good), Bytes(bad, fails=True), Bytes(last)]
    arrays = [FileArray("F32", (1, 2, 16, 8), source) for source in sources]
    target.write(0, arrays[0])
    with pytest.raises(BadRecord):
        target.write(16, arrays[1])
    target.write(32, arrays[2])
    target.write(48, arrays[2].rows(0, 8))
    staging.flush()
    assert [source.n_direct for source in sources] == [1, 1, 1]
    found = np.asarray(target.array)
    assert np.array_equal(found[:, :, :16], good.words)
    assert not found[:, :, 16:32].any()
    assert np.array_equal(found[:, :, 32:48], last.words)
    assert np.array_equal(found[:, :, 48:56], last.words[:, :, :8])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_of_cache_is_put_together_the_same(architecture, tiny_model):
    model, tokens = tiny_model(architecture), prompt_of(300)
    caches = prefill(model, kv.make_caches(model), tokens, 64)
    layout = kv.layout_of(caches)
    refs = chain(NAMESPACE, tokens)
    records = [
        record
        for ref, block in zip(refs, kv.cut_blocks(caches, 300), strict=True)
        for record in records_of(NAMESPACE, ref, block)
    ]
    plain, through = kv.Assembly(layout, 300), kv.Assembly(layout, 300, Staging())
    for record in records:
        plain.add(block_of(record))
        through.add(block_of(record))
    for a, b in zip(plain.finish(), through.finish(), strict=True):
        for left, right in zip(kv.encode(a).arrays(), kv.encode(b).arrays(), strict=True):
            assert mx.array_equal(left, right)
