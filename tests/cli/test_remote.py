"""`keepwarm remote …` on places that two classes of machines have filled."""

import json
import os
import time
from contextlib import closing

import pytest
from typer.testing import CliRunner

from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.cli.main import command_line
from keepwarm.cli.remote import DAY_S
from keepwarm.errors import BadInput, Unreachable
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.opening import held_blobs
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.disk.disk import DiskLimits
from tests.kit.redis_server import redis_server
from tests.store.kit import NAMESPACE, record, refs_of, tokens_of

SOON = 30.0
CLASSES = "cpu-mlx-0.1", "metal-mlx-0.1"
REFS = refs_of(3)
POLICIES = {"redis": "allkeys-lru", "redis with LFU": "allkeys-lfu"}


@pytest.fixture(params=["directory", "redis"])
def place(request, tmp_path):
    if request.param != "directory":
        with redis_server(tmp_path, "--maxmemory-policy", POLICIES[request.param]) as server:
            yield server.url
    else:
        (tmp_path / "place").mkdir()
        yield (tmp_path / "place").as_uri()


@pytest.fixture
def remote(place, tmp_path, monkeypatch):
    """Runs the verb: each class has three records there, and this machine knows their model."""
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KEEPWARM_REMOTE", place)
    for compute_class in CLASSES:
        with closing(RemoteTier(open_backend(place), compute_class)) as tier:
            assert tier.health.wait_until_tried(SOON)
            assert all(tier.put(record(ref)).stored for ref in REFS)
    with AgentStore(tmp_path / "home" / "store", DiskLimits(min_free_bytes=0)) as store:
        for ref in REFS:
            store.disk.put(record(ref))
        branch = Branch.of(NAMESPACE, tokens_of(3 * BLOCK_TOKENS), model="tiny")
        store.agents.create("coder", branch)

    def run(*arguments, code=0, catch=True):
        verbs = command_line(["remote", "cache"])
        done = CliRunner().invoke(verbs, ["remote", *arguments], catch_exceptions=catch)
        assert done.exit_code == code, done.output
        return done.output

    return run


def name_of(ref):
    return RemoteNames(CLASSES[0]).of(RemoteRecord.of(record(ref).header))


def rows(remote, *options):
    return json.loads(remote("ls", "--json", *options))


def test_ls_tells_records_and_bytes_by_class_and_model(remote, place):
    found = rows(remote)
    assert [(row["tier"], row["class"], row["records"]) for row in found] == [
        (place, compute_class, 3) for compute_class in CLASSES
    ]
    assert {row["model"] for row in found} == {"tiny"}
    assert all(row["n_bytes"] >= 3 * record(REFS[0]).n_bytes for row in found)
    assert [row["class"] for row in rows(remote, "--class", CLASSES[1])] == [CLASSES[1]]
    assert rows(remote, "--model", "other") == rows(remote, "--older-than", "1") == []
    heading, *lines = (line.split("\t") for line in remote("ls").splitlines())
    assert [line[heading.index("class")] for line in lines] == list(CLASSES)
    assert {line[heading.index("tier")] for line in lines} == {place}


def test_rm_deletes_what_is_wanted_and_never_all_by_accident(remote, place):
    assert "Say what to delete" in str(CliRunner().invoke(
        command_line(["remote", "cache"]), ["remote", "rm"]
    ).exception)  # fmt: skip
    assert "--older-than" in remote("rm", "--older-than=-1", code=2)
    with pytest.raises(BadInput, match="leave it out"):
        remote("rm", "--all", "--class", CLASSES[0], catch=False)
    assert sum(row["records"] for row in rows(remote)) == 6
    assert remote("rm", "--class", CLASSES[0]) == "Deleted 3 records.\n"
    assert [row["class"] for row in rows(remote)] == [CLASSES[1]]
    with closing(RemoteTier(open_backend(place), CLASSES[1])) as tier:
        assert tier.health.wait_until_tried(SOON)
        tier.tell(NAMESPACE, "a conversation", b"its past answers", REFS[0])
    assert remote("verify") == "3 of 3 records are intact.\n"
    assert [row["records"] for row in rows(remote)] == [3]
    assert remote("rm", "--all") == "Deleted 3 records.\n"
    with closing(open_backend(place)) as backend:
        assert not list(held_blobs(backend)), "past answers are gone too"
    assert rows(remote) == []


@pytest.mark.parametrize("place", ["redis with LFU"], indirect=True)
def test_ages_that_are_not_told_are_not_taken_for_any(remote):
    assert {(row["oldest"], row["newest"]) for row in rows(remote)} == {(None, None)}
    assert "unknown" in remote("ls")
    assert remote("verify") == "6 of 6 records are intact.\n"
    with pytest.raises(BadInput, match="leave --older-than out"):
        remote("rm", "--older-than", "1", catch=False)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
@pytest.mark.parametrize("command", ["memory", "get"])
def test_a_user_who_may_not_ask_for_sizes_or_records_is_told_so(remote, place, command):
    """No record is bad because it could not be read."""
    with closing(open_backend(place)) as backend:
        backend._call([[b"ACL", b"SETUSER", b"default", f"-{command}".encode()]], SOON)
    with pytest.raises(Unreachable, match="NOPERM"):
        remote("verify", catch=False)


@pytest.mark.parametrize("place", ["directory"], indirect=True)
def test_what_is_used_keeps_what_it_begins_with(remote, place, tmp_path):
    """A bucket tells only when each was put: beginnings of prompts long ago."""
    old = time.time() - 10 * DAY_S
    paths = [tmp_path / "place" / name_of(ref) for ref in REFS]
    for path in paths[:2]:
        os.utime(path, (old, old))
    assert rows(remote, "--older-than", "5") == []
    assert remote("rm", "--older-than", "5") == "Deleted 0 records.\n"
    os.utime(paths[2], (old, old))
    assert [row["records"] for row in rows(remote, "--older-than", "5")] == [3]
    assert remote("rm", "--older-than", "5") == "Deleted 3 records.\n"
    assert [row["class"] for row in rows(remote)] == [CLASSES[1]]


VERBS = [["ls"], ["verify"], ["rm", "--all"]]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["directory"], indirect=True)
def test_a_place_that_is_not_mounted_or_not_named_is_not_an_empty_one(
    remote, verb, monkeypatch, tmp_path
):
    (tmp_path / "place").rename(tmp_path / "share")
    (tmp_path / "place").mkdir()
    with pytest.raises(BadInput, match="not mounted"):
        remote(*verb, catch=False)
    monkeypatch.setenv("KEEPWARM_REMOTE", "")
    with pytest.raises(BadInput, match="set KEEPWARM_REMOTE"):
        remote(*verb, catch=False)


def test_verify_names_what_is_damaged(remote, place):
    assert remote("verify") == "6 of 6 records are intact.\n"
    name = name_of(REFS[1])
    with closing(open_backend(place)) as backend:
        backend.put(name, [os.urandom(2000)], SOON, replace=True)
    said = remote("verify", code=1)
    assert said.startswith(f"{name}: ")
    assert said.endswith("5 of 6 records are intact.\n")
    assert remote("verify", "--class", CLASSES[1]) == "3 of 3 records are intact.\n"
