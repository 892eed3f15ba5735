"""The program whose system calls are recorded: a store at work that says what it has promised.

    python -m tests.store.disk.traced <directory> <scenario> [<function without its syncs>]

What is said goes to the file `said` beside the store, a line (JSON) before and after each step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from keepwarm.agents.agent import Branch
from keepwarm.agents.agents import Agents
from keepwarm.files import write_atomically
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits, DiskTier
from keepwarm.store.index.database import Database
from keepwarm.store.marker import unlock
from tests.store.disk.crash import KEY, NAMESPACE, WORLD, Block

STORE = Path("made", "store")


def is_called_by(name: str) -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if name in frame.f_code.co_qualname.split("."):
            return True
        frame = frame.f_back
    return False


def leave_out_syncs(of: str) -> None:
    """Let one function, or all of one class, forget its syncs."""
    fsync, transaction = os.fsync, Database.transaction

    def fsync_unless(fd: int) -> None:
        if not is_called_by(of):
            fsync(fd)

    def transaction_unless(
        self: Database, synced: bool = False, wait_s: float | None = None
    ) -> Any:
        return transaction(self, synced and not is_called_by(of), wait_s)

    os.fsync = fsync_unless  # type: ignore[assignment]
    Database.transaction = transaction_unless  # type: ignore[method-assign]


class Worker:
    """Works on a store, and says what it does."""

    def __init__(self, directory: Path, secret: str | None, n_bytes: int = 500) -> None:
        self._root, self._secret, self._n_bytes = directory / STORE, secret, n_bytes
        self._said = os.open(directory / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._clock = count(1e6, 60.0).__next__  # what comes a minute later may evict
        self.open()

    def open(self) -> None:
        cipher = unlock(self._root, self._secret)
        self.tier = DiskTier(self._root, clock=self._clock, cipher=cipher)
        self.agents = Agents(self.tier, self._clock)

    @contextmanager
    def _saying(self, verb: str, **what: Any) -> Iterator[None]:
        for done in (False, True):
            os.write(self._said, json.dumps({"verb": verb, "done": done, **what}).encode() + b"\n")
            if not done:
                yield

    def put(self, block: Block, part: Part = Part.DELTA, w_rows: int = 1) -> None:
        with self._saying("put", block=block, part=part.value):
            put = self.tier.put(block.record(part, w_rows, self._n_bytes))
            put.durable.result()
            assert put.stored

    def delete(self, block: Block) -> None:
        with self._saying("delete", block=block):
            self.tier.delete_all([block.key])

    def name(self, agent_id: str, blocks: Sequence[Block], pinned: bool = False) -> None:
        with self._saying("name", agent=agent_id, pinned=blocks[-1] if pinned else None):
            keys = tuple(block.key for block in blocks)
            head = Branch(NAMESPACE, keys, BLOCK_TOKENS * len(keys))
            self.agents.create(agent_id, head, pinned=pinned)

    def remove(self, agent_id: str, going: Sequence[Block]) -> None:
        with self._saying("remove", agent=agent_id, blocks=list(going)):
            self.agents.delete(agent_id)

    def restart(self) -> None:
        self.tier.close()
        self.open()


def publish(directory: Path) -> Worker:
    """New directories, new blocks, more window rows, a block deleted and put again."""
    worker = Worker(directory, None)
    for block in WORLD[:3]:
        worker.put(block)
    worker.put(WORLD[0], Part.WINDOW, w_rows=1)
    worker.put(WORLD[0], Part.WINDOW, w_rows=3)
    worker.delete(WORLD[2])
    worker.put(WORLD[2])
    worker.delete(WORLD[0])
    return worker


def evict(directory: Path) -> Worker:
    """What was evicted and then put again, after a restart."""
    worker = Worker(directory, None, n_bytes=200_000)
    for block in WORLD[:3]:
        worker.put(block)
    worker.restart()
    cap = worker.tier.stats().n_bytes + INDEX_ROOM + 100_000  # less than a block
    worker.tier.limits = DiskLimits(max_bytes=cap, min_free_bytes=0)
    worker.put(WORLD[8])
    worker.put(WORLD[9])
    worker.put(WORLD[2])
    assert worker.tier.stats().evicted
    return worker


def encrypt(directory: Path) -> Worker:
    """From the file that marks the store as sealed on."""
    worker = Worker(directory, KEY)
    for block in WORLD[:2]:
        worker.put(block)
    worker.delete(WORLD[1])
    worker.put(WORLD[1])
    worker.restart()
    return worker


def remove(directory: Path) -> Worker:
    """Agents, their pins and their blocks."""
    worker = Worker(directory, None)
    worker.put(WORLD[8])
    worker.delete(WORLD[8])  # from now on the index survives
    for block in WORLD[:4]:
        worker.put(block)
    worker.name("stays", WORLD[:2], pinned=True)
    worker.name("leaves", WORLD[:3])
    worker.remove("leaves", going=WORLD[2:4])  # the fourth descends from what it had
    worker.put(WORLD[2])
    worker.remove("stays", going=WORLD[:3])
    return worker


def resume(directory: Path) -> Worker:
    """What a killed process has left: a directory that was not synced, and an unfinished file."""
    worker = Worker(directory, None)
    worker.put(WORLD[0])
    worker.tier.files.write(worker.tier.scratch.new(), [b"unfinished"])
    worker.tier.records.path_of(WORLD[1].key, Part.DELTA).parent.mkdir()
    worker.restart()
    worker.put(WORLD[1])
    return worker


def write_files(directory: Path) -> None:
    """Files outside of a store."""
    said = os.open(directory / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for number in range(3):
        write_atomically(directory / "file", str(number) * 10_000, sync=True)
        os.write(said, f"{number}\n".encode())


SCENARIOS: dict[str, Callable[[Path], Worker]] = {
    scenario.__name__: scenario for scenario in (publish, evict, encrypt, remove, resume)
}


def main(directory: str, scenario: str, without: str = "") -> None:
    if without:
        leave_out_syncs(without)
    if scenario == write_files.__name__:
        write_files(Path(directory))
    else:
        SCENARIOS[scenario](Path(directory)).tier.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
