"""A shared directory: calls that hang, a share that is not mounted, files left unfinished."""

import os
from contextlib import closing

import pytest

from keepwarm.errors import BadInput
from keepwarm.store.blobs.backend import BlobError
from keepwarm.store.blobs.directory import DirectoryBackend
from keepwarm.store.blobs.hands import MAX_HANDS
from keepwarm.store.blobs.opening import open_backend

SOON = 30.0


def take(n_bytes):
    return memoryview(bytearray(n_bytes))


@pytest.fixture
def blobs(tmp_path):
    with closing(DirectoryBackend(tmp_path)) as opened:
        yield opened


def test_a_call_that_hangs_is_left_at_its_deadline(tmp_path, blobs):
    """A pipe without a writer hangs like a share whose server is gone."""
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "x.d")
    for _ in range(2):
        with pytest.raises(BlobError, match="20 ms"):
            blobs.read("a/x.d", take, 0.02)
    assert blobs.put("a/y.d", [b"y"], SOON)
    for _ in range(MAX_HANDS):  # until no hand is left
        with pytest.raises(BlobError):
            blobs.read("a/x.d", take, 0.02)
    with pytest.raises(BlobError):
        blobs.sizes(["a/y.d"], 0.02)
    end = os.open(tmp_path / "a" / "x.d", os.O_WRONLY)  # the server is back: readers see an end
    os.close(end)
    assert blobs.sizes(["a/y.d"], SOON) == [1]


def test_a_share_that_is_not_mounted_is_not_made(tmp_path):
    with closing(DirectoryBackend(tmp_path / "mnt")) as blobs:
        with pytest.raises(BlobError):
            blobs.put("a/x.d", [b"x"], SOON)
        assert blobs.sizes(["a/x.d"], SOON) == [None]
    assert not (tmp_path / "mnt").exists()


def test_a_put_that_fails_leaves_nothing(tmp_path, blobs):
    (tmp_path / "a" / "x.d" / "in the way").mkdir(parents=True)
    with pytest.raises(BlobError):
        blobs.put("a/x.d", [b"x"], SOON, replace=True)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "address",
    ["", "redis://", "http://host", "file://host/mnt", "file:mnt", "redis://h:port", "redis://h/x"],
)
def test_an_address_of_no_place_is_refused_in_one_sentence(address):
    with pytest.raises(BadInput, match=r"use redis://"):
        open_backend(address)


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(BadInput, match="KEEPWARM_REMOTE_PASSWORD") as refused:
        open_backend("redis://:hunter2@host")
    assert "hunter2" not in str(refused.value)
