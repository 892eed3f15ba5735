"""Verifying a store: bad records are quarantined, unreadable ones are reported and stay."""

import errno

import pytest

from keepwarm.records.record import Part
from keepwarm.store.disk.maintenance import verify
from tests.store.kit import chain_of


@pytest.fixture
def tier(open_tier):
    made = open_tier()
    for record in chain_of(2):
        assert made.put(record).stored
    return made


def wrongs(tier, **options):
    return [(checked.wrong, checked.quarantined) for checked in verify(tier, **options)]


@pytest.mark.parametrize("fix", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_record_that_cannot_be_read_is_named_and_not_moved(code, fix, tier, store):
    """It cannot be judged good or bad."""
    keys = [stored.key for stored in tier.walk()]
    tier.files.break_(code, "open")
    found = wrongs(tier, fix=fix)
    assert [why.startswith("could not be read: ") for why, _ in found] == [True, True]
    assert [aside for _, aside in found] == [False, False]
    assert all(tier.records.path_of(key, Part.DELTA).exists() for key in keys)
    assert not list((store / "quarantine").iterdir())
    tier.files.mend()
    assert wrongs(tier) == [(None, False)] * 2
    assert all(tier.read(key, Part.DELTA) is not None for key in keys)


def test_a_bad_record_is_reported_as_quarantined_when_it_was(tier):
    (first, _) = tier.walk()
    path = tier.records.path_of(first.key, Part.DELTA)
    path.write_bytes(path.read_bytes()[:-1])
    ((why, aside),) = [found for found in wrongs(tier) if found[0]]
    assert ("truncated" in why or "bytes" in why, aside) == (True, False)
    tier.files.break_(errno.EROFS, "publish")
    assert [aside for why, aside in wrongs(tier, fix=True) if why] == [False]
    assert path.exists()


def test_a_record_deleted_meanwhile_is_not_reported(tier):
    found = verify(tier)
    next(found)
    (_, second) = tier.walk()
    tier.delete_all([second.key])
    assert all(checked.wrong is None for checked in found)


def test_a_small_file_is_quarantined_with_its_reason(tier, store):
    path = store / "agents" / "coder.json"
    path.write_text("{torn")
    assert tier.records.move_to_quarantine(path, "it is torn")
    bad, why = sorted((store / "quarantine").iterdir())
    assert not path.exists()
    assert bad.name.startswith("coder.json.")
    assert (bad.read_text(), why.read_text()) == ("{torn", "it is torn\n")
