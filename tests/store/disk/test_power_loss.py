"""What was acknowledged is found after a kill or a power cut, whatever was not written yet.

The system calls of a real store are recorded, those of SQLite too (`syscalls.c`). For points of the
record the states that a disk may show after a cut are built (`power.py`), opened, and compared with
what the store had acknowledged until then. Without any one of its syncs the store loses something.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

from keepwarm.agents.agents import Agents
from keepwarm.errors import KeepwarmError
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.marker import unlock
from keepwarm.store.names import INDEX
from tests.store.disk import power
from tests.store.disk.crash import (
    KEY,
    WORLD,
    Block,
    UnsyncedFiles,
    fast_directory,
    holding_tokens,
    holds_its_content,
    marked_for_deletion,
)
from tests.store.disk.power import Call, Disk, Keeps, everything
from tests.store.disk.test_crash import check_files
from tests.store.disk.traced import STORE

pytestmark = pytest.mark.linux  # where libraries can be preloaded
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs `cc`")
RECENT = 200  # calls
NAMES = {f"{b.key.hex()}.{p.value}.safetensors": (b, p) for b in WORLD for p in Part}


class Promises:
    """What a caller may expect, from what was said and which files were deleted until then."""

    def __init__(self) -> None:
        self.there: set[tuple[Block, Part]] = set()
        self.gone: set[Block] = set()
        self.forgotten: set[BlockKey] = set()  # deleted with an agent: not even tokens are left
        self.agents: set[str] = set()
        self.gone_agents: set[str] = set()
        self.pinned: dict[str, BlockKey] = {}  # by agent

    def follow(self, call: Call) -> None:
        name = Path(call.path).name
        if call.letter == "U" and name in NAMES:
            self.there.discard(NAMES[name])  # any block may have been evicted
        elif is_said(call):
            said = json.loads(call.data)
            (self._put if said["verb"] == "put" else self._other)(**said)

    def _put(self, verb: str, done: bool, block: Sequence[int], part: str) -> None:
        self.gone.discard(Block(*block))
        self.forgotten.discard(Block(*block).key)
        if done:
            self.there.add((Block(*block), Part(part)))

    def _other(
        self,
        verb: str,
        done: bool,
        agent: str = "",
        block: Sequence[int] | None = None,
        blocks: Sequence[Sequence[int]] = (),
        pinned: Sequence[int] | None = None,
    ) -> None:
        self.agents.discard(agent)
        self.gone_agents.discard(agent)
        self.pinned.pop(agent, None)
        if verb == "name":
            self.agents |= {agent} if done else set()
            if done and pinned:
                self.pinned[agent] = Block(*pinned).key
            return
        going = {Block(*each) for each in ([block] if block else blocks)}
        self.there = {one for one in self.there if one[0] not in going}
        if done:
            self.gone |= going
            self.gone_agents |= {agent} if agent else set()
            self.forgotten |= {each.key for each in going} if agent else set()


class State(NamedTuple):
    """A store after a cut, and what must hold in it."""

    root: Path
    promises: Promises
    being_deleted: set[BlockKey]  # at the moment of the cut
    secret: str | None

    def check(self) -> None:
        if not self.promises.there and not self.root.exists():
            return
        files = UnsyncedFiles()
        is_rebuilt = not self._has_index()
        tier = DiskTier(self.root, files=files, cipher=unlock(self.root, self.secret, files))
        try:
            self._check_blocks(tier)
            self._check_agents(tier)
            check_files(tier)
            if not is_rebuilt:
                self._check_pins(tier)
        finally:
            tier.close()

    def _has_index(self) -> bool:
        """Whether tables are left; otherwise the index is rebuilt, and `AgentStore` pins anew."""
        if not (self.root / INDEX).exists():
            return False
        with closing(sqlite3.connect(self.root / INDEX)) as db:
            try:
                return bool(db.execute("SELECT count(*) FROM pins").fetchone())
            except sqlite3.DatabaseError:
                return False

    def _check_blocks(self, tier: DiskTier) -> None:
        for block, part in self.promises.there:
            if block.key not in self.being_deleted:
                assert part in tier.have([block.key])[block.key].parts
                record = tier.read(block.key, part)
                assert record is not None
                assert holds_its_content(record)
        assert not tier.have([block.key for block in self.promises.gone])

    def _check_agents(self, tier: DiskTier) -> None:
        agents = Agents(tier)
        names = {agent.id for agent in agents.all()}
        assert self.promises.agents <= names
        assert not self.promises.gone_agents & names
        assert not list(agents.unreadable())
        assert not holding_tokens(tier.root, self.promises.forgotten)

    def _check_pins(self, tier: DiskTier) -> None:
        for agent, key in self.promises.pinned.items():
            assert f"agent:{agent}" in tier.index.lookups.owners(key)


def cuts(calls: Sequence[Call], at: int) -> Iterator[Keeps]:
    """After call `at`: of what was not synced all is kept, as after a kill, or nothing, or some;
    after a change of names also all but the call before; after the first sync of a new file all
    but the names of other new ones; and after something was said what was written before some
    earlier change.
    """
    call = calls[at]
    yield everything
    if call.letter != "W" or is_said(call):
        yield lambda number, piece: False
    if call.letter in "RU":
        yield lambda number, piece: number != at - 1
    if call.letter == "S" and (new := _latest_file(calls, at)) is not None:
        yield lambda number, piece: calls[number].letter != "O" or number == new
    if call.letter != "S":
        yield lambda number, piece: random.Random(f"{at} {number} {piece}").random() < 0.5
    if is_said(call):
        for before in range(max(0, at - RECENT), at):
            if calls[before].letter in "RU" and calls[before - 1].letter == "W":
                yield lambda number, piece, before=before: number < before  # type: ignore[misc]


def _latest_file(calls: Sequence[Call], at: int) -> int | None:
    """The call that made the file which call `at` syncs, if none was made since."""
    made = next((n for n in range(at, -1, -1) if calls[n].letter == "O"), None)
    return made if made is not None and calls[made].path == calls[at].path else None


def is_said(call: Call) -> bool:
    return call.letter == "W" and Path(call.path).name == "said"


def is_worth_a_cut(call: Call, number: int) -> bool:
    """Syncs, changes of names, and what was said; of the other writes every tenth."""
    return call.letter in "SRU" or is_said(call) or (call.letter in "WT" and number % 10 == 0)


def promised_cuts(calls: Sequence[Call], at: int) -> Iterator[Keeps]:
    """Only after something was said, and nothing is left of what was not synced."""
    if is_said(calls[at]):
        yield lambda number, piece: False


def cut_everywhere(
    calls: Sequence[Call],
    directory: Path,
    scratch: Path,
    secret: str | None = None,
    cuts: Callable[[Sequence[Call], int], Iterator[Keeps]] = cuts,
) -> int:
    """Check the states after cuts; how many there were."""
    disk, promises, seen = Disk(directory), Promises(), set()
    for number, call in enumerate(calls):
        disk.apply(call)
        promises.follow(call)
        marked = cache(partial(marked_now, disk, scratch))
        for keeps in cuts(calls, number) if is_worth_a_cut(call, number) else ():
            state = (repr(vars(promises)), *disk.files_after(keeps))
            if state not in seen:
                seen.add(state)
                disk.write(scratch / "after", keeps)
                State(scratch / "after" / STORE, promises, marked(), secret).check()
                shutil.rmtree(scratch / "after")
    return len(seen)


def marked_now(disk: Disk, scratch: Path) -> set[BlockKey]:
    """Blocks that are being deleted at this moment; earlier or later tombstones do not count."""
    now = scratch / "now"
    disk.write(now, everything, only=INDEX)
    try:
        return marked_for_deletion(now / STORE / INDEX)
    finally:
        shutil.rmtree(now)


def cut_promises_first(calls: Sequence[Call], memory: Path) -> None:
    """What is lost is mostly seen in these few."""
    for some in (promised_cuts, cuts):
        cut_everywhere(calls, memory / "work", memory, cuts=some)


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_directory() as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return power.build(tmp_path_factory.mktemp("library"))


def work(library: Path, memory: Path, scenario: str, without: str = "") -> list[Call]:
    directory = memory / "work"
    directory.mkdir()
    arguments = (str(directory), scenario, *([without] if without else []))
    return power.traced(library, directory, "tests.store.disk.traced", *arguments)


SECRETS = {"encrypt": KEY}


@needs_cc
@pytest.mark.parametrize("scenario", ["publish", "evict", "encrypt", "remove", "resume"])
def test_what_was_acknowledged_survives_a_power_cut(
    scenario: str, library: Path, memory: Path
) -> None:
    """Blocks, evictions, an encrypted store, agents with pins and their removal."""
    calls = work(library, memory, scenario)
    n_states = cut_everywhere(calls, memory / "work", memory, SECRETS.get(scenario))
    assert n_states > 50


@needs_cc
@pytest.mark.parametrize(
    ("without", "scenario"),
    [
        ("make_directory", "publish"),
        ("write", "publish"),
        ("publish", "publish"),
        ("delete_marked", "publish"),
        ("SQLite", "remove"),
        ("remove", "remove"),
        ("pin_only", "remove"),
        ("Scratch", "remove"),
        ("make_directories", "resume"),
        ("_delete_unfinished", "resume"),
    ],
)
def test_without_one_of_its_syncs_the_store_would_lose_something(
    without: str, scenario: str, library: Path, memory: Path
) -> None:
    """The control: for each function that syncs, for one class, and for SQLite itself."""
    calls = work(library, memory, scenario, without)
    if without == "SQLite":
        calls = [call for call in calls if call.letter != "S" or INDEX not in call.path]
    with pytest.raises((AssertionError, KeyError, OSError, KeepwarmError)):
        cut_promises_first(calls, memory)


@needs_cc
@pytest.mark.parametrize("without", ["", "replacing", "sync_directory"])
def test_a_synced_file_survives_a_power_cut(without: str, library: Path, memory: Path) -> None:
    """`write_atomically`, with its syncs and without one of them."""
    calls = work(library, memory, "write_files", without)
    kept = list(whole_files(calls, memory))
    assert len(kept) > 10
    assert all(kept) == (not without)


def whole_files(calls: Sequence[Call], memory: Path) -> Iterator[bool]:
    """For each cut whether the file is there, whole, and not older than was said."""
    disk, least = Disk(memory / "work"), -1
    for number, call in enumerate(calls):
        disk.apply(call)
        least = int(call.data) if is_said(call) else least
        for keeps in cuts(calls, number):
            disk.write(memory / "after", keeps)
            path = memory / "after" / "file"
            found = path.read_text() if path.exists() else ""
            allowed = [str(n) * 10_000 for n in range(max(0, least), 3)] + [""] * (least < 0)
            yield found in allowed
            shutil.rmtree(memory / "after")


@needs_cc
def test_the_record_is_complete(library: Path, memory: Path) -> None:
    """Replayed with all writes it yields the very files that are there."""
    disk = Disk(memory / "work")
    for call in work(library, memory, "remove"):
        disk.apply(call)
    disk.write(memory / "copy", everything)
    assert listing(memory / "copy") == listing(memory / "work")
    assert any(name.endswith(INDEX) for name in listing(memory / "copy"))


def listing(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
