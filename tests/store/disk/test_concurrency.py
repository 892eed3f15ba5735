"""Threads and processes share one directory, while one of them is killed again and again."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import pytest

from keepwarm.records.record import Part
from keepwarm.store.atomic import Files
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier, StagedRecords
from tests.store.disk import contend
from tests.store.disk.crash import WORLD, Block, holds_its_content
from tests.store.disk.test_crash import check_files

PROCESSES = 4
PATIENCE = 300  # seconds after which a process counts as hung


def start(store_root: Path, number: int, seconds: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.store.disk.contend",
        str(store_root),
        str(number),
        str(seconds),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def die_again_and_again(store_root: Path, number: int, seconds: float) -> int:
    """Start a process again and again and kill it half-way; returns how often."""
    chance, until, n_kills = random.Random(number), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        process = start(store_root, number, seconds=PATIENCE)
        time.sleep(chance.uniform(0.2, 1.5))
        process.kill()
        _, errors = process.communicate()
        assert "Traceback" not in errors, errors
        n_kills += 1
    return n_kills


def result_of(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"a process was held up: {process.communicate()[1]}")
    assert process.returncode == 0, errors
    assert "locked" not in errors, errors
    return dict(json.loads(output.splitlines()[-1]))


def contend_for(store_root: Path, seconds: float) -> list[dict[str, Any]]:
    """Run all processes for so long; returns the report of each surviving thread."""
    steady = [start(store_root, number, seconds) for number in range(PROCESSES - 1)]
    try:
        assert die_again_and_again(store_root, PROCESSES - 1, seconds - 1) > 0
        results = [result_of(process, PATIENCE) for process in steady]
    finally:
        for process in steady:
            process.kill()
            process.communicate()
    for what, expected in (("evicted", True), ("quarantined", False), ("errors", False)):
        assert any(result["stats"][what] for result in results) is expected, what
    return [outcome for result in results for outcome in result["outcomes"]]


def check_share(store_root: Path, seconds: float) -> None:
    outcomes = contend_for(store_root, seconds)
    assert not [line for outcome in outcomes for line in outcome["wrong"]]
    done = {what: sum(o[what] for o in outcomes) for what in ("puts", "reads", "deletes")}
    assert min(done.values()) > 5 * seconds, done
    tier = DiskTier(store_root, contend.LIMITS)
    try:
        for outcome in outcomes:
            for numbers in outcome["kept"]:
                record = tier.read(Block(*numbers).key, Part.DELTA)
                assert record is not None, "a pinned block was lost"
                assert holds_its_content(record)
        check_files(tier)
    finally:
        tier.close()


def test_threads_and_processes_share_a_directory(tmp_path: Path) -> None:
    """Every value is right, nothing acknowledged is lost, index and files agree."""
    check_share(tmp_path, seconds=4)


@pytest.mark.soak
def test_threads_and_processes_share_a_directory_for_a_minute(tmp_path: Path) -> None:
    """The same for long."""
    check_share(tmp_path, seconds=60)


class Meanwhile(Files):
    """Runs another operation once, at the worst moment of this one."""

    def __init__(self) -> None:
        self.opening = self.writing = self.written = _nothing
        self.published = self.removing = _nothing

    def open(self, path: Path) -> BinaryIO:
        try:
            return super().open(path)
        finally:
            self._once("opening")

    def write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        self._once("writing")
        super().write(path, pieces)
        self._once("written")

    def publish(self, temp: Path, target: Path) -> None:
        super().publish(temp, target)
        self._once("published")

    def remove(self, path: Path) -> bool:
        self._once("removing")
        return super().remove(path)

    def _once(self, when: str) -> None:
        action: Callable[[], object] = getattr(self, when)
        setattr(self, when, _nothing)
        action()


def _nothing() -> object:
    return None


@pytest.fixture
def meanwhile() -> Meanwhile:
    return Meanwhile()


@pytest.fixture
def two(tmp_path: Path, meanwhile: Meanwhile) -> Iterator[tuple[DiskTier, DiskTier]]:
    """One that can be interrupted, and another as in a second process, on the same directory."""
    with ExitStack() as stack:
        tiers = DiskTier(tmp_path, files=meanwhile), DiskTier(tmp_path)
        for tier in tiers:
            stack.callback(tier.close)
        yield tiers


def agrees_with_files(tier: DiskTier) -> bool:
    files = [path for path in (tier.root / "blocks").rglob("*") if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    return tier.index.lookups.names() == sizes and tier.index.lookups.n_bytes() == sum(
        sizes.values()
    )


def test_a_miss_does_not_forget_a_block_that_came_meanwhile(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile
) -> None:
    tier, other = two
    meanwhile.opening = lambda: other.put(WORLD[0].record())
    assert tier.read(WORLD[0].key, Part.DELTA) is None
    assert WORLD[0].key in tier.have([WORLD[0].key])
    assert agrees_with_files(tier)


def test_a_bad_record_that_was_replaced_meanwhile_is_not_quarantined(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile
) -> None:
    tier, _ = two
    tier.put(WORLD[0].record())
    path = tier.records.path_of(WORLD[0].key, Part.DELTA)
    good, better = path.read_bytes(), path.with_name("better")
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    better.write_bytes(good)
    meanwhile.opening = lambda: better.replace(path)
    assert tier.read(WORLD[0].key, Part.DELTA) is None
    assert tier.read(WORLD[0].key, Part.DELTA) is not None
    assert tier.stats().quarantined == 0


def test_a_window_that_grows_while_it_is_read_is_not_quarantined(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile
) -> None:
    tier, other = two
    tier.put(WORLD[0].record(Part.WINDOW, w_rows=1))
    meanwhile.opening = lambda: other.put(WORLD[0].record(Part.WINDOW, w_rows=3))
    record = tier.read(WORLD[0].key, Part.WINDOW)
    assert record is not None
    assert record.header.w_rows == 1
    assert tier.stats().quarantined == 0
    assert agrees_with_files(tier)


def test_a_block_deleted_while_it_is_published_leaves_no_row(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile
) -> None:
    tier, other = two
    deleting = Thread(target=other.delete_all, args=([WORLD[0].key],))

    def delete() -> None:
        deleting.start()
        deleting.join(0.3)

    meanwhile.published = delete
    assert tier.put(WORLD[0].record()).stored
    deleting.join()
    assert not tier.have([WORLD[0].key])
    assert agrees_with_files(tier)


def test_a_block_put_after_a_crash_during_its_deletion_stays(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile, tmp_path: Path
) -> None:
    tier, other = two
    tier.put(WORLD[0].record())
    tier.put(WORLD[0].record(Part.WINDOW))

    def die() -> None:
        raise KeyboardInterrupt

    meanwhile.removing = die
    with pytest.raises(KeyboardInterrupt):
        tier.delete_all([WORLD[0].key])
    assert not other.have([WORLD[0].key])
    assert other.put(WORLD[0].record()).stored
    assert other.have([WORLD[0].key])[WORLD[0].key].parts == {Part.DELTA}
    third = DiskTier(tmp_path)
    assert third.read(WORLD[0].key, Part.DELTA) is not None
    assert agrees_with_files(third)
    third.close()


@pytest.mark.parametrize("same_process", [True, False])
def test_a_block_put_twice_at_once_is_counted_once(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile, same_process: bool
) -> None:
    tier, other = two
    faster = tier if same_process else other
    meanwhile.writing = lambda: faster.put(WORLD[0].record())
    assert not tier.put(WORLD[0].record()).stored
    assert tier.read(WORLD[0].key, Part.DELTA) is not None
    assert agrees_with_files(tier)


def test_fewer_window_rows_never_replace_more(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile
) -> None:
    tier, other = two
    meanwhile.writing = lambda: other.put(WORLD[0].record(Part.WINDOW, w_rows=4))
    assert not tier.put(WORLD[0].record(Part.WINDOW, w_rows=2)).stored
    assert tier.have([WORLD[0].key])[WORLD[0].key].w_rows == 4
    assert agrees_with_files(tier)


def test_the_parent_of_a_block_being_written_is_not_evicted(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile
) -> None:
    """The child has no row yet, so nothing but its reservation protects the parent."""
    tier, other = two
    parent, child, rival = WORLD[0], WORLD[1], WORLD[8]
    tier.put(parent.record())
    evicted: list[bool] = []

    def squeeze() -> None:
        cap = other.stats().n_bytes + INDEX_ROOM
        other.limits = DiskLimits(max_bytes=cap, min_free_bytes=0)
        evicted.append(other.put(rival.record()).stored)

    meanwhile.writing = squeeze
    assert tier.put(child.record()).stored
    assert evicted == [False]
    assert tier.have([parent.key, child.key]).keys() == {parent.key, child.key}


def test_a_failed_write_leaves_nothing(
    two: tuple[DiskTier, DiskTier], meanwhile: Meanwhile, tmp_path: Path
) -> None:
    tier, _ = two

    def fail() -> None:
        raise OSError("no")

    meanwhile.written = fail
    put = tier.put(WORLD[0].record())
    assert put.durable.exception() is not None
    assert not list((tmp_path / "tmp").rglob("*.tmp"))
    assert not tier.index.lookups.writers()


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


@pytest.fixture(params=["directory", "index"])
def failing(
    request: pytest.FixtureRequest,
    two: tuple[DiskTier, DiskTier],
    meanwhile: Meanwhile,
    monkeypatch: pytest.MonkeyPatch,
) -> DiskTier:
    """Fails after the rename: to sync the directory, or to add the row."""
    tier, _ = two
    tier.put(WORLD[0].record(Part.WINDOW, w_rows=1))
    if request.param == "directory":
        meanwhile.published = refuse
    else:
        monkeypatch.setattr(tier.index, "add", refuse)
    return tier


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_record_whose_row_could_not_be_added_leaves_no_file(
    failing: DiskTier, tmp_path: Path, is_staged: bool
) -> None:
    """Nobody could delete it, and the next start would let it be found."""
    one = WORLD[0].record()
    if is_staged:
        with StagedRecords(failing) as staged:
            assert staged.add(one)
            with pytest.raises(sqlite3.OperationalError):
                staged.publish()
    else:
        assert failing.put(one).durable.exception() is not None
    assert agrees_with_files(failing)
    assert not failing.index.lookups.writers()
    with closing(DiskTier(tmp_path)) as again:
        assert again.have([WORLD[0].key])[WORLD[0].key].parts == {Part.WINDOW}


def test_a_record_that_has_replaced_another_stays_without_its_row(
    failing: DiskTier, tmp_path: Path
) -> None:
    """The other's row leads to it."""
    put = failing.put(WORLD[0].record(Part.WINDOW, w_rows=3))
    assert put.durable.exception() is not None
    assert failing.read(WORLD[0].key, Part.WINDOW) is not None
    with closing(DiskTier(tmp_path)) as again:
        assert again.have([WORLD[0].key])[WORLD[0].key].w_rows == 3
        assert agrees_with_files(again)


def test_processes_that_start_at_once_share_one_index(tmp_path: Path) -> None:
    """A half-made or busy index of another process is not taken for a damaged one."""
    for process in [start(tmp_path / "store", number, seconds=0.5) for number in range(PROCESSES)]:
        assert not [line for o in result_of(process, PATIENCE)["outcomes"] for line in o["wrong"]]
    tier = DiskTier(tmp_path / "store")
    try:
        check_files(tier)
    finally:
        tier.close()
