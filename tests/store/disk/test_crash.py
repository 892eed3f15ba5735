"""A process killed at any moment leaves a store that is right after the next start.

Kills come at random moments and steps of publishing, deleting, evicting, removing agents,
collecting what is old and starting. `test_power_loss.py` has what a kill at each step leaves.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from keepwarm.agents.agent_store import AgentStore
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.record import Part
from keepwarm.store.disk import maintenance
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.names import parse_name
from tests.store.disk import crash
from tests.store.disk.crash import (
    Request,
    fast_directory,
    holding_tokens,
    holds_its_content,
    marked_for_deletion,
)

Name = tuple[BlockKey, Part]
KILLED = "exit -9"
RANDOM_KILLS = 30  # of one directory
SOAK_RUNS, SOAK_KILLS = 20, 100


class Server:
    """Starts and kills children of a process without MLX."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.store.disk.crash"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def run(self, request: Request) -> list[str]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request._asdict()) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=300)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_directory() as store_root:
        yield Path(store_root)


class Named(NamedTuple):
    """An agent that was acknowledged, or nearly so."""

    keys: tuple[BlockKey, ...]
    pinned: bool


class Expected:
    """What must be in the store, from the lines that the child printed."""

    def __init__(self) -> None:
        self.rows: dict[Name, int] = {}
        self.pinned: set[BlockKey] = set()
        self.deleted: set[BlockKey] = set()
        self.agents: dict[str, Named] = {}
        self.forgotten: set[BlockKey] = set()  # deleted with an agent: not even tokens are left
        # Operations that a kill ended; either outcome is right.
        self.cut: dict[BlockKey, str] = {}
        self.cut_agents: dict[str, Named] = {}
        self._verb = ""
        self._going: set[BlockKey] = set()

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

    def _begin(self, verb: str, *words: str) -> None:
        self._verb = verb
        if verb == "name":
            self.cut_agents[words[0]] = named(words)
        elif verb in ("remove", "collect"):
            self._begin_removing(words)
        elif words:
            block = BlockKey(bytes.fromhex(words[0]))
            self.cut[block] = "delete" if self.cut.get(block) == "delete" else verb
            if verb == "put":
                self.deleted.discard(block)
                self.forgotten.discard(block)

    def _begin_removing(self, agents: Iterable[str]) -> None:
        """All their descendants may be deleted, but nothing that another agent has."""
        for name in agents:
            if name in self.agents:
                self.cut_agents[name] = self.agents.pop(name)
        keys = {key for name in agents for key in self.cut_agents[name].keys}
        talks = {block.conversation for block in crash.WORLD if block.key in keys}
        below = {block.key for block in crash.WORLD if block.conversation in talks}
        going = below - keys_of(self.agents)
        self._going = going - self.cut.keys()
        self.cut |= dict.fromkeys(going, "delete")

    def _gone(self, file_name: str) -> None:
        name = parse_name(file_name)
        if name is None:  # an agent, or a quarantined record
            return
        if self._verb == "put" and name in self.rows and self.cut.get(name[0]) != "delete":
            held = {agent.keys[-1] for agent in self.agents.values() if agent.pinned}
            assert name[0] not in self.pinned | held, "a pinned block was evicted"
        if self._verb in ("remove", "collect") and name in self.rows:
            assert name[0] not in keys_of(self.agents), "it is another agent's"
        self.rows.pop(name, None)

    def _done(self, verb: str, *words: str) -> None:
        if verb == "name":
            self.agents[words[0]] = self.cut_agents.pop(words[0])
        elif verb in ("remove", "collect"):
            self._done_removing(words)
        elif words:
            self._done_block(verb, BlockKey(bytes.fromhex(words[0])), *words[1:])

    def _done_removing(self, agents: Iterable[str]) -> None:
        own = {key for name in agents for key in self.cut_agents.pop(name).keys}
        own -= keys_of(self.agents) | keys_of(self.cut_agents)
        self.deleted |= own
        self.forgotten |= own
        self.rows = {name: n for name, n in self.rows.items() if name[0] not in own}
        self.cut = {key: verb for key, verb in self.cut.items() if key not in self._going}

    def _done_block(self, verb: str, block: BlockKey, part: str = "", *numbers: str) -> None:
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

    def settle(self, disk_store: AgentStore) -> None:
        """Accept the outcome of the interrupted operations."""
        tier = disk_store.disk
        for key in self.cut:
            known = tier.have([key]).get(key)
            self.rows = {name: n for name, n in self.rows.items() if name[0] != key}
            if known:
                self.rows |= {(key, part): known.w_rows for part in known.parts}
            self.pinned.discard(key)
            self.pinned |= {key} if is_held(tier, key, key.hex()) else set()
        there = {agent.id for agent in disk_store.agents.all()}
        for name, cut in self.cut_agents.items():
            if name in there:
                held = is_held(tier, cut.keys[-1], f"agent:{name}")
                self.agents[name] = cut._replace(pinned=held)
        self.cut.clear()
        self.cut_agents.clear()


def named(words: Sequence[str]) -> Named:
    return Named(tuple(BlockKey(bytes.fromhex(key)) for key in words[2:]), words[1] == "1")


def keys_of(agents: Mapping[str, Named]) -> set[BlockKey]:
    return {key for agent in agents.values() for key in agent.keys}


def check_after_start(store_root: Path, expected: Expected, secret: str | None = None) -> None:
    """Check what the next start must repair, and that the index agrees with the files."""
    assert not holding_tokens(store_root, expected.forgotten)  # before the log is truncated
    marked = marked_for_deletion(store_root / "index.sqlite")
    with AgentStore(store_root, crash.LIMITS, secret=secret) as disk_store:
        tier = disk_store.disk
        expected.rows = {name: n for name, n in expected.rows.items() if name[0] not in marked}
        check_found(tier, expected)
        check_files(tier)
        check_agents(disk_store, expected)
        assert not set(tier.have(expected.deleted)), "deleted and back"
        assert not set(tier.have(marked)), "a deletion was not finished"
        assert marked - {k for k, verb in expected.cut.items() if verb == "delete"} <= (
            marked - expected.pinned
        ), "a pinned block was evicted"
        for key in expected.pinned - expected.cut.keys():
            assert is_held(tier, key, key.hex()), "a pin was lost"
        expected.settle(disk_store)


def is_held(tier: DiskTier, key: BlockKey, owner: str) -> bool:
    hidden = tier.cipher.hidden("owner", owner.encode()).hex() if tier.cipher else owner
    return hidden in tier.index.lookups.owners(key)


def check_agents(disk_store: AgentStore, expected: Expected) -> None:
    assert not list(disk_store.agents.unreadable())
    there = {agent.id: agent for agent in disk_store.agents.all()}
    assert expected.agents.keys() <= there.keys(), "an agent was lost"
    assert there.keys() <= expected.agents.keys() | expected.cut_agents.keys(), "removed and back"
    for name, agent in expected.agents.items():
        assert there[name].blocks == agent.keys
        if agent.pinned:
            held = is_held(disk_store.disk, agent.keys[-1], f"agent:{name}")
            assert held, "what was promised to an agent was lost"


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
    """No orphan, no corrupt record, and the index counts the actual bytes."""
    assert not [checked for checked in maintenance.verify(tier) if checked.wrong or checked.newer]
    files = [path for path in (tier.root / "blocks").rglob("*") if path.is_file()]
    sizes = {parse_name(path.name): path.stat().st_size for path in files}
    assert {path.name: path.stat().st_size for path in files} == tier.index.lookups.names()
    assert tier.index.lookups.n_bytes() == sum(sizes.values())
    for name in sizes:
        assert name
        record = tier.read(*name)
        assert record is not None
        assert holds_its_content(record)
    assert not tier.index.lookups.deleting()
    assert not tier.index.lookups.writers()
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


def kill_at_random(
    server: Server, store_root: Path, seed: int, n_kills: int, secret: str | None = None
) -> None:
    """One directory through many kills; some of them hit the start that repairs the one before."""
    chance = random.Random(seed)
    expected = Expected()
    for _ in range(n_kills):
        request = Request(str(store_root), chance.getrandbits(32), secret=secret)
        if chance.random() < 0.5:
            request = request._replace(kill_after=chance.uniform(0.001, 0.15))
        else:
            request = request._replace(kill_at=chance.randint(1, 400))
        lines = server.run(request)
        assert lines[-1] == KILLED, lines
        expected.follow(lines)
        if chance.random() < 0.7:
            check_after_start(store_root, expected, secret)
    check_after_start(store_root, expected, secret)


@pytest.mark.parametrize("secret", [None, crash.KEY], ids=["plain", "sealed"])
def test_a_kill_at_a_random_moment_loses_nothing(
    server: Server, tmp_path: Path, secret: str | None
) -> None:
    """Whatever the store was doing, again and again in one directory."""
    kill_at_random(server, tmp_path, seed=7, n_kills=RANDOM_KILLS, secret=secret)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 100 + SOAK_RUNS))
def test_thousands_of_kills_lose_nothing(server: Server, tmp_path: Path, seed: int) -> None:
    kill_at_random(server, tmp_path, seed, n_kills=SOAK_KILLS)
