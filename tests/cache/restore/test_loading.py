"""A restore that cannot begin leaves nobody behind, and one that has ended no memory."""

import threading
import weakref
from contextlib import closing

import mlx.core as mx
import pytest

from keepwarm.cache.restore import reading
from keepwarm.cache.restore.loading import Loading
from keepwarm.cache.restore.plan import Point
from keepwarm.cache.restore.reading import Reader
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout, TensorSpec
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.kit.waiting import no_collection, wait_until
from tests.store.kit import tokens_of

SPEC = TensorSpec((None, 8), mx.uint8)  # what the kit's records hold
LAYOUT = Layout((LayerSpec("0", Kind.DELTA, "KVCache", {"keys": SPEC, "values": SPEC}, {}),))


@pytest.mark.parametrize("n_begun", [0, 1, 4])
def test_a_start_that_fails_half_way_leaves_nobody_waiting(n_begun, disk, reads, monkeypatch):
    """Who has opened a file waits for its place, who fetches waits until others were read."""
    monkeypatch.setattr(reading, "MAX_PREFETCHED", 1)
    reader = Reader(Tiers([("disk", disk)]))
    submit, begun = reader._pool.submit, []

    def few(*given):
        if len(begun) == n_begun:
            raise RuntimeError("can't start new thread")
        begun.append(submit(*given))
        return begun[-1]

    monkeypatch.setattr(reader._pool, "submit", few)
    point = Point(256 * len(reads), tuple(reads), 0)
    with pytest.raises(RuntimeError, match="new thread"):
        Loading(tokens_of(point.n_tokens), point, LAYOUT, reader, MemorySaver(MemoryTier(0)))
    ended = threading.Thread(target=reader.close, daemon=True)
    ended.start()
    ended.join(300)
    assert not ended.is_alive()
    assert all(future.done() for future in begun)


def test_what_was_restored_is_freed_without_the_garbage_collector(disk, reads):
    """It would free gigabytes of a device at once, in the middle of another request."""
    reader = Reader(Tiers([("disk", disk)]))
    point = Point(256 * len(reads), tuple(reads), 0)
    with closing(reader), no_collection():
        loading = Loading(
            tokens_of(point.n_tokens), point, LAYOUT, reader, MemorySaver(MemoryTier(0))
        )
        assert loading.finish().restored is not None
        kept = weakref.ref(loading)
        del loading
        wait_until(lambda: kept() is None)
