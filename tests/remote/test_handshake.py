"""One passphrase gives every machine the same keys: the first leaves its salt in the place."""

import json

import pytest

from keepwarm.errors import BadRecord
from keepwarm.remote.handshake import STORE_META, handshake
from keepwarm.store.marker import unlock
from keepwarm.store.names import SEALED
from tests.remote.conftest import SOON
from tests.store.kit import record, refs_of

PASSPHRASE = "correct horse battery"
COST = {"n": 2, "r": 8, "p": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("keepwarm.store.marker.SCRYPT", COST)


def opened(root, address, secret=PASSPHRASE):
    agree = handshake([address], "") if address else bytes
    return unlock(root, secret, handshake=agree), (root / SEALED).read_bytes()


def test_new_stores_take_the_salt_of_the_first(machine, address, tmp_path):
    cipher, mark = opened(tmp_path / "a", address)
    tier = machine(cipher=cipher, mark=mark)
    assert not tier.health.refused
    other_seal, other_mark = opened(tmp_path / "b", address)
    assert other_mark == mark
    other_seal.open(b"name", cipher.seal(b"name", b"bytes"))
    assert other_seal.hidden("namespace", b"n") == cipher.hidden("namespace", b"n")
    assert not machine(cipher=other_seal, mark=other_mark).health.refused
    again, _ = opened(tmp_path / "b", "")
    again.open(b"name", cipher.seal(b"name", b"bytes"))


def test_a_store_with_another_salt_or_secret_is_refused(machine, address, tmp_path):
    cipher, mark = opened(tmp_path / "a", address)
    machine(cipher=cipher, mark=mark)
    for name, at, secret in (("old", "", PASSPHRASE), ("wrong", address, "another passphrase")):
        theirs, their_mark = opened(tmp_path / name, at, secret)
        assert their_mark != mark
        with pytest.raises(BadRecord):
            theirs.open(b"name", cipher.seal(b"name", b"bytes"))
        refused = machine(cipher=theirs, mark=their_mark)
        assert "another key" in refused.health.refused
        assert not refused.put(record(refs_of(1)[0])).stored
    assert "encrypted blocks" in machine().health.refused


def test_whoever_writes_there_cannot_make_the_passphrase_easy_to_guess(
    address, machine, place, tmp_path, monkeypatch
):
    _, mark = opened(tmp_path / "a", address)
    monkeypatch.setattr("keepwarm.store.marker.SCRYPT", {"n": 4, "r": 8, "p": 1})
    _, own = opened(tmp_path / "b", address)
    assert own != mark
    assert json.loads(own)["scrypt"] == {"n": 4, "r": 8, "p": 1}
    for number, nonsense in enumerate((b"no json", b"[]", b"[" * 4096, b"x" * 9999)):
        place.put(STORE_META, [nonsense], SOON, replace=True)
        cipher, own = opened(tmp_path / f"c{number}", address)
        assert json.loads(own)["scrypt"] == {"n": 4, "r": 8, "p": 1}
        assert "another key" in machine(cipher=cipher, mark=own).health.refused


def test_a_place_that_does_not_answer_delays_no_new_store(tmp_path):
    missing = (tmp_path / "missing" / "share").as_uri()
    cipher, mark = opened(tmp_path / "a", missing)
    assert json.loads(mark)["scrypt"] == COST
    assert cipher is not None


def test_a_store_that_another_version_has_filled_is_refused(machine, place):
    assert place.put(STORE_META, [b"plain"], SOON)
    assert "Another version" in machine().health.refused
