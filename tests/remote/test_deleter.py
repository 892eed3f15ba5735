"""What is deleted here is deleted from shared tiers too, at once or when they can be reached."""

import json
import shutil
import threading
from contextlib import closing

import pytest

from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.concurrency import CallDeadline
from keepwarm.errors import StoreFailed
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, pack, unpack
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.deleter import DeleterThread, RemoteDeleter, erase_at_once, erase_from
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.disk.disk import DiskLimits
from tests.kit.waiting import wait_until
from tests.store.kit import NAMESPACE, record, refs_of, tokens_of

SOON = 30.0
CLASS = "cpu-mlx-0.1"
TOKENS = tokens_of(2 * BLOCK_TOKENS + 40)
REFS = refs_of(3, n_last=40)
SECRET = "correct horse battery"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture(params=["", SECRET], ids=["plain", "sealed"])
def open_store(request, tmp_path, place, monkeypatch):
    monkeypatch.setattr("keepwarm.store.marker.SCRYPT", {"n": 2, "r": 8, "p": 1})
    stores = []

    def opener():
        limits = DiskLimits(min_free_bytes=0)
        stores.append(AgentStore(tmp_path / "store", limits, secret=request.param))
        return stores[-1]

    yield opener
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store, place):
    """A store with one agent, whose blocks another machine can find."""
    store = open_store()
    store.tombstones.share_with([place.as_uri()])
    tier = RemoteTier(open_backend(place.as_uri()), CLASS, store.disk.cipher)
    assert tier.health.wait_until_tried(SOON)
    for ref in REFS:
        store.disk.put(record(ref))
        assert tier.put(record(ref)).stored
    tier.close()
    store.agents.create("coder", Branch.of(NAMESPACE, TOKENS))
    return store


def shared(place):
    names = RemoteNames(CLASS)
    found = (place / names.of(RemoteRecord.of(record(ref).header)) for ref in REFS)
    return [path.exists() for path in found]


def at_once(store):
    return RemoteDeleter(
        store.tombstones, store.blocks_of_agents, erase_at_once("", store.disk.cipher, CLASS)
    ).finish()


def test_a_deleted_agent_is_gone_from_a_place(store, place):
    assert store.agents.delete("coder") == 3
    assert shared(place) == [True] * 3
    assert at_once(store) == []
    assert shared(place) == [False] * 3
    assert store.tombstones.all() == {}


def test_what_could_not_be_reached_is_deleted_later(store, open_store, place):
    """Also after a restart; what is written down tells no tokens."""
    away = place.rename(place.with_name("away"))
    store.agents.delete("coder")
    assert at_once(store) == [place.as_uri()]
    assert store.disk.have([ref.key for ref in REFS]) == {}
    written = [path.read_bytes() for path in (store.disk.root / "shared").iterdir()]
    assert len(written) == 2
    for told in (pack(TOKENS[:4]), pack(TOKENS[:4]).hex().encode(), b"coder"):
        assert all(told not in data for data in written)
    store.close()
    away.rename(place)
    again = open_store()
    assert at_once(again) == []
    assert shared(place) == [False] * 3
    assert again.tombstones.all() == {}


def test_a_place_is_cleared_when_it_answers_again(store, place, monkeypatch):
    """In a running process: a deletion does not wait, and the rest is tried again."""
    monkeypatch.setattr("keepwarm.remote.deleter.RETRY_S", 0.01)
    tier = RemoteTier(open_backend(place.as_uri()), CLASS, store.disk.cipher)
    assert tier.health.wait_until_tried(SOON)
    away = place.rename(place.with_name("away"))
    thread = DeleterThread(
        RemoteDeleter(store.tombstones, store.blocks_of_agents, erase_from({place.as_uri(): tier}))
    )
    assert thread.wait(SOON) == []
    for _ in range(3):
        tier.health.failed()
    store.agents.delete("coder")
    thread.notice()
    assert thread.wait(SOON) == [place.as_uri()]
    assert len(store.tombstones.all()) == 1
    away.rename(place)
    tier.health.tried(True)
    with thread._changed:
        assert thread._changed.wait_for(lambda: not thread._left, SOON)
    assert shared(place) == [False] * 3
    thread.close()
    tier.close()


def test_a_place_that_hangs_is_named_before_it_has_failed(store, place):
    """A deletion waits for a moment only."""
    is_back = threading.Event()

    def hang(*_):
        is_back.wait(SOON)
        return True

    thread = DeleterThread(RemoteDeleter(store.tombstones, store.blocks_of_agents, hang))
    assert thread.wait(SOON) == []
    store.agents.delete("coder")
    thread.notice()
    assert thread.wait(0.01) == [place.as_uri()]
    is_back.set()
    assert thread.wait(SOON) == []
    thread.close()


@pytest.mark.parametrize("error", [StoreFailed("full"), OSError("odd")])
def test_deleter_thread_after_an_error_names_the_place_and_tries_again(
    store, place, monkeypatch, error
):
    monkeypatch.setattr("keepwarm.remote.deleter.RETRY_S", 0.01)
    errors, again = [error], threading.Event()

    def erase(*_):
        if errors:
            raise errors.pop()
        return again.wait(SOON)

    thread = DeleterThread(RemoteDeleter(store.tombstones, store.blocks_of_agents, erase))
    assert thread.wait(SOON) == []
    store.agents.delete("coder")
    thread.notice()
    assert thread.wait(SOON) == [place.as_uri()]
    again.set()
    wait_until(lambda: not store.tombstones.all())
    thread.close()


def test_deleter_thread_goes_on_when_the_tombstones_cannot_be_read(store, place, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.deleter.RETRY_S", 0.01)
    read_all, errors = store.tombstones.all, [OSError("odd")] * 2

    def fail_twice():
        if errors:
            raise errors.pop()
        return read_all()

    monkeypatch.setattr(store.tombstones, "all", fail_twice)
    deleter = RemoteDeleter(store.tombstones, store.blocks_of_agents, lambda *_: True)
    store.agents.delete("coder")
    thread = DeleterThread(deleter)
    wait_until(lambda: read_all() == {})
    assert errors == []
    thread.close()


def mounted(place, store, compute_class=CLASS):
    """A tier as a server opens it: it remembers what it has marked."""
    flags = store.disk.index.database
    return RemoteTier(open_backend(place.as_uri()), compute_class, store.disk.cipher, flags=flags)


def test_a_deletion_waits_for_a_share_that_is_not_mounted(store, place):
    """Though its mount point can be written to; else the agent would be back with the share."""
    with closing(mounted(place, store)) as tier:
        assert tier.health.wait_until_tried(SOON)
    share = place.rename(place.with_name("share"))
    place.mkdir()
    with closing(mounted(place, store)) as tier:  # after a restart
        assert not tier.health.wait_until_tried(SOON)
        assert "not mounted" in tier.health.refused
        store.agents.delete("coder")
        erase = erase_from({place.as_uri(): tier})
        deleter = RemoteDeleter(store.tombstones, store.blocks_of_agents, erase)
        assert deleter.finish() == [place.as_uri()]
        assert not any(path.is_file() for path in place.rglob("*")), "nothing is left there"
        shutil.rmtree(place)
        share.rename(place)
        tier._try(CallDeadline(SOON))
        tier.health.tried(True)
        assert deleter.finish() == []
    assert shared(place) == [False] * 3


def test_a_share_that_is_unmounted_is_left_alone(store, place, monkeypatch):
    """In a running process: what is put would fill the disk below."""
    monkeypatch.setattr("keepwarm.remote.tier.REFRESH_S", 0.02)
    with closing(mounted(place, store)) as tier:
        assert tier.health.wait_until_tried(SOON)
        place.rename(place.with_name("share"))
        place.mkdir()
        wait_until(lambda: tier.is_open)
        assert "not mounted" in tier.health.refused


def test_what_another_agent_has_by_then_stays(store, place):
    away = place.rename(place.with_name("away"))
    store.agents.delete("coder")
    assert at_once(store) == [place.as_uri()]
    store.agents.create("other", Branch.of(NAMESPACE, TOKENS[:BLOCK_TOKENS]))
    away.rename(place)
    assert at_once(store) == []
    assert shared(place) == [True, False, False]


def test_blocks_that_were_evicted_here_are_deleted_there(store, place):
    store.disk.delete_all([REFS[2].key])
    assert store.agents.delete("coder") == 2
    assert at_once(store) == []
    assert shared(place) == [False] * 3


def test_blocks_of_a_model_that_an_agent_had_before_are_deleted_there(store, place):
    store.agents.rewind("coder", 0)
    store.agents.advance("coder", Namespace(bytes(32)), tokens_of(90))
    assert NAMESPACE not in {each.namespace for each in store.agents.show("coder").branches}
    store.agents.delete("coder")
    assert at_once(store) == []
    assert shared(place) == [False] * 3


def test_clearing_a_store_deletes_there_what_agents_had_that_was_evicted_here(store, place):
    store.disk.delete_all([REFS[2].key])
    store.clear()
    assert at_once(store) == []
    assert shared(place) == [False] * 3


def test_clearing_a_store_does_so_too(store, place):
    store.agents.delete("coder")
    assert at_once(store) == []
    assert shared(place) == [False] * 3
    store.disk.put(record(REFS[0]))
    store.clear()
    (tombstone,) = store.tombstones.all().values()
    assert [block.key for block in tombstone.blocks] == [REFS[0].key]
    assert tombstone.namespaces == (NAMESPACE,)


def test_a_store_that_shares_nothing_writes_nothing_down(open_store):
    store = open_store()
    store.disk.put(record(REFS[0]))
    store.agents.create("coder", Branch.of(NAMESPACE, unpack(REFS[0].tokens)))
    store.agents.delete("coder")
    assert not (store.disk.root / "shared").exists()


def test_a_place_that_is_not_used_is_not_waited_for_and_cleared_when_it_is_used_again(store, place):
    away = place.rename(place.with_name("away"))
    store.agents.delete("coder")
    assert at_once(store) == [place.as_uri()]
    store.tombstones.share_with([(place / "other").as_uri()])
    assert at_once(store) == []
    away.rename(place)
    store.tombstones.share_with([place.as_uri()])
    assert at_once(store) == []
    assert shared(place) == [False] * 3
    assert store.tombstones.all() == {}


def test_agents_are_not_read_for_a_place_that_is_down(store, place):
    """Else all of them would be, every two seconds."""
    store.agents.delete("coder")
    with closing(mounted(place, store)) as tier:
        assert tier.health.wait_until_tried(SOON)
        for _ in range(3):
            tier.health.failed()
        read = []
        erase = erase_from({place.as_uri(): tier})
        deleter = RemoteDeleter(store.tombstones, lambda: read.append(1) or (), erase)
        assert deleter.finish() == [place.as_uri()]
        assert read == []
        tier.health.tried(True)
        assert (deleter.finish(), read) == ([], [1])


def test_a_process_that_ends_does_not_wait_for_a_place_that_hangs(store, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.deleter.CLOSE_S", 0.01)
    is_asked, is_back = threading.Event(), threading.Event()

    def hang(*_):
        is_asked.set()
        return is_back.wait(SOON)

    store.agents.delete("coder")
    thread = DeleterThread(RemoteDeleter(store.tombstones, store.blocks_of_agents, hang))
    assert is_asked.wait(SOON)
    thread.close()
    assert thread._thread.is_alive()
    is_back.set()
    thread._thread.join(SOON)


def test_the_command_line_says_which_places_it_could_not_reach(tmp_path, place, monkeypatch):
    from typer.testing import CliRunner

    from keepwarm.cli.agents import app

    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path / "home"))
    tier = RemoteTier(open_backend(place.as_uri()), CLASS)
    assert tier.health.wait_until_tried(SOON)
    tier.close()
    with AgentStore(tmp_path / "home" / "store", DiskLimits(min_free_bytes=0)) as store:
        store.tombstones.share_with([place.as_uri(), (tmp_path / "missing").as_uri()])
        store.disk.put(record(REFS[0]))
        for name in ("coder", "other"):
            store.agents.create(name, Branch.of(NAMESPACE, unpack(REFS[0].tokens)))
    missing = (tmp_path / "missing").as_uri()
    assert f"server: {missing}\n" not in CliRunner().invoke(app, ["rm", "other"]).stdout
    said = json.loads(CliRunner().invoke(app, ["rm", "coder", "--json"]).stdout)
    assert said == {
        "agent": "coder",
        "removed_blocks": 1,
        "shared_unreached": [missing],
    }
    with AgentStore(tmp_path / "home" / "store", DiskLimits(min_free_bytes=0)) as store:
        store.disk.put(record(REFS[0]))
        store.agents.create("coder", Branch.of(NAMESPACE, unpack(REFS[0].tokens)))
    assert f"server: {missing}\n" in CliRunner().invoke(app, ["rm", "coder"]).stdout
