"""A restore that cannot begin leaves nobody behind."""

import threading

import mlx.core as mx
import pytest

from keepwarm.cache.io import MemoryOnly
from keepwarm.cache.loading import Loading
from keepwarm.cache.plan import Point, Read
from keepwarm.cache.reading import Reader
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout, TensorSpec
from keepwarm.store.disk import DiskLimits, DiskTier
from keepwarm.store.memory import MemoryTier
from keepwarm.store.record import Part
from keepwarm.store.tiers import Tiers
from tests.store.kit import chain_of, tokens_of

SPEC = TensorSpec((None, 8), mx.uint8)  # what the kit's records hold
LAYOUT = Layout((LayerSpec("0", Kind.DELTA, "KVCache", {"keys": SPEC, "values": SPEC}, {}),))
N_BLOCKS = 6


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0))
    for record in chain_of(N_BLOCKS, n_bytes=4096):
        tier.put(record)
    yield tier
    tier.close()


@pytest.mark.parametrize("n_begun", [1, 4, N_BLOCKS])
def test_a_start_that_fails_half_way_leaves_nobody_waiting(n_begun, disk, monkeypatch):
    """Those who have opened a file wait for its place: they are told that none comes."""
    reader = Reader(Tiers([("disk", disk)]))
    records = chain_of(N_BLOCKS, n_bytes=4096)
    reads = tuple(Read(one.header.key, Part.DELTA, i) for i, one in enumerate(records))
    submit, begun = reader._pool.submit, []

    def few(*given):
        if len(begun) == n_begun:
            raise RuntimeError("can't start new thread")
        begun.append(submit(*given))
        return begun[-1]

    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(reader._pool, "submit", few)
    monkeypatch.setattr(reader._ahead, "submit", none)
    point = Point(256 * N_BLOCKS, reads, 0)
    with pytest.raises(RuntimeError, match="new thread"):
        Loading(tokens_of(point.n_tokens), point, LAYOUT, reader, MemoryOnly(MemoryTier(0)))
    ended = threading.Thread(target=reader.close, daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()
    assert all(future.done() for future in begun)
