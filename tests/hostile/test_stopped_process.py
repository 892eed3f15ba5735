"""A process that is stopped while it holds a lock of the store costs the others no answer.

Real processes: a child takes the lock and sends itself SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from keepwarm import files
from keepwarm.agents.agent_store import AgentStore
from keepwarm.errors import Busy, StoreFailed
from keepwarm.prefix.blocks import BlockKey
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.store.disk import maintenance
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.index import database
from tests.hostile.test_fault_matrix import no_hanging
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of
from tests.store.kit import BrokenFiles, chain_of, content, keys_of

HANGS_S = 60  # a guard against hanging, far above every bound
NEVER_S = 120.0  # longer than the guard

HOLDER = """
import os, signal, sys
from pathlib import Path
from keepwarm.files import SharedLock
from keepwarm.store.disk.disk import DiskTier

root, lock = Path(sys.argv[1]), sys.argv[2]
tier = DiskTier(root)
among_processes = SharedLock(root / "tmp" / lock).hold()
with tier.index.database.transaction() if lock == "index" else among_processes:
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
tier.close()
print("went on", flush=True)
sys.stdin.readline()
"""
LOCKS = pytest.mark.parametrize("lock", ["index", "names"])


class Stopped:
    """A process that was stopped while it held a lock."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "went on\n"


@contextmanager
def stopped(root, lock):
    command = [sys.executable, "-c", HOLDER, str(root), lock]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        yield Stopped(process)
    finally:
        process.kill()
        process.communicate(timeout=HANGS_S)


@pytest.fixture(autouse=True)
def guard():
    with no_hanging(HANGS_S):
        yield


@pytest.fixture
def wait(monkeypatch):
    """Sets how long a writer waits for other processes."""

    def set_wait(seconds):
        monkeypatch.setattr(files, "LOCK_WAIT_S", seconds)
        monkeypatch.setattr(database, "LOCK_WAIT_S", seconds)

    return set_wait


@pytest.fixture
def tier(tmp_path):
    opened = DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0), BrokenFiles())
    yield opened
    opened.close()


@pytest.mark.parametrize("lock", ["index", "names", "state"])
def test_answers_do_not_wait_for_a_stopped_process(lock, models, tmp_path, wait):
    """Writers would wait for two minutes: stored prompts are found, new ones are answered. When the
    other process goes on, what has waited is saved.
    """
    with engine_on(models.of("llama"), tmp_path) as engine:
        known, new = prompt_of(600), prompt_of(600, seed=1)
        cold = engine.submit(ask(known, 4)).result()
        engine.wait_until_saved()
        engine.clear()
        wait(NEVER_S)
        root = engine.store.on_disk.disk.root
        with stopped(root, lock) as other:
            engine.submit(ask(new, 4, agent="a")).result()
            writer = engine.store.saver
            while writer._n_done < writer._n_put and len(writer._order) == writer._n_put:
                time.sleep(0.01)  # until the writer has taken the first record
            answer = engine.submit(ask(known, 4)).result()
            assert tokens_of(answer.choices[0]) == tokens_of(cold.choices[0])
            assert answer.receipt.reused == {"disk": 599}
            stats = engine.store.write_stats()
            assert (stats.failed, stats.dropped) == (0, 0), "the writer waits"
            other.go_on()
            engine.wait_until_saved()
        assert engine.store.on_disk.agents.show("a").n_tokens == 604
        engine.clear()
        assert engine.submit(ask(new, 4)).result().receipt.reused == {"disk": 599}


@LOCKS
def test_a_durable_answer_comes_and_says_that_it_is_not_on_disk(lock, models, tmp_path, wait):
    """The save is skipped and counted; the next request saves the blocks."""
    wait(0.2)
    prompt = prompt_of(600)
    with engine_on(models.of("llama"), tmp_path) as engine:
        with stopped(engine.store.on_disk.disk.root, lock) as other:
            request = ask(prompt, 4, policy=Policy.DURABLE)
            assert not engine.submit(request).result().receipt.durable
            stats = engine.store.write_stats()
            assert stats.failed
            assert not stats.written_records
            other.go_on()
        assert engine.submit(request).result().receipt.durable


@LOCKS
def test_many_writes_wait_once(lock, tier, wait, caplog):
    """Those after the first do not wait, or they would take longer than the guard."""
    wait(0.5)
    records = chain_of(150)
    with stopped(tier.root, lock) as other:
        assert not any(tier.put(record).stored for record in records)
        with pytest.raises(StoreFailed, match=r"another process holds its lock.*then try again"):
            tier.delete_all([records[0].header.key])
        assert tier.stats().errors == 151
        assert caplog.text.count("could not be written") == 1
        other.go_on()
    assert all(tier.put(record).stored for record in records)
    assert not tier.index.lookups.writers(), "no reservation is left"


@LOCKS
def test_a_bad_record_is_a_miss_at_once_and_repaired_later(lock, tier, wait):
    records = chain_of(3)
    for record in records:
        tier.put(record)
    tier.records.path_of(records[1].header.key, Part.DELTA).write_bytes(b"bad")
    tier.records.path_of(records[2].header.key, Part.DELTA).unlink()
    wait(NEVER_S)
    with stopped(tier.root, lock) as other:
        assert tier.read(records[1].header.key, Part.DELTA) is None
        assert tier.read(records[2].header.key, Part.DELTA) is None
        other.go_on()
    for record in records[1:]:
        assert tier.put(record).stored, "it is repaired first"
        found = tier.read(record.header.key, Part.DELTA)
        assert found is not None
        assert content(found) == content(record)
    assert not [check for check in maintenance.verify(tier) if check.wrong]


def test_a_look_up_does_not_wait_for_a_thread_that_waits(tier, wait):
    """The thread that writes waits for another process, and holds the connection meanwhile."""
    record, *_ = records = chain_of(2)
    tier.put(record)
    wait(NEVER_S)
    with stopped(tier.root, "index") as other:
        done = threading.Event()
        writer = threading.Thread(target=lambda: (tier.put(records[1]), done.set()), daemon=True)
        writer.start()
        while tier.index.database.lock.acquire(blocking=False):  # until the writer has it
            tier.index.database.lock.release()
            time.sleep(0.01)
        assert list(tier.have(keys_of(records))) == [record.header.key]
        assert tier.children(record.header.parent, record.header.tokens)
        tier.touch([record.header.key])
        assert len(list(tier.walk())) == 1
        assert tier.stats().blocks == 1
        assert not done.is_set()
        other.go_on()
        assert done.wait(HANGS_S)
    assert len(tier.have(keys_of(records))) == 2


@pytest.mark.parametrize("lock", ["index", "names", "lock"])
def test_a_start_ends_with_a_sentence(lock, tmp_path, wait):
    """`tmp/lock` guards the directories of processes."""
    root = tmp_path / "store"
    AgentStore(root).close()
    wait(0.2)
    with stopped(root, lock) as other:
        with pytest.raises((Busy, StoreFailed), match=r"[Oo]ther process.*try again"):
            open_and_write(root)
        other.go_on()
    assert open_and_write(root)


def open_and_write(root):
    with AgentStore(root, DiskLimits(min_free_bytes=0)) as store:
        store.disk.delete_all([BlockKey(bytes(20))])
        return True
