"""What may be written a day: counted and refused in one step, by all processes together."""

import subprocess
import sys

import pytest

from keepwarm.store.disk.write_budget import DAYS_KEPT, WriteBudget

TAKER = """
import sys
from pathlib import Path
from keepwarm.store.disk.write_budget import WriteBudget
wear = WriteBudget(Path(sys.argv[1]), 5_000, lambda: "2026-11-15")
sys.stdin.readline()
print(sum(wear.take(100) for _ in range(40)))
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_processes_together_stay_within_the_budget(root):
    """Each asks for 40 of the 50 pieces that there are."""
    command = [sys.executable, "-c", TAKER, str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    takers = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for taker in takers:  # all are there: go
        taker.stdin.write("\n")
        taker.stdin.flush()
    taken = [int(taker.communicate(timeout=300)[0]) for taker in takers]
    assert sum(taken) == 50
    assert WriteBudget(root).by_day() == {"2026-11-15": 5_000}


def test_what_was_not_written_may_be_taken_again(root):
    wear = WriteBudget(root, 100, lambda: "2026-11-15")
    assert wear.take(60)
    assert not wear.take(60)
    assert not wear.allows(60)
    wear.give_back(60)
    assert wear.take(60)
    assert wear.by_day() == {"2026-11-15": 60}


def test_without_a_budget_all_is_counted_and_nothing_refused(root):
    wear = WriteBudget(root, None, lambda: "2026-11-15")
    assert [wear.take(1 << 40), wear.take(1)] == [True, True]
    assert wear.by_day() == {"2026-11-15": (1 << 40) + 1}


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
