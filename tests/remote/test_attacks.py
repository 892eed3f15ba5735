"""What others can put into a shared place makes a miss, and neither a loop nor an outage."""

import threading
from pathlib import Path

import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part, encode_record
from keepwarm.remote.compression import MAX_RECORD_BYTES
from keepwarm.remote.deleter import erase_from_tier
from keepwarm.remote.janitor import LEASE, LEASE_S, Janitor, RemoteLimits
from keepwarm.remote.lookup import KnownRecords
from keepwarm.remote.records import CLASSES, RemoteNames, RemoteRecord, list_classes
from keepwarm.remote.tier import MAX_CLASSES
from keepwarm.store.tier import NamedBlock
from tests.remote.conftest import CLASS, SOON
from tests.remote.test_tier import question
from tests.store.kit import NAMESPACE, content, record, refs_of, tokens_of

FIRST, SECOND = refs_of(2)
ONE, TWO = record(FIRST), record(SECOND)
SEAL = Cipher(b"k" * 32)


def name_of(ref, compute_class=CLASS):
    return RemoteNames(compute_class).of(RemoteRecord.of(record(ref).header))


def found(tier, ref=FIRST):
    tier.look_up(question(tokens_of(2 * BLOCK_TOKENS)), CallDeadline(SOON))
    return tier.read(ref.key, Part.DELTA)


def test_names_that_lead_back_to_where_they_began_end(clock):
    """A file `<key>/<key>.delta` is easily made, and losing a block loses all that follows it."""
    known = KnownRecords(clock)
    for parent, ref in ((FIRST, FIRST), (FIRST, SECOND), (SECOND, FIRST)):
        known.add([RemoteRecord(NAMESPACE, parent.key, ref.key, Part.DELTA, 256, 0, 1)])
    lost = threading.Thread(target=known.lose, args=(FIRST.key,), daemon=True)
    lost.start()
    lost.join(SOON)
    assert not lost.is_alive()
    assert known.have([FIRST.key, SECOND.key]) == {}


def test_names_in_the_wrong_folder_are_left(machine, place):
    assert machine().put(ONE).stored
    folder = RemoteNames(CLASS).folder(NAMESPACE, FIRST.key)
    for name in (
        f"{folder}/256.{FIRST.key.hex()}.d.0",
        f"{folder}/256.{SECOND.key.hex()}.d.0",
    ):
        assert place.put(name, encode_record(ONE), SOON)
    tier = machine()
    assert content(found(tier)) == content(ONE)
    assert found(tier, SECOND) is None
    tier.discard(FIRST.key, Part.DELTA, "for a test")
    assert tier.have([FIRST.key]) == {}
    assert not tier.is_open


def test_other_files_beside_the_classes_do_not_stop_anything(machine, place, address):
    """As `.DS_Store` of a Mac; and nobody can have every question asked a thousand times."""
    theirs = machine("cuda-mlx-0.1")
    assert theirs.put(ONE).stored
    for number in range(2 * MAX_CLASSES):
        assert place.put(f"{CLASSES}/zzz-{number}", [b"1"], SOON)
    assert place.put(f"{CLASSES}/a/b", [b"1"], SOON)
    if address.startswith("file:"):
        root = place._root
        for name in (".DS_Store", "a b", "-"):
            (root / CLASSES / name).write_bytes(b"1")
        (root / "cuda-mlx-0.1" / "Thumbs.db").write_bytes(b"1")
        (root / "cuda-mlx-0.1" / "._x").mkdir()
    elif address.startswith("redis:"):
        key = b"keepwarm:classes/"
        for member in (b"", b"!", b"zz!x", b"!a b", b"!../x", b"\xff!x", b"00!.x", b"!a/b/c/d/e/f"):
            place._call([[b"ZADD", key, b"0", member]], SOON)
    tier = machine(any_class=True)
    assert len(tier._finder.other_classes) == MAX_CLASSES
    assert content(found(tier)) == content(ONE)
    assert "cuda-mlx-0.1" in list_classes(place, SOON)
    block = NamedBlock(FIRST.key, FIRST.parent, BLOCK_TOKENS)
    assert erase_from_tier(tier, [NAMESPACE], [block], ())
    assert place.sizes([name_of(FIRST, "cuda-mlx-0.1")], SOON) == [None]


@pytest.mark.parametrize("address", ["directory"], indirect=True)
def test_a_record_that_is_too_large_is_a_bad_one_and_no_outage(machine, place):
    assert machine().put(ONE).stored
    with (place._root / name_of(FIRST)).open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)
    tier = machine()
    assert found(tier) is None
    assert tier.take_fault(FIRST.key, Part.DELTA) == "damaged"
    assert tier.is_trusted


@pytest.mark.parametrize("address", ["directory"], indirect=True)
def test_a_janitor_deletes_records_only(machine, place, clock):
    assert machine().put(ONE).stored
    folder = (place._root / name_of(FIRST)).parent
    others = [folder / "notes.txt", folder.parent / "notes.txt", folder.parents[1] / ".DS_Store"]
    for path in others:
        path.write_bytes(b"x")
    sparse = place._root / LEASE
    sparse.parent.mkdir()
    with sparse.open("wb") as file:
        file.truncate(1 << 42)
    janitor = Janitor(place, RemoteLimits(n_bytes=1), Path("own"), clock)
    assert janitor.sweep() == 0, "of another holder"
    clock.now += LEASE_S
    assert janitor.sweep() == 1
    assert place.sizes([name_of(FIRST)], SOON) == [None]
    assert all(path.exists() for path in others)


def test_plain_records_and_those_of_others_are_not_opened_in_a_sealed_place(machine, place):
    """Nor one of another name, nor one that was cut."""
    assert machine(cipher=SEAL).put(TWO).stored
    sealed = bytes(place.read(name_of(SECOND), lambda n: memoryview(bytearray(n)), SOON))
    forged = {
        "plain": encode_record(ONE),
        "another key": encode_record(ONE, Cipher(b"x" * 32)),
        "another name": [sealed],
        "cut": encode_record(ONE, SEAL)[:-1],
    }
    for pieces in forged.values():
        place.put(name_of(FIRST), pieces, SOON, replace=True)
        tier = machine(cipher=SEAL)
        assert found(tier) is None
        assert not tier.is_open
    place.put(name_of(FIRST), encode_record(ONE, SEAL), SOON, replace=True)
    assert content(found(machine(cipher=SEAL))) == content(ONE)
