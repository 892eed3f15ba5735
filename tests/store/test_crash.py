"""S0-24: a process killed at any moment leaves a store that is right after the next start.

Kills come at every step of publishing, deleting, evicting and starting, and at random moments.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.disk import DiskTier
from keepwarm.store.names import parse_name
from keepwarm.store.record import Part
from keepwarm.store.unlock import unlock
from tests.store import crash
from tests.store.crash import (
    Request,
    UnsyncedFiles,
    fast_place,
    holds_its_content,
    marked_for_deletion,
)

Name = tuple[BlockKey, Part]
KILLED = "exit -9"


class Server:
    """Starts and kills children of a process without MLX."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.store.crash"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def run(self, request: Request) -> list[str]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request._asdict()) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_place() as place:
        yield Path(place)


class Expected:
    """What must be in the store, from what the child said."""

    def __init__(self) -> None:
        self.rows: dict[Name, int] = {}
        self.pinned: set[BlockKey] = set()
        self.deleted: set[BlockKey] = set()
        self.cut: dict[BlockKey, str] = {}  # operations that a kill ended; either outcome is right
        self._verb = ""

    def follow(self, lines: list[str]) -> None:
        for line in lines:
            verb, *words = line.split()
            assert verb != "wrong", line
            if verb == "begin":
                self._begin(*words)
            elif verb == "gone":
                self._gone(words[0])
            elif verb == "done":
                self._done(*words)

    def _begin(self, verb: str, key: str = "", *_: str) -> None:
        self._verb = verb
        if key:
            block = BlockKey(bytes.fromhex(key))
            self.cut[block] = "delete" if self.cut.get(block) == "delete" else verb
            if verb == "put":
                self.deleted.discard(block)

    def _gone(self, file_name: str) -> None:
        name = parse_name(file_name)
        assert name
        if self._verb == "put" and name in self.rows and self.cut.get(name[0]) != "delete":
            assert name[0] not in self.pinned, "a pinned block was evicted"
        self.rows.pop(name, None)

    def _done(self, verb: str, key: str = "", part: str = "", *numbers: str) -> None:
        block = BlockKey(bytes.fromhex(key))
        if self.cut.get(block) == verb:
            del self.cut[block]
        if verb == "put" and int(numbers[1]):
            self.rows[block, Part(part)] = int(numbers[0])
        elif verb == "delete":
            self.deleted.add(block)
            self.rows = {name: n for name, n in self.rows.items() if name[0] != block}
        elif verb == "pin":
            self.pinned.add(block)
        elif verb == "unpin":
            self.pinned.discard(block)

    def settle(self, tier: DiskTier) -> None:
        """Take over what became of the operations that were cut."""
        for key in self.cut:
            known = tier.have([key]).get(key)
            self.rows = {name: n for name, n in self.rows.items() if name[0] != key}
            if known:
                self.rows |= {(key, part): known.w_rows for part in known.parts}
            self.pinned.discard(key)
            self.pinned |= {key} if tier.index.owners(key) else set()
        self.cut.clear()


def check_after_start(place: Path, expected: Expected, secret: str | None = None) -> None:
    """Everything the next start owes, and that the books agree with the files."""
    marked = marked_for_deletion(place / "index.sqlite")
    files = UnsyncedFiles()
    tier = DiskTier(place, crash.LIMITS, files, seal=unlock(place, secret, files))
    try:
        expected.rows = {name: n for name, n in expected.rows.items() if name[0] not in marked}
        check_found(tier, expected)
        check_files(tier)
        assert not set(tier.have(expected.deleted)), "deleted and back"
        assert not set(tier.have(marked)), "a deletion was not finished"
        assert marked - {k for k, verb in expected.cut.items() if verb == "delete"} <= (
            marked - expected.pinned
        ), "a pinned block was evicted"
        for key in expected.pinned - expected.cut.keys():
            assert len(tier.index.owners(key)) == 1, "a pin was lost"
        expected.settle(tier)
    finally:
        tier.close()


def check_found(tier: DiskTier, expected: Expected) -> None:
    for (key, part), w_rows in expected.rows.items():
        if expected.cut.get(key) == "delete":
            continue
        known = tier.have([key])
        assert key in known, "acknowledged and lost"
        assert part in known[key].parts, "acknowledged and lost"
        record = tier.read(key, part)
        assert record is not None, "acknowledged and lost"
        if part is Part.WINDOW:
            assert known[key].w_rows == record.header.w_rows >= w_rows


def check_files(tier: DiskTier) -> None:
    """No orphan, no corrupt record, and the index counts what is really there."""
    files = [path for path in (tier.root / "blocks").rglob("*") if path.is_file()]
    sizes = {parse_name(path.name): path.stat().st_size for path in files}
    assert {path.name: path.stat().st_size for path in files} == tier.index.names()
    assert tier.index.n_bytes() == sum(sizes.values())
    for name in sizes:
        assert name
        record = tier.read(*name)
        assert record is not None
        assert holds_its_content(record)
    assert not tier.index.doomed()
    assert not tier.index.writers()
    assert [path.name for path in (tier.root / "tmp").iterdir() if path.is_dir()] == [
        tier.scratch.name
    ]
    assert not list((tier.root / "tmp").rglob("*.tmp"))
    assert not list((tier.root / "quarantine").iterdir())
    check_index(tier.root / "index.sqlite")


def check_index(path: Path) -> None:
    wrong = (
        "SELECT key FROM blocks b WHERE children != "
        "(SELECT count(*) FROM blocks c WHERE c.parent = b.key)",
        "SELECT key FROM blocks b WHERE pins != (SELECT count(*) FROM pins p WHERE p.key = b.key)",
        "SELECT key FROM tokens WHERE key NOT IN (SELECT key FROM blocks)",
        "SELECT key FROM blocks WHERE key NOT IN (SELECT key FROM tokens)",
    )
    db = sqlite3.connect(path)
    try:
        for query in wrong:
            assert not db.execute(query).fetchall(), query
    finally:
        db.close()


def kill_at_steps(
    server: Server, place: Path, scenario: str, every: int = 1, secret: str | None = None
) -> int:
    """Run the scenario once whole, then on a fresh copy for each step, or every so many; count."""
    template = place / "template"
    start = server.run(Request(str(template), "fill", secret=secret))
    assert start[-1] == "exit 0"
    whole = copy_of(template, place)
    n_steps = int(server.run(Request(str(whole), scenario, secret=secret))[-2].split()[1])
    for step in range(1, n_steps + 1, every):
        copy = copy_of(template, place)
        lines = server.run(Request(str(copy), scenario, kill_at=step, secret=secret))
        assert lines[-1] == KILLED
        expected = Expected()
        expected.follow(start)
        expected.follow(lines)
        check_after_start(copy, expected, secret)
    return n_steps


def copy_of(template: Path, place: Path) -> Path:
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(template, copy, copy_function=os.link)
    for path in copy.glob("index.sqlite*"):  # written in place; records never are
        path.unlink()
        shutil.copy(template / path.name, path)
    return copy


def kill_at_random(
    server: Server, place: Path, seed: int, n_kills: int, secret: str | None = None
) -> None:
    """One directory through many kills; some of them hit the start that repairs the one before."""
    chance = random.Random(seed)
    expected = Expected()
    for _ in range(n_kills):
        request = Request(str(place), "play", chance.getrandbits(32), secret=secret)
        if chance.random() < 0.5:
            request = request._replace(kill_after=chance.uniform(0.001, 0.15))
        else:
            request = request._replace(kill_at=chance.randint(1, 400))
        lines = server.run(request)
        assert lines[-1] == KILLED, lines
        expected.follow(lines)
        if chance.random() < 0.7:
            check_after_start(place, expected, secret)
    check_after_start(place, expected, secret)


@pytest.mark.parametrize("scenario", ["publish", "delete", "evict", "restart"])
def test_a_kill_at_any_step_loses_nothing(server: Server, memory: Path, scenario: str) -> None:
    """S0-24: each file operation and each statement of the index, one after the other."""
    n_kills = kill_at_steps(server, memory, scenario)
    assert n_kills > 20


@pytest.mark.parametrize("scenario", ["publish", "delete", "evict", "restart"])
def test_a_kill_loses_nothing_of_an_encrypted_store(
    server: Server, memory: Path, scenario: str
) -> None:
    """S0-24: the same steps with everything sealed, every ninth of them."""
    assert kill_at_steps(server, memory, scenario, every=9, secret=crash.KEY) > 20


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_a_random_moment_loses_nothing(server: Server, tmp_path: Path, seed: int) -> None:
    """S0-24: whatever the store was doing, again and again in one directory."""
    kill_at_random(server, tmp_path, seed, n_kills=40)


def test_random_kills_lose_nothing_of_an_encrypted_store(server: Server, tmp_path: Path) -> None:
    """S0-24."""
    kill_at_random(server, tmp_path, seed=7, n_kills=15, secret=crash.KEY)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_thousands_of_kills_lose_nothing(server: Server, tmp_path: Path, seed: int) -> None:
    """S0-24: two thousand of them."""
    kill_at_random(server, tmp_path, seed, n_kills=100)
