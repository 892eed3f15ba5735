"""A disk of its own for every test, and records to put there."""

import pytest

from keepwarm.cache.restore.plan import Read
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from tests.store.kit import chain_of


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0))
    yield tier
    tier.close()


@pytest.fixture
def records():
    return chain_of(6, n_bytes=4096)


@pytest.fixture
def reads(disk, records):
    for record in records:
        disk.put(record)
    return [Read(r.header.key, Part.DELTA, i) for i, r in enumerate(records)]
