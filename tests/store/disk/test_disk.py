"""The disk tier: the limit, file modes, a lost index, and what eviction frees."""

import errno
import os
import random
import resource
import sqlite3
import stat
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from keepwarm.errors import BadInput, BadRecord, Busy, StoreFailed
from keepwarm.prefix.blocks import Namespace, root
from keepwarm.prefix.fingerprint import FORMAT_VERSION
from keepwarm.records.record import Header, Part, check_identity
from keepwarm.store.atomic import Files
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier
from keepwarm.store.disk.maintenance import verify
from keepwarm.store.index import database
from keepwarm.store.index.index import note_damage
from keepwarm.store.names import path_of
from tests.store.kit import (
    NAMESPACE,
    chain_of,
    content,
    disk_use,
    encode,
    files_under,
    first_block,
    keys_of,
    record,
    refs_of,
)

MIB = 1 << 20


def put_all(tier, records):
    for one in records:
        assert tier.put(one).stored


def assert_all_read(tier, records):
    for one in records:
        assert content(tier.read(one.header.key, one.header.part)) == content(one)


# The cap


@pytest.mark.parametrize(("n_bytes", "n_puts"), [(1_000, 80), (40_000, 80), (300_000, 25)])
def test_the_cap_holds_after_every_put(n_bytes, n_puts, open_tier, store):
    """Every byte under the root, index and log among them."""
    cap = 3 * MIB
    tier = open_tier(cap)
    pick = random.Random(n_bytes)
    for i in range(n_puts):
        tier.put(record(first_block([i]), n_bytes=pick.randrange(n_bytes // 2, n_bytes) & ~1))
        assert disk_use(store) <= cap
    assert tier.stats().n_bytes == pytest.approx(disk_use(store), rel=0.02)
    assert tier.stats().blocks > 3


def test_what_others_left_counts(open_tier, store):
    """Files of other versions, programs or users, anywhere under the root."""
    open_tier().close()
    (store / "notes.tmp").write_bytes(bytes(MIB))
    (store / "blocks" / "00").mkdir(parents=True)
    (store / "blocks" / "00" / "old.v0").write_bytes(bytes(MIB))
    # The name of a record, but not where it belongs, and one that is not quite a name.
    misplaced = f"{first_block([1]).key.hex()}.d.safetensors"
    (store / "blocks" / "zz").mkdir()
    (store / "blocks" / "zz" / misplaced).write_bytes(bytes(MIB // 2))
    (store / "blocks" / "00" / misplaced.upper()).write_bytes(bytes(MIB // 2))
    tier = open_tier(6 * MIB)
    for i in range(40):
        tier.put(record(first_block([i]), n_bytes=200_000))
        assert disk_use(store) <= 6 * MIB
    assert (store / "notes.tmp").exists()
    assert tier.stats().blocks > 3


def test_what_others_leave_later_counts_too(open_tier, store, monkeypatch):
    """Bundles, agents, records that another process has quarantined."""
    monkeypatch.setattr("keepwarm.store.names.MEASURE_EVERY_S", 0.0)
    tier = open_tier(5 * MIB)
    for i in range(12):
        tier.put(record(first_block([i]), n_bytes=200_000))
    (store / "agents" / "one.json").write_bytes(bytes(2 * MIB))
    tier.put(record(first_block([99]), n_bytes=200_000))
    assert disk_use(store) <= 5 * MIB
    assert tier.stats().evicted > 3


def test_what_others_leave_counts_though_all_blocks_are_worth_more(open_tier, store, monkeypatch):
    """Than a new one, which therefore finds no room."""
    monkeypatch.setattr("keepwarm.store.names.MEASURE_EVERY_S", 0.0)
    tier = open_tier(5 * MIB)
    made = [record(first_block([i]), n_bytes=200_000) for i in range(12)]
    put_all(tier, made)
    for _ in range(100):
        tier.touch(keys_of(made))
    new = record(first_block([98]), n_bytes=200_000)
    flood(tier, 30, seed=10_000)
    assert set(tier.have(keys_of(made))) == set(keys_of(made))
    (store / "agents" / "one.json").write_bytes(bytes(3 * MIB))
    tier.put(new)
    assert disk_use(store) <= 5 * MIB
    assert 0 < len(tier.have(keys_of(made))) < len(made)


def test_a_directory_that_may_not_be_read_stops_no_put(open_tier, store, monkeypatch):
    """As `lost+found` in the root of a file system."""
    tier, scan = open_tier(6 * MIB), os.scandir
    (store / "lost+found").mkdir()

    def scandir(path):
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    tier.records.others.changed()
    assert tier.put(record(first_block([1]))).stored


def test_quarantined_files_count(open_tier, store):
    tier = open_tier(6 * MIB)
    for i in range(30):
        one = record(first_block([i]), n_bytes=200_000)
        tier.put(one)
        path = tier.records.path_of(one.header.key, Part.DELTA)
        if i % 3 == 0 and path.exists():
            path.write_bytes(path.read_bytes()[:-1])
            assert tier.read(one.header.key, Part.DELTA) is None
        assert disk_use(store) <= 6 * MIB
    assert tier.stats().quarantined == 10


def test_two_tiers_on_one_directory_share_the_cap(open_tier, store):
    cap = 4 * MIB
    tiers = [open_tier(cap), open_tier(cap)]
    for i in range(40):
        tiers[i % 2].put(record(first_block([i]), n_bytes=200_000))
        assert disk_use(store) <= cap
    assert {s.key for s in tiers[0].walk()} == {s.key for s in tiers[1].walk()}


def test_a_cap_smaller_than_before_is_reached_by_the_next_put(open_tier, store):
    tier = open_tier()
    put_all(tier, (record(first_block([i]), n_bytes=200_000) for i in range(40)))
    assert disk_use(store) > 8 * MIB
    tier.close()
    open_tier(4 * MIB).put(record(first_block([99]), n_bytes=200_000))
    assert disk_use(store) <= 4 * MIB


# Modes


def test_files_are_for_their_owner_only(open_tier, store):
    """0600 and 0700, the index and its log too, whatever the umask, also in an existing root."""
    store.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        tier = open_tier()
        put_all(tier, chain_of(2))
        bad = record(first_block([1]))
        tier.put(bad)
        tier.records.path_of(bad.header.key, Part.DELTA).write_bytes(b"")
        assert tier.read(bad.header.key, Part.DELTA) is None
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in store.rglob("*")}
    assert not {p: oct(m) for p, m in modes.items() if m != (0o700 if p.is_dir() else 0o600)}
    assert any(path.name == "index.sqlite-wal" for path in modes)


# An index that is lost or wrong


def lose_everything(index):
    for path in index.parent.glob("index.sqlite*"):
        path.unlink()


def empty_it(index):
    lose_everything(index)
    index.write_bytes(b"")


def garbage(index):
    lose_everything(index)
    index.write_bytes(random.randbytes(50_000))


def halve(index):
    data = index.read_bytes()
    index.write_bytes(data[: len(data) // 2])


def garble_pages(index):
    """All but the first page, which still says that this is an index."""
    data = bytearray(index.read_bytes())
    for at in range(8192, len(data)):
        data[at] ^= 0x5A
    index.write_bytes(bytes(data))


def garble_tokens(index):
    """Only the pages with token ids, so that it is noticed late."""
    with sqlite3.connect(index) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name='tokens'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    db.close()
    with index.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(random.randbytes(size))


def newer(index):
    with sqlite3.connect(index) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def older(index):
    with sqlite3.connect(index) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()


DAMAGE = [lose_everything, empty_it, garbage, halve, garble_pages, older]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_a_damaged_index_is_rebuilt_from_the_files(damage, open_tier, store):
    refs = refs_of(3)
    made = [record(ref, part) for ref in refs for part in Part]
    tier = open_tier()
    put_all(tier, made)
    tier.index.database.checkpoint()
    tier.close()
    damage(store / "index.sqlite")
    again = open_tier()
    assert_all_read(again, made)
    assert {s.key: set(s.n_bytes) for s in again.walk()} == {r.key: set(Part) for r in refs}
    assert [c.n_common for c in again.children(root(NAMESPACE), refs[0].tokens)] == [256]
    assert len(again.states([root(NAMESPACE), refs[0].key])) == 2
    assert again.have([refs[1].key])[refs[1].key].w_rows == 256
    assert again.put(record(first_block([7]))).stored


def test_the_store_of_a_newer_keepwarm_is_not_touched(open_tier, store):
    """Neither its index nor a record; one sentence says what to do."""
    tier = open_tier()
    put_all(tier, chain_of(2))
    tier.close()
    newer(store / "index.sqlite")
    (store / "index.sqlite-damaged").touch()
    before = {path: path.read_bytes() for path in files_under(store) if path.name != "lock"}
    with pytest.raises(BadInput, match="written by a newer Keepwarm; update this one, or name"):
        open_tier()
    after = {path: path.read_bytes() for path in files_under(store) if path.name != "lock"}
    assert after == before


def newer_record(tier, one):
    """Rewrites a record as a later version would have left it."""
    path = tier.records.path_of(one.header.key, one.header.part)
    header = replace(one.header, version=FORMAT_VERSION + 1)
    path.write_bytes(encode(replace(one, header=header)))
    return path


def test_a_newer_record_is_a_miss_and_is_left_alone(open_tier, store):
    """Not quarantined, not replaced, not counted as bad."""
    one, two = made = chain_of(2)
    tier = open_tier()
    put_all(tier, made)
    path = newer_record(tier, two)
    data = path.read_bytes()
    assert tier.read(two.header.key, Part.DELTA) is None
    assert tier.read(one.header.key, Part.DELTA) is not None
    assert not tier.put(two).stored
    assert [c.newer for c in verify(tier, fix=True)].count(True) == 1
    assert path.read_bytes() == data
    assert not list((store / "quarantine").iterdir())
    assert (tier.stats().newer, tier.stats().misses, tier.stats().quarantined) == (1, 1, 0)


def test_a_newer_record_is_not_adopted_but_counts(open_tier, store):
    """With the index lost it counts as a file that is not a record."""
    one, two = made = chain_of(2, n_bytes=100_000)
    tier = open_tier()
    put_all(tier, made)
    path = newer_record(tier, two)
    tier.close()
    (store / "index.sqlite").unlink()
    again = open_tier()
    assert set(again.have(keys_of(made))) == {one.header.key}
    assert again.stats().newer == 1
    assert again.stats().n_bytes >= path.stat().st_size + 100_000
    cap = again.stats().n_bytes + INDEX_ROOM + MIB
    again.close()
    small = open_tier(max_bytes=cap, clock=iter(range(2**31, 2**32)).__next__)
    put_all(small, [record(first_block([n]), n_bytes=100_000) for n in range(20)])
    assert small.stats().evicted > 0
    assert disk_use(store) <= cap
    assert path.exists(), "only what is ours was evicted"


@pytest.mark.parametrize("damage", [garble_pages, halve], ids=lambda d: d.__name__)
def test_an_index_damaged_under_way_fails_no_request(damage, open_tier, store):
    made = chain_of(3)
    tier = open_tier()
    put_all(tier, made)
    tier.index.database.checkpoint()
    damage(store / "index.sqlite")
    other = sqlite3.connect(store / "index.sqlite")  # makes SQLite read it again
    other.close()
    tier.have(keys_of(made))
    tier.children(root(NAMESPACE), made[0].header.tokens)
    tier.states(keys_of(made))
    tier.touch(keys_of(made))
    tier.put(record(first_block([7])))
    for one in made:
        found = tier.read(one.header.key, Part.DELTA)
        assert found is None or content(found) == content(one)
    tier.close()
    assert_all_read(open_tier(), made)


def test_an_index_that_another_process_rebuilds_is_shared_with_it(open_tier, store):
    """What is put or deleted by either is known to both, and counts towards one limit."""
    one, two, three = (chain_of(1, seed=seed)[0] for seed in range(3))
    tier = open_tier()
    tier.put(one)
    note_damage(store)
    again = open_tier()
    assert tier.put(two).stored
    assert again.put(three).stored
    assert again.have(keys_of([one, two, three])).keys() == set(keys_of([one, two, three]))
    assert tier.have(keys_of([three]))
    again.forget("mine", ())
    again.delete_all([one.header.key])
    assert not tier.have(keys_of([one]))
    assert tier.index.forgotten.generation() == again.index.forgotten.generation()
    tier.touch(keys_of([two]))  # by a function that SQL calls
    tier.delete_all([two.header.key])
    assert again.index.lookups.n_bytes() == disk_use(store / "blocks")
    tier.close()
    assert_all_read(again, [three])


def replace_index(store, version):
    for path in store.glob("index.sqlite*"):
        path.unlink()
    with closing(sqlite3.connect(store / "index.sqlite")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA user_version = {version}")


def test_an_index_that_a_newer_keepwarm_makes_is_an_outage_for_who_is_at_work(open_tier, store):
    tier, made = open_tier(), chain_of(2)
    put_all(tier, made)
    replace_index(store, 99)
    assert not tier.have(keys_of(made))
    assert not tier.put(record(first_block([7]))).stored
    path_of(store, made[0].header.key, Part.DELTA).write_bytes(b"damaged")
    assert tier.read(made[0].header.key, Part.DELTA) is None
    assert content(tier.read(made[1].header.key, Part.DELTA)) == content(made[1])
    tier.close()


def test_an_index_that_could_not_be_opened_again_is_tried_once_more(open_tier, store, monkeypatch):
    one, two = (chain_of(1, seed=seed)[0] for seed in range(2))
    tier = open_tier()
    note_damage(store)
    again = open_tier()
    assert again.put(one).stored

    def fail(*_):
        raise sqlite3.OperationalError("too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(database, "_connect", fail)
        assert not tier.have(keys_of([one]))
        assert not tier.put(two).stored
    assert tier.have(keys_of([one]))
    assert tier.put(two).stored


def test_damage_that_is_noticed_late_is_mended_by_the_next_start(open_tier, store):
    """Where only a part of the index is bad, start does not see it; the first use notes it down."""
    refs = refs_of(3)
    tier = open_tier()
    put_all(tier, [record(ref) for ref in refs])
    tier.index.database.checkpoint()
    tier.close()
    garble_tokens(store / "index.sqlite")
    for expected in ([], [256]):
        again = open_tier()
        found = again.children(root(NAMESPACE), refs[0].tokens)
        assert [child.n_common for child in found] == expected
        assert set(again.have([ref.key for ref in refs])) == {ref.key for ref in refs}
        again.close()


def test_damage_that_cannot_be_noted_down_is_no_error(tmp_path):
    """The disk may be read-only, or gone."""
    note_damage(tmp_path / "gone")


def test_a_busy_index_is_not_taken_for_a_damaged_one(store, open_tier, monkeypatch):
    """A process that starts while another writes for long must not throw the index away."""
    monkeypatch.setattr("keepwarm.store.index.database.LOCK_WAIT_S", 0.01)
    open_tier().put(chain_of(1)[0])
    inode = (store / "index.sqlite").stat().st_ino
    with closing(sqlite3.connect(store / "index.sqlite", isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(Busy, match="using the index"):
            open_tier()
    assert (store / "index.sqlite").stat().st_ino == inode
    assert open_tier().stats().blocks == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 100, encode(record(first_block([1])))],
    ids=["empty", "garbage", "another record"],
)
def test_a_bad_file_without_a_row_is_quarantined(data, open_tier, store):
    (one,) = chain_of(1)
    tier = open_tier()
    path = tier.records.path_of(one.header.key, Part.DELTA)
    path.parent.mkdir()
    path.write_bytes(data)
    again = open_tier()
    assert list(again.walk()) == []
    assert not path.exists()
    assert again.stats().quarantined == 1
    assert again.put(one).stored


def test_a_row_without_a_file_is_dropped(open_tier):
    one, two, three = made = chain_of(3)
    tier = open_tier()
    put_all(tier, made)
    tier.records.path_of(one.header.key, Part.DELTA).unlink()
    tier.records.path_of(two.header.key, Part.DELTA).unlink()
    assert tier.read(one.header.key, Part.DELTA) is None
    assert set(tier.have(keys_of(made))) == set(keys_of([two, three]))
    again = open_tier()
    assert set(again.have(keys_of(made))) == set(keys_of([three]))


def test_a_directory_in_place_of_a_file_is_quarantined(open_tier, store):
    (one,) = chain_of(1)
    tier = open_tier()
    put_all(tier, [one])
    path = tier.records.path_of(one.header.key, Part.DELTA)
    path.unlink()
    (path / "inner").mkdir(parents=True)
    assert tier.read(one.header.key, Part.DELTA) is None
    assert tier.put(one).stored
    assert_all_read(tier, [one])


def test_a_directory_in_place_of_a_file_being_deleted_stops_nothing(open_tier):
    """The deletion still hides the block, and the next start succeeds."""
    one, two = made = chain_of(2)
    tier = open_tier()
    put_all(tier, made)
    path = tier.records.path_of(two.header.key, Part.DELTA)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreFailed, match="could not delete blocks"):
        tier.delete_all([two.header.key])
    assert set(tier.have(keys_of(made))) == set(keys_of([one]))
    again = open_tier()
    assert set(again.have(keys_of(made))) == set(keys_of([one]))
    assert_all_read(again, [one])


class StubbornFiles(Files):
    """One file cannot be deleted."""

    def __init__(self, name):
        self.name = name

    def remove(self, path):
        if path.name == self.name:
            raise PermissionError(path)
        return super().remove(path)


def test_a_file_that_cannot_be_deleted_takes_no_others_along(tmp_path):
    """What is evicted with it is gone, and the next put has room."""
    made = [chain_of(1, seed=seed, n_bytes=400_000)[0] for seed in range(11)]
    big, kept = chain_of(1, seed=11, n_bytes=1_500_000)[0], keys_of(made[:10])
    files = StubbornFiles(path_of(tmp_path, kept[0], Part.DELTA).name)
    with closing(DiskTier(tmp_path, DiskLimits(6_500_000, 0), files)) as tier:
        put_all(tier, made[:10])
        assert isinstance(tier.put(big).durable.exception(), PermissionError)
        found = tier.have(kept)
        assert len(list(files_under(tmp_path / "blocks"))) == len(found) + 1 < 10
        assert tier.index.lookups.n_bytes() == disk_use(tmp_path / "blocks")
        assert tier.put(made[10]).stored


# Quarantine and identity


def test_a_bad_record_is_quarantined_with_its_reason(open_tier, store):
    (one,) = chain_of(1)
    tier = open_tier()
    put_all(tier, [one])
    path = tier.records.path_of(one.header.key, Part.DELTA)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert tier.read(one.header.key, Part.DELTA) is None
    assert tier.have(keys_of([one])) == {}
    assert (tier.stats().quarantined, tier.stats().misses, tier.stats().hits) == (1, 1, 0)
    bad, why = sorted((store / "quarantine").iterdir())
    assert bad.read_bytes() == bytes(data)
    assert why.read_text() == "L0_B0_V does not match its digest\n"
    assert tier.put(one).stored
    assert_all_read(tier, [one])


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": bytes(20)},
        {"part": Part.STATE},
        {"namespace": Namespace(bytes(32))},
        {"parent": bytes(20)},
        {"tokens": bytes(4)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_record_must_be_the_one_that_was_asked_for(wrong):
    """Its key is the hash of namespace, parent and tokens: none can be another's."""
    (ref,) = refs_of(1)
    header = record(ref).header
    check_identity(header, ref.key, Part.DELTA)
    with pytest.raises(BadRecord):
        check_identity(Header(**{**vars(header), **wrong}), ref.key, Part.DELTA)


# Writers


@contextmanager
def no_file_may_grow():
    """A disk quota of nothing, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_fails_no_request(open_tier):
    """A real limit of the system, so that SQLite meets it too: reads serve, puts are counted."""
    made = chain_of(3)
    tier = open_tier()
    put_all(tier, made)
    tier.index.database.checkpoint()
    with no_file_may_grow():
        found = [tier.read(one.header.key, Part.DELTA) for one in made]
        known = tier.have(keys_of(made))
        tier.touch(keys_of(made))
        put = tier.put(record(first_block([5])))
    assert [content(f) for f in found] == [content(one) for one in made]
    assert set(known) == set(keys_of(made))
    assert not put.stored
    assert put.durable.exception(timeout=300) is not None
    assert tier.stats().errors >= 1
    assert tier.put(record(first_block([5]))).stored


def test_a_bad_record_on_a_disk_that_takes_no_more_is_a_miss(open_tier):
    """It can be neither quarantined nor deleted from the index."""
    one, two = made = chain_of(2)
    tier = open_tier()
    put_all(tier, made)
    tier.index.database.checkpoint()
    path = tier.records.path_of(one.header.key, Part.DELTA)
    path.write_bytes(path.read_bytes()[:-1])
    tier.records.path_of(two.header.key, Part.DELTA).unlink()
    with no_file_may_grow():
        found = [tier.read(one.header.key, Part.DELTA) for one in made]
    assert found == [None, None]
    assert tier.stats().misses == 2


def test_a_bad_record_that_cannot_be_moved_is_a_miss_and_is_replaced(open_tier):
    """It is not counted as quarantined."""
    (one,) = chain_of(1)
    tier = open_tier()
    tier.put(one)
    tier.records.path_of(one.header.key, Part.DELTA).write_bytes(b"")
    tier.files.break_(errno.EACCES, "publish")
    assert tier.read(one.header.key, Part.DELTA) is None
    assert tier.stats().quarantined == 0
    tier.files.mend()
    put_all(tier, [one])
    assert_all_read(tier, [one])


# Pins


def flood(tier, n, seed):
    """Puts other blocks, more than there is room for."""
    for i in range(n):
        tier.put(record(first_block([seed + i]), n_bytes=MIB // 4))


def test_a_pinned_block_and_its_ancestors_are_never_evicted(open_tier):
    tier = open_tier(6 * MIB, clock=iter(range(2**31, 2**32)).__next__)  # a second a look
    pinned, unpinned = chain_of(4, seed=1, n_bytes=MIB // 4), chain_of(4, seed=2, n_bytes=MIB // 4)
    put_all(tier, pinned + unpinned)
    tier.pin(pinned[-1].header.key, "agent")
    flood(tier, 60, seed=10_000)
    assert set(tier.have(keys_of(pinned))) == set(keys_of(pinned))
    assert tier.have(keys_of(unpinned)) == {}


@pytest.mark.parametrize("bad", [2, 4])
def test_a_pin_protects_what_is_before_a_bad_record(bad, open_tier):
    """Until its owner lets go."""
    tier = open_tier(6 * MIB, clock=iter(range(2**31, 2**32)).__next__)  # a second a look
    made = chain_of(5, n_bytes=MIB // 4)
    put_all(tier, made)
    tier.pin(made[-1].header.key, "agent")
    tier.records.path_of(made[bad].header.key, Part.DELTA).write_bytes(b"")
    assert tier.read(made[bad].header.key, Part.DELTA) is None
    flood(tier, 60, seed=10_000)
    assert set(tier.have(keys_of(made))) == set(keys_of(made[:bad] + made[bad + 1 :]))
    tier.pin_only("agent", ())
    flood(tier, 60, seed=20_000)
    assert tier.have(keys_of(made)) == {}


def test_a_block_is_pinned_until_every_owner_lets_go(open_tier):
    tier, one = open_tier(6 * MIB), record(first_block([1]), n_bytes=MIB // 4)
    key = one.header.key
    tier.put(one)
    for owner in ("a", "b", "b"):
        tier.pin(key, owner)
    tier.pin_only("a", ())
    tier.pin_only("nobody", ())
    flood(tier, 40, seed=10_000)
    assert key in tier.have([key])
    tier.pin_only("b", ())
    flood(tier, 40, seed=50_000)
    assert key not in tier.have([key])
