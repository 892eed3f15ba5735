"""Files are written whole: the old content or the new, never a part."""

import fcntl
import os
import stat
import time

import pytest

from keepwarm.files import STALE_AFTER_S, SharedLock, replacing, write_atomically


def test_content_is_replaced_and_private(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old, and longer")
    write_atomically(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    write_atomically(path, b"\x00\xff", sync=True)
    assert path.read_bytes() == b"\x00\xff"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_changes_nothing(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temp:
            temp.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_lies_beside_it_and_keeps_its_suffix(tmp_path):
    with replacing(tmp_path / "a.safetensors") as temp:
        assert (temp.parent, temp.suffix) == (tmp_path, ".safetensors")


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path):
    path = tmp_path / "a[1].json"
    old, new = (tmp_path / f".a[1].json.part-{name}.json" for name in ("old_0001", "new_0001"))
    other = tmp_path / ".a1.json.part-old_0001.json"
    for leftover in (old, new, other):
        leftover.touch()
    long_ago = time.time() - STALE_AFTER_S - 60
    os.utime(old, (long_ago, long_ago))
    os.utime(other, (long_ago, long_ago))
    write_atomically(path, "x")
    assert sorted(tmp_path.iterdir()) == sorted([path, new, other])


def test_a_lock_keeps_others_out(tmp_path):
    with SharedLock(tmp_path / "lock").hold():
        fd = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), SharedLock(tmp_path / "lock").hold():
        _ = 1 / 0
    with SharedLock(tmp_path / "lock").hold():
        pass
