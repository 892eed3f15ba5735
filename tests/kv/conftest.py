"""Fixtures of the tests of KV caches."""

from collections.abc import Iterator

import pytest

from keepwarm.kv.slabs import SlabPool


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    pool = SlabPool()
    yield pool
    pool.close()
