"""The program of the concurrency tests: threads that put, read, pin and delete in one directory.

    python -m tests.store.disk.contend <directory> <seed> <seconds>

Every thread puts and deletes blocks of the common world. Besides, every thread has blocks of its
own that it pins, so that no other may evict them: they must be found at every look-up. The last
line is JSON: what was done, what each thread still owns, and what went wrong.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keepwarm.records.record import Part, Record
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from tests.store.disk.crash import PARTS, WORLD, Block, holds_its_content

THREADS = 8
LIMITS = DiskLimits(max_bytes=5 << 20, min_free_bytes=0)
SMALL = 8_000


@dataclass
class Outcome:
    puts: int = 0
    reads: int = 0
    deletes: int = 0
    no_room: int = 0
    kept: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Worker:
    """The work of one thread."""

    def __init__(self, tier: DiskTier, number: int) -> None:
        self._tier = tier
        self._chance = random.Random(number)
        self._name = f"worker {number}"
        self._own = [Block(1000 + number, n) for n in range(2)]
        self._kept: set[Block] = set()
        self.outcome = Outcome()

    def run(self, until: float) -> None:
        moves = [self._share] * 4 + [self._look] * 4 + [self._forget, self._hold, self._keep]
        try:
            self._clear()
            while time.monotonic() < until:
                self._chance.choice(moves)()
            self._check_own()
        except Exception as error:
            self.outcome.wrong.append(f"{self._name}: {type(error).__name__}: {error}")
        self.outcome.kept = sorted(self._kept)

    def _clear(self) -> None:
        """A predecessor of this name may have been killed at any moment."""
        self._tier.pin_only(self._name, ())
        for block in self._own:
            self._tier.delete_all([block.key])

    def _share(self) -> None:
        block, part = self._chance.choice(WORLD), self._chance.choice(PARTS)
        self._put(block.record(part, self._chance.randint(1, 5)))

    def _look(self) -> None:
        block, part = self._chance.choice(WORLD), self._chance.choice(PARTS)
        record = self._tier.read(block.key, part)
        self.outcome.reads += 1
        if record is not None:
            self._expect(holds_its_content(record), "a wrong value was read")
            self._expect(record.header.key == block.key, "another block was read")
            self._tier.touch([block.key])
        self._tier.children(block.parent, block.tokens)

    def _forget(self) -> None:
        self._tier.delete_all([self._chance.choice(WORLD).key])
        self.outcome.deletes += 1

    def _hold(self) -> None:
        """Pin and unpin blocks that other threads evict, delete and put."""
        block, owner = self._chance.choice(WORLD), f"{self._name} for a moment"
        self._tier.pin(block.key, owner)
        self._tier.have([block.key])
        self._tier.pin_only(owner, ())

    def _keep(self) -> None:
        """Put and pin a block of our own, or delete it again."""
        self._check_own()
        block = self._chance.choice(self._own)
        if block in self._kept:
            self._kept.discard(block)
            self._tier.delete_all([block.key])
            self._tier.pin_only(self._name, [kept.key for kept in self._kept])
            self._expect(not self._tier.have([block.key]), "a deleted block was found")
            return
        self._tier.pin(block.key, self._name)
        self._put(block.record(n_bytes=SMALL))
        if self._tier.have([block.key]):
            self._kept.add(block)
        else:
            self.outcome.no_room += 1

    def _put(self, record: Record) -> None:
        put = self._tier.put(record)
        put.durable.result()
        self.outcome.puts += put.stored

    def _check_own(self) -> None:
        for block in self._kept:
            record = self._tier.read(block.key, Part.DELTA)
            self._expect(record is not None, "a pinned block was lost")
            self._expect(record is None or holds_its_content(record), "a pinned block was wrong")

    def _expect(self, fact: bool, otherwise: str) -> None:
        if not fact:
            self.outcome.wrong.append(f"{self._name}: {otherwise}")


def main(store_root: str, seed: str, seconds: str) -> None:
    tier = DiskTier(Path(store_root), LIMITS)
    workers = [Worker(tier, THREADS * int(seed) + n) for n in range(THREADS)]
    until = time.monotonic() + float(seconds)
    threads = [threading.Thread(target=w.run, args=(until,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = asdict(tier.stats())
    tier.close()
    outcomes = [asdict(worker.outcome) for worker in workers]
    print(json.dumps({"outcomes": outcomes, "stats": stats}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
