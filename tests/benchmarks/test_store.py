"""The benchmark of the store, and the memory bound of a restore."""

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.caches import Shape
from benchmarks.kv import arrays_of, raw_bytes
from benchmarks.measure import Peak
from benchmarks.requests.measure import drop_files, in_child

from benchmarks import store
from keepwarm.cache.restore.loading import Reader
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.tiers import Tiers
from tests.benchmarks.test_operations import MEDIUM

TINY = Shape("tiny", n_layers=2, n_heads=2, width=16)


def filled_store(shape, n_tokens, root):
    disk = DiskTier(root, DiskLimits(min_free_bytes=0))
    for record in store.records_for(shape, n_tokens):
        assert disk.put(record).stored
    return disk


@pytest.fixture
def tiny(tmp_path):
    disk = filled_store(TINY, 600, tmp_path / "store")
    yield disk
    disk.close()


def test_the_rival_assembles_the_same_bytes(tiny):
    """Both sides do the same work."""
    reader = Reader(Tiers([("disk", tiny)]))
    ours = store.restore_all(store.restorer_of(TINY, tiny, reader), store.tokens_of(600))
    files = sorted((tiny.root / "blocks").rglob("*.safetensors"))
    theirs = store.load_and_assemble(TINY, 600, files)
    for cache, pair in zip(ours, theirs, strict=True):
        for array, rival in zip((cache.keys, cache.values), pair, strict=True):
            rows = mx.contiguous(array[..., :600, :])
            assert np.array_equal(raw_bytes(rows), raw_bytes(rival))
    assert [a.nbytes for a in arrays_of(ours)] == [a.nbytes for pair in theirs for a in pair]
    reader.close()


def test_reading_reads_every_byte(tiny):
    files = sorted((tiny.root / "blocks").rglob("*.safetensors"))
    drop_files(files)
    for n_threads in (1, 3):
        assert store.read_all(files, n_threads) == sum(file.stat().st_size for file in files)


def test_restoring_from_disk_stays_within_its_memory(tmp_path):
    """Peak RSS minus baseline is at most 1.1 times the live cache's bytes plus two blocks."""
    filled_store(MEDIUM, 8192, tmp_path / "store").close()
    growth = in_child(store.restore_growth, MEDIUM, 8192, tmp_path / "store")
    live, block = MEDIUM.live_bytes(8192), MEDIUM.block_bytes
    assert growth > 0.9 * live
    assert Peak("medium", 8192, "restore", live, block, growth).holds, f"{growth / live:.2f}"
