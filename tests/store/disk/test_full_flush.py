"""On macOS `fsync` leaves data in the drive's cache: who asks for a full flush, who for a barrier.

The calls are recorded as macOS would get them; the file system here has neither.
"""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from keepwarm import files
from keepwarm.agents.agent import Branch
from keepwarm.agents.agents import Agents
from keepwarm.prefix.policy import Policy
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of
from tests.store.kit import NAMESPACE, chain_of, keys_of

FULL, BARRIER = 51, 85


@pytest.fixture
def asked(monkeypatch):
    """The commands that the system was given, as on macOS."""
    commands = []
    monkeypatch.setattr(files, "F_FULLFSYNC", FULL)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: commands.append(command))
    return commands


@pytest.fixture
def tier(asked, tmp_path):
    opened = DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0))
    asked.clear()
    yield opened
    opened.close()


def test_a_synced_file_is_flushed_and_its_name_too(asked, tmp_path):
    files.write_atomically(tmp_path / "a", "x", sync=True)
    assert asked == [FULL, FULL]


def test_where_the_file_system_has_neither_it_is_synced(monkeypatch, tmp_path):
    """Network drives."""
    synced = []

    def refuse(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(files, "F_FULLFSYNC", FULL)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    files.write_atomically(tmp_path / "a", "x", sync=True)
    assert len(synced) == 2


def test_elsewhere_there_is_nothing_to_flush(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("fsync has done it"))
    if files.F_FULLFSYNC is None:
        files.flush_drive(tmp_path)


def test_blocks_are_saved_with_barriers_and_flushed_once(tier, asked):
    for record in chain_of(3):
        assert tier.put(record).stored
    assert set(asked) == {BARRIER}
    tier.flush()
    assert asked.count(FULL) == 1


def test_a_deleted_agent_is_flushed_at_the_end(tier, asked):
    records = chain_of(2)
    for record in records:
        tier.put(record)
    agents = Agents(tier)
    agents.create("a", Branch(NAMESPACE, tuple(keys_of(records)), 512))
    asked.clear()
    assert agents.delete("a") == 2
    assert asked.count(FULL) == 1
    assert asked[-1] == FULL


def test_only_a_durable_answer_is_flushed(asked, models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(300), 2, agent="a")).result()
        engine._recorder.wait_until_done()
        assert FULL not in asked
        assert BARRIER in asked
        answer = engine.submit(ask(prompt_of(300, seed=1), 2, policy=Policy.DURABLE)).result()
        assert answer.receipt.durable
        assert asked.count(FULL) == 1


def test_the_index_is_flushed_at_deletions_and_checkpoints(tier):
    """SQLite does it itself where the system can; here its settings are seen."""
    database, statements = tier.index.database, []
    database._db.set_trace_callback(statements.append)
    records = chain_of(1)
    tier.put(records[0])
    assert not [each for each in statements if "fullfsync" in each]
    tier.delete_all([records[0].header.key])
    database._db.set_trace_callback(None)
    pragmas = [each for each in statements if "fullfsync" in each or each == "COMMIT"]
    on = pragmas.index("PRAGMA fullfsync = ON")
    assert pragmas[on:] == ["PRAGMA fullfsync = ON", "COMMIT", "PRAGMA fullfsync = OFF"]
    assert database.execute("PRAGMA checkpoint_fullfsync").fetchone() == (1,)
    assert database.execute("PRAGMA fullfsync").fetchone() == (0,)
