"""The program that the crash tests kill: a store at work that prints each step.

Run as a program it is a fork server, so that a kill costs no start of Python: a request a line in
(JSON, the fields of `Request`), the lines of the dead child out (JSON). It never imports MLX.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sqlite3
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from keepwarm.agents.agent import Branch
from keepwarm.agents.agents import Agents
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, pack, root
from keepwarm.records.record import Header, Part, Record, Tensor
from keepwarm.store.atomic import Files
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.disk.maintenance import clear_quarantine
from keepwarm.store.index.index import Index
from keepwarm.store.marker import unlock

NAMESPACE = Namespace(bytes(range(32)))
KEY = b64encode(bytes(range(32))).decode()
LIMITS = DiskLimits(max_bytes=3 << 20, min_free_bytes=0)
N_BYTES = 60_000  # a dozen or two of them reach the limit
CONVERSATIONS, LENGTH = 6, 8
FURTHER = [1000] * (BLOCK_TOKENS - 2)  # no number of a block, so that its beginning is its own
PARTS = (Part.DELTA, Part.WINDOW)


class Request(NamedTuple):
    root: str
    seed: int
    kill_at: int = 0  # the number of a step; 0: never
    kill_after: float = 0.0  # seconds; 0: never
    secret: str | None = None  # of an encrypted store


class Block(NamedTuple):
    """One block of the tests' small set; two numbers determine all of it."""

    conversation: int
    number: int

    @property
    def tokens(self) -> bytes:
        return pack([self.conversation, self.number, *FURTHER])

    @property
    def parent(self) -> BlockKey:
        if self.number == 0:
            return root(NAMESPACE)
        return Block(self.conversation, self.number - 1).key

    @property
    def key(self) -> BlockKey:
        return block_key(NAMESPACE, self.parent, self.tokens)

    def record(self, part: Part = Part.DELTA, w_rows: int = 1, n_bytes: int = N_BYTES) -> Record:
        extra = {"w_rows": w_rows} if part is Part.WINDOW else {}
        header = Header(NAMESPACE, self.key, self.parent, part, self.number, self.tokens, extra)
        data = content(self.key, part, w_rows if extra else 1, n_bytes)
        return Record(header, (Tensor("x", "U8", (len(data),), memoryview(data)),))


def content(key: BlockKey, part: Part, w_rows: int, n_bytes: int = N_BYTES) -> bytes:
    """Bytes that no other record has; more rows are more bytes."""
    seed = hashlib.sha256(key + part.encode() + bytes([w_rows])).digest()
    size = n_bytes + 100 * w_rows
    return (seed * (size // 32 + 1))[:size]


def holds_its_content(record: Record) -> bool:
    header = record.header
    rows = header.w_rows or 1
    size = record.tensors[0].n_bytes - 100 * rows
    return bytes(record.tensors[0].data) == content(header.key, header.part, rows, size)


def marked_for_deletion(index: Path) -> set[BlockKey]:
    """Blocks that a dead process had marked for deletion; the next start must finish it."""
    if not index.exists():
        return set()
    db = sqlite3.connect(index)
    try:
        return {BlockKey(row[0]) for row in db.execute("SELECT key FROM blocks WHERE deleting")}
    except sqlite3.OperationalError:  # killed before the first table was created
        return set()
    finally:
        db.close()


def holding_tokens(store_root: Path, keys: Collection[BlockKey]) -> list[str]:
    """The files in which there are tokens of these blocks, found by their bytes."""
    first = [block.tokens[:24] for block in WORLD if block.key in keys]
    bits = [*first, *map(b64encode, first)]
    files = [path for path in store_root.rglob("*") if bits and path.is_file()]
    return [
        path.name for path in files if (data := path.read_bytes()) and any(b in data for b in bits)
    ]


WORLD = [Block(c, n) for c in range(CONVERSATIONS) for n in range(LENGTH)]


def fast_directory() -> TemporaryDirectory[str]:
    """A directory in memory where the system has one, for tests that open thousands of stores."""
    shared = Path("/dev/shm")
    return TemporaryDirectory(dir=shared if shared.is_dir() else None)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Steps:
    """Counts the store's operations, and kills the process at the chosen step."""

    def __init__(self, kill_at: int) -> None:
        self.n, self._kill_at = 0, kill_at

    def next_kills(self) -> bool:
        return self.n + 1 == self._kill_at

    def __call__(self, *_: object) -> None:
        self.n += 1
        if self.n == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class UnsyncedFiles(Files):
    """No sync: a killed process loses nothing that the system holds in memory."""

    def sync(self, fd: int) -> None:
        pass


class SteppedFiles(UnsyncedFiles):
    """A step before and after each operation; syncing is one of its own, so also in between."""

    def __init__(self, steps: Steps) -> None:
        self._step = steps

    def _stepped(self, operation: Callable[..., Any], *arguments: object) -> Any:
        self._step()
        done = operation(*arguments)
        self._step()
        return done

    def make_directory(self, path: Path) -> None:
        self._stepped(super().make_directory, path)

    def write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        if self._step.next_kills():
            path.write_bytes(b"".join(pieces)[:-100])
        self._stepped(super().write, path, pieces)

    def publish(self, temp: Path, target: Path) -> None:
        self._stepped(super().publish, temp, target)

    def remove(self, path: Path) -> bool:
        say("gone", path.name)
        return bool(self._stepped(super().remove, path))

    def discard(self, temp: Path) -> None:
        self._stepped(super().discard, temp)

    def sync(self, fd: int) -> None:
        self._stepped(super().sync, fd)


class SteppedTier(DiskTier):
    """Each end of a transaction is a step too; everything between is in memory only."""

    def __init__(self, store_root: Path, steps: Steps, secret: str | None) -> None:
        self._steps = steps
        files = SteppedFiles(steps)
        super().__init__(store_root, LIMITS, files, cipher=unlock(store_root, secret, files))

    def _open_index(self) -> Index:
        self._steps()
        index = super()._open_index()
        index.database._db.set_trace_callback(self._statement)
        return index

    def _statement(self, text: str) -> None:
        if text.startswith(("BEGIN", "COMMIT", "PRAGMA")):
            self._steps()


class Player:
    """Runs operations on a store, and prints a line before and after each."""

    def __init__(self, store_root: Path, steps: Steps, secret: str | None) -> None:
        self._store_root, self._steps, self._secret = store_root, steps, secret
        self.open()

    def open(self) -> None:
        say("begin", "open")
        self._tier = SteppedTier(self._store_root, self._steps, self._secret)
        self._agents = Agents(self._tier)
        say("done", "open")

    def reopen(self) -> None:
        say("begin", "close")
        self._tier.close()
        self.open()

    def put(self, block: Block, part: Part = Part.DELTA, w_rows: int = 1) -> None:
        say("begin", "put", block.key.hex(), part, w_rows)
        stored = self._tier.put(block.record(part, w_rows))
        stored.durable.result()
        say("done", "put", block.key.hex(), part, w_rows, int(stored.stored))

    def delete(self, block: Block) -> None:
        say("begin", "delete", block.key.hex())
        self._tier.delete_all([block.key])
        say("done", "delete", block.key.hex())

    def pin(self, block: Block) -> None:
        say("begin", "pin", block.key.hex())
        self._tier.pin(block.key, block.key.hex())
        say("done", "pin", block.key.hex())

    def unpin(self, block: Block) -> None:
        say("begin", "unpin", block.key.hex())
        self._tier.pin_only(block.key.hex(), ())
        say("done", "unpin", block.key.hex())

    def read(self, block: Block) -> None:
        say("begin", "read", block.key.hex())
        for part in PARTS:
            record = self._tier.read(block.key, part)
            if record is not None and not holds_its_content(record):
                say("wrong", block.key.hex(), part)
        self._tier.touch([block.key])
        say("done", "read", block.key.hex())

    def name(self, agent_id: str, blocks: Sequence[Block], **promises: Any) -> None:
        keys = tuple(block.key for block in blocks)
        words = (agent_id, int(promises.get("pinned", False)), *(key.hex() for key in keys))
        say("begin", "name", *words)
        head = Branch(NAMESPACE, keys, BLOCK_TOKENS * len(keys))
        self._agents.create(agent_id, head, **promises)
        say("done", "name", *words)

    def remove(self, agent_id: str) -> None:
        say("begin", "remove", agent_id)
        self._agents.delete(agent_id)
        say("done", "remove", agent_id)

    def collect(self) -> None:
        """What `keepwarm cache gc` does."""
        agents = [agent for agent in self._agents.all() if not agent.pinned]
        old = [agent.id for agent in agents if agent.retention_s is not None]
        say("begin", "collect", *old)
        self._agents.expire(self._agents.expired())
        clear_quarantine(self._tier)
        say("done", "collect", *old)

    def agents(self) -> list[str]:
        return [agent.id for agent in self._agents.all()]


def play(player: Player, seed: int) -> None:
    """Random operations, until the test kills the process."""
    chance = random.Random(seed)
    moves = [player.put] * 6 + [player.delete, player.pin, player.unpin, player.read]
    while True:
        block = chance.choice(WORLD)
        move = chance.choice(moves)
        if chance.random() < 0.2:
            play_with_agents(player, chance, block)
        elif move == player.put:
            player.put(block, chance.choice(PARTS), chance.randint(1, 5))
        elif chance.random() < 0.05:
            player.reopen()
        elif move != player.pin or block.number < 2:
            move(block)


def play_with_agents(player: Player, chance: random.Random, block: Block) -> None:
    agent_id = f"agent{block.conversation}-{chance.randint(0, 1)}"
    if agent_id in player.agents():
        player.remove(agent_id)
    elif chance.random() < 0.2:
        player.collect()
    else:
        promise = {"retention_s": 0.0} if chance.random() < 0.3 else {"pinned": block.number < 2}
        chain = [Block(block.conversation, n) for n in range(block.number + 1)]
        player.name(agent_id, chain, **promise)


def child(request: Request) -> None:
    steps = Steps(request.kill_at)
    player = Player(Path(request.root), steps, request.secret)
    play(player, request.seed)


def run(request: Request) -> list[str]:
    """Fork, work, kill; the lines that the child wrote before its end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        status = 1
        try:
            child(request)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    lines = _read_until_killed(pid, reading, request.kill_after)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [*lines, f"exit {status}"]


def _read_until_killed(pid: int, reading: int, kill_after: float) -> list[str]:
    deadline = time.monotonic() + kill_after
    text = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            left = max(0.0, deadline - time.monotonic()) if kill_after else None
            if not select.select([pipe], [], [], left)[0]:
                os.kill(pid, signal.SIGKILL)
                kill_after = 0
                continue
            piece = pipe.read(65536)
            if not piece:
                return text.decode().splitlines()
            text += piece


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(run(Request(**json.loads(line)))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
