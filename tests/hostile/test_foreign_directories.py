"""A directory that is not ours: nothing in it is deleted, moved, made or followed.

Each test names what a user's folder may hold where Keepwarm works: under the names of our folders,
beside our files, or behind a link.
"""

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.cache.store import Store
from keepwarm.config import Settings
from keepwarm.errors import BadInput, StoreFailed
from keepwarm.files import write_atomically
from keepwarm.models import builtin
from keepwarm.records.record import Part
from keepwarm.remote.backend import FolderRange, Listed, new_memory
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.store.atomic import Files
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.disk.maintenance import clear_quarantine
from keepwarm.store.marker import MARKER
from tests.cli import keepwarm_here
from tests.kit.checkpoints import write_checkpoint
from tests.store.kit import chain_of

UUID = "0123456789abcdef" * 2
LIMITS = DiskLimits(min_free_bytes=0)
YEAR_S = 365 * 24 * 3600
SOON = 30.0


def tree(root: Path) -> dict[str, bytes | Path | None]:
    """Everything under a root: content of files, targets of links."""
    return {str(path.relative_to(root)): content(path) for path in root.rglob("*")}


def content(path: Path) -> bytes | Path | None:
    if path.is_symlink():
        return path.readlink()
    return path.read_bytes() if path.is_file() else None


def write(path: Path, text: str = "mine") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def folder(tmp_path):
    """A user's folder that looks like a store by its names only."""
    root = tmp_path / "folder"
    write(root / "tmp" / UUID / "draft.txt")
    write(root / "tmp" / "holiday" / "photo.jpg")
    write(root / "quarantine" / "letter.txt")
    write(root / "blocks" / "ab" / "house.txt")
    write(root / "blocks" / "ab" / f"ab{'0' * 38}.d.safetensors", "not a record")
    write(root / "agents" / "smith.json", "{}")
    write(root / "index.sqlite", "a text")
    return root


@pytest.fixture
def store(tmp_path):
    """A store with two blocks, closed."""
    with AgentStore(tmp_path / "store", LIMITS) as opened:
        assert all(opened.disk.put(one).stored for one in chain_of(2))
    return tmp_path / "store"


def n_blocks(root: Path) -> int:
    with AgentStore(root, LIMITS) as opened:
        return opened.disk.stats().blocks


# A folder without the marker


@pytest.mark.parametrize("secret", [None, "a long passphrase"])
def test_a_folder_that_is_not_a_store_is_refused_by_name_and_stays_as_it_was(folder, secret):
    before = tree(folder)
    with pytest.raises(BadInput, match="is not a store of Keepwarm") as refused:
        AgentStore(folder, LIMITS, secret=secret)
    assert str(folder) in str(refused.value)
    assert tree(folder) == before


@pytest.mark.parametrize("arguments", [["ls"], ["gc"], ["verify", "--fix"], ["rm", "smith"]])
def test_no_cache_command_touches_a_folder_that_is_not_a_store(folder, tmp_path, arguments):
    before = tree(folder)
    done = keepwarm_here("cache", *arguments, home=tmp_path / "home", KEEPWARM_STORE=str(folder))
    assert done.returncode == 2
    assert f"{folder} is not empty and is not a store of Keepwarm" in done.stderr.decode()
    assert tree(folder) == before


def test_neither_the_server_nor_the_library_touches_a_folder_that_is_not_a_store(folder, tmp_path):
    before = tree(folder)
    with pytest.raises(BadInput, match="is not a store of Keepwarm"):
        Store(settings=Settings(home=tmp_path / "home", store=folder))
    model = write_checkpoint(tmp_path / "model")
    home, port = tmp_path / "home", "0"
    done = keepwarm_here(
        "serve", "--model", model, "--port", port, home=home, KEEPWARM_STORE=str(folder)
    )
    assert done.returncode == 2
    assert f"{folder} is not empty and is not a store of Keepwarm" in done.stderr.decode()
    assert tree(folder) == before


def test_another_programs_index_is_not_taken_for_ours(tmp_path):
    with sqlite3.connect(tmp_path / "index.sqlite") as database:
        database.execute("CREATE TABLE blocks(key BLOB PRIMARY KEY)")
    database.close()
    before = tree(tmp_path)
    with pytest.raises(BadInput, match="is not a store"):
        DiskTier(tmp_path, LIMITS)
    assert tree(tmp_path) == before


def test_pipes_under_our_names_do_not_stop_us(tmp_path):
    for name in (MARKER, "index.sqlite", "sealed.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match="is not a store"):
        DiskTier(tmp_path, LIMITS)


def test_a_file_called_like_the_marker_is_not_enough(folder):
    write(folder / MARKER, '{"keepwarm": "shop"}')
    with pytest.raises(BadInput, match="is not a store"):
        DiskTier(folder, LIMITS)


@pytest.mark.parametrize("made", [False, True])
def test_an_empty_or_missing_directory_becomes_a_store(tmp_path, made):
    root = tmp_path / "deep" / "store"
    if made:
        root.mkdir(parents=True)
    DiskTier(root, LIMITS).close()
    assert json.loads((root / MARKER).read_text()) == {"keepwarm": "store", "version": 2}
    assert n_blocks(root) == 0


def test_a_new_file_system_counts_as_empty(tmp_path):
    (tmp_path / "lost+found").mkdir()
    DiskTier(tmp_path, LIMITS).close()
    assert (tmp_path / "lost+found").is_dir()


@pytest.mark.parametrize(
    ("version", "why"), [(3, "newer Keepwarm"), (1, "format 1 of an earlier Keepwarm")]
)
def test_store_of_another_version_is_refused_and_stays_as_it_was(store, version, why):
    write(store / MARKER, json.dumps({"keepwarm": "store", "version": version}))
    before = tree(store)
    with pytest.raises(BadInput, match=why):
        DiskTier(store, LIMITS)
    assert tree(store) == before


def test_store_without_its_marker_is_refused_and_stays_as_it_was(store):
    (store / MARKER).unlink()
    before = tree(store)
    with pytest.raises(BadInput, match="is not a store"):
        DiskTier(store, LIMITS)
    assert tree(store) == before


class Stopped(Exception):
    """As if the process were killed."""


class StoppingFiles(Files):
    """Stops before the operation with this number."""

    def __init__(self, stop_at: int) -> None:
        self._left = stop_at
        self.seen: list[tuple[str, str]] = []

    def _step(self, what: str, path: Path) -> None:
        if not self._left:
            raise Stopped
        self._left -= 1
        self.seen.append((what, path.name))

    def make_directory(self, path):
        self._step("make", path)
        super().make_directory(path)

    def write(self, path, pieces):
        self._step("write", path)
        super().write(path, pieces)

    def publish(self, temp, target):
        self._step("publish", target)
        super().publish(temp, target)


@pytest.mark.parametrize("secret", [None, "A" * 43 + "="])
def test_a_start_that_was_killed_leaves_what_the_next_one_opens(tmp_path, secret):
    """From before the directory is made until its first folders are there."""
    for stop_at in range(7):
        root = tmp_path / f"store-{stop_at}"
        with pytest.raises(Stopped):
            DiskTier(root, LIMITS, StoppingFiles(stop_at))
        AgentStore(root, LIMITS, secret=secret).close()
        assert [path.name for path in root.iterdir() if path.name.startswith(f".{MARKER}")] == []


def test_the_marker_comes_before_anything_else(tmp_path):
    files = StoppingFiles(100)
    DiskTier(tmp_path / "store", LIMITS, files).close()
    made = [name for what, name in files.seen if (what, name) != ("make", "store")]
    assert made[0].startswith(f".{MARKER}.")
    assert made[1] == MARKER


# What others put into a store


def test_only_our_leftovers_in_tmp_are_deleted(store):
    """Ours: a name of 32 hex digits, an empty lock file, and numbered files."""
    tmp = store / "tmp"
    ours = write(tmp / ("a" * 32) / "0.tmp").parent
    (ours / "lock").touch()
    (tmp / ("b" * 32)).mkdir()  # killed before it had a lock
    kept = [
        write(tmp / UUID / "draft.txt"),  # no lock
        write(tmp / "holiday" / "photo.jpg"),
        write(tmp / "holiday" / "lock", ""),  # another name
        write(tmp / ("c" * 32) / "0.tmp"),
        write(tmp / ("d" * 32) / "letter.txt"),  # in a directory of ours
        write(tmp / "note.txt"),
    ]
    write(tmp / ("c" * 32) / "lock", "not empty")
    (tmp / ("d" * 32) / "lock").touch()
    assert n_blocks(store) == 2
    assert [path for path in kept if not path.exists()] == []
    assert not ours.exists()
    assert not (tmp / ("b" * 32)).exists()


def test_only_what_we_put_into_quarantine_is_deleted(store):
    record = next((store / "blocks").rglob("*.safetensors"))
    name = f"{record.name}.{time.time_ns()}"
    kept = [
        write(store / "quarantine" / "letter.txt"),
        write(store / "quarantine" / "letter.txt.why"),
        write(store / "quarantine" / name),  # without its reason
        write(store / "quarantine" / f"{record.name}.1" / "inner.txt"),
    ]
    record.write_bytes(record.read_bytes()[:-1])
    with AgentStore(store, LIMITS) as opened:
        for stored in list(opened.disk.walk()):
            opened.disk.read(stored.key, Part.DELTA)
        assert opened.disk.stats().quarantined == 1
        assert clear_quarantine(opened.disk) > 0
    left = {path for path in (store / "quarantine").rglob("*") if path.is_file()}
    assert left == set(kept)


def test_a_directory_in_quarantine_keeps_what_we_did_not_write(store):
    record = next((store / "blocks").rglob("*.safetensors"))
    record.unlink()
    write(record / "letter.txt")
    with AgentStore(store, LIMITS) as opened:
        for stored in list(opened.disk.walk()):
            opened.disk.read(stored.key, Part.DELTA)
        clear_quarantine(opened.disk)
    assert [path.name for path in store.rglob("letter.txt")] == ["letter.txt"]


# Links


def test_store_with_a_link_for_its_marker_is_none(store, tmp_path):
    (store / MARKER).rename(tmp_path / "away")
    (store / MARKER).symlink_to(tmp_path / "away")
    with pytest.raises(BadInput, match="is not a store"):
        DiskTier(store, LIMITS)


@pytest.mark.parametrize(
    "name", ["blocks", "tmp", "quarantine", "agents", "models", "index.sqlite", "blocks/00"]
)
def test_a_link_in_place_of_a_part_of_the_store_is_refused(store, tmp_path, name):
    away = tmp_path / "away"
    place = store / name
    if place.exists():
        place.rename(away)
    else:
        away.mkdir()
    place.symlink_to(away)
    before = tree(away) if away.is_dir() else away.read_bytes()
    with pytest.raises(BadInput, match="symbolic link") as refused:
        AgentStore(store, LIMITS)
    assert str(place) in str(refused.value)
    assert before == (tree(away) if away.is_dir() else away.read_bytes())


def test_links_in_tmp_and_quarantine_are_neither_followed_nor_deleted(store, tmp_path):
    away = write(tmp_path / "away" / "0.tmp").parent
    (away / "lock").touch()
    (store / "tmp" / UUID).symlink_to(away)
    quarantined = f"{'0' * 40}.d.safetensors.{time.time_ns()}"
    (store / "quarantine" / quarantined).symlink_to(away / "0.tmp")
    write(store / "quarantine" / f"{quarantined}.why")
    with AgentStore(store, LIMITS) as opened:
        clear_quarantine(opened.disk)
    assert sorted(path.name for path in away.iterdir()) == ["0.tmp", "lock"]
    assert (store / "tmp" / UUID).is_symlink()
    assert (store / "quarantine" / quarantined).is_symlink()


def test_a_record_behind_a_link_is_a_miss_and_stays(store, tmp_path):
    record = next((store / "blocks").rglob("*.safetensors"))
    away = record.rename(tmp_path / "away")
    record.symlink_to(away)
    with AgentStore(store, LIMITS) as opened:
        read = [opened.disk.read(one.key, Part.DELTA) for one in list(opened.disk.walk())]
    assert sum(one is None for one in read) == 1
    assert record.is_symlink()
    assert away.exists()


def test_an_agent_behind_a_link_is_not_read(store, tmp_path):
    with AgentStore(store, LIMITS) as opened:
        opened.agents.create("mine", Branch(next(opened.disk.walk()).namespace))
        away = (store / "agents" / "mine.json").rename(tmp_path / "away.json")
        (store / "agents" / "mine.json").symlink_to(away)
        assert list(opened.agents.all()) == []
        assert [name for name, _ in opened.agents.unreadable()] == ["mine.json"]


def test_a_directory_of_blocks_that_becomes_a_link_is_not_deleted_from(store, tmp_path):
    with AgentStore(store, LIMITS) as opened:
        stored = next(opened.disk.walk())
        path = opened.disk.records.path_of(stored.key, Part.DELTA)
        away = path.parent.rename(tmp_path / "away")
        path.parent.symlink_to(away)
        assert opened.disk.read(stored.key, Part.DELTA) is None
        with pytest.raises(StoreFailed):
            opened.disk.delete_all([stored.key])
    assert (away / path.name).exists()


def test_blocks_that_become_a_link_are_neither_read_nor_changed(store, tmp_path):
    """The whole directory, exchanged while the store is open."""
    with AgentStore(store, LIMITS) as opened:
        stored = next(opened.disk.walk())
        away = (store / "blocks").rename(tmp_path / "away")
        (store / "blocks").symlink_to(away)
        before = tree(away)
        assert opened.disk.read(stored.key, Part.DELTA) is None
        with pytest.raises(StoreFailed):
            opened.disk.delete_all([stored.key])
        for record in chain_of(4, seed=7):
            assert not opened.disk.put(record).stored
        assert tree(away) == before


def test_the_path_of_the_store_itself_may_be_a_link(store, tmp_path):
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(store)
    dangling.symlink_to(tmp_path / "new")
    assert n_blocks(link) == 2
    assert n_blocks(dangling) == 0
    assert (tmp_path / "new" / MARKER).exists()


# Home


def test_only_our_leftovers_beside_a_file_are_deleted(tmp_path):
    away = write(tmp_path / "away")
    kept = [
        write(tmp_path / ".a.json.part-of my notes"),
        write(tmp_path / ".a.json.part-abcdefgh.txt"),
        write(tmp_path / ".a.json.part-abcdefgi.json" / "inner").parent,
        tmp_path / ".a.json.part-abcdefgj.json",
    ]
    kept[-1].symlink_to(away)
    ours = write(tmp_path / ".a.json.part-abcdefgk.json")
    for path in (*kept, ours):
        os.utime(path, (0, time.time() - YEAR_S), follow_symlinks=False)
    write_atomically(tmp_path / "a.json", "{}")
    assert [path for path in kept if not path.is_symlink() and not path.exists()] == []
    assert kept[-1].is_symlink()
    assert not ours.exists()


def test_only_our_unfinished_downloads_are_deleted(tmp_path):
    settings = Settings(home=tmp_path, store=tmp_path / "store")
    model = builtin.BUILTINS[settings.model]
    ours = settings.models / f".{model.name}-abcdefgh"
    kept = [
        settings.models / f".{model.name}-backup",
        settings.models / f".{model.name}-my_model",  # eight characters, but not marked
        settings.models / f".{model.name}-abcdefgi",
    ]
    write(ours / builtin.WORK_MARKER, "")
    write(kept[0] / builtin.WORK_MARKER, "")
    write(kept[1] / "model.gguf")
    away = write(tmp_path / "away" / builtin.WORK_MARKER, "").parent
    kept[2].symlink_to(away)
    for path in (ours, *kept):
        os.utime(path, (0, time.time() - YEAR_S), follow_symlinks=False)
    builtin._delete_leftovers(model, settings.models)
    assert sorted(settings.models.iterdir()) == sorted(kept)
    assert (away / builtin.WORK_MARKER).exists()


# A directory that machines share


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "share").mkdir()
    with closing(DirectoryBackend(tmp_path / "share")) as opened:
        yield opened


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/x.d", "tmp"])
def test_links_in_a_shared_directory_lead_nowhere(shared, tmp_path, link):
    """Whoever writes to the share would have this machine's own files read, changed or deleted."""
    share, away = tmp_path / "share", tmp_path / "away"
    for path in (away / "x.d", away / "b" / "x.d"):
        write(path)
        os.utime(path, (1, 1))
    before = tree(away)
    (share / link).parent.mkdir(parents=True, exist_ok=True)
    (share / link).symlink_to(away / "x.d" if link.endswith(".d") else away)
    assert shared.sizes(["a/b/x.d"], SOON) == [None]
    assert shared.read("a/b/x.d", new_memory, SOON) is None
    assert shared.look([FolderRange("a/b", "x.d")], SOON)[0] in ([], [Listed("a/b/x.d")])
    assert shared.list_names("a/b", SOON) == []
    assert not shared.put("a/b/x.d", [b"theirs"], SOON)
    assert not shared.put("a/b/y.d", [b"theirs"], SOON) or link.endswith(".d")
    shared.touch(["a/b/x.d"], SOON)
    shared.delete(["a/b/x.d", "a/b/y.d"], SOON)
    assert tree(away) == before
    assert {path.stat().st_mtime for path in away.rglob("*.d")} == {1}
