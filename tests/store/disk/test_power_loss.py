"""S0-24: what was acknowledged is found after a power cut, whatever the disk had not written yet.

The file operations of a real store are recorded. For every point of the record the states that a
disk may show after a cut are built: a file without its sync is empty, half or whole, a directory
shows its entries as of its last sync and any of the later changes, and the index is lost, the
latest, or any that was there since it was last synced.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from keepwarm.cache.agents.agents import Agents
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.store.atomic import Files
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier
from keepwarm.store.index.index import Index
from keepwarm.store.names import parse_name
from keepwarm.store.record import Part
from keepwarm.store.unlock import unlock
from tests.store.disk.crash import (
    KEY,
    NAMESPACE,
    WORLD,
    Block,
    UnsyncedFiles,
    fast_directory,
    holding_tokens,
    holds_its_content,
    marked_for_deletion,
)


class Change(NamedTuple):
    """A name in a directory gets a file, a directory or nothing."""

    directory: Path
    name: str
    node: int | None


class Synced(NamedTuple):
    path: Path


class Indexed(NamedTuple):
    """The index after a transaction, as a whole database; `synced`: the disk has it for sure."""

    database: bytes
    synced: bool
    marked: bool = False  # something in it is being deleted


class Said(NamedTuple):
    """What the caller knows: an operation on a block began, or was acknowledged."""

    verb: str
    block: Block
    part: Part = Part.DELTA
    done: bool = False


class SaidOfAgent(NamedTuple):
    """The same of an agent, and the blocks that go with it."""

    verb: str
    agent: str
    blocks: Sequence[Block] = ()
    done: bool = False


Event = Change | Synced | Indexed | Said | SaidOfAgent


class Log:
    """All that happened, in order, and what was in the files."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.contents: dict[int, bytes | None] = {}  # by node; None: a directory
        self._nodes: dict[Path, int] = {}
        self._database = b""

    def create(self, path: Path, content: bytes | None) -> None:
        node = len(self.contents)
        self.contents[node], self._nodes[path] = content, node
        self.events.append(Change(path.parent, path.name, node))

    def rename(self, old: Path, new: Path) -> None:
        self._nodes[new] = self._nodes.pop(old)
        self.events.append(Change(new.parent, new.name, self._nodes[new]))
        self.events.append(Change(old.parent, old.name, None))

    def remove(self, path: Path) -> None:
        self._nodes.pop(path)
        self.events.append(Change(path.parent, path.name, None))

    def index(self, state: Indexed) -> None:
        """Only if it changed, or is safe from now on."""
        if state.synced or state.database != self._database:
            self.events.append(state)
            self._database = state.database


class RecordedFiles(Files):
    """Does everything but the syncs, which are seen where they are made, not where promised."""

    def __init__(self, log: Log, photograph: Callable[[], None]) -> None:
        self._log, self._photograph = log, photograph
        self._syncing = Path()

    def make_directory(self, path: Path) -> None:
        if not path.exists():
            self._log.create(path, None)
        super().make_directory(path)

    def write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        self._photograph()
        self._log.create(path, b"".join(pieces))
        self._syncing = path
        super().write(path, pieces)

    def publish(self, temp: Path, target: Path) -> None:
        self._photograph()
        self._log.rename(temp, target)
        super().publish(temp, target)

    def remove(self, path: Path) -> bool:
        self._photograph()
        if path.exists():
            self._log.remove(path)
        return super().remove(path)

    def discard(self, temp: Path) -> None:
        if temp.exists():
            self._log.remove(temp)
        super().discard(temp)

    def sync_directory(self, path: Path) -> None:
        self._syncing = path
        super().sync_directory(path)

    def sync(self, fd: int) -> None:
        self._log.events.append(Synced(self._syncing))


class RecordedTier(DiskTier):
    """A tier whose index is photographed after every transaction."""

    def __init__(
        self, root: Path, log: Log, clock: Callable[[], float], secret: str | None
    ) -> None:
        self._log, self.root = log, root
        self._full = False
        files = RecordedFiles(log, self.photograph)
        super().__init__(root, None, files, clock, unlock(root, secret, files))

    def _open_index(self) -> Index:
        index = super()._open_index()
        index.database._db.set_trace_callback(self._statement)
        return index

    def _statement(self, text: str) -> None:
        """Called before a statement runs, so a commit is photographed at the statement after it."""
        if "synchronous = FULL" in text:
            self._full = True
        elif "synchronous = NORMAL" in text:
            self.photograph(synced=self._full)
            self._full = False
        elif text.startswith("BEGIN"):
            self.photograph()
        elif "wal_checkpoint" in text:  # which begins by syncing the log
            self.photograph(synced=True)

    def photograph(self, synced: bool = False) -> None:
        if not (self.root / "index.sqlite").exists():  # a store is marked as sealed before
            return
        other = sqlite3.connect(self.root / "index.sqlite")
        try:
            marked = other.execute("SELECT 1 FROM blocks WHERE doomed").fetchone()
            self._log.index(Indexed(other.serialize(), synced, marked is not None))
        finally:
            other.close()


class Recorder:
    """Works on a store and keeps the log of it."""

    def __init__(self, root: Path, n_bytes: int = 500, secret: str | None = None) -> None:
        self.log, self.root, self._n_bytes, self.secret = Log(), root, n_bytes, secret
        self._clock = count(1e6, 60.0).__next__  # what comes a minute later may evict
        self.tier = RecordedTier(root, self.log, self._clock, secret)

    def put(self, block: Block, part: Part = Part.DELTA, w_rows: int = 1) -> None:
        self.log.events.append(Said("put", block, part))
        put = self.tier.put(block.record(part, w_rows, self._n_bytes))
        put.durable.result()
        assert put.stored
        self.log.events.append(Said("put", block, part, done=True))

    def delete(self, block: Block) -> None:
        self.log.events.append(Said("delete", block))
        self.tier.delete(block.key)
        self.log.events.append(Said("delete", block, done=True))

    def name(self, agent_id: str, blocks: Sequence[Block]) -> None:
        self.log.events.append(SaidOfAgent("name", agent_id))
        keys = tuple(block.key for block in blocks)
        n_tokens = BLOCK_TOKENS * len(keys)
        Agents(self.tier).create(agent_id, NAMESPACE, blocks=keys, n_tokens=n_tokens)
        self.log.events.append(SaidOfAgent("name", agent_id, done=True))

    def remove(self, agent_id: str, going: Sequence[Block]) -> None:
        self.log.events.append(SaidOfAgent("remove", agent_id, going))
        Agents(self.tier).delete(agent_id)
        self.log.events.append(SaidOfAgent("remove", agent_id, going, done=True))

    def restart(self) -> None:
        self.tier.close()
        self.tier = RecordedTier(self.root, self.log, self._clock, self.secret)

    def finish(self) -> Log:
        self.tier.photograph()
        self.tier.close()
        return self.log


class Cut(NamedTuple):
    """Which unsynced changes reached the disk, and which index is left."""

    keeps: Callable[[], bool]
    database: bytes


def cuts(events: list[Event], seed: int) -> Iterator[Cut]:
    chance = random.Random(seed)
    states = possible_indexes(events)
    marked = {state.database for state in states if state.marked}
    for database in {b"", states[0].database, states[-1].database} | marked:
        yield Cut(lambda: False, database)
    yield Cut(lambda: True, states[0].database)
    yield Cut(lambda: chance.random() < 0.5, chance.choice(states).database)


def after_a_cut(log: Log, at: int, cut: Cut, origin: Path, store_root: Path) -> None:
    """Build in `store_root` what the disk shows of `origin` if the power goes after `at` events."""
    entries = surviving_entries(log.events[:at], cut)
    synced = {event.path for event in log.events[:at] if isinstance(event, Synced)}
    changes = [event for event in log.events if isinstance(event, Change)]
    first_names = {change.node: change.directory / change.name for change in reversed(changes)}

    def build(directory: Path, copy: Path) -> None:
        copy.mkdir(parents=True)
        for name, node in entries.get(directory, {}).items():
            content = log.contents[node]
            if content is None:
                build(directory / name, copy / name)
            elif first_names[node] in synced:
                (copy / name).write_bytes(content)
            else:
                half = random.Random(at).choice((0, len(content) // 2, len(content)))
                (copy / name).write_bytes(content[:half])

    if origin.name in entries.get(origin.parent, {}):
        build(origin, store_root)
        if cut.database:
            (store_root / "index.sqlite").write_bytes(cut.database)


def surviving_entries(events: list[Event], cut: Cut) -> dict[Path, dict[str, int]]:
    last_sync = {e.path: at for at, e in enumerate(events) if isinstance(e, Synced)}
    entries: dict[Path, dict[str, int]] = {}
    for at, event in enumerate(events):
        if not isinstance(event, Change):
            continue
        if at < last_sync.get(event.directory, -1) or cut.keeps():
            names = entries.setdefault(event.directory, {})
            if event.node is None:
                names.pop(event.name, None)
            else:
                names[event.name] = event.node
    return entries


def possible_indexes(events: list[Event]) -> list[Indexed]:
    """None at all, or what any transaction since the last sync left."""
    states = [Indexed(b"", synced=True)]
    for event in events:
        if isinstance(event, Indexed):
            states = [event] if event.synced else [*states, event]
    return states


def promised(events: list[Event]) -> tuple[set[tuple[Block, Part]], set[Block]]:
    """Records that must be found, and blocks that must not; any block may have been evicted."""
    names = {f"{b.key.hex()}.{p.value}.safetensors": (b, p) for b in WORLD for p in Part}
    there: set[tuple[Block, Part]] = set()
    gone: set[Block] = set()
    for event in events:
        if isinstance(event, Change) and event.node is None and event.name in names:
            there.discard(names[event.name])
        elif isinstance(event, Said) and event.verb == "put":
            gone.discard(event.block)
            there |= {(event.block, event.part)} if event.done else set()
        elif isinstance(event, Said | SaidOfAgent) and event.verb != "name":
            going = {event.block} if isinstance(event, Said) else set(event.blocks)
            there = {name for name in there if name[0] not in going}
            gone |= going if event.done else set()
    return there, gone


def promised_agents(events: list[Event]) -> tuple[set[str], set[str]]:
    """Agents that must exist, and agents that must not."""
    last = {event.agent: event for event in events if isinstance(event, SaidOfAgent)}
    done = [event for event in last.values() if event.done]
    there = {event.agent for event in done if event.verb == "name"}
    return there, {event.agent for event in done} - there


def forgotten(events: list[Event]) -> set[BlockKey]:
    """Blocks deleted with an agent and not put again: not even tokens may be left."""
    keys: set[BlockKey] = set()
    for event in events:
        if isinstance(event, SaidOfAgent) and event.done:
            keys |= {block.key for block in event.blocks}
        elif isinstance(event, Said) and event.verb == "put":
            keys.discard(event.block.key)
    return keys


def check(events: list[Event], store_root: Path, secret: str | None) -> None:
    there, gone = promised(events)
    evicting = marks(events, store_root.with_name("now.sqlite"))
    files = UnsyncedFiles()
    tier = DiskTier(store_root, files=files, seal=unlock(store_root, secret, files))
    try:
        for block, part in there:
            if block.key in evicting:
                continue
            assert part in tier.have([block.key])[block.key].parts
            record = tier.read(block.key, part)
            assert record is not None
            assert holds_its_content(record)
        assert not tier.have([block.key for block in gone])
        for name, n_bytes in tier.index.lookups.names().items():
            parsed = parse_name(name)
            assert parsed
            assert tier.records.path_of(*parsed).stat().st_size == n_bytes
        assert tier.stats().quarantined == 0
        assert not tier.index.lookups.deleting()
        check_agents(tier, events)
    finally:
        tier.close()


def check_agents(tier: DiskTier, events: list[Event]) -> None:
    agents = Agents(tier)
    there, gone = promised_agents(events)
    names = {agent.id for agent in agents.all()}
    assert there <= names
    assert not gone & names
    assert not list(agents.unreadable())
    assert not holding_tokens(tier.root, forgotten(events))


def marks(events: list[Event], file: Path) -> set[BlockKey]:
    """Blocks being deleted at this moment; earlier or later tombstones do not count."""
    databases = [event.database for event in events if isinstance(event, Indexed)]
    if not databases:
        return set()
    file.write_bytes(databases[-1])
    return marked_for_deletion(file)


def cut_everywhere(
    log: Log, origin: Path, scratch: Path, every: int = 1, secret: str | None = None
) -> int:
    n_states = 0
    for at in range(0, len(log.events) + 1, every):
        for cut in cuts(log.events[:at], seed=at):
            store_root = scratch / "after"
            after_a_cut(log, at, cut, origin, store_root)
            check(log.events[:at], store_root, secret)
            shutil.rmtree(store_root)
            n_states += 1
    return n_states


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_directory() as store_root:
        yield Path(store_root)


def test_publishing_and_deleting_survive_a_power_cut(tmp_path: Path, memory: Path) -> None:
    """S0-24: new directories, new blocks, more window rows, a block deleted and put again."""
    recorder = Recorder(tmp_path / "made" / "store")
    for block in WORLD[:4]:
        recorder.put(block)
    recorder.put(WORLD[0], Part.WINDOW, w_rows=1)
    recorder.put(WORLD[0], Part.WINDOW, w_rows=3)
    recorder.delete(WORLD[3])
    recorder.put(WORLD[3])
    recorder.delete(WORLD[0])
    n_states = cut_everywhere(recorder.finish(), recorder.root, memory)
    assert n_states > 300


def test_eviction_and_restart_survive_a_power_cut(tmp_path: Path, memory: Path) -> None:
    """S0-24: what was evicted and then put again."""
    recorder = Recorder(tmp_path / "store", n_bytes=200_000)
    for block in WORLD[:3]:
        recorder.put(block)
    recorder.restart()
    tier = recorder.tier
    cap = tier.stats().n_bytes + INDEX_ROOM + 50_000
    tier.limits = DiskLimits(max_bytes=cap, min_free_bytes=0)
    recorder.put(WORLD[8])
    recorder.put(WORLD[9])
    recorder.put(WORLD[2])
    assert tier.stats().evicted
    n_states = cut_everywhere(recorder.finish(), recorder.root, memory)
    assert n_states > 300


def test_an_encrypted_store_survives_a_power_cut(tmp_path: Path, memory: Path) -> None:
    """S0-24: from the file that marks it as sealed on."""
    recorder = Recorder(tmp_path / "store", secret=KEY)
    for block in WORLD[:3]:
        recorder.put(block)
    recorder.put(WORLD[0], Part.WINDOW, w_rows=3)
    recorder.delete(WORLD[2])
    recorder.put(WORLD[2])
    recorder.restart()
    n_states = cut_everywhere(recorder.finish(), recorder.root, memory, every=3, secret=KEY)
    assert n_states > 100


def recorded_removal(root: Path) -> Recorder:
    recorder = Recorder(root)
    for block in WORLD[:4]:
        recorder.put(block)
    recorder.name("stays", WORLD[:2])
    recorder.name("leaves", WORLD[:3])
    recorder.remove("leaves", going=WORLD[2:4])  # the fourth descends from what it had
    recorder.put(WORLD[2])
    recorder.remove("stays", going=WORLD[:3])
    return recorder


def test_a_removed_agent_stays_removed_after_a_power_cut(tmp_path: Path, memory: Path) -> None:
    """S0-24: its file, its blocks and all of their tokens; what others have stays."""
    recorder = recorded_removal(tmp_path / "store")
    n_states = cut_everywhere(recorder.finish(), recorder.root, memory)
    assert n_states > 300


@pytest.mark.parametrize("directory", ["agents", "blocks"])
def test_a_removal_without_a_sync_would_be_seen(
    tmp_path: Path, memory: Path, directory: str
) -> None:
    """The control: the files of an agent, or of its blocks, do come back."""
    recorder = recorded_removal(tmp_path / "store")
    log = recorder.finish()
    first = next(at for at, e in enumerate(log.events) if getattr(e, "verb", "") == "remove")
    log.events[first:] = [
        event
        for event in log.events[first:]
        if not (isinstance(event, Synced) and directory in event.path.parts)
    ]
    with pytest.raises(AssertionError):
        cut_everywhere(log, recorder.root, memory, every=5)


def test_a_mark_that_outlived_its_deletion_would_be_seen(tmp_path: Path, memory: Path) -> None:
    """The control: with an index from before the deletion was finished, a block put since goes."""
    recorder = Recorder(tmp_path / "store")
    recorder.put(WORLD[0])
    recorder.delete(WORLD[0])
    recorder.put(WORLD[0])
    log = recorder.finish()
    for at, event in enumerate(log.events):
        if isinstance(event, Indexed):
            log.events[at] = event._replace(synced=False)
    with pytest.raises(KeyError):
        cut_everywhere(log, recorder.root, memory)


@pytest.mark.parametrize("left_out", ["make_directory", "write", "publish"])
def test_a_missing_sync_would_be_seen(tmp_path: Path, memory: Path, left_out: str) -> None:
    """The control: a store that forgets one kind of sync loses blocks here, or its marker."""
    recorder = Recorder(tmp_path / "store")
    for block in WORLD[:2]:
        recorder.put(block)
    log = recorder.finish()
    log.events = [event for event in log.events if not is_sync_of(event, left_out, log)]
    with pytest.raises((AssertionError, KeyError, BadInput)):
        cut_everywhere(log, recorder.root, memory)


def is_sync_of(event: Event, operation: str, log: Log) -> bool:
    if not isinstance(event, Synced):
        return False
    if event.path.suffix == ".tmp":
        return operation == "write"
    in_blocks = event.path.parent.name == "blocks"
    return operation == ("publish" if in_blocks else "make_directory")
