"""A disk tier to be broken, and opened again."""

import pytest

from keepwarm.store.disk.disk import DiskLimits, DiskTier
from tests.store.kit import BrokenFiles


@pytest.fixture
def store(tmp_path):
    """Where the tier lies."""
    return tmp_path / "store"


@pytest.fixture
def open_tier(store):
    """Opens the tier with these limits; what was opened before goes on, as in another process."""
    opened = []

    def opener(max_bytes=None, min_free_bytes=0, **options):
        limits = DiskLimits(max_bytes, min_free_bytes)
        opened.append(DiskTier(store, limits, BrokenFiles(), **options))
        return opened[-1]

    yield opener
    for tier in opened:
        tier.close()
