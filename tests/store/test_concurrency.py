"""S0-27: threads and processes share one directory, one of them dying again and again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepwarm.store.disk import DiskTier
from keepwarm.store.record import Part
from tests.store import contend
from tests.store.crash import Block, holds_its_content
from tests.store.test_crash import check_files

PROCESSES = 4
PATIENCE = 60  # seconds after which a process that should have ended is held up for ever


def start(place: Path, number: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.contend", str(place), str(number), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def die_again_and_again(place: Path, number: int, seconds: float) -> int:
    """Start a process over and over and kill it in the middle; says how often."""
    chance, until, n_kills = random.Random(number), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        process = start(place, number, seconds=PATIENCE)
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


def contend_for(place: Path, seconds: float) -> list[dict[str, Any]]:
    """Everybody at work for so long; returns what each thread of the survivors says."""
    steady = [start(place, number, seconds) for number in range(PROCESSES - 1)]
    try:
        assert die_again_and_again(place, PROCESSES - 1, seconds - 1) > 2
        results = [result_of(process, PATIENCE) for process in steady]
    finally:
        for process in steady:
            process.kill()
            process.communicate()
    for what, expected in (("evicted", True), ("quarantined", False), ("errors", False)):
        assert any(result["stats"][what] for result in results) is expected, what
    return [outcome for result in results for outcome in result["outcomes"]]


def check_share(place: Path, seconds: float) -> None:
    outcomes = contend_for(place, seconds)
    assert not [line for outcome in outcomes for line in outcome["wrong"]]
    done = {what: sum(o[what] for o in outcomes) for what in ("puts", "reads", "deletes")}
    assert min(done.values()) > 5 * seconds, done
    tier = DiskTier(place, contend.LIMITS)
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
    """S0-27: every value is right, nothing acknowledged is lost, and the books agree at the end."""
    check_share(tmp_path, seconds=12)


@pytest.mark.soak
def test_threads_and_processes_share_a_directory_for_a_minute(tmp_path: Path) -> None:
    """S0-27: the same for long."""
    check_share(tmp_path, seconds=60)
