"""A shared directory: calls that hang, a share that is not mounted, files left unfinished."""

import ctypes
import errno
import os
import threading
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from keepwarm.concurrency import MAX_WORKERS, AbandonableExecutor, CallDeadline, CallError
from keepwarm.errors import BadInput
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import BESIDE, FolderRange
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.handshake import PLAIN, STORE_META, check_mark
from keepwarm.remote.tier import RemoteTier

SOON = 30.0
NOBODY = 65534
LIBC = ctypes.CDLL(None)


def take(n_bytes):
    return memoryview(bytearray(n_bytes))


@pytest.fixture
def blobs(tmp_path):
    with closing(DirectoryBackend(tmp_path)) as opened:
        yield opened


def test_a_call_that_hangs_is_left_at_its_deadline(tmp_path, blobs):
    """As when the server of a share is gone."""
    is_back = threading.Event()

    def hang(n_bytes):
        is_back.wait(SOON)
        return take(n_bytes)

    assert blobs.put("a/x.d", [b"x"], SOON)
    for _ in range(2):
        with pytest.raises(CallError, match="20 ms"):
            blobs.read("a/x.d", hang, 0.02)
    assert blobs.put("a/y.d", [b"y"], SOON)
    for _ in range(MAX_WORKERS):  # until no hand is left
        with pytest.raises(CallError):
            blobs.read("a/x.d", hang, 0.02)
    with pytest.raises(CallError):
        blobs.sizes(["a/y.d"], 0.02)
    is_back.set()
    assert blobs.sizes(["a/y.d"], SOON) == [1]


def test_what_is_no_file_is_no_blob(tmp_path, blobs):
    """Whoever writes to a share can put pipes and links there."""
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe.d")
    (tmp_path / "a" / "null.d").symlink_to("/dev/zero")
    for name in ("a/pipe.d", "a/null.d"):
        assert blobs.sizes([name], SOON) == [None]
        assert blobs.read(name, take, SOON) is None


def test_links_are_not_followed_by_a_listing(tmp_path, blobs):
    """Else the janitor would delete what is elsewhere on this machine."""
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    (elsewhere / "b").mkdir(parents=True)
    (elsewhere / "b" / "x.d").write_bytes(b"x")
    (tmp_path / "a").symlink_to(elsewhere)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "b").symlink_to(elsewhere)
    (tmp_path / "c" / "y.d").write_bytes(b"y")
    listed = {
        folder: blobs.list_names(folder, SOON) for folder in ("a", "a/b", "c", "c/b", "c/y.d")
    }
    assert [folder for folder, found in listed.items() if found] == ["c"]
    assert [one.name for one in listed["c"]] == ["c/y.d"]


def test_a_folder_goes_with_its_last_file(tmp_path, blobs):
    """One is made for each block: they would be more than a file system has."""
    for name in ("a/b/x.d", "a/b/y.d", "a/b/x.d"):
        assert blobs.put(name, [b"x"], SOON)
        blobs.delete(["a/b/x.d"], SOON)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["y.d"]
    blobs.delete(["a/b/y.d", "a/b/y.d"], SOON)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_look_lists_the_wanted_and_some_others_of_very_many(tmp_path, blobs):
    (tmp_path / "a").mkdir()
    for number in range(1000, 1000 + 2 * BESIDE):
        (tmp_path / "a" / f"{number}.d").write_bytes(b"x")
    wanted = f"{999 + 2 * BESIDE}.d"
    (found,) = blobs.look([FolderRange("a", wanted)], SOON)
    assert [one.name for one in found[:2]] == [f"a/{wanted}", "a/1000.d"]
    assert len(found) == BESIDE + 1
    assert len(blobs.list_names("a", SOON)) == 2 * BESIDE


def test_a_share_that_is_not_mounted_is_not_made(tmp_path):
    with closing(DirectoryBackend(tmp_path / "mnt")) as blobs:
        with pytest.raises(CallError):
            blobs.put("a/x.d", [b"x"], SOON)
        assert blobs.sizes(["a/x.d"], SOON) == [None]
    assert not (tmp_path / "mnt").exists()


@pytest.mark.parametrize("name", ["a/x.d", STORE_META])
def test_an_empty_file_is_replaced(tmp_path, blobs, name):
    """Readers take it for none; a crash of the machine that wrote it may leave it."""
    path = tmp_path / name
    path.parent.mkdir()
    path.touch()
    assert blobs.sizes([name], SOON) == [None]
    assert blobs.put(name, [b"x"], SOON)
    assert not blobs.put(name, [b"y"], SOON)
    assert path.read_bytes() == b"x"


def test_a_place_whose_mark_is_empty_is_marked_again(tmp_path, blobs):
    (tmp_path / STORE_META).parent.mkdir()
    (tmp_path / STORE_META).touch()
    check_mark(blobs, None, b"", CallDeadline(SOON))
    assert (tmp_path / STORE_META).read_bytes() == PLAIN


def test_a_link_or_a_pipe_is_not_replaced(tmp_path, blobs):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link.d").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a" / "pipe.d")
    assert not any(blobs.put(f"a/{name}.d", [b"x"], SOON) for name in ("link", "pipe"))


def test_a_put_that_fails_leaves_nothing(tmp_path, blobs):
    (tmp_path / "a" / "x.d" / "in the way").mkdir(parents=True)
    with pytest.raises(CallError):
        blobs.put("a/x.d", [b"x"], SOON, replace=True)
    assert list((tmp_path / "tmp").iterdir()) == []


class AsNobody(AbandonableExecutor):
    """Another user's calls: root may do everything."""

    def run(self, work, timeout_s):
        def as_nobody():
            before = LIBC.setfsuid(NOBODY)
            try:
                return work()
            finally:
                LIBC.setfsuid(before)

        return super().run(as_nobody if os.geteuid() == 0 else work, timeout_s)


@pytest.fixture
def others(tmp_path):
    """What a machine with another user id sees; `tmp_path` itself may be closed to it."""
    with TemporaryDirectory(dir="/tmp") as root, closing(DirectoryBackend(Path(root))) as own:
        Path(root).chmod(0o755)
        with closing(DirectoryBackend(Path(root))) as opened:
            opened._workers = AsNobody()
            yield own, opened


def test_what_another_user_may_not_read_is_a_miss(others):
    own, theirs = others
    for name in ("a/x.d", "a/y.d"):
        own.put(name, [b"x"], SOON)
        own._path_of(name).chmod(0o644)
    own._path_of("a/x.d").chmod(0)
    assert theirs.read("a/x.d", take, SOON) is None
    assert bytes(theirs.read("a/y.d", take, SOON)) == b"x"
    own._path_of("a").chmod(0)
    assert theirs.sizes(["a/y.d"], SOON) == [None]
    assert theirs.read("a/y.d", take, SOON) is None
    assert theirs.look([FolderRange("a", "y")], SOON) == [[]]
    theirs.touch(["a/y.d"], SOON)
    own._path_of("a").chmod(0o755)


def test_a_use_of_a_read_only_mount_is_not_noted_and_no_failure(blobs, monkeypatch):
    def fail(code):
        def utime(*_, **__):
            raise OSError(code, os.strerror(code))

        return utime

    monkeypatch.setattr(os, "utime", fail(errno.EROFS))
    blobs.touch(["a/x.d"], SOON)
    monkeypatch.setattr(os, "utime", fail(errno.EIO))
    with pytest.raises(CallError):
        blobs.touch(["a/x.d"], SOON)


def test_another_users_directory_is_read_and_not_written(others):
    own, theirs = others
    check_mark(own, None, b"", CallDeadline(SOON))
    own._path_of(STORE_META).chmod(0o644)
    if os.geteuid():  # who is not root cannot become another user
        own._root.chmod(0o555)
    assert not theirs.put("a/x.d", [b"x"], SOON)
    tier = RemoteTier(theirs, "cpu-mlx-0.1")
    with closing(tier):
        assert tier.health.wait_until_tried(SOON)
        assert tier.state == "read-only"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "redis://",
        "http://host",
        "file://host/mnt",
        "file:mnt",
        "file:///mnt?x",
        "file:///mnt#x",
        "file:///mnt%00",
        "redis://h:port",
        "redis://h/x",
        "redis://h?password=hunter2",
        "redis://[h",
        "user:hunter2@h",
    ],
)
def test_an_address_of_no_place_is_refused_in_one_sentence(address):
    with pytest.raises(BadInput, match=r"names no place; use redis://") as refused:
        open_backend(address)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("password", ["hunter2", "hunter2/x", "[hunter2", "hunter2?", "h#hunter2"])
@pytest.mark.parametrize("before", ["redis://:", "redis://us@er:", "s3://key:", "file://user:"])
def test_a_password_in_the_address_is_refused_and_not_repeated(before, password):
    says = "use redis://" if before.startswith("file") else "KEEPWARM_REMOTE_PASSWORD"
    with pytest.raises(BadInput, match=says) as refused:
        open_backend(f"{before}{password}@host/x")
    assert "hunter2" not in str(refused.value)
