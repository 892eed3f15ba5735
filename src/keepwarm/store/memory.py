"""Blocks in memory, with the same index and eviction rules as on disk.

A record is put on the thread that runs the model, between two slices of a prompt, and the index
takes more time than all the rest. So it follows later, in order: whoever asks it brings it up to
date first, and nobody else waits for it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.index.index import Index
from keepwarm.store.record import Header, Part, ReadBuffer, Record, RecordView
from keepwarm.store.thinning import find_surplus
from keepwarm.store.tier import (
    BlockInfo,
    CheckpointRef,
    Child,
    PutResult,
    ReadFault,
    RefusedBlocks,
    StoredBlock,
    TierCounts,
    TierStats,
    as_store_errors,
    default_on_io_error,
    use_whole,
)

MAX_CHANGES = 512  # that the index may be behind


class _Held:
    """The records, and what they say of each block."""

    def __init__(self) -> None:
        self.records: dict[tuple[BlockKey, Part], Record] = {}
        self.known: dict[BlockKey, BlockInfo] = {}
        self.n_bytes = 0

    def add(self, record: Record) -> None:
        header = record.header
        self._take(header.key, header.part)
        self.records[header.key, header.part] = record
        self.n_bytes += _size(record)
        self._note(header.key)

    def drop(self, key: BlockKey, parts: Collection[Part] = tuple(Part)) -> None:
        for part in parts:
            self._take(key, part)
        self._note(key)

    def clear(self) -> None:
        self.records.clear()
        self.known.clear()
        self.n_bytes = 0

    def _take(self, key: BlockKey, part: Part) -> None:
        if (record := self.records.pop((key, part), None)) is not None:
            self.n_bytes -= _size(record)

    def _note(self, key: BlockKey) -> None:
        held = [one for part in Part if (one := self.records.get((key, part))) is not None]
        if not held:
            self.known.pop(key, None)
            return
        parts, w_rows, n_bytes = frozenset(one.header.part for one in held), 0, 0
        for record in held:
            w_rows, n_bytes = w_rows or record.header.w_rows, n_bytes + _size(record)
        self.known[key] = BlockInfo(parts, len(held[0].header.tokens) // 4, w_rows, n_bytes)


class _LateIndex:
    """An index that changes when it is asked next, or `settle` is called."""

    def __init__(self, lock: threading.RLock) -> None:
        """The lock is that of the tier, for which changes and records are one."""
        self.behind = Index(":memory:")  # by what was not made so far
        self.changes: deque[Callable[[], None]] = deque()
        self._last: deque[Callable[[], None]] = deque()
        self._lock = lock
        self.is_open = True

    def change(self, change: Callable[[], None]) -> None:
        """Make a change, after those before."""
        if self.is_open:
            self.changes.append(change)
        if len(self.changes) > MAX_CHANGES:
            self.settle()

    def change_last(self, change: Callable[[], None]) -> None:
        """Make a change that depends on all others, after them."""
        if self.is_open:
            self._last.append(change)

    def settle(self) -> Index:
        """Make all changes; the index, up to date."""
        while self.changes or self._last:
            with self._lock:  # for one at a time: others go on in between
                if some := self.changes or self._last:
                    some.popleft()()
        return self.behind

    def close(self) -> None:
        self.is_open = False
        self.changes.clear()
        self._last.clear()
        self.behind.close()


class MemoryTier:
    """Records, shared and not copied, up to a number of bytes."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._late = _LateIndex(self._lock)
        self._held = _Held()
        self._refused = RefusedBlocks()
        self._demoted: dict[
            BlockKey, None
        ] = {}  # their window rows are evicted first, oldest first
        self._counts = TierCounts()
        self._durable: Future[None] = Future()  # shared by all records: memory is never durable
        self._durable.set_result(None)

    @property
    def index(self) -> Index:
        """The index, up to date."""
        return self._late.settle()

    @default_on_io_error(lambda: None)
    def settle(self) -> None:
        """Bring the index up to date, so that whoever asks it next need not."""
        self._late.settle()

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        with self._lock:
            known = self._held.known
            return {key: known[key] for key in keys if key in known}

    @default_on_io_error(list)
    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self.index.lookups.children(parent, tokens)

    @default_on_io_error(list)
    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return self.index.lookups.states(parents)

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        with self._lock:
            record = self._held.records.get((key, part))
            self._counts.add(hits=1 if record else 0, misses=0 if record else 1)
        if record is None or tensors is None:
            return record
        return replace(record, tensors=tuple(t for t in record.tensors if t.name in tensors))

    def peek(self, key: BlockKey, part: Part) -> Record | None:
        """A record that is not counted as read."""
        with self._lock:
            return self._held.records.get((key, part))

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
        with self._lock:
            return (key, part) in self._held.records

    def put(self, record: Record) -> PutResult:
        with self._lock:
            return PutResult(self._put(record), self._durable)

    def demote_window(self, key: BlockKey) -> None:
        """Evict the window rows of this block first: they are unlikely to be needed."""
        with self._lock:
            if (key, Part.WINDOW) in self._held.records:
                self._demoted[key] = None

    def promote_window(self, key: BlockKey) -> None:
        """They may be needed after all."""
        with self._lock:
            self._demoted.pop(key, None)

    @default_on_io_error(bool)
    def _put(self, record: Record) -> bool:
        header, n_bytes = record.header, _size(record)
        before, now = self._held.records.get((header.key, header.part)), self._clock()
        if not self._late.is_open or (before and not header.improves_on(before.header.w_rows)):
            return False
        if not self._make_room(record, n_bytes - (_size(before) if before else 0), now):
            self._refused.add(header.key)
            self._counts.add(refused=1)
            return False
        self._held.add(record)
        self._late.change(partial(self._add_row, header, n_bytes, now))
        self._counts.add(puts=1)
        return True

    def _add_row(self, header: Header, n_bytes: int, now: float) -> None:
        try:
            self._late.behind.add(header, n_bytes, now)
        except BaseException:
            self.delete_part(header.key, header.part)  # or it would never be evicted
            raise

    def _make_room(self, record: Record, n_bytes: int, now: float) -> bool:
        """Evict blocks of lower priority than one used once, now."""
        over = self._held.n_bytes + n_bytes - self._max_bytes
        if over <= 0:
            return True
        if n_bytes > self._max_bytes:
            return False
        if self._refused.follows(record.header.parent, self.have):
            return False
        over -= self._evict_demoted(over)
        if over <= 0:
            return True
        self.index.follow_clock(now)
        exclude = {record.header.key, record.header.parent}
        priority = self.index.priority_of(record.header, n_bytes, now)
        victims = self.index.evict(over, exclude, priority)
        self._drop_records([victim.key for victim in victims])
        self._counts.add(evicted=len(victims))
        return bool(victims)

    def _drop_records(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self._held.drop(key)

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
            record = self._held.records.get((key, Part.WINDOW))
            if record is not None:
                freed += _size(record)
                self.delete_part(key, Part.WINDOW)
        return freed

    def resize(self, max_bytes: int) -> None:
        """Change the limit, and evict down to it."""
        with self._lock:
            self._max_bytes = max_bytes
            if (over := self._held.n_bytes - max_bytes) > 0:
                self.release(over)

    def release(self, n_bytes: int) -> int:
        """Evict until so many bytes are free; returns how many were."""
        with self._lock:
            freed, n_evicted = self._drop(n_bytes)
            self._counts.add(evicted=n_evicted)
            return freed

    def clear(self) -> int:
        """Delete all unpinned blocks, which is no eviction; returns the bytes."""
        with self._lock:
            return self._drop(sys.maxsize)[0]

    def _drop(self, n_bytes: int) -> tuple[int, int]:
        """Drop the least valuable until so many bytes are free; the bytes and blocks."""
        before = self._held.n_bytes
        n_bytes -= self._evict_demoted(n_bytes)
        victims = self.index.evict(max(0, n_bytes), set(), math.inf, partial=True)
        self._drop_records([victim.key for victim in victims])
        return before - self._held.n_bytes, len(victims)

    def pin(self, key: BlockKey, owner: str) -> None:
        with as_store_errors(self, "pin a block"):
            self.promote_window(key)
            self.index.pin(key, owner)

    def unpin(self, key: BlockKey, owner: str) -> None:
        with as_store_errors(self, "unpin a block"):
            self.index.unpin(key, owner)

    @default_on_io_error(lambda: None)
    def touch(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self.promote_window(key)
        self._late.change(partial(self._late.behind.touch, keys, self._clock()))

    @default_on_io_error(lambda: None)
    def discard(self, key: BlockKey, part: Part, why: str) -> None:  # noqa: ARG002
        self.delete_part(key, part)

    @default_on_io_error(lambda: None)
    def delete_outgrown(self, key: BlockKey) -> None:
        self._late.change_last(partial(self._delete_outgrown, key))

    def _delete_outgrown(self, key: BlockKey) -> None:
        lookups = self._late.behind.lookups
        for state in find_surplus(*lookups.checkpoints(key)):
            self._held.drop(state.key, [Part.STATE])
            self._late.behind.delete_part(state.key, Part.STATE)
            self._delete(lookups.outgrown(state.beside))
        self._delete(lookups.outgrown(key))

    def delete(self, key: BlockKey) -> None:
        self.delete_all([key])

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        with as_store_errors(self, "delete blocks"), self._lock:
            self._late.settle()
            self._delete(keys)

    def _delete(self, keys: Collection[BlockKey]) -> None:
        with self._lock:
            self._drop_records(keys)
            if keys:
                self._late.behind.mark_deleting(keys)
                self._late.behind.delete_marked(keys)

    def delete_part(self, key: BlockKey, part: Part) -> None:
        """Delete one part; the block goes with its last part."""
        with self._lock:
            self._held.drop(key, [part])
            self._late.change(partial(self._late.behind.delete_part, key, part))

    def walk(self) -> Iterator[StoredBlock]:
        with as_store_errors(self, "list its blocks"):
            yield from self.index.walk()

    def stats(self) -> TierStats:
        with self._lock:
            return self._counts.stats(len(self._held.known), self._held.n_bytes, self._max_bytes)

    def close(self) -> None:
        with self._lock:
            self._late.close()
            self._held.clear()

    def note_error(self, error: Exception) -> None:  # noqa: ARG002
        self._counts.add(errors=1)


def _size(record: Record) -> int:
    return max(1, record.n_bytes)  # 0 bytes would mean missing
