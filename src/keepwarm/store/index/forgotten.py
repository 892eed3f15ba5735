"""What was deleted on purpose, for other processes to forget it too.

Every such deletion is a new generation. A process that has memory of its own looks at the number
before it reuses or writes anything, and reads what is new since its own. The log holds keys of
blocks and names of owners, no tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockRef, Namespace, block_key
from keepwarm.store.index.database import Database
from keepwarm.store.tier import NamedBlock

MAX_GENERATIONS = 1024  # a process that is further behind forgets everything
NO_BLOCK = (None, None, 0)  # for an owner without blocks


class Forgotten(NamedTuple):
    """One deletion: whose, and which blocks, with all that continues them.

    `owner` is as the index has it.
    """

    owner: str
    blocks: tuple[NamedBlock, ...]

    def first_in(self, namespace: Namespace, refs: Iterable[BlockRef]) -> int | None:
        """The first block of a prompt that is one of these, or begins as they do."""
        keys, by_parent = {block.key for block in self.blocks}, defaultdict(list)
        for block in self.blocks:
            if block.is_open:
                by_parent[block.parent].append(block)

        def begins(ref: BlockRef, block: NamedBlock) -> bool:
            start = ref.tokens[: 4 * block.n_tokens]
            return block_key(namespace, ref.parent, start) == block.key

        def is_one(ref: BlockRef) -> bool:
            open_ones = by_parent.get(ref.parent, ())
            return ref.key in keys or any(begins(ref, block) for block in open_ones)

        return next((ref.number for ref in refs if is_one(ref)), None)


class NewlyForgotten(NamedTuple):
    """What was forgotten since some generation; None: unknown, so it may be everything."""

    generation: int
    deletions: list[Forgotten] | None


class ForgottenLog:
    def __init__(self, database: Database, owner: Callable[[str], str]) -> None:
        """`owner` makes the owner as `Forgotten` has it of a name."""
        self._database = database
        self.owner = owner

    def generation(self) -> int:
        """A number that every deletion on purpose increases."""
        rows = self._database.rows("SELECT value FROM counts WHERE name = 'generation'")
        return int(rows[0][0])

    def add(self, owner: str, blocks: Iterable[NamedBlock]) -> None:
        """Begin a generation in which these blocks are forgotten, and all that is the owner's."""
        name = self.owner(owner)
        with self._database.transaction(synced=True) as db:
            db.execute("UPDATE counts SET value = value + 1 WHERE name = 'generation'")
            now = self.generation()
            rows = ((now, name, *block) for block in (*blocks, NO_BLOCK))
            db.executemany("INSERT INTO forgotten VALUES (?, ?, ?, ?, ?)", rows)
            db.execute("DELETE FROM forgotten WHERE generation <= ?", (now - MAX_GENERATIONS,))

    def add_all(self) -> None:
        """Begin a generation in which everything is forgotten: all are too far behind for less."""
        with self._database.transaction(synced=True) as db:
            db.execute("DELETE FROM forgotten")
            query = "UPDATE counts SET value = value + ? WHERE name = 'generation'"
            db.execute(query, (MAX_GENERATIONS + 1,))

    def since(self, generation: int) -> NewlyForgotten:
        now = self.generation()
        if not generation <= now <= generation + MAX_GENERATIONS:
            return NewlyForgotten(now, None)
        query = "SELECT * FROM forgotten WHERE generation > ? AND generation <= ? ORDER BY 1"
        found: defaultdict[tuple[int, str], list[NamedBlock]] = defaultdict(list)
        for number, owner, key, parent, n_tokens in self._database.rows(query, (generation, now)):
            found[number, owner] += [NamedBlock(key, parent, n_tokens)] if key else []
        if len({number for number, _ in found}) < now - generation:
            return NewlyForgotten(now, None)
        deletions = [Forgotten(owner, tuple(blocks)) for (_, owner), blocks in found.items()]
        return NewlyForgotten(now, deletions)
