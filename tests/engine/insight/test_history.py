"""The history of what was spared survives a restart and is shared by several servers."""

import json
from dataclasses import replace

import pytest

from keepwarm.cache.counts import PromptCounts
from keepwarm.cache.restore.writing import WriteStats
from keepwarm.engine.insight import history as module
from keepwarm.engine.insight.history import History, day_name, minute_name, recording
from keepwarm.engine.insight.latency import latency_name, percentile_ms
from keepwarm.engine.insight.stats import Stats
from keepwarm.engine.live import LiveStats
from tests.kit.waiting import wait_until

NOON = 1_700_000_000.0 // 86400 * 86400 + 12 * 3600


def stats(live=0, disk=0, prefilled=0, saved_ms=0.0, written=0):
    counters = {
        "reused_tokens": {"live": live, "disk": disk},
        "prompt_tokens": live + disk + prefilled,
        "prefilled_tokens": prefilled,
        "generated_tokens": 0,
        **dict.fromkeys(("finished", "cancelled", "failed"), 0),
        "saved_ms": saved_ms,
    }
    writes = WriteStats(written_bytes=written)
    live_stats, counts = LiveStats(0, 0, 0, 0, 0, 0, 0), PromptCounts()
    return Stats(0, 0, 0, counters, 0.0, 1.0, live_stats, {}, writes, True, counts, {})


class Clock:
    def __init__(self, now=NOON):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "history.json"


def test_times_to_the_first_token_add_up(path):
    """Percentiles of several minutes, also after a restart; within a class of 9 %."""
    clock = Clock()
    history = History(path, clock)
    for ms in (100.0, 110.0, 90.0):
        history.add_latency(ms)
    history.save()
    again = History(path, clock)
    again.add_latency(5000.0)
    amounts = again.timeline.total
    assert percentile_ms(amounts, 0.5) == pytest.approx(100, rel=0.1)
    assert percentile_ms(amounts, 0.95) == pytest.approx(5000, rel=0.1)
    assert percentile_ms({"ttft_x": 3, "prompt": 5}, 0.5) is None
    assert latency_name(0.0) == latency_name(1.0)  # nothing is faster than a millisecond


def test_differences_go_to_their_minute_and_day(path):
    """Hit rate over time, today and in all."""
    clock = Clock()
    history = History(path, clock)
    history.observe(stats(live=10, prefilled=5, saved_ms=100.4))
    clock.now += 60
    history.observe(stats(live=30, prefilled=5, disk=7, saved_ms=100.4, written=9))
    timeline = history.timeline
    assert timeline.minutes[minute_name(NOON)] == {
        "live": 10,
        "prefilled": 5,
        "prompt": 15,
        "saved_ms": 100,
    }
    second = timeline.minutes[minute_name(NOON + 60)]
    assert second == {"live": 20, "disk": 7, "prompt": 27, "written_bytes": 9}
    assert history.today()["live"] == timeline.total["live"] == 30
    clock.now += 86400
    assert history.today() == {}
    assert timeline.days[day_name(NOON)]["live"] == 30


def test_today_survives_a_restart(path):
    """What was noted is on file."""
    clock = Clock()
    first = History(path, clock)
    first.observe(stats(live=10))
    first.save()
    again = History(path, clock)
    again.observe(stats(live=3))  # a new engine counts from nothing
    assert again.today()["live"] == 13
    assert path.stat().st_mode & 0o077 == 0


def test_another_engine_counts_from_zero(path):
    history = History(path, Clock())
    for n in (10, 12, 4):  # the engine was exchanged before the last look
        history.observe(stats(live=n))
    assert history.timeline.total["live"] == 16


def test_two_servers_share_the_file(path):
    one, two = History(path, Clock()), History(path, Clock())
    for history, n in ((one, 5), (two, 7)):
        history.observe(stats(live=n))
        history.save()
    one.observe(stats(live=6))
    one.save()
    assert History(path).timeline.total["live"] == 13


@pytest.mark.parametrize("text", ["", "{", "[]", '{"minutes": 1}', '{"minutes": {}, "days": {}}'])
def test_a_torn_file_is_no_history(path, text):
    path.parent.mkdir()
    path.write_text(text)
    history = History(path, Clock())
    history.observe(stats(live=2))
    history.save()
    assert json.loads(path.read_text())["total"]["live"] == 2


def test_only_the_latest_minutes_are_kept(path, monkeypatch):
    monkeypatch.setattr(module, "MINUTES_KEPT", 3)
    clock = Clock()
    history = History(path, clock)
    for n in range(1, 6):
        clock.now += 60
        history.observe(stats(live=n))
    history.save()
    assert len(History(path).timeline.minutes) == 3
    assert History(path).timeline.total["live"] == 5


def test_a_disk_that_refuses_costs_nothing_else(path):
    path.parent.write_text("a file where a directory should be")
    history = History(path, Clock())
    history.observe(stats(live=2))
    history.save()
    assert history.timeline.total["live"] == 2


def test_an_engine_is_watched_and_the_end_is_saved(path, monkeypatch):
    monkeypatch.setattr(module, "OBSERVE_EVERY_S", 0.01)
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 2:
            raise RuntimeError("between two engines")
        return None if len(looks) == 3 else stats(live=len(looks))

    with recording(History(path, Clock()), look):
        wait_until(lambda: len(looks) > 5)
    assert History(path).timeline.total["live"] == len(looks)


def test_values_stay_as_they_were(path):
    """Books are values: adding to one changes no other."""
    history = History(path, Clock())
    history.observe(stats(live=1))
    before = history.timeline
    copy = replace(before)
    history.observe(stats(live=9))
    assert before == copy
    assert before.total["live"] == 1
