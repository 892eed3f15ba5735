"""A place that does not evict by itself is kept within its limits, ends of prompts first."""

import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import Listed
from keepwarm.remote.health import MAX_FAILURES, MAX_RETRY_S
from keepwarm.remote.janitor import (
    FIRST_SWEEP_S,
    LEASE,
    LEASE_S,
    SWEEP_S,
    Janitor,
    RemoteLimits,
    surplus,
    walk,
)
from keepwarm.remote.records import FleetKey, RemoteNames, RemoteRecord, parse_last
from keepwarm.remote.tier import RemoteTier
from tests.kit.waiting import wait_until
from tests.remote.conftest import CLASS, REAL, SOON
from tests.store.kit import record, refs_of

LONG, SHORT = refs_of(4), refs_of(2, seed=1)


def name_of(ref):
    return RemoteNames(CLASS).of(RemoteRecord.of(record(ref).header))


@pytest.fixture
def share(tmp_path):
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


@pytest.fixture
def place(share, clock):
    """A directory with two prompts: the long one was used later, root last."""
    with closing(open_backend(share.as_uri())) as backend:
        tier = RemoteTier(backend, CLASS, clock=clock)
        assert tier.health.wait_until_tried(SOON)
        for ref in (*LONG, *SHORT):
            assert tier.put(record(ref)).stored
        used = (share / name_of(LONG[0])).stat().st_mtime - 1000
        for n, ref in enumerate([*reversed(SHORT), *reversed(LONG)]):
            os.utime(share / name_of(ref), (used + 100 * n, used + 100 * n))
        yield backend
        tier.close()


def janitor_of(place, limits, clock):
    """Of another machine than all others."""
    return Janitor(place, limits, Path(uuid.uuid4().hex), clock)


def left(place):
    sizes = place.sizes([name_of(ref) for ref in (*LONG, *SHORT)], SOON)
    return [ref for ref, size in zip((*LONG, *SHORT), sizes, strict=True) if size]


def test_bytes_go_ends_first(place, clock):
    (size,) = place.sizes([name_of(LONG[0])], SOON)
    assert janitor_of(place, RemoteLimits(n_bytes=6 * size + 600), clock).sweep() == 0
    assert janitor_of(place, RemoteLimits(n_bytes=3 * size + 600), clock).sweep() == 0, "a lease"
    clock.now += LEASE_S
    late = janitor_of(place, RemoteLimits(n_bytes=3 * size + 600), clock)
    late.sweep()
    clock.now += LEASE_S
    assert late.sweep() == 3
    assert left(place) == LONG[:3]


def test_what_a_fleet_key_signed_goes_too(share, clock):
    key = FleetKey(b"k" * 32)
    with closing(RemoteTier(open_backend(share.as_uri()), CLASS, fleet_key=key)) as tier:
        assert tier.health.wait_until_tried(SOON)
        assert all(tier.put(record(ref)).stored for ref in LONG)
        names = [one.name for one in walk(tier.backend)]
        assert len(names) == len(LONG)
        assert all(name.endswith(".mac") for name in names)
        (size,) = tier.backend.sizes(names[:1], SOON)
        assert janitor_of(tier.backend, RemoteLimits(n_bytes=3 * size + 600), clock).sweep() == 1
        kept = {parse_last(one.name).key for one in walk(tier.backend)}
        assert kept == {ref.key for ref in LONG[:3]}


def test_age_goes_by_the_clock_of_the_place(place, clock):
    """The end of the short prompt is the oldest, its beginning is 100 seconds younger."""
    assert janitor_of(place, RemoteLimits(age_s=950), clock).sweep() == 1
    assert left(place) == [*LONG, SHORT[0]]


def test_what_was_left_unfinished_goes_after_a_day(place, share, clock):
    now = time.time()
    for folder, name, age_s in (
        ("tmp", "old", 90_000),
        ("trial", "old", 90_000),
        ("tmp", "new", 9),
    ):
        (path := share / folder / name).parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (now - age_s, now - age_s))
    assert janitor_of(place, RemoteLimits(n_bytes=1 << 40), clock).sweep() == 2
    assert [path.name for path in (share / "tmp").iterdir()] == ["new"]
    assert not (share / "trial").exists()


def test_one_machine_at_a_time(place, clock):
    first, second = (janitor_of(place, RemoteLimits(age_s=10), clock) for _ in range(2))
    assert first._hold_lease()
    assert not second._hold_lease()
    clock.now += LEASE_S - 1
    assert first._hold_lease(), "it renews its own"
    clock.now += 2
    assert not second._hold_lease(), "it has seen it change"
    clock.now += LEASE_S
    assert second._hold_lease()
    assert not first._hold_lease()


@pytest.mark.parametrize("store", ["own", "another"])
@pytest.mark.parametrize("lives", [False, True])
def test_a_lease_of_a_process_that_was_killed_is_its_store_s(
    place, clock, monkeypatch, lives, store
):
    """Not one of another server on the same store, nor of another machine's."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with monkeypatch.context() as before:
            before.setattr(os, "getpid", lambda: process.pid)
            assert Janitor(place, RemoteLimits(age_s=10), Path("own"), clock)._hold_lease()
        if lives:
            assert not Janitor(place, RemoteLimits(age_s=10), Path(store), clock)._hold_lease()
    after = Janitor(place, RemoteLimits(age_s=10), Path(store), clock)
    assert after._hold_lease() == (store == "own")


@pytest.mark.parametrize("had_lease", ["none", "its own", "another's"])
def test_a_full_place_is_swept_without_a_renewed_lease(had_lease, place, clock, monkeypatch):
    (size,) = place.sizes([name_of(LONG[0])], SOON)
    janitor, other = (janitor_of(place, RemoteLimits(3 * size + 600), clock) for _ in range(2))
    if had_lease != "none":
        assert (janitor if had_lease == "its own" else other)._hold_lease()
    monkeypatch.setattr(place, "put", lambda *_, **__: False)
    if had_lease == "another's":
        assert janitor.sweep() == 0, "it may be sweeping"
        clock.now += LEASE_S
    assert janitor.sweep() == 3
    assert left(place) == LONG[:3]
    assert janitor.found[1] >= 0


def test_the_machine_that_swept_tells_what_it_has_left(place, clock):
    """No other: sums over all machines count it once."""
    (size,) = place.sizes([name_of(LONG[0])], SOON)
    first, second = (janitor_of(place, RemoteLimits(3 * size + 600), clock) for _ in range(2))
    assert (first.sweep(), second.sweep()) == (3, 0)
    kept = sum(place.sizes([name_of(ref) for ref in LONG[:3]], SOON))
    assert (first.found[0], second.found) == (kept, (0, None))
    oldest_s = first.found[1]
    clock.now += LEASE_S
    assert (second.sweep(), first.sweep()) == (0, 0)
    assert (first.found, second.found[0]) == ((0, None), kept)
    assert 0 < oldest_s < 1000, "the short prompt was used before"
    assert second.found[1] >= oldest_s


def test_what_is_old_goes_from_a_full_place_too(place, share, clock, monkeypatch):
    """The short prompt's end was used 500 seconds before the latest use, and 1,000 before now."""
    held, new = (janitor_of(place, RemoteLimits(age_s=age_s), clock) for age_s in (950, 450))
    with monkeypatch.context() as full:
        full.setattr(place, "put", lambda *_, **__: False)
        assert new.sweep() == 1, "there was never a lease"
    assert place.put(name_of(SHORT[1]), [b"x"], SOON)
    old = (share / name_of(SHORT[0])).stat().st_mtime - 100
    os.utime(share / name_of(SHORT[1]), (old, old))
    assert held._hold_lease()
    os.utime(share / LEASE, (old, old))
    monkeypatch.setattr(place, "put", lambda *_, **__: False)
    assert held.sweep() == 1, "it was renewed long ago"
    assert left(place) == [*LONG, SHORT[0]]


def test_a_beginning_stays_as_long_as_something_follows_it():
    def blob(last, parent, used, n_bytes=10):
        return Listed(f"c/n/{parent}/256.{last}", n_bytes, used)

    old_root, fresh_end = blob("aa.d.0", "root", 1.0), blob("bb.d.0", "aa", 99.0)
    assert list(surplus([old_root, fresh_end], RemoteLimits(age_s=50), 100.0)) == []
    window, other = blob("bb.w.0", "aa", 2.0), blob("bb.d.0", "xx", 1.0)
    listed = [old_root, fresh_end, window, other]
    assert list(surplus(listed, RemoteLimits(n_bytes=25), 100.0)) == [fresh_end, window, other]


def wait_for_its_clock(bucket):
    """Until what is put is younger than what is there: buckets tell seconds."""
    before = max(one.used for one in walk(bucket))
    until = time.monotonic() + SOON
    while True:
        bucket.put("probe/x", [b"1"], SOON, replace=True)
        (probe,) = bucket.list_names("probe", SOON)
        if probe.used > before:
            return
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("address", ["moto", *REAL[1:]], indirect=True)
def test_a_bucket_keeps_beginnings_and_goes_by_its_own_clock(machine, address, clock):
    """It knows only when each was put."""
    tier = machine()
    for ref in (LONG[0], SHORT[0]):
        assert tier.put(record(ref)).stored
    with closing(open_backend(address)) as bucket:
        wait_for_its_clock(bucket)  # beginnings are older
        for ref in (*LONG[1:], *SHORT[1:]):
            assert tier.put(record(ref)).stored
        names = [one.name for one in walk(bucket)]
        assert len(names) == 6
        n_bytes = sum(bucket.sizes(names, SOON))
        assert janitor_of(bucket, RemoteLimits(n_bytes, age_s=3600), clock).sweep() == 0
        clock.now += LEASE_S
        late = janitor_of(bucket, RemoteLimits(n_bytes // 2), clock)
        assert late.sweep() == 0, "another's lease, seen for the first time"
        clock.now += LEASE_S
        assert late.sweep() == len(names) // 2
        kept = left(bucket)
        for prompt in (LONG, SHORT):
            n_kept = sum(ref in kept for ref in prompt)
            assert [ref for ref in prompt if ref in kept] == prompt[:n_kept]
        assert len(kept) == 3
        assert len(list(walk(bucket))) == len(names) // 2


def test_redis_needs_none(redis, share):
    with closing(open_backend(f"{redis.url}/999")) as backend:
        tier = RemoteTier(backend, CLASS)
        tier.keep_within(RemoteLimits(n_bytes=1), share)
        assert tier._janitor is None
        tier.close()


def test_a_tier_sweeps_its_directory_now_and_then(share, clock, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.tier.REFRESH_S", 0.02)
    with closing(RemoteTier(open_backend(share.as_uri()), CLASS, clock=clock)) as tier:
        assert tier.health.wait_until_tried(SOON)
        assert all(tier.put(record(ref)).stored for ref in LONG[:2])
        first, second = (share / name_of(ref) for ref in LONG[:2])
        tier.keep_within(RemoteLimits(n_bytes=first.stat().st_size + 1), share)
        clock.now += FIRST_SWEEP_S
        wait_until(lambda: tier.stats().n_bytes == first.stat().st_size)
        assert not second.exists()
        assert 0 <= tier.stats().oldest_s < SOON


def test_a_sweep_that_takes_long_delays_no_trial(share, clock, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.tier.REFRESH_S", 0.02)
    is_sweeping, may_end = threading.Event(), threading.Event()

    def sweep(self):
        is_sweeping.set()
        assert may_end.wait(SOON)

    monkeypatch.setattr(Janitor, "sweep", sweep)
    with closing(RemoteTier(open_backend(share.as_uri()), CLASS, clock=clock)) as tier:
        assert tier.health.wait_until_tried(SOON)
        tier.keep_within(RemoteLimits(n_bytes=1), share)
        clock.now += SWEEP_S
        assert is_sweeping.wait(SOON)
        for _ in range(MAX_FAILURES):
            tier.health.failed()
        clock.now += MAX_RETRY_S
        wait_until(lambda: not tier.is_open)
        may_end.set()
