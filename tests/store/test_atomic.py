"""Files are published whole, and scratch directories end with their process."""

import os
import stat
import threading

import pytest

from keepwarm.store import atomic
from keepwarm.store.atomic import Files, Scratch, is_alive


@pytest.fixture
def files():
    return Files()


@pytest.mark.parametrize("n_pieces", [0, 1, 3, 511, 512, 513, 2000])
def test_pieces_are_written_one_after_another(n_pieces, files, tmp_path):
    """Empty ones among them, and more than one system call takes."""
    pieces = [bytes([n % 256]) * (n % 5) for n in range(n_pieces)]
    files.write(tmp_path / "file", [memoryview(p) if n % 2 else p for n, p in enumerate(pieces)])
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_words_are_written_as_bytes(files, tmp_path):
    files.write(tmp_path / "file", [memoryview(b"abcdefgh").cast("I")])
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"


def test_a_short_write_goes_on(files, tmp_path, monkeypatch):
    """The system may take fewer bytes than it was given."""
    monkeypatch.setattr(atomic.os, "writev", lambda fd, pieces: os.write(fd, pieces[0][:3]))
    files.write(tmp_path / "file", [b"0123456789", b"", b"ab", b"c" * 10])
    assert (tmp_path / "file").read_bytes() == b"0123456789ab" + b"c" * 10


def test_a_file_that_is_there_is_not_written_over(files, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"old"


def test_modes_are_for_the_owner_only(files, tmp_path):
    before = os.umask(0)
    try:
        files.make_directory(tmp_path / "directory")
        files.write(tmp_path / "directory" / "file", [b"x"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "directory").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "directory" / "file").stat().st_mode) == 0o600


def test_publishing_gives_the_name_and_leaves_nothing_behind(files, tmp_path):
    files.write(tmp_path / "temp", [b"x"])
    files.publish(tmp_path / "temp", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_removing_says_whether_it_was_there(files, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    assert files.remove(tmp_path / "file")
    assert not files.remove(tmp_path / "file")


def test_discarding_what_is_not_there_is_no_error(files, tmp_path):
    files.discard(tmp_path / "file")


def test_a_reader_sees_the_old_file_or_the_new_one(files, tmp_path):
    target, seen, stop = tmp_path / "file", set(), threading.Event()
    files.write(tmp_path / "0", [b"0" * 50_000])
    files.publish(tmp_path / "0", target)

    def read():
        while not stop.is_set():
            seen.add(target.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 60):
        digit = str(n % 10).encode()
        files.write(tmp_path / str(n), [digit * 25_000, digit * 25_000])
        files.publish(tmp_path / str(n), target)
    stop.set()
    reader.join()
    assert all(len(data) == 50_000 and len(set(data)) == 1 for data in seen)


def test_scratch_paths_are_used_once(tmp_path):
    one, two = Scratch(tmp_path / "tmp"), Scratch(tmp_path / "tmp")
    paths = [scratch.new() for scratch in (one, two) for _ in range(50)]
    assert len(set(paths)) == 100
    assert is_alive(tmp_path / "tmp", one.name)
    one.close()
    assert not is_alive(tmp_path / "tmp", one.name)
    assert is_alive(tmp_path / "tmp", two.name)
    two.close()


def test_scratch_of_the_dead_is_cleared_and_of_the_living_kept(tmp_path):
    living, dead = Scratch(tmp_path / "tmp"), Scratch(tmp_path / "tmp")
    for scratch in (living, dead):
        scratch.new().write_bytes(b"half")
    os.close(dead._lock)  # as the end of its process would
    dead._lock = None
    Scratch(tmp_path / "tmp").close()
    assert living.path.exists()
    assert not dead.path.exists()
    living.close()


def test_closing_twice_does_not_close_another_file(tmp_path):
    scratch = Scratch(tmp_path / "tmp")
    scratch.close()
    with (tmp_path / "other").open("wb") as other:  # gets the file descriptor that was just closed
        scratch.close()
        other.write(b"x")


def test_who_never_was_is_not_alive(tmp_path):
    assert not is_alive(tmp_path, "nobody")


@pytest.mark.linux
def test_reading_through_covers_the_file(files, tmp_path, monkeypatch):
    """In as many portions as the system takes; a file cut short meanwhile ends it."""
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    asked, send = [], os.sendfile

    def few(out, source, at, n_bytes):
        n_sent = send(out, source, at, min(n_bytes, 2000))
        asked.append((at, n_sent))
        return n_sent

    monkeypatch.setattr(os, "sendfile", few)
    with files.open(path) as file:
        files.read_into_page_cache(file)
        assert asked == [(0, 2000), (2000, 2000), (4000, 1000)]
        monkeypatch.setattr(os, "sendfile", lambda *_: 0)
        files.read_into_page_cache(file)
