"""The clock may jump: what was written while it was ahead does not displace what is new."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from keepwarm.agents import agent_store
from keepwarm.agents.agent import Branch
from keepwarm.agents.agents import Agents
from keepwarm.agents.shares import TtlPins
from keepwarm.files import STALE_AFTER_S, replacing, write_atomically
from keepwarm.prefix.blocks import chain
from keepwarm.records.record import Part
from keepwarm.store.disk import disk as disk_module
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier
from keepwarm.store.disk.write_budget import DAYS_KEPT, WriteBudget
from keepwarm.store.eviction import DISK_HALF_LIFE_S, after_use
from keepwarm.store.memory import MemoryTier
from keepwarm.store.names import INDEX, INDEX_FILES, is_quarantined
from keepwarm.store.tier import TTL_PIN
from keepwarm.telemetry.ledger import MINUTES_KEPT, Timeline, day_name, minute_name
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of
from tests.store.kit import NAMESPACE, BrokenFiles, first_block, keys_of, record, tokens_of

YEAR_S = 365 * 24 * 3600.0
SIZE = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def blocks(first, n=4):
    return [record(first_block([n, 7]), n_bytes=SIZE) for n in range(first, first + n)]


def disk_tier(root, clock):
    limits = DiskLimits(8 * SIZE + INDEX_ROOM, min_free_bytes=0)
    return DiskTier(root, limits, BrokenFiles(), clock)


def fill(tier, clock, first, n=4):
    """Put blocks a second apart; which of them were stored."""
    stored = []
    for made in blocks(first, n):
        clock.now += 1
        stored.append(tier.put(made).stored)
    return stored


@pytest.mark.parametrize("ahead_s", [YEAR_S, 60.0])
def test_a_store_that_was_filled_ahead_of_time_takes_new_blocks(ahead_s, tmp_path, clock):
    """After a restart, and the new ones are not displaced by the old ones either."""
    clock.now += ahead_s
    tier = disk_tier(tmp_path, clock)
    fill(tier, clock, first=0, n=8)
    assert tier.stats().evicted, "it is full"
    tier.close()
    clock.now -= ahead_s
    tier = disk_tier(tmp_path, clock)
    assert all(fill(tier, clock, first=10))
    assert len(tier.have(keys_of(blocks(10)))) == 4
    tier.close()


def test_an_open_store_follows_the_clock_back(tmp_path, clock):
    """Also what another process has used meanwhile."""
    clock.now += YEAR_S
    tier, other = disk_tier(tmp_path, clock), disk_tier(tmp_path, clock)
    fill(other, clock, first=0, n=8)
    other.touch(keys_of(blocks(2)))
    other.close()
    clock.now -= YEAR_S
    assert all(fill(tier, clock, first=10))
    assert max(block.used for block in tier.walk()) <= clock.now
    tier.close()


def test_files_from_the_future_are_adopted_as_used_now(tmp_path, clock):
    """Their index is lost, and they have only their times."""
    tier = disk_tier(tmp_path, clock)
    fill(tier, clock, first=0, n=8)
    tier.close()
    for path in tmp_path.glob("blocks/*/*"):
        os.utime(path, (clock.now + YEAR_S, clock.now + YEAR_S))
    for name in INDEX_FILES:
        (tmp_path / name).unlink(missing_ok=True)
    assert not (tmp_path / INDEX).exists()
    tier = disk_tier(tmp_path, clock)
    assert all(fill(tier, clock, first=10))
    tier.close()


def test_memory_that_was_filled_ahead_of_time_takes_new_blocks(clock):
    clock.now += YEAR_S
    tier = MemoryTier(4 * SIZE, clock)
    fill(tier, clock, first=0, n=8)
    clock.now -= YEAR_S
    assert all(fill(tier, clock, first=10))
    tier.close()


def test_a_use_before_the_last_one_makes_no_block_more_valuable():
    now = 1e9
    once = after_use(now, 0.0, now, DISK_HALF_LIFE_S)
    assert after_use(now + YEAR_S, 0.0, now, DISK_HALF_LIFE_S) == once


def pins_of(disk, key):
    owners = disk.index.lookups.owners(key)
    return [float(owner.removeprefix(TTL_PIN)) for owner in owners]


def test_a_pin_with_a_ttl_lasts_no_longer_than_that(tmp_path, clock):
    """The clock was ahead when it was made; one from before keeps its end."""
    disk = disk_tier(tmp_path, clock)
    tokens = tokens_of(256)
    (ref,) = chain(NAMESPACE, tokens)
    disk.put(record(ref))
    pins = TtlPins(disk, clock)
    pins.pin(NAMESPACE, tokens, 256, 7200)
    early = clock.now + 7200
    clock.now += YEAR_S
    disk.touch([ref.key])
    pins.pin(NAMESPACE, tokens, 256, 300)
    disk.index.follow_clock(clock.now)  # writes the use
    clock.now -= YEAR_S
    disk.index.follow_clock(clock.now)
    assert sorted(pins_of(disk, ref.key)) == pytest.approx([clock.now + 300, early], abs=2)
    clock.now += 7201
    assert pins.expire() == 2
    assert not next(disk.walk()).pinned
    disk.close()


def test_an_agent_used_in_the_future_is_kept_for_its_retention_only(tmp_path, clock):
    disk = disk_tier(tmp_path, clock)
    agents = Agents(disk, clock)
    clock.now += YEAR_S
    agents.create("a", Branch(NAMESPACE), retention_s=60.0)
    clock.now -= YEAR_S
    assert agents.expired() == []
    clock.now += 61
    assert agents.expired() == ["a"]
    disk.close()


def test_a_jump_that_is_corrected_deletes_no_agent(models, tmp_path, monkeypatch):
    """A year ahead for a moment, all agents seem expired; they go only if they stay so."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        agents = engine.store.on_disk.agents
        engine.submit(ask(prompt_of(300), 2, agent="a")).result()
        engine.wait_until_saved()
        agents.update("a", retention_s=60.0)

        def look(ahead_s):
            agents._clock = lambda: time.time() + ahead_s
            engine.store.on_disk._next_expiry = 0.0
            engine.store.forget_expired()
            return [agent.id for agent in agents.all()]

        assert look(YEAR_S) == ["a"]
        assert look(0.0) == ["a"]
        monkeypatch.setattr(agent_store, "CONFIRM_S", 0.0)
        assert look(0.0) == ["a"]
        assert look(YEAR_S) == []


def test_days_from_the_future_do_not_end_the_count_of_today(tmp_path):
    """With 90 of them in the file, today would be cut off at every write."""
    (tmp_path / "tmp").mkdir()
    day = [""]
    wear = WriteBudget(tmp_path, 100, lambda: day[0])
    for number in range(DAYS_KEPT):
        day[0] = f"2027-{1 + number // 28:02d}-{1 + number % 28:02d}"
        assert wear.take(60)
    day[0] = "2026-11-16"
    assert wear.take(60)
    assert not wear.take(60)


def test_minutes_from_the_future_do_not_displace_those_of_now():
    now = time.time()
    ahead = Timeline()
    for number in range(MINUTES_KEPT):
        ahead = replace(
            ahead, minutes={**ahead.minutes, minute_name(now + YEAR_S + 60 * number): {}}
        )
    both = ahead.until(now).plus(Timeline.of_minutes({int(now // 60): Counter(prompt=1)}))
    assert both.minutes == {minute_name(now): {"prompt": 1}}
    assert both.days == {day_name(now): {"prompt": 1}}


def test_a_file_that_is_being_written_is_no_leftover_whatever_the_time(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as temp:
        for when in (time.time() - YEAR_S, time.time() + YEAR_S):
            os.utime(temp, (when, when))
            write_atomically(path, "other")
            assert temp.exists()
    left = tmp_path / ".a.json.part-abcdefgh.json"
    left.touch()
    os.utime(left, (time.time() + 2 * STALE_AFTER_S,) * 2)
    write_atomically(path, "x")
    assert not left.exists()


def test_quarantine_is_recognised_whatever_the_year(tmp_path, monkeypatch):
    """Before 2001 the nanoseconds had fewer digits."""
    monkeypatch.setattr(disk_module, "time", SimpleNamespace(time_ns=lambda: 12_345))
    tier = disk_tier(tmp_path, time.time)
    made = blocks(0, 1)[0]
    tier.put(made)
    path = tier.records.path_of(made.header.key, Part.DELTA)
    path.write_bytes(b"bad")
    assert tier.read(made.header.key, Part.DELTA) is None
    tier.close()
    names = [path.name for path in (tmp_path / "quarantine").iterdir()]
    assert len(names) == 2
    assert all(map(is_quarantined, names))
