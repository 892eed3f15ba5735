"""Files are published whole, and scratch directories end with their process."""

import os

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
