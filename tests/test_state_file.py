"""Small JSON files: sections of several owners, changed by several processes, damaged at times."""

import errno
import json
import threading
from pathlib import Path

import pytest

from keepwarm import files
from keepwarm.state_file import DAMAGE, StateFile

DAMAGED = ["", "{", "[]", "null", "7", "\x00", '{"a": 7}', '{"a": []}', '{"a": {"x": "no"}}']


def numbers(kept):
    return {str(name): int(n) for name, n in kept.items()}


def part(path, section="a"):
    return StateFile(path, section, numbers)


def test_sections_of_one_file_leave_each_other_alone(tmp_path):
    path = tmp_path / "home" / "state.json"
    assert part(path).read() == {}
    assert part(path).change(lambda kept: {**kept, "x": 1}) == {"x": 1}
    part(path, "b").change(lambda kept: {**kept, "y": 2})
    part(path).change(lambda kept: {**kept, "z": 3})
    assert json.loads(path.read_text()) == {"a": {"x": 1, "z": 3}, "b": {"y": 2}}
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_file_reads_as_empty_and_is_written_over(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(DAMAGE):
        part(path).read_strictly()
    assert part(path).read() == {}
    part(path).change(lambda kept: {**kept, "x": 1})
    assert part(path).read_strictly() == {"x": 1}


def test_damaged_section_does_not_cost_the_others(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"a": [], "b": {"y": 2}}')
    part(path).change(lambda kept: {"x": 1})
    assert part(path, "b").read() == {"y": 2}


def test_a_file_that_cannot_be_read_now_is_not_written_over(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    part(path).change(lambda kept: {"x": 1})

    read_text = Path.read_text
    for n_failing, section in ((1, "a"), (2, "b")):
        fails = iter([True] * n_failing + [False] * 9)

        def read(file, fails=fails):
            if next(fails):
                raise OSError(errno.EIO, "the disk fails")
            return read_text(file)

        with monkeypatch.context() as broken:
            broken.setattr(Path, "read_text", read)
            with pytest.raises(OSError, match="disk fails"):
                part(path, section).change(lambda kept: {"y": 2})
        assert part(path).read() == {"x": 1}


def test_changes_at_once_lose_nothing(tmp_path):
    """Each has its own object, as processes have."""
    path = tmp_path / "state.json"

    def count(name):
        for _ in range(20):
            part(path, name).change(lambda kept: {"n": kept.get("n", 0) + 1})

    threads = [threading.Thread(target=count, args=(name,)) for name in "aab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(path.read_text()) == {"a": {"n": 40}, "b": {"n": 20}}


def test_change_while_another_holds_the_lock_raises_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_WAIT_S", 60)
    path = tmp_path / "state.json"
    with part(path, "b").lock.hold(), pytest.raises(TimeoutError):
        part(path).change(lambda kept: {"x": 1}, wait_s=0.0)
    assert not path.exists()
