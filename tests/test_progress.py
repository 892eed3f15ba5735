"""How far something is: in place on a terminal, else a line now and then."""

import io
from types import SimpleNamespace

import pytest

from keepwarm import progress
from keepwarm.progress import BAR, CLEAR, ProgressLine, drawn


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that only the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_terminal_shows_what_is_done_now_on_one_line(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    line = ProgressLine("loading", out := Terminal())
    line.say("opening its files")
    line.say("reading weights, 0 %")
    line.clear()
    shown = ["", "loading: opening its fi", "loading: reading weight", ""]
    assert out.getvalue().split(CLEAR) == shown


def test_counts_are_not_written_more_often_than_they_are_read(clock):
    line = ProgressLine("verifying", out := Terminal())
    for done in range(1000):
        line.count(done, 1000)
    clock[0] += 1
    line.count(1000, 1000)
    assert out.getvalue().count(CLEAR) == 2
    assert out.getvalue().endswith("1,000 of 1,000 (100 %)")


def test_elsewhere_what_is_quick_prints_nothing_and_the_rest_whole_lines(clock):
    line = ProgressLine("exporting", out := io.StringIO())
    line.count(1, 4)
    assert out.getvalue() == ""
    for done in (2, 3):
        clock[0] += progress.PLAIN_S
        line.count(done, 4)
        line.say("the same moment")
    line.clear()
    assert out.getvalue() == f"exporting {drawn(2, 4)}\nexporting {drawn(3, 4)}\n"


def test_a_bar_is_as_long_as_its_part():
    assert drawn(1, 4) == "█" * (BAR // 4) + "░" * (BAR - BAR // 4) + " 1 of 4 (25 %)"
    assert drawn(999, 1000).startswith("█" * (BAR - 1) + "░ ")
    assert drawn(7, 0) == "7"
