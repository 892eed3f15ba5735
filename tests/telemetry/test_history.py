"""The history of what was spared survives a restart and is shared by several servers."""

import json

import pytest

from keepwarm.telemetry import ledger as module
from keepwarm.telemetry.ledger import (
    History,
    Ledger,
    day_name,
    latency_name,
    minute_name,
    percentile_ms,
)
from tests.telemetry.test_ledger import NOON, Clock, record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "history.json"


def history_of(path, clock, *records):
    """A history, and a ledger with these requests."""
    ledger = Ledger(clock=clock)
    for one in records:
        ledger.append(one)
    return History(path, ledger, clock), ledger


def test_percentiles_of_saved_and_unsaved_latencies_add_up(path):
    """Within a class of 9 %."""
    first, _ = history_of(path, Clock(), *(record(ttft_ms=ms) for ms in (100.0, 110.0, 90.0)))
    first.save()
    again, _ = history_of(path, Clock(), record(ttft_ms=5000.0))
    amounts = again.timeline.total
    assert percentile_ms(amounts, 0.5) == pytest.approx(100, rel=0.1)
    assert percentile_ms(amounts, 0.95) == pytest.approx(5000, rel=0.1)
    halves = {latency_name(100.0): 1, latency_name(5000.0): 1}
    assert percentile_ms(halves, 0.5) == pytest.approx(100, rel=0.1)
    assert percentile_ms({"ttft_x": 3, "prompt": 5}, 0.5) is None
    assert latency_name(0.0) == latency_name(1.0)  # nothing is faster than a millisecond


def test_amounts_go_to_their_minute_and_day(path):
    clock = Clock()
    history, ledger = history_of(path, clock, record(live=10, computed=5, saved_ms=100.4))
    ledger.count(prefilled_tokens=5)
    clock.now += 60
    ledger.append(record(live=20, disk=7))
    timeline = history.timeline
    assert timeline.minutes[minute_name(NOON)] == {
        "live": 10,
        "prefilled": 5,
        "prompt": 15,
        "saved_ms": 100,
        "finished": 1,
    }
    second = timeline.minutes[minute_name(NOON + 60)]
    assert second == {"live": 20, "disk": 7, "prompt": 27, "finished": 1}
    assert history.today()["live"] == timeline.total["live"] == 30
    clock.now += 86400
    assert history.today() == {}
    assert timeline.days[day_name(NOON)]["live"] == 30


def test_today_survives_a_restart(path):
    first, _ = history_of(path, Clock(), record(live=10))
    first.save()
    again, _ = history_of(path, Clock(), record(live=3))
    assert again.today()["live"] == 13
    assert path.stat().st_mode & 0o077 == 0


def test_two_servers_add_to_one_file(path):
    (one, ledger), (two, _) = (history_of(path, Clock(), record(live=n)) for n in (5, 7))
    one.save()
    two.save()
    ledger.append(record(live=1))
    one.save()
    one.save()
    assert history_of(path, Clock())[0].timeline.total["live"] == 13
    assert one.timeline.total["live"] == 13


@pytest.mark.parametrize("text", ["", "{", "[]", '{"minutes": 1}', '{"minutes": {}, "days": {}}'])
def test_a_damaged_file_counts_as_empty(path, text):
    path.parent.mkdir()
    path.write_text(f'{{"timeline": {text}}}')
    history_of(path, Clock(), record(live=2))[0].save()
    assert json.loads(path.read_text())["timeline"]["total"]["live"] == 2


def test_only_the_latest_minutes_are_kept(path, monkeypatch):
    monkeypatch.setattr(module, "MINUTES_KEPT", 3)
    clock = Clock()
    history, ledger = history_of(path, clock)
    for _ in range(5):
        clock.now += 60
        ledger.append(record(live=1))
        history.save()
    kept = history_of(path, clock)[0].timeline
    assert (len(kept.minutes), kept.total["live"]) == (3, 5)


def test_counts_stay_in_memory_while_the_file_cannot_be_written(path):
    path.parent.write_text("a file where a directory should be")
    history, _ = history_of(path, Clock(), record(live=2))
    history.save()
    assert history.timeline.total["live"] == 2
    path.parent.unlink()
    history.save()
    assert history_of(path, Clock())[0].timeline.total["live"] == 2
