"""What may be written a day: counted and refused in one step, by all processes together."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepwarm.store.disk.write_budget import DAYS_KEPT, WriteBudget
from tests.store.test_counts import fail_once


@pytest.fixture
def root(tmp_path):
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_several_writers_together_stay_within_the_budget(root):
    """Each asks for 40 of the 50 pieces that there are, as a process of its own would."""

    def take(_):
        wear = WriteBudget(root, 5_000, lambda: "2026-11-15")
        return sum(wear.take(100) for _ in range(40))

    with ThreadPoolExecutor(3) as takers:
        assert sum(takers.map(take, range(3))) == 50
    assert WriteBudget(root).by_day() == {"2026-11-15": 5_000}


def test_what_was_not_written_may_be_taken_again(root):
    wear = WriteBudget(root, 100, lambda: "2026-11-15")
    assert wear.take(60)
    assert not wear.take(60)
    wear.give_back(60)
    assert wear.take(60)
    assert wear.by_day() == {"2026-11-15": 60}


def test_without_a_budget_all_is_counted_and_nothing_refused(root):
    wear = WriteBudget(root, None, lambda: "2026-11-15")
    assert [wear.take(1 << 40), wear.take(1)] == [True, True]
    assert wear.by_day() == {"2026-11-15": (1 << 40) + 1}


def test_a_count_that_cannot_be_read_stops_no_block_where_none_is_refused(root, monkeypatch):
    def fail(_):
        raise OSError(errno.EACCES, "not ours")

    monkeypatch.setattr(Path, "read_text", fail)
    free = WriteBudget(root)
    assert free.take(60)
    free.give_back(60)
    with pytest.raises(OSError, match="not ours"):
        WriteBudget(root, 100).take(60)


def test_a_count_that_cannot_be_read_now_is_not_begun_anew(root, monkeypatch):
    wear = WriteBudget(root, 100, lambda: "2026-11-15")
    assert wear.take(60)
    with monkeypatch.context() as failing:
        fail_once(failing)
        with pytest.raises(OSError, match="the disk fails"):
            wear.take(60)
        fail_once(failing)
        wear.give_back(60)
    assert wear.by_day() == {"2026-11-15": 60}
    assert not wear.take(60)


def test_what_is_given_back_after_midnight_is_not_owed(root):
    day = ["2026-11-15"]
    wear = WriteBudget(root, 100, lambda: day[0])
    assert wear.take(60)
    day[0] = "2026-11-16"
    wear.give_back(60)
    assert wear.by_day() == {"2026-11-15": 60, "2026-11-16": 0}
    assert not wear.take(101)


def test_old_days_are_forgotten(root):
    days = [f"2026-{n // 28 + 1:02}-{n % 28 + 1:02}" for n in range(DAYS_KEPT + 5)]
    for day in days:
        assert WriteBudget(root, None, lambda day=day: day).take(1)
    assert list(WriteBudget(root).by_day()) == days[5:]
