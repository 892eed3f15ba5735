"""Blocks in memory: dicts, with the look-ups and eviction rules of the index on disk.

Not SQLite: the thread that runs the model puts a record between two slices of a prompt, and would
wait for each statement.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from keepwarm.errors import StoreFailed
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.records.at_rest import CODEC, is_rounded
from keepwarm.records.record import Header, Part, ReadBuffer, Record, RecordView
from keepwarm.store.eviction import (
    CLOCK_TOLERANCE_S,
    MEMORY_HALF_LIFE_S,
    SHORT_BRANCH,
    SUPERSEDED,
    Checkpoint,
    after_use,
    find_surplus,
    prefill_saved,
)
from keepwarm.store.tier import (
    NEIGHBOURS,
    BlockInfo,
    CheckpointRef,
    Child,
    PutResult,
    ReadFault,
    RefusedBlocks,
    StoredBlock,
    TierCounts,
    TierStats,
    by_common_tokens,
    use_whole,
)


@dataclass(slots=True)
class _Block:
    """A block, its records, and what they are worth."""

    header: Header  # of its first record
    used: float
    records: dict[Part, Record] = field(default_factory=dict)
    info: BlockInfo = field(init=False)
    value: float = 0.0
    cost: float = 0.0

    @property
    def key(self) -> BlockKey:
        return self.header.key

    @property
    def priority(self) -> float:
        return self.used + self.value + self.cost

    def size_of(self, part: Part) -> int:
        return _size(self.records[part]) if part in self.records else 0

    def describe(self) -> None:
        """Bring up to date what follows from the records."""
        n_tokens, sizes = len(self.header.tokens) // 4, [self.size_of(part) for part in Part]
        window = self.records.get(Part.WINDOW)
        w_rows = window.header.w_rows if window else 0
        times = (record.prefill for record in self.records.values())
        prefill = next(filter(None, times), None)
        self.info = BlockInfo(frozenset(self.records), n_tokens, w_rows, sum(sizes), prefill)
        self.cost = _cost(self.header.number, n_tokens, *sizes)


def _cost(number: int, n_tokens: int, d: int, w: int, s: int) -> float:
    """What a block saves, as seconds by which it outlives a block that saves 1."""
    return MEMORY_HALF_LIFE_S * math.log2(prefill_saved(number, n_tokens, d, w, s))


def _improves(header: Header, before: Header) -> bool:
    """Whether a record has more window rows than the one that is there, or will take less room."""
    is_smaller = is_rounded(header) and not is_rounded(before)
    return is_smaller or header.improves_on(before.w_rows)


def _size(record: Record) -> int:
    return max(1, record.n_bytes)  # 0 bytes would mean missing


class _Siblings:
    """The children of one block, in the order of their tokens: the longest common prefixes of a
    query are its neighbours.
    """

    def __init__(self) -> None:
        self.tokens: list[bytes] = []  # sorted
        self.keys: dict[bytes, BlockKey] = {}
        self.states: dict[BlockKey, None] = {}  # those with a checkpoint

    def add(self, header: Header) -> None:
        if header.tokens not in self.keys:
            insort(self.tokens, header.tokens)
            self.keys[header.tokens] = header.key

    def remove(self, header: Header) -> None:
        del self.keys[header.tokens], self.tokens[bisect_left(self.tokens, header.tokens)]

    def near(self, tokens: bytes) -> list[Child]:
        at = bisect_right(self.tokens, tokens)
        near = self.tokens[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
        found = {self.keys[one]: one for one in near}
        if at > NEIGHBOURS:  # others may lie between the query and its prefixes
            found |= {self.keys[one]: one for one in self.prefixes(tokens)}
        return by_common_tokens(found, tokens)

    def prefixes(self, tokens: bytes) -> list[bytes]:
        """Those that these tokens begin with."""
        if len(self.tokens) < len(tokens) // 4:
            return [one for one in self.tokens if tokens.startswith(one)]
        starts = (tokens[:end] for end in range(4, len(tokens) + 1, 4))
        return [start for start in starts if start in self.keys]

    def is_fork(self, start: bytes) -> bool:
        """Whether those that begin so part from each other."""
        after = bisect_right(self.tokens, start.ljust(4 * BLOCK_TOKENS + 1, b"\xff"))
        found = self.tokens[bisect_left(self.tokens, start) : after]
        return not all(found[-1].startswith(one) for one in found)


class BlockTable:
    """All blocks by key and by parent, and the order in which they are evicted. For one thread."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, _Block] = {}
        self.n_bytes = 0
        self._siblings: dict[BlockKey, _Siblings] = {}  # by parent
        # Every block that may be evicted, by priority. Entries may be outdated: a block that was
        # used or got a child is entered again when it may be evicted, and checked then.
        self._order: list[tuple[float, BlockKey]] = []
        self._latest = -math.inf  # use

    # Look-ups

    def have(self, keys: Iterable[BlockKey]) -> dict[BlockKey, BlockInfo]:
        blocks = self.blocks
        return {key: blocks[key].info for key in keys if key in blocks}

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        siblings = self._siblings.get(parent)
        return siblings.near(tokens) if siblings else []

    def children_of(self, parent: BlockKey) -> list[BlockKey]:
        siblings = self._siblings.get(parent)
        return list(siblings.keys.values()) if siblings else []

    def states(self, parents: Iterable[BlockKey]) -> list[CheckpointRef]:
        held = [(parent, self._siblings[parent]) for parent in parents if parent in self._siblings]
        return [
            CheckpointRef(key, parent, self.blocks[key].info.n_tokens)
            for parent, siblings in held
            for key in siblings.states
        ]

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        """Blocks of the same parent whose tokens are a proper prefix of this block's."""
        if (block := self.blocks.get(key)) is None:
            return []
        siblings, own = self._siblings[block.header.parent], block.header.tokens
        return [siblings.keys[one] for one in siblings.prefixes(own) if one != own]

    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Everything below a block, deepest first, without the block itself."""
        below = [key]
        for one in below:  # grows
            below += self.children_of(one)
        return below[:0:-1]

    def superseded(self, key: BlockKey) -> list[BlockKey]:
        """Shorter siblings that this block can replace: it has their rows, they have no state."""
        if (block := self.blocks.get(key)) is None:
            return []
        parts = set(block.info.parts)
        if block.info.w_rows < block.info.n_tokens:
            parts.discard(Part.WINDOW)
        parts.discard(Part.STATE)
        shorter = [self.blocks[one] for one in self.shorter_siblings(key)]
        return [old.key for old in shorter if old.info.parts <= parts and self._is_free(old)]

    def checkpoints(self, key: BlockKey) -> tuple[list[Checkpoint], int]:
        """The states on the path to a block that has one, and the K and V bytes on that path."""
        block = self.blocks.get(key)
        found: list[Checkpoint] = []
        kv_bytes = 0
        if block is None or Part.STATE not in block.records:
            return found, kv_bytes
        while block is not None:
            kv_bytes += block.size_of(Part.DELTA)
            kv_bytes += block.size_of(Part.WINDOW) if block.info.w_rows else 0
            found += self._checkpoints_beside(block)
            block = self.blocks.get(block.header.parent)
        return found, kv_bytes

    def _checkpoints_beside(self, block: _Block) -> Iterator[Checkpoint]:
        """States at the end of a block and inside it; not those of other conversations."""
        siblings = self._siblings[block.header.parent]
        own = {block.key, *self.shorter_siblings(block.key)} if siblings.states else set()
        for key in siblings.states.keys() & own:
            state = self.blocks[key]
            at = state.header.number * BLOCK_TOKENS + state.info.n_tokens
            n_bytes, is_fork = state.size_of(Part.STATE), self._is_fork(state)
            yield Checkpoint(at, key, block.key, n_bytes, held=False, is_fork=is_fork)

    def _is_fork(self, block: _Block) -> bool:
        """Whether conversations part at the end of a block, or soon after."""
        if block.info.n_tokens < BLOCK_TOKENS:
            return self._siblings[block.header.parent].is_fork(block.header.tokens)
        after = self._siblings.get(block.key)
        return after is not None and after.is_fork(b"")

    def walk(self) -> list[StoredBlock]:
        return [self._stored(block) for block in self.blocks.values()]

    def _stored(self, block: _Block) -> StoredBlock:
        header, sizes = block.header, {part: block.size_of(part) for part in block.records}
        return StoredBlock(
            block.key, header.parent, header.namespace, header.number, block.info.n_tokens,
            sizes, block.used, pinned=False,
        )  # fmt: skip

    # Changes

    def put(self, record: Record, now: float) -> None:
        """Add a record, or replace one of the same block and part."""
        header = record.header
        self._latest = max(self._latest, now)
        self._devalue_superseded(header, now)
        block = self.blocks.get(header.key)
        if block is None:
            block = self.blocks[header.key] = _Block(header, now)
            self._siblings.setdefault(header.parent, _Siblings()).add(header)
        if header.part is Part.STATE:
            self._siblings[header.parent].states[header.key] = None
        self.set_part(block, record)

    def set_part(self, block: _Block, record: Record) -> None:
        """Add a part to a block, or replace it."""
        part = record.header.part
        self.n_bytes += _size(record) - block.size_of(part)
        block.records[part] = record
        block.describe()
        self._offer(block)

    def _devalue_superseded(self, header: Header, now: float) -> None:
        """Devalue a short sibling branch with the same first tokens: an answer rendered anew."""
        if header.parent not in self.blocks:
            return
        near = self.children(header.parent, header.tokens)
        # A sibling that this block continues is a checkpoint inside it.
        parted = (
            child.key
            for child in near
            if child.key != header.key and child.n_common < self.blocks[child.key].info.n_tokens
        )
        first = next(parted, None)
        branch = [] if first is None else self._first_of_branch(first)
        if len(branch) <= SHORT_BRANCH:
            for block in (self.blocks[key] for key in branch):
                if block.used <= now:
                    block.value = SUPERSEDED * MEMORY_HALF_LIFE_S
                    self._offer(block)

    def _first_of_branch(self, key: BlockKey) -> list[BlockKey]:
        """A block and what is below it, as far as that tells whether the branch is short."""
        branch = [key]
        for one in branch:  # grows
            if len(branch) > SHORT_BRANCH:
                break
            branch += self.children_of(one)
        return branch

    def touch(self, keys: Iterable[BlockKey], now: float) -> None:
        self._latest = max(self._latest, now)
        for key in dict.fromkeys(keys):
            if (block := self.blocks.get(key)) is not None:
                block.value = after_use(block.used, block.value, now, MEMORY_HALF_LIFE_S)
                block.used = now
                self._offer(block)

    def follow_clock(self, now: float) -> None:
        """If the clock was set back, move uses back with it: what was used while it was ahead would
        outlive everything new.
        """
        if self._latest <= now + CLOCK_TOLERANCE_S:
            return
        for block in self.blocks.values():
            block.used = min(block.used, now)
        self._latest = now
        self._reorder()

    def delete_part(self, key: BlockKey, part: Part) -> int:
        """Delete one part, and the block with its last part; returns the bytes."""
        block = self.blocks.get(key)
        record = block.records.pop(part, None) if block else None
        if block is None or record is None:
            return 0
        self.n_bytes -= _size(record)
        siblings = self._siblings[block.header.parent]
        if part is Part.STATE:
            del siblings.states[key]
        if block.records:
            block.describe()
            self._offer(block)
        else:
            self._remove(block, siblings)
        return _size(record)

    def _remove(self, block: _Block, siblings: _Siblings) -> None:
        parent = block.header.parent
        del self.blocks[block.key]
        siblings.remove(block.header)
        if not siblings.keys:
            del self._siblings[parent]
            if parent in self.blocks:
                self._offer(self.blocks[parent])

    def delete(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            for part in Part:
                self.delete_part(key, part)

    # Eviction

    def evict(
        self,
        n_bytes: int,
        exclude: Collection[BlockKey] = (),
        priority: float = math.inf,
        partial: bool = False,
    ) -> list[BlockKey]:
        """Delete blocks, the least valuable first and each after its descendants, that
        together free `n_bytes`; unless `partial`, none at all where that cannot be reached.

        Only blocks up to this priority: the new block is worth no more than the others.
        """
        chosen: dict[BlockKey, _Block] = {}
        spared: list[_Block] = []
        taken: Counter[BlockKey] = Counter()  # children of each block
        freed, order = 0, self._order
        while freed < n_bytes and order and order[0][0] <= priority:
            entered, key = heappop(order)
            block = self.blocks.get(key)
            if block is None or key in chosen or entered != block.priority:
                continue
            if not self._is_free(block, taken[key]):
                continue
            if key in exclude:
                spared.append(block)
                continue
            chosen[key] = block
            freed += block.info.n_bytes
            taken[block.header.parent] += 1
            if (parent := self.blocks.get(block.header.parent)) is not None:
                heappush(order, (parent.priority, parent.key))
        if not partial and freed < n_bytes:
            spared += chosen.values()
            chosen = {}
        for block in spared:
            self._offer(block)
        self.delete(chosen)
        return list(chosen)

    def _is_free(self, block: _Block, n_taken: int = 0) -> bool:
        """Whether a block has no more children than these."""
        siblings = self._siblings.get(block.key)
        n_children = len(siblings.keys) if siblings else 0
        return n_children == n_taken

    def _offer(self, block: _Block) -> None:
        """Enter a block where it stands now in the order of eviction."""
        if self._is_free(block):
            heappush(self._order, (block.priority, block.key))
        if len(self._order) > 2 * len(self.blocks) + 64:
            self._reorder()

    def _reorder(self) -> None:
        """Leave out the entries that are outdated."""
        free = (block for block in self.blocks.values() if self._is_free(block))
        self._order = [(block.priority, block.key) for block in free]
        heapify(self._order)


class MemoryTier:
    """Records, shared and not copied, up to a number of bytes. For all threads."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._table = BlockTable()
        self._is_open = True
        self._refused = RefusedBlocks()
        self._demoted: dict[BlockKey, None] = {}  # window rows evicted first, oldest first
        self._counts = TierCounts()
        self._durable: Future[None] = Future()  # shared by all records: memory is never durable
        self._durable.set_result(None)

    @contextmanager
    def _opened(self, what: str) -> Iterator[BlockTable]:
        """For what must be known to fail."""
        with self._lock:
            if not self._is_open:
                self._counts.add(errors=1)
                raise StoreFailed(f"The store could not {what}: it is closed; open it again.")
            yield self._table

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        with self._lock:
            return self._table.have(keys)

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        with self._lock:
            return self._table.children(parent, tokens)

    def children_of(self, parent: BlockKey) -> list[BlockKey]:
        with self._lock:
            return self._table.children_of(parent)

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        with self._lock:
            return self._table.shorter_siblings(key)

    def descendants(self, key: BlockKey) -> list[BlockKey]:
        with self._lock:
            return self._table.descendants(key)

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        with self._lock:
            return self._table.states(parents)

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        record = self.peek(key, part)
        self._counts.add(hits=1 if record else 0, misses=0 if record else 1)
        if record is None or tensors is None:
            return record
        return replace(record, tensors=tuple(t for t in record.tensors if t.name in tensors))

    def peek(self, key: BlockKey, part: Part) -> Record | None:
        """A record that is not counted as read."""
        with self._lock:
            block = self._table.blocks.get(key)
            return block.records.get(part) if block else None

    def visit(
        self,
        key: BlockKey,
        part: Part,
        use: Callable[[RecordView], None],
        buffer: ReadBuffer,  # noqa: ARG002
    ) -> bool:
        return use_whole(self.read(key, part), use)

    def take_fault(self, key: BlockKey, part: Part) -> ReadFault | None:  # noqa: ARG002
        return None

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Nothing to do."""
        return self.peek(key, part) is not None

    def put(self, record: Record) -> PutResult:
        with self._lock:
            return PutResult(self._is_open and self._put(record), self._durable)

    def _put(self, record: Record) -> bool:
        header, now = record.header, self._clock()
        before = self.peek(header.key, header.part)
        if before and not _improves(header, before.header):
            return False
        if header.part is Part.WINDOW:
            self._demoted.pop(header.key, None)  # what is replaced must not make room again
        if not self._make_room(record, _size(record) - (_size(before) if before else 0), now):
            self._refused.add(header.key)
            self._counts.add(refused=1)
            return False
        self._table.put(record, now)
        self._counts.add(puts=1)
        return True

    def replace(self, record: Record) -> None:
        """Keep a record in fewer bits, if this block is still here."""
        with self._lock:
            block = self._table.blocks.get(record.header.key)
            there = block and block.records.get(record.header.part)
            if block and there and CODEC not in there.header.extra:
                self._table.set_part(block, record)

    def _make_room(self, record: Record, n_bytes: int, now: float) -> bool:
        """Evict blocks of lower priority than one used once, now."""
        header, over = record.header, self._table.n_bytes + n_bytes - self._max_bytes
        if over <= 0:
            return True
        if n_bytes > self._max_bytes or self._refused.follows(header.parent, self._table.have):
            return False
        over -= self._evict_demoted(over)
        if over <= 0:
            return True
        self._table.follow_clock(now)
        sizes = (n_bytes if part is header.part else 0 for part in Part)
        priority = now + _cost(header.number, len(header.tokens) // 4, *sizes)
        victims = self._table.evict(over, {header.key, header.parent}, priority)
        self._counts.add(evicted=len(victims))
        return bool(victims)

    def demote_window(self, key: BlockKey) -> None:
        """Evict the window rows of this block first: they are unlikely to be needed."""
        with self._lock:
            if self.peek(key, Part.WINDOW) is not None:
                self._demoted[key] = None

    def promote_window(self, key: BlockKey) -> None:
        """They may be needed after all."""
        with self._lock:
            self._demoted.pop(key, None)

    def demoted_windows(self, keys: Collection[BlockKey]) -> set[BlockKey]:
        """Which of these blocks have demoted window rows."""
        with self._lock:
            return {key for key in keys if key in self._demoted}

    def _evict_demoted(self, n_bytes: int) -> int:
        """Delete demoted window rows until so many bytes are free; returns the bytes."""
        freed = 0
        while self._demoted and freed < n_bytes:
            key = next(iter(self._demoted))
            del self._demoted[key]
            freed += self._table.delete_part(key, Part.WINDOW)
        return freed

    def resize(self, max_bytes: int) -> None:
        """Change the limit, and evict down to it."""
        with self._lock:
            self._max_bytes = max_bytes
            if (over := self._table.n_bytes - max_bytes) > 0:
                self.release(over)

    def release(self, n_bytes: int) -> int:
        """Evict until so many bytes are free; returns how many were."""
        with self._lock:
            freed, n_evicted = self._drop(n_bytes)
            self._counts.add(evicted=n_evicted)
            return freed

    def clear(self) -> int:
        """Delete all blocks, which is no eviction; returns the bytes."""
        with self._lock:
            return self._drop(sys.maxsize)[0]

    def _drop(self, n_bytes: int) -> tuple[int, int]:
        """Drop the least valuable until so many bytes are free; the bytes and blocks."""
        before = self._table.n_bytes
        n_bytes -= self._evict_demoted(n_bytes)
        victims = self._table.evict(n_bytes, partial=True)
        return before - self._table.n_bytes, len(victims)

    def touch(self, keys: Collection[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._demoted.pop(key, None)
            self._table.touch(keys, self._clock())

    def discard(self, key: BlockKey, part: Part, why: str) -> None:  # noqa: ARG002
        self.delete_part(key, part)

    def delete_superseded(self, key: BlockKey) -> None:
        with self._lock:
            for state in find_surplus(*self._table.checkpoints(key)):
                self._table.delete_part(state.key, Part.STATE)
                self._table.delete(self._table.superseded(state.beside))
            self._table.delete(self._table.superseded(key))

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        with self._opened("delete blocks") as table:
            table.delete(keys)

    def delete_part(self, key: BlockKey, part: Part) -> None:
        """Delete one part; the block goes with its last part."""
        with self._lock:
            self._table.delete_part(key, part)

    def walk(self) -> Iterator[StoredBlock]:
        with self._opened("list its blocks") as table:
            return iter(table.walk())

    def stats(self) -> TierStats:
        with self._lock:
            table = self._table
            return self._counts.stats(len(table.blocks), table.n_bytes, self._max_bytes)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._table = BlockTable()
