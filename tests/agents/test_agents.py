"""Agents name blocks: fork, rewind, promise, carry and forget without copying any."""

import errno
import json
import os
import sqlite3
import tarfile
from base64 import b64encode
from contextlib import closing, suppress
from dataclasses import replace

import psutil
import pytest

from keepwarm.agents import reachability
from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.agents import MAX_SIDES, Agents
from keepwarm.agents.reachability import dropped_by_rewind
from keepwarm.agents.texts import AgentTurn
from keepwarm.agents.verify import verify_store
from keepwarm.errors import BadCacheFile, BadInput, BadRecord, StoreFailed, UnknownAgent
from keepwarm.prefix.blocks import BlockKey, chain, pack
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.prefix.turn import KeptTurn
from keepwarm.records.record import Part
from keepwarm.store.atomic import Files
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.disk.maintenance import file_path
from keepwarm.store.index import database
from keepwarm.store.tier import NamedBlock, agent_owner
from tests.contract.test_tiers import Minutes
from tests.store.kit import files_under, record, tokens_of

IDENTITY = Identity(weights={"model": "1"}, config="2", tokenizer="3", layout="4")
NAME = namespace(IDENTITY)
LIMITS = DiskLimits(min_free_bytes=0)


@pytest.fixture
def disk_store(tmp_path):
    with AgentStore(tmp_path / "store", LIMITS) as opened:
        opened.register(IDENTITY)
        yield opened


def keep(disk_store, tokens, n_bytes=2048):
    """Put the blocks of a conversation, as a request would."""
    for ref in chain(NAME, tokens):
        disk_store.disk.put(record(ref, n_bytes=n_bytes, namespace=NAME)).durable.result()


def turn(disk_store, agent_id, tokens):
    keep(disk_store, tokens)
    return disk_store.agents.advance(agent_id, NAME, tokens)


def holds_tokens(root, tokens):
    """The files under the root that contain some of these token ids in a row, in any spelling."""
    runs = [tokens[i : i + 4] for i in range(0, len(tokens) - 4, 4)]
    spellings = [pack(run) for run in runs]
    spellings += [b"".join(t.to_bytes(4, "little") for t in run) for run in runs]
    # In base64, bytes at a multiple of three keep their own letters.
    spellings += [b64encode(pack(tokens[i : i + 6])) for i in range(0, len(tokens) - 6, 3)]
    return [
        path
        for path in files_under(root)
        if any(spelling in path.read_bytes() for spelling in spellings)
    ]


def test_turns_fork_and_rewind_copy_no_bytes(disk_store):
    tokens = tokens_of(700)
    turn(disk_store, "coder", tokens[:300])
    turn(disk_store, "coder", tokens)
    before = disk_store.disk.stats().puts
    whole = disk_store.agents.show("coder")
    assert whole.turns == (300, 700)
    fork = disk_store.agents.fork("coder", "coder-2")
    assert (fork.turns, fork.forked_from) == ((300, 700), "coder")
    back = disk_store.agents.rewind("coder-2", 1)
    assert (back.n_tokens, back.turns, len(back.blocks)) == (300, (300,), 2)
    dropped = [block.key for block in dropped_by_rewind(whole, back)]
    assert dropped == [key for key in whole.blocks if key not in back.blocks]
    assert len(dropped) == 2
    assert disk_store.agents.show("coder") == whole
    assert disk_store.disk.stats().puts == before
    assert disk_store.tokens_of(back) == tokens[:300]


def test_a_changed_past_keeps_only_the_turns_that_still_hold(disk_store):
    tokens = tokens_of(900)
    for n in (300, 600, 900):
        turn(disk_store, "a", tokens[:n])
    edited = tokens[:400] + tokens_of(300, seed=5)
    assert turn(disk_store, "a", edited).turns == (300, 700)


def test_agents_and_their_pins_survive_a_lost_index(tmp_path):
    """The promise is in the agent's own file; a start may have died before it made the pins."""
    root, tokens = tmp_path / "store", tokens_of(600)
    with AgentStore(root, LIMITS) as disk_store:
        last = turn(disk_store, "a", tokens).blocks[-1]
        turn(disk_store, "b", tokens_of(300, seed=2))
        disk_store.agents.update("a", pinned=True)
    (root / "index.sqlite").unlink()
    DiskTier(root, LIMITS).close()  # a start that came no further
    with AgentStore(root, LIMITS) as disk_store:
        assert [agent.id for agent in disk_store.agents.all()] == ["a", "b"]
        assert disk_store.tokens_of(disk_store.agents.show("a")) == tokens
        assert disk_store.disk.index.lookups.owners(last) == ["agent:a"]
        assert [stored.key for stored in disk_store.disk.walk() if stored.pinned] == [last]


def test_the_title_is_what_the_conversation_began_with_or_a_label(disk_store):
    """Not what a short request beside it asked, nor what it was compacted to; it is deleted with
    the agent, whose file alone has it."""
    agents, path = disk_store.agents, disk_store.agents._path("a")

    def ended(tokens, *said):
        messages = KeptTurn([{"role": "user", "content": text} for text in said])
        agents.advance("a", NAME, tokens, len(tokens), client="claude-cli", messages=messages)
        return agents.show("a").title

    assert ended(tokens_of(20, seed=9), "Is this a topic?") == "claude-cli: Is this a topic?"
    tokens = tokens_of(600)
    assert ended(tokens, "Mend the test.") == "claude-cli: Mend the test."
    assert ended(tokens + tokens_of(90, seed=2), "Mend the test.", "And more.").endswith("test.")
    assert ended(tokens_of(700, seed=3), "Compacted.").endswith("Mend the test.")
    assert agents.fork("a", "b").title.endswith("Mend the test.")
    assert agents.update("b", metadata={"title": "mending"}).title == "mending"
    assert "Mend the test." in path.read_text()
    agents.delete("a")
    assert not path.exists()


def test_a_newer_agent_is_left_alone(disk_store):
    """Not listed, not overwritten, and nothing is deleted that it may share."""
    tokens = tokens_of(600)
    turn(disk_store, "new", tokens)
    turn(disk_store, "old", tokens[:300])
    path = disk_store.agents._path("new")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 5, "mood": "good"}))
    before = path.read_text()
    assert [agent.id for agent in disk_store.agents.all()] == ["old"]
    assert [name for name, _ in disk_store.agents.unreadable()] == ["new.json"]
    for use in (
        lambda: disk_store.agents.show("new"),
        lambda: disk_store.agents.advance("new", NAME, tokens),
        lambda: disk_store.agents.delete("new"),
        lambda: disk_store.agents.delete("old"),
    ):
        with pytest.raises(BadInput, match="newer Keepwarm"):
            use()
    assert path.read_text() == before
    assert len(disk_store.disk.have([ref.key for ref in chain(NAME, tokens)])) == 3


def test_agent_file_that_is_torn_or_of_an_older_format_is_refused_in_one_sentence(disk_store):
    turn(disk_store, "a", tokens_of(300))
    path = disk_store.agents._path("a")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    with pytest.raises(BadInput, match=r"old format 3, which is not read\); delete "):
        disk_store.agents.show("a")
    for torn in ("", "[]", "{}", "null", '{"id": 7}'):
        path.write_text(torn)
        with pytest.raises(BadInput, match="is damaged"):
            disk_store.agents.show("a")


def test_a_store_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(BadInput, match=r"cannot be used .*; name another directory"):
        AgentStore(tmp_path / "store", LIMITS)


@pytest.mark.parametrize("bad", ["../x", "", "a/b", ".hidden", "x" * 129, "a\0b", "-rf"])
def test_ids_never_become_paths_unchecked(bad, disk_store):
    for use in (disk_store.agents.show, disk_store.agents.delete):
        with pytest.raises(BadInput, match="not an agent id"):
            use(bad)


def test_an_id_of_other_case_is_not_taken_for_another_agents(disk_store):
    """Some file systems have one file for both."""
    agents = disk_store.agents
    turn(disk_store, "ops", tokens_of(300))
    with suppress(FileExistsError):  # on such a file system
        os.link(agents._path("ops"), agents._path("Ops"))
    for use in (
        agents.show,
        agents.delete,
        lambda agent_id: agents.fork(agent_id, "copy"),
        lambda agent_id: agents.advance(agent_id, NAME, tokens_of(400)),
    ):
        with pytest.raises(BadInput, match="'Ops' is that of 'ops'"):
            use("Ops")
    assert agents.show("ops").turns == (300,)


def test_a_store_whose_pins_cannot_be_made_is_closed_again(tmp_path, monkeypatch):
    """Nobody has it who could close it."""

    def fail(agents):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Agents, "pin_all", fail)
    with pytest.raises(StoreFailed, match="could not pin the blocks"):
        AgentStore(tmp_path / "store", LIMITS)
    opened = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_a_response_that_another_process_deletes_meanwhile_is_passed_over(disk_store, monkeypatch):
    class Gone:
        name = path = f"ada~{'0' * 40}.json"

        def stat(self, **_):
            raise FileNotFoundError

    scan = os.scandir
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", lambda path: [Gone(), *scan(path)])
        disk_store.agents.responses.put("ada", "resp_1", b"Hi", 60.0)
    assert disk_store.agents.responses.get("resp_1", 60.0) == b"Hi"


def test_an_unknown_agent_is_named(disk_store):
    with pytest.raises(UnknownAgent, match="'nobody'"):
        disk_store.agents.show("nobody")


def test_deleting_removes_what_no_other_agent_reaches(disk_store):
    """A byte search for its tokens over every file finds nothing."""
    shared = tokens_of(512, seed=1)
    mine, theirs = shared + tokens_of(400, seed=2), shared + tokens_of(400, seed=3)
    turn(disk_store, "mine", mine[:700])
    turn(disk_store, "mine", mine)
    turn(disk_store, "theirs", theirs)
    anonymous = mine + tokens_of(300, seed=4)  # descends from mine
    keep(disk_store, anonymous)
    assert holds_tokens(disk_store.disk.root, mine[512:])
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, anonymous[512:])
    assert [agent.id for agent in disk_store.agents.all()] == ["theirs"]
    assert disk_store.tokens_of(disk_store.agents.show("theirs")) == theirs


def test_deleting_takes_quarantined_records_along(disk_store):
    tokens = tokens_of(300)
    agent = turn(disk_store, "a", tokens)
    (path,) = [
        p for p in files_under(disk_store.disk.root / "blocks") if agent.blocks[0].hex() in p.name
    ]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    part = next(iter(disk_store.disk.have(agent.blocks)[agent.blocks[0]].parts))
    assert disk_store.disk.read(agent.blocks[0], part) is None
    assert list((disk_store.disk.root / "quarantine").iterdir())
    disk_store.agents.delete("a")
    assert not holds_tokens(disk_store.disk.root, tokens)


def part_in_block(n_shared):
    """Two conversations that have so many first tokens in common."""
    shared = tokens_of(n_shared, seed=1)
    return shared + tokens_of(700, seed=2), shared + tokens_of(300, seed=3)


@pytest.mark.parametrize("n_shared", [0, 100, 256])
def test_deleting_takes_a_rewritten_past_along(n_shared, disk_store):
    """What an agent has said and taken back was its own; what it shares stays."""
    old, new = part_in_block(n_shared)
    turn(disk_store, "other", old[: n_shared // 256 * 256])
    old_blocks = turn(disk_store, "mine", old).blocks
    turn(disk_store, "mine", new)
    turn(disk_store, "mine", new + tokens_of(100, seed=4))
    keep(disk_store, old + tokens_of(300, seed=5))
    bad = old_blocks[2]  # what follows it has no parent any more
    disk_store.disk.records.path_of(bad, Part.DELTA).write_bytes(b"")
    assert disk_store.disk.read(bad, Part.DELTA) is None
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, old[n_shared:])
    assert not holds_tokens(disk_store.disk.root, new[n_shared:])
    assert len(list(disk_store.disk.walk())) == n_shared // 256


def test_deleting_takes_what_went_on_from_an_earlier_turn(disk_store):
    """Its tail of that time is long outgrown."""
    mine, parent = tokens_of(300), tokens_of(256, seed=1)
    turn(disk_store, "other", parent)
    for n in (100, 300):
        turn(disk_store, "mine", parent + mine[:n])
    keep(disk_store, parent + mine[:100] + tokens_of(300, seed=2))
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, mine)


@pytest.mark.parametrize("to_turn", [0, 1])
def test_deleting_takes_what_was_rewound_along(to_turn, disk_store):
    tokens = tokens_of(900)
    turn(disk_store, "other", tokens[:256])
    for n in (300, 900):
        turn(disk_store, "mine", tokens[:n])
    disk_store.agents.rewind("mine", to_turn)
    turn(disk_store, "mine", tokens[:256] + tokens_of(200, seed=2))
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, tokens[256:])
    assert disk_store.tokens_of(disk_store.agents.show("other")) == tokens[:256]


def ends_to_delete(disk_store, agent_id):
    """Keys that are deleted from shared tiers with an agent."""
    disk_store.agents.delete(agent_id)
    return {block.key for dead in disk_store.tombstones.all().values() for block in dead.blocks}


def last_key(tokens):
    *_, last = chain(NAME, tokens)
    return last.key


def rewind_it(agents, tokens):
    agents.rewind("a", 1)


def answer_again(agents, tokens):
    agents.advance("a", NAME, tokens[:270] + tokens_of(100, seed=3), 260)


def let_it_age(agents, tokens):
    agents.rewind("a", 1, branch=1)
    for seed in range(MAX_SIDES):
        agents.advance("a", NAME, tokens_of(20, seed=10 + seed))


@pytest.mark.parametrize("drop", [rewind_it, answer_again, let_it_age])
def test_deleting_names_the_ends_of_turns_that_were_dropped(drop, disk_store):
    """Answers may have been told that end there."""
    agents, tokens = disk_store.agents, tokens_of(350)
    disk_store.tombstones.share_with(["file:///nowhere"])
    agents.advance("a", NAME, tokens_of(500, seed=1))
    keep(disk_store, tokens)
    for n, n_prompt in ((50, 40), (300, 260), (350, 260)):
        agents.advance("a", NAME, tokens[:n], n_prompt)
    assert agents.show("a").head.turns == (50, 300, 350)
    drop(agents, tokens)
    assert all(300 not in branch.turns for branch in agents.show("a").branches)
    assert last_key(tokens[:300]) in ends_to_delete(disk_store, "a")


def test_what_a_dropped_turn_had_is_listed_as_long_as_blocks_are_shared(disk_store, monkeypatch):
    """Its whole blocks, too: shared tiers may have what was evicted here."""
    monkeypatch.setattr(reachability, "MAX_UNCHECKED_LEFT", 6)
    disk_store.tombstones.share_with(["file:///nowhere"])
    for seed in range(MAX_SIDES + 10):
        turn(disk_store, "a", tokens_of(300, seed=seed))
        disk_store.disk.delete_all([stored.key for stored in disk_store.disk.walk()])
    dropped = {last_key(tokens_of(n, seed=1)) for n in (256, 300)}
    assert dropped <= ends_to_delete(disk_store, "a")


def test_deleting_spares_what_goes_on_from_a_turn_of_another(disk_store):
    """As it spares what descends from a whole block that both have."""
    tokens = tokens_of(100)
    turn(disk_store, "first", tokens)
    disk_store.agents.fork("first", "fork")
    first = turn(disk_store, "first", tokens + tokens_of(100, seed=1))
    turn(disk_store, "fork", tokens + tokens_of(100, seed=2))
    anonymous = tokens + tokens_of(100, seed=3)
    keep(disk_store, anonymous)
    disk_store.agents.delete("fork")
    assert {stored.key for stored in disk_store.disk.walk()} == {
        *first.blocks,
        *(ref.key for ref in chain(NAME, anonymous)),
    }


def test_a_past_of_another_model_goes_with_the_agent(disk_store):
    tokens, other_name = tokens_of(100), namespace(replace(IDENTITY, config="9"))
    turn(disk_store, "mine", tokens)
    disk_store.agents.advance("mine", other_name, tokens_of(100, seed=2))
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, tokens)


def test_deleting_spares_a_rewritten_past_that_another_agent_has(disk_store):
    old, new = part_in_block(100)
    turn(disk_store, "mine", old)
    disk_store.agents.fork("mine", "fork")
    turn(disk_store, "mine", new)
    disk_store.agents.delete("mine")
    assert disk_store.tokens_of(disk_store.agents.show("fork")) == old


def test_a_growing_agent_has_left_nothing(disk_store):
    tokens = tokens_of(700)
    for n in (100, 256, 300, 700):
        assert turn(disk_store, "a", tokens[:n]).left == ()


def test_what_an_agent_has_left_is_forgotten_when_it_is_gone(disk_store, monkeypatch):
    """An agent that is always asked something else has a record of bounded size."""
    monkeypatch.setattr(reachability, "MAX_UNCHECKED_LEFT", 6)
    for seed in range(18):
        agent = turn(disk_store, "a", tokens_of(300, seed=seed))
        disk_store.disk.delete_all([stored.key for stored in disk_store.disk.walk()])
    assert len(agent.left) <= 6
    for seed in range(24):
        agent = turn(disk_store, "a", tokens_of(20, seed=1000 + seed))
    assert len(agent.sides) == MAX_SIDES
    assert len(agent.left) + MAX_SIDES >= 23, "what is there is not forgotten"
    disk_store.agents.delete("a")
    assert not list(disk_store.disk.walk())


@pytest.mark.parametrize("data", [b"[", b"{}", b'{"messages": 1}', b'{"messages": [{}]}'])
def test_messages_of_strangers_that_are_none_are_refused(data):
    with pytest.raises(BadRecord, match="not those of a conversation"):
        KeptTurn.from_bundle(data)


def test_an_agent_is_empty_if_it_is_known_that_nothing_was_said():
    said = [{"role": "user", "content": "Hi"}]
    turns = (None, KeptTurn([]), KeptTurn(said))
    assert [AgentTurn(NAME, turn=turn).is_empty for turn in turns] == [False, True, False]


def test_a_turn_of_a_deleted_agent_leaves_no_block(disk_store):
    """It ended after its agent was deleted; what another agent uses stays."""
    turn(disk_store, "other", tokens_of(300))
    late = [*tokens_of(256), *tokens_of(300, seed=1)]
    keep(disk_store, late)
    assert disk_store.agents.advance("gone", NAME, late, is_wanted=lambda: False) is None
    assert [agent.id for agent in disk_store.agents.all()] == ["other"]
    left = disk_store.disk.have([ref.key for ref in chain(NAME, late)])
    assert list(left) == [next(iter(chain(NAME, late))).key]


def test_a_request_that_read_an_agent_while_it_was_deleted_knows_of_it(disk_store):
    """It began after the deletion was noted, and before the agent was gone."""
    turn(disk_store, "ops", tokens_of(300))
    log, began = disk_store.disk.index.forgotten, []
    disk_store.agents.delete("ops", lambda *_: began.append(log.generation()))
    deletions = log.since(began[-1]).deletions
    assert [each.owner for each in deletions] == [log.owner(agent_owner("ops"))]


def test_deleting_finds_a_record_set_aside_under_another_name(disk_store):
    """Two files that were swapped lie in quarantine under each other's names."""
    mine, theirs = tokens_of(256), tokens_of(256, seed=2)
    paths = []
    for name, tokens in (("mine", mine), ("theirs", theirs)):
        (key,) = turn(disk_store, name, tokens).blocks
        paths.append(disk_store.disk.records.path_of(key, Part.DELTA))
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    for agent in disk_store.agents.all():
        assert disk_store.disk.read(agent.blocks[0], Part.DELTA) is None
    assert holds_tokens(disk_store.disk.root / "quarantine", mine)
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, mine)


@pytest.mark.parametrize("inside", [[], ["letter"]])
def test_deleting_keeps_what_lay_in_a_directory_in_the_place_of_a_file(disk_store, inside):
    """We did not write it; an empty directory goes."""
    (key,) = turn(disk_store, "mine", tokens_of(256)).blocks
    path = disk_store.disk.records.path_of(key, Part.DELTA)
    path.unlink()
    path.mkdir()
    for name in inside:
        (path / name).write_bytes(b"anything")
    assert disk_store.disk.read(key, Part.DELTA) is None
    quarantine = disk_store.disk.root / "quarantine"
    assert list(quarantine.iterdir())
    disk_store.agents.delete("mine")
    assert [one.name for one in quarantine.glob("*/*")] == inside
    assert len(list(quarantine.iterdir())) == len(inside)


def test_deleting_one_of_many_leaves_nothing_in_the_index(disk_store):
    """Pages of the index are split and merged meanwhile, and old ones used again."""
    shared = tokens_of(256)
    for seed in range(80):
        keep(disk_store, shared + tokens_of(256, seed=100 + seed), n_bytes=64)
    mine = shared + tokens_of(8_000, seed=1)
    keep(disk_store, mine, n_bytes=64)
    disk_store.agents.advance("other", NAME, shared)
    disk_store.agents.advance("mine", NAME, mine)
    for seed in range(80, 120):
        keep(disk_store, shared + tokens_of(256, seed=100 + seed), n_bytes=64)
    pairs = {pack(mine[i : i + 2]) for i in range(256, len(mine) - 1)}
    assert holds_any(disk_store.disk.root / "index.sqlite", pairs)
    disk_store.agents.delete("mine")
    assert not holds_any(disk_store.disk.root / "index.sqlite", pairs)
    assert not holds_any(disk_store.disk.root / "index.sqlite-wal", pairs)
    assert len(list(disk_store.disk.walk())) == 121


def holds_any(path, words):
    """Whether a file has one of these 8 bytes anywhere."""
    data = path.read_bytes()
    return any(data[i : i + 8] in words for i in range(len(data)))


def test_deleting_says_so_where_the_log_cannot_be_cut(disk_store, monkeypatch):
    """While another process reads the index, deleted tokens stay in its log."""
    mine = tokens_of(300)
    turn(disk_store, "mine", mine)
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.1)
    with closing(sqlite3.connect(disk_store.disk.root / "index.sqlite")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM blocks").fetchone()
        with pytest.raises(StoreFailed, match=r"other processes are using.*try again"):
            disk_store.agents.delete("mine")
        assert holds_tokens(disk_store.disk.root, mine)
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, mine)
    assert not list(disk_store.agents.all())


@pytest.fixture
def small_store(tmp_path):
    with AgentStore(tmp_path / "store", DiskLimits(max_bytes=3 << 20, min_free_bytes=0)) as opened:
        opened.disk._clock = Minutes()
        yield opened


def press(disk_store):
    """Put more than the store takes."""
    for seed in range(10, 40):
        keep(disk_store, tokens_of(512, seed=seed), n_bytes=100_000)


def large_agent(disk_store, name, n_tokens, seed=1):
    tokens = tokens_of(n_tokens, seed=seed)
    keep(disk_store, tokens, n_bytes=100_000)
    return disk_store.agents.advance(name, NAME, tokens)


def test_a_pinned_agent_outlives_pressure_and_an_unpinned_does_not(small_store):
    """Blocks in its middle and at its end were bad; the others are kept all the same."""
    kept, lost = large_agent(small_store, "kept", 6 * 256), large_agent(small_store, "lost", 512, 2)
    bad = {kept.blocks[2], kept.blocks[5]}
    for key in bad:
        small_store.disk.records.path_of(key, Part.DELTA).write_bytes(b"")
        small_store.disk.read(key, Part.DELTA)
    small_store.agents.update("kept", pinned=True)
    press(small_store)
    assert set(small_store.disk.have(kept.blocks)) == set(kept.blocks) - bad
    assert not small_store.disk.have(lost.blocks)


@pytest.mark.parametrize(("too_few", "n_kept"), [(0, 2), (1, 1), (None, 0)])
def test_a_quota_covers_the_first_blocks_that_fit(too_few, n_kept, small_store):
    agent = large_agent(small_store, "a", 1024)
    first = small_store.disk.have(agent.blocks[:2]).values()
    exact = sum(block.n_bytes for block in first)
    small_store.agents.update("a", quota_bytes=None if too_few is None else exact - too_few)
    press(small_store)
    assert set(small_store.disk.have(agent.blocks)) == set(agent.blocks[:n_kept])


def test_agents_expire_after_their_retention(tmp_path):
    """A default of the store, which can be changed for each; one may be gone already."""
    now = [1000.0]
    with AgentStore(tmp_path / "store", LIMITS, retention_s=60.0) as disk_store:
        agents = disk_store.agents
        agents._clock = lambda: now[0]
        turn(disk_store, "a", tokens_of(300))
        agents.fork("a", "b")
        agents.fork("a", "c")
        agents.create("d", Branch(NAME), retention_s=None)
        agents.update("c", retention_s=100.0)
        found = {agent.id: agent.retention_s for agent in agents.all()}
        assert found == {"a": 60.0, "b": 60.0, "c": 100.0, "d": None}
        now[0] += 60
        assert agents.expire(agents.expired()) == []
        turn(disk_store, "a", tokens_of(300, seed=5))
        now[0] += 41
        due = agents.expired()
        assert agents.expire(due, lambda done, _: done == 1 and agents.delete("c")) == ["b"]
        assert [agent.id for agent in agents.all()] == ["a", "d"]
        agents.pin("a", branch=2)
        now[0] += 61
        assert agents.expired() == []
        agents.pin("a", False, branch=2)
        assert agents.expired() == ["a"]


def test_an_agent_that_goes_on_while_others_expire_is_kept(tmp_path):
    now, tokens = [1000.0], tokens_of(600)
    with AgentStore(tmp_path / "store", LIMITS, retention_s=60.0) as disk_store:
        agents = disk_store.agents
        agents._clock = lambda: now[0]
        turn(disk_store, "a", tokens_of(300, seed=1))
        turn(disk_store, "b", tokens[:300])
        now[0] += 61
        goes_on = lambda done, _: done == 1 and turn(disk_store, "b", tokens)  # noqa: E731
        assert agents.expire(agents.expired(), goes_on) == ["a"]
        assert disk_store.tokens_of(agents.show("b")) == tokens
        now[0] += 61
        assert agents.expire(agents.expired()) == ["b"]


def test_labels_are_kept_and_bounded(disk_store):
    """And returned with the agent."""
    turn(disk_store, "a", tokens_of(300))
    disk_store.agents.update("a", metadata={"team": "web", "note": "of the demo"})
    turn(disk_store, "a", tokens_of(400))
    assert disk_store.agents.show("a").metadata == {"team": "web", "note": "of the demo"}
    assert disk_store.agents.fork("a", "b").metadata == {"team": "web", "note": "of the demo"}
    for bad in ({str(n): "" for n in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}):
        with pytest.raises(BadInput, match="at most 16 labels"):
            disk_store.agents.update("a", metadata=bad)


def test_agents_of_which_nothing_is_stored_are_deleted(disk_store):
    """Not one that has said nothing yet, and not one whose tail a longer block replaced."""
    for number, name in enumerate(("gone", "there")):
        turn(disk_store, name, tokens_of(300, seed=number))
    disk_store.agents.create("new", Branch(NAME))
    disk_store.disk.delete_all(disk_store.agents.show("gone").blocks)
    assert disk_store.agents.delete_empty() == ["gone"]
    assert [agent.id for agent in disk_store.agents.all()] == ["new", "there"]


def test_no_agent_is_taken_for_empty_while_the_index_cannot_be_read(disk_store):
    turn(disk_store, "a", tokens_of(300))
    disk_store.disk.index.database._reader.close()
    with pytest.raises(StoreFailed, match="look for empty agents"):
        disk_store.agents.delete_empty()
    assert disk_store.agents._path("a").exists()


def test_blocks_of_an_agent_that_cannot_be_read_now_are_not_free(tmp_path, monkeypatch):
    """A start that makes pins anew leaves the rest to the next one."""
    root, tokens, read = tmp_path / "store", tokens_of(600), Agents._read
    with AgentStore(root, LIMITS) as opened:
        last = turn(opened, "a", tokens).blocks[-1]
        opened.agents.update("a", pinned=True)

    def fail(agents, path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (root / "index.sqlite").unlink()
    monkeypatch.setattr(Agents, "_read", fail)
    with AgentStore(root, LIMITS) as opened, pytest.raises(StoreFailed, match="could not be read"):
        opened.blocks_of_agents()
    monkeypatch.setattr(Agents, "_read", read)
    with AgentStore(root, LIMITS) as opened:
        assert opened.disk.index.lookups.owners(last) == ["agent:a"]
        assert opened.blocks_of_agents() == {ref.key for ref in chain(NAME, tokens)}


def test_no_left_block_is_taken_for_gone_while_the_index_cannot_be_read(disk_store):
    """Else it would not be deleted with its agent."""
    left = tuple(NamedBlock(ref.key, ref.parent, 256) for ref in chain(NAME, tokens_of(256 * 65)))
    keep(disk_store, tokens_of(256 * 65), n_bytes=8)
    assert reachability.existing(disk_store.disk, left) == left
    disk_store.disk.index.database._reader.close()
    with pytest.raises(sqlite3.Error):
        reachability.existing(disk_store.disk, left)


@pytest.mark.parametrize("secret", [None, "a passphrase"])
def test_nothing_is_left_of_an_agent_whose_file_is_gone(tmp_path, secret):
    """A damaged one is quarantined first; nor of one that was cleared damaged."""

    def pinned():
        return {block.key for block in opened.disk.walk() if block.pinned}

    def have_turn(agent_id, tokens):
        messages = KeptTurn([{"role": "user", "content": f"I am {agent_id}."}])
        keep(opened, tokens)
        agents.advance(agent_id, NAME, tokens, messages=messages)
        agents.update(agent_id, pinned=True)
        return agents._path(agent_id), file_path(opened.disk, "messages", agent_id)

    with AgentStore(tmp_path / "store", LIMITS, secret=secret) as opened:
        agents = opened.agents
        path, gone = have_turn("gone", tokens_of(300))
        _, there = have_turn("there", tokens_of(300, seed=1))
        opened.ttl_pins.pin(NAME, tokens_of(300), 10, 60)
        before = pinned()
        path.write_text("torn")
        agents.delete_empty()
        assert gone.exists()
        assert pinned() == before
        verify_store(opened, fix=True)
        agents.delete_empty()
        assert there.exists()
        assert not gone.exists()
        by_ttl = next(chain(NAME, tokens_of(300))).key
        assert pinned() == {by_ttl, agents.show("there").blocks[-1]}
        agents._path("there").write_text("torn")
        opened.clear()
        keep(opened, tokens_of(300, seed=1))
        assert not pinned()


class FailingFiles(Files):
    """A disk that cannot read one directory now."""

    def __init__(self, directory):
        self.directory = directory

    def open(self, path):
        if path.parent.name == self.directory:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().open(path)


def test_nothing_is_deleted_while_the_blocks_of_others_cannot_be_listed(disk_store):
    tokens = tokens_of(600)
    turn(disk_store, "mine", tokens[:300])
    turn(disk_store, "other", tokens)
    path, read = disk_store.agents._path("other"), disk_store.agents._read

    def read_but_one(file):
        if file == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file)

    disk_store.agents._read = read_but_one
    for name in ("mine", "other"):
        with pytest.raises(StoreFailed, match=r"other\.json of an agent could not be read"):
            disk_store.agents.delete(name)
    disk_store.agents._read = read
    assert disk_store.tokens_of(disk_store.agents.show("other")) == tokens
    disk_store.agents.delete("mine")
    assert [agent.id for agent in disk_store.agents.all()] == ["other"]


def test_messages_that_cannot_be_read_now_are_not_overwritten(disk_store):
    """Nor those of a newer Keepwarm; damaged ones are lost anyway."""
    turns, said = disk_store.agents.turns, KeptTurn([{"role": "user", "content": "Hi"}])
    keep_turn = lambda tokens: turns.keep("a", tokens, last_key(tokens), said)  # noqa: E731
    first, second = tokens_of(300), tokens_of(300, seed=1)
    keep_turn(first)
    disk_store.disk.records.files = FailingFiles("messages")
    keep_turn(second)
    disk_store.disk.records.files = Files()
    assert turns.find("a", first) is not None
    (path,) = (disk_store.disk.root / "messages").iterdir()
    path.write_text('{"version": 2}')
    keep_turn(second)
    assert path.read_text() == '{"version": 2}'
    path.write_text("torn")
    keep_turn(second)
    assert turns.find("a", second) is not None


def test_nothing_is_deleted_while_it_is_unknown_where_it_is_shared(disk_store):
    """Else shared tiers would keep it."""
    disk_store.tombstones.share_with(["file:///nowhere"])
    agent = turn(disk_store, "a", tokens_of(300))
    disk_store.disk.records.files = FailingFiles("shared")
    with pytest.raises(StoreFailed, match="note what is deleted"):
        disk_store.agents.delete("a")
    disk_store.disk.records.files = Files()
    assert disk_store.disk.have(agent.blocks)
    disk_store.agents.delete("a")
    (dead,) = disk_store.tombstones.all().values()
    assert dead.left == ("file:///nowhere",)


def test_a_fork_has_the_text_of_its_own_turns_alone(disk_store):
    """What its parent has dropped goes with the parent."""
    agents, tokens = disk_store.agents, tokens_of(700)

    def say(tokens, *said):
        messages = KeptTurn([{"role": "user", "content": text} for text in said])
        agents.advance("a", NAME, tokens, messages=messages)

    def heard(agent_id, n_tokens):
        turn = agents.turns.find(agent_id, tokens[:n_tokens])
        return [message["content"] for message in turn.messages]

    say(tokens[:300], "Quick.")
    say(tokens, "Quick.", "Lazy.")
    agents.fork("a", "whole")
    agents.rewind("a", 1)
    agents.fork("a", "b")
    agents.rewind("a", 0)
    agents.fork("a", "c")
    agents.delete("a")
    assert heard("whole", 300) == heard("b", 300) == ["Quick."]
    assert heard("whole", 700) == ["Quick.", "Lazy."]
    agents.delete("whole")
    files = files_under(disk_store.disk.root)
    assert not [path for path in files if b"Lazy" in path.read_bytes()]
    agents.delete("b")
    files = files_under(disk_store.disk.root)
    assert not [path for path in files if b"Quick" in path.read_bytes()]
    assert agents.show("c").n_tokens == 0


def test_clearing_takes_the_files_of_damaged_agents_along(disk_store):
    """They have the beginning of the conversation in words."""
    turn(disk_store, "a", tokens_of(300))
    turn(disk_store, "b", tokens_of(300))
    disk_store.agents._path("b").write_text("torn")
    assert disk_store.clear().n_agents == 2
    assert not list(disk_store.agents._directory.iterdir())


def test_several_forks_are_made_at_once_or_not_at_all(disk_store):
    tokens = tokens_of(600)
    turn(disk_store, "a", tokens)
    before = disk_store.disk.stats().puts
    made = disk_store.agents.fork_all("a", [f"a-{n}" for n in range(10)])
    assert {disk_store.tokens_of(agent)[-1] for agent in made} == {tokens[-1]}
    assert disk_store.disk.stats().puts == before
    for bad, says in ((["b", "a-3"], "'a-3' already exists"), (["b", "b"], "the same id")):
        with pytest.raises(BadInput, match=says):
            disk_store.agents.fork_all("a", bad)
    assert len(list(disk_store.agents.all())) == 11


def test_an_ephemeral_agent_has_no_bytes_on_disk(disk_store):
    """It is shown and advanced in this process; deleting its parent does not wait for it."""
    tokens = tokens_of(600)
    turn(disk_store, "a", tokens)
    before = {path: path.read_bytes() for path in files_under(disk_store.disk.root / "agents")}
    disk_store.agents.fork_all("a", ["b", "c"], ephemeral=True)
    disk_store.agents.advance("b", NAME, [*tokens, 7], len(tokens))
    assert disk_store.agents.show("b").turns == (600, 601)
    assert [agent.id for agent in disk_store.agents.all()] == ["a", "b", "c"]
    after = {path: path.read_bytes() for path in files_under(disk_store.disk.root / "agents")}
    assert after == before
    assert disk_store.agents.delete("b") == 0
    with pytest.raises(UnknownAgent):
        disk_store.agents.show("b")
    disk_store.agents.delete("a")
    assert not holds_tokens(disk_store.disk.root, tokens)


def test_clearing_leaves_nothing(disk_store):
    tokens = tokens_of(700)
    turn(disk_store, "a", tokens)
    disk_store.agents.update("a", pinned=True)
    keep(disk_store, tokens_of(300, seed=2))
    assert disk_store.clear() == (1, 5)
    assert not holds_tokens(disk_store.disk.root, tokens)
    assert not list(disk_store.agents.all())


@pytest.mark.parametrize("field", ["weights", "kv_options"])
def test_a_bundle_for_another_model_is_refused_with_the_reason(field, disk_store, tmp_path):
    turn(disk_store, "a", tokens_of(300))
    disk_store.export_agent("a", tmp_path / "a.kw")
    other = {"weights": {"model": "9"}, "kv_options": {"kv_bits": 4}}.get(field, "9")
    expected = Identity(**{**vars(IDENTITY), field: other})
    with AgentStore(tmp_path / "other", LIMITS) as there:
        with pytest.raises(BadCacheFile, match=f"{field} differ"):
            there.import_agent(tmp_path / "a.kw", expected)
        assert not list(there.disk.walk())


@pytest.mark.parametrize(("member", "at"), [(0, 0.5), (1, 0.1), (3, 0.99)])
def test_a_damaged_bundle_is_refused_whole(member, at, disk_store, tmp_path):
    """One byte of the manifest or of a record: nothing of it is taken."""
    turn(disk_store, "a", tokens_of(600))
    bundle = tmp_path / "a.kw"
    disk_store.export_agent("a", bundle)
    with tarfile.open(bundle) as archive:
        info = archive.getmembers()[member]
    data = bytearray(bundle.read_bytes())
    data[info.offset_data + int(info.size * at)] ^= 1
    bundle.write_bytes(data)
    with AgentStore(tmp_path / "other", LIMITS) as other:
        with pytest.raises(BadCacheFile, match="not a complete bundle"):
            other.import_agent(bundle, IDENTITY)
        assert not list(other.disk.walk())


def test_messages_and_responses_are_counted_and_cleared(tmp_path):
    """Those of lost agents too; what is not ours stays."""
    with AgentStore(tmp_path, LIMITS) as store:
        empty = store.disk.stats().n_bytes
        turn = KeptTurn([{"role": "user", "content": "x" * 5000}])
        for agent_id in ("ada", "lost"):
            store.agents.create(agent_id, Branch(NAME))
            store.agents.turns.keep(agent_id, [1, 2, 3], BlockKey(b"k" * 20), turn)
            store.agents.responses.put(agent_id, "resp_1", b"y" * 3000, 60.0)
        (tmp_path / "agents" / "lost.json").unlink()
        (tmp_path / "responses" / "notes.txt").write_text("mine")
        texts = store.text_bytes()
        assert texts["messages_bytes"] > 10_000
        assert texts["responses_bytes"] == 6004
        store.disk.records.others.changed()
        assert store.disk.stats().n_bytes - empty >= sum(texts.values())
        assert store.clear().n_agents == 1
        assert store.text_bytes() == {"messages_bytes": 0, "responses_bytes": 4}


def test_a_directory_among_the_files_of_agents_stops_no_deletion(disk_store):
    turn(disk_store, "a", tokens_of(300))
    strange = disk_store.disk.root / "agents" / "x.json"
    strange.mkdir()
    assert disk_store.agents.delete("a") == 2
    turn(disk_store, "b", tokens_of(300))
    assert disk_store.agents.delete_all() == 1
    assert strange.exists()


def test_blocks_of_agents_while_the_index_is_busy_are_a_sentence(disk_store, monkeypatch):
    def fail(_):
        raise sqlite3.OperationalError("database is locked")

    turn(disk_store, "a", tokens_of(300))
    monkeypatch.setattr(disk_store.disk.index.lookups, "have", fail)
    with pytest.raises(StoreFailed):
        disk_store.blocks_of_agents()


def test_blocks_of_agents_while_ephemeral_ones_are_made(disk_store):
    agents = disk_store.agents
    for number in range(3):
        agents.create(f"e{number}", Branch(NAME), ephemeral=True)
    seen = []
    for agent in agents.in_use():
        seen.append(agent.id)
        agents.create(f"new{len(seen)}", Branch(NAME), ephemeral=True)
    assert seen == ["e0", "e1", "e2"]
