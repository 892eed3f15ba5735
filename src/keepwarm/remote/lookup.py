"""What a remote store has of a prompt: asked for by exact keys on the caller's thread, in a few
requests, and remembered for a while, so that planning asks nobody.

First how far the chain of whole blocks reaches, then what lies around its end: window rows, states
and begun blocks that the prompt continues. Names of records tell tokens, rows and bytes, so that no
record is read. A block that only begins like the prompt has another key and is not found: at most
255 tokens are computed for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, block_key
from keepwarm.records.record import Part
from keepwarm.remote.backend import Backend, FolderRange
from keepwarm.remote.health import RemoteSpeed
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.store.tier import BlockInfo, CheckpointRef, Child, RemoteLookup

PRESENT_S = 60.0
ABSENT_S = 5.0
MAX_KNOWN = 50_000  # blocks; the oldest are forgotten
MAX_REQUESTS = 12  # to a distant store for 100,000 tokens, unless no state is near their end
STATE_BLOCKS = 8  # last blocks of a chain in which states are looked for
CONNECTING = 2  # round trips: the store may have closed the connection meanwhile


class _Block(NamedTuple):
    """What is known of a block: its records; none if it is not there."""

    parent: BlockKey
    n_tokens: int
    records: dict[Part, RemoteRecord]
    until: float
    is_listed: bool  # all of them are known


class KnownRecords:
    """What a remote store is known to hold. For all threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, _Block] = {}
        self._children: dict[BlockKey, dict[int, set[BlockKey]]] = {}  # by parent and tokens

    def add(self, records: Iterable[RemoteRecord], is_listed: bool = False) -> None:
        """They are there; with `is_listed` all of their blocks are. Of window records of a block
        the one with the most rows counts.
        """
        until = self._clock() + PRESENT_S
        with self._lock:
            for one in records:
                known = self._fresh(one.key)
                parts = dict(known.records) if known else {}
                if one.part not in parts or parts[one.part].w_rows <= one.w_rows:
                    parts[one.part] = one
                listed = is_listed or (known is not None and known.is_listed)
                self._note(one.key, _Block(one.parent, one.n_tokens, parts, until, listed))

    def add_absent(self, refs: Iterable[BlockRef], is_listed: bool = False) -> None:
        until = self._clock() + ABSENT_S
        with self._lock:
            for ref in refs:
                self._note(ref.key, _Block(ref.parent, ref.n_tokens, {}, until, is_listed))

    def lose(self, key: BlockKey) -> None:
        """A block could not be read: it counts as absent, and so does all that follows it."""
        until = self._clock() + ABSENT_S
        with self._lock:
            for one in self._below(key):
                if (known := self._blocks.get(one)) is not None:
                    self._blocks[one] = known._replace(records={}, until=until, is_listed=True)

    def is_answered(self, key: BlockKey) -> bool:
        return self._fresh(key) is not None

    def is_listed(self, key: BlockKey) -> bool:
        """Whether all records of a block are known, and begun blocks beside it."""
        known = self._fresh(key)
        return known is not None and known.is_listed

    def find(self, key: BlockKey, part: Part) -> RemoteRecord | None:
        known = self._fresh(key)
        return known.records.get(part) if known else None

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        found = {}
        for key in keys:
            known = self._fresh(key)
            if known and known.records:
                records = known.records.values()
                found[key] = BlockInfo(
                    frozenset(known.records),
                    known.n_tokens,
                    max(one.w_rows for one in records),
                    sum(one.n_bytes for one in records),
                )
        return found

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        """Those that the tokens continue, or are: of others the tokens are not known."""
        with self._lock:
            lengths = {n: list(keys) for n, keys in self._children.get(parent, {}).items()}
        found = []
        for n_tokens in sorted(lengths, reverse=True):
            one = next((r for key in lengths[n_tokens] for r in self._records(key)), None)
            if one is not None and 4 * n_tokens <= len(tokens):
                key = block_key(one.namespace, parent, tokens[: 4 * n_tokens])
                found += [Child(key, n_tokens)] if any(self._records(key)) else []
        return found

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        with self._lock:
            children = [
                (parent, n_tokens, key)
                for parent in parents
                for n_tokens, keys in self._children.get(parent, {}).items()
                for key in keys
            ]
        return [
            CheckpointRef(key, parent, n_tokens)
            for parent, n_tokens, key in children
            if self.find(key, Part.STATE)
        ]

    def _records(self, key: BlockKey) -> Collection[RemoteRecord]:
        known = self._fresh(key)
        return known.records.values() if known else ()

    def _fresh(self, key: BlockKey) -> _Block | None:
        known = self._blocks.get(key)
        return known if known and self._clock() < known.until else None

    def _below(self, key: BlockKey) -> Iterator[BlockKey]:
        """Names that others wrote may lead back to where they began."""
        waiting, seen = [key], {key}
        while waiting:
            one = waiting.pop()
            yield one
            new = set(chain.from_iterable(self._children.get(one, {}).values())) - seen
            seen |= new
            waiting += new

    def _note(self, key: BlockKey, block: _Block) -> None:
        self._forget(key)  # the latest is the last
        self._blocks[key] = block
        self._children.setdefault(block.parent, {}).setdefault(block.n_tokens, set()).add(key)
        while len(self._blocks) > MAX_KNOWN:
            self._forget(next(iter(self._blocks)))

    def _forget(self, key: BlockKey) -> None:
        known = self._blocks.pop(key, None)
        if known is None:
            return
        lengths = self._children[known.parent]
        lengths[known.n_tokens].discard(key)
        if not lengths[known.n_tokens]:
            del lengths[known.n_tokens]
        if not lengths:
            del self._children[known.parent]


def n_round_trips(lookup: RemoteLookup) -> int:
    """The most that a look-up takes, where one name is asked for at a time."""
    n_unknown = lookup.n_whole - lookup.n_here
    search = 1 + max(0, n_unknown - 2).bit_length() if n_unknown else 0
    around = 2 if lookup.has_states else 1
    return CONNECTING + search + around + 1  # the beginning of a window


class Finder:
    """Finds out what is there of prompts, and has it remembered. Raises CallError."""

    def __init__(
        self, backend: Backend, names: RemoteNames, known: KnownRecords, speed: RemoteSpeed
    ) -> None:
        self.backend, self.names, self.known, self.speed = backend, names, known, speed
        self.other_classes: Sequence[str] = ()  # in which records are looked for too

    def find(self, lookup: RemoteLookup, deadline: CallDeadline) -> None:
        search = _Search(self, lookup, deadline)
        if self.backend.in_batches:
            search.look_everywhere()
        else:
            search.look_around(search.bisect())

    def same(self, wanted: RemoteRecord, deadline: CallDeadline) -> list[RemoteRecord]:
        """Records of the same part of a block, in the class of this machine."""
        folder = self.names.folder(wanted.namespace, wanted.parent)
        place = FolderRange(folder, self.names.stem(wanted.n_tokens, wanted.key))
        with self.speed.calling():
            (listed,) = self.backend.look([place], deadline.left_s())
        parsed = (self.names.parse(one, wanted.namespace, wanted.parent) for one in listed)
        own = wanted.key, wanted.part
        found = [one for one in parsed if one and (one.key, one.part) == own]
        self.known.add(found)
        return found


class _Search:
    """The requests of one look-up: within its time, counted and timed.

    Blocks go by their number in the prompt: to look at one is to list the records of the block, and
    begun ones beside it, which the prompt may continue.
    """

    def __init__(self, finder: Finder, lookup: RemoteLookup, deadline: CallDeadline) -> None:
        self._finder, self._known, self._names = finder, finder.known, finder.names
        self._lookup, self._deadline = lookup, deadline
        self._classes = ("", *finder.other_classes)
        self._n_requests = 0

    def look_everywhere(self) -> None:
        """One call tells all of a store that is asked in batches."""
        n_back = max(self._lookup.n_window, STATE_BLOCKS if self._lookup.has_states else 0)
        self._look(range(max(0, self._lookup.n_here - n_back), len(self._lookup.refs)))

    def bisect(self) -> int:
        """How many leading whole blocks are there, in about log n requests: what is put root first
        has no gaps.

        Most prompts are new or there as a whole, so the first block and the last are asked for
        before those in the middle.
        """
        low, high = self._lookup.n_here, self._lookup.n_whole
        ends = [high - 1, low]  # all before `low` are there, `high` is not
        self._look_for([n for n in ends if low <= n < high])
        while low < high:
            middle = ends.pop() if ends else (low + high - 1) // 2
            self._look_for([middle])
            if (found := self._shown(middle)) is not None:
                self._presume_rows(range(low, middle), found)
                low = middle + 1
            else:
                high = middle
        return low

    def look_around(self, n_there: int) -> None:
        """Learn of windows, states and begun blocks where the chain ends after so many blocks."""
        lookup = self._lookup
        first = max(0, n_there - (1 if lookup.has_states else 0))
        forks = range(first, min(n_there + 1, len(lookup.refs)))
        windows = range(max(0, n_there - lookup.n_window), n_there)
        if self._fits({*windows, *forks}):
            self._look([*windows, *forks])
        else:
            self._look([*windows[-1:], *forks])
            self._presume_windows(windows)
        if lookup.has_states and not any(map(self._has_state, forks)):
            self._look(range(max(0, n_there - STATE_BLOCKS), first))

    # Requests

    def _look_for(self, numbers: Iterable[int]) -> None:
        """Learn whether whole blocks are there. Rows have an exact name. Otherwise lists tell more:
        the window and the state of the last block that is there, and what follows it; but that of
        all first blocks may be long.
        """
        lookup = self._lookup
        has_points = not lookup.has_rows or lookup.n_window > 0 or lookup.has_states
        listed = [n for n in numbers if has_points and (n or not lookup.has_rows)]
        self._look(listed)
        self._ask_for_rows([n for n in numbers if n not in listed])

    def _look(self, numbers: Iterable[int]) -> None:
        """Learn of blocks and begun blocks beside them, but for those that are known."""
        new = [n for n in dict.fromkeys(numbers) if not self._is_known(n)]
        asked = [(n, of) for of in self._classes for n in new]
        if not asked:
            return
        self._n_requests += len(asked)
        with self._finder.speed.calling():
            ranges = [self._range(n, of) for n, of in asked]
            lists = self._finder.backend.look(ranges, self._deadline.left_s())
        found: dict[int, list[RemoteRecord]] = {n: [] for n in new}
        for (n, of), listed in zip(reversed(asked), reversed(lists), strict=True):
            ref = self._lookup.refs[n]
            parsed = (self._names.parse(o, self._lookup.namespace, ref.parent, of) for o in listed)
            found[n] += filter(None, parsed)  # own class last, which counts
        for n, records in found.items():
            self._note(self._lookup.refs[n], records)

    def _note(self, ref: BlockRef, records: Sequence[RemoteRecord]) -> None:
        """Of what is listed the block itself and its beginnings are of use, known by their keys."""
        lengths = {one.n_tokens for one in records if one.n_tokens < ref.n_tokens}
        own = {self._key(ref, n) for n in lengths} | {ref.key}
        if not any(one.key == ref.key for one in records):
            self._known.add_absent([ref], is_listed=True)
        self._known.add((one for one in records if one.key in own), is_listed=True)

    def _ask_for_rows(self, numbers: Iterable[int]) -> None:
        new = [n for n in numbers if not self._known.is_answered(self._lookup.refs[n].key)]
        wanted = [self._rows(n)._replace(compute_class=of) for n in new for of in self._classes]
        if not wanted:
            return
        self._n_requests += len(wanted)
        with self._finder.speed.calling():
            names = [self._names.of(one) for one in wanted]
            sizes = self._finder.backend.sizes(names, self._deadline.left_s())
        there = [r._replace(n_bytes=n) for r, n in zip(wanted, sizes, strict=True) if n]
        self._known.add(reversed(there))
        keys = {one.key for one in there}
        self._known.add_absent(ref for n in new if (ref := self._lookup.refs[n]).key not in keys)

    def _fits(self, numbers: Iterable[int]) -> bool:
        """Whether requests are left for all of these."""
        if not self._finder.backend.is_distant:
            return True
        n_new = sum(not self._is_known(n) for n in numbers) * len(self._classes)
        return self._n_requests + n_new <= MAX_REQUESTS

    def _range(self, number: int, compute_class: str) -> FolderRange:
        ref = self._lookup.refs[number]
        folder = self._names.folder(self._lookup.namespace, ref.parent, compute_class)
        return FolderRange(folder, self._names.stem(ref.n_tokens, ref.key))

    # What is known

    def _is_known(self, number: int) -> bool:
        """Whether a block need not be listed; one may be known by the exact name of its rows."""
        return self._known.is_listed(self._lookup.refs[number].key)

    def _shown(self, number: int) -> RemoteRecord | None:
        """A record that shows that a whole block is there. With windows each has one of these,
        perhaps without rows; else it may have a state only.
        """
        parts = [Part.DELTA] if self._lookup.has_rows else [Part.WINDOW, Part.STATE]
        found = (self._known.find(self._lookup.refs[number].key, part) for part in parts)
        return next(filter(None, found), None)

    def _has_state(self, number: int) -> bool:
        """Whether a checkpoint in a block is known, after which a token of the prompt is left."""
        ref = self._lookup.refs[number]
        is_last = number == len(self._lookup.refs) - 1
        most = ref.n_tokens - 1 if is_last else ref.n_tokens
        states = self._known.states([ref.parent])
        return any(s.n_tokens <= most and self._key(ref, s.n_tokens) == s.key for s in states)

    def _key(self, ref: BlockRef, n_tokens: int) -> BlockKey:
        return block_key(self._lookup.namespace, ref.parent, ref.tokens[: 4 * n_tokens])

    # What is presumed

    def _rows(self, number: int) -> RemoteRecord:
        ref = self._lookup.refs[number]
        return RemoteRecord(self._lookup.namespace, ref.parent, ref.key, Part.DELTA, ref.n_tokens)

    def _like(self, number: int, other: RemoteRecord) -> RemoteRecord:
        n_bytes, compute_class = other.n_bytes, other.compute_class
        return self._rows(number)._replace(n_bytes=n_bytes, compute_class=compute_class)

    def _presume_rows(self, numbers: Iterable[int], like: RemoteRecord) -> None:
        if self._lookup.has_rows:
            self._known.add([self._like(n, like) for n in numbers if self._shown(n) is None])

    def _presume_windows(self, windows: range) -> None:
        """Learn of window rows by two blocks: the last, and the first that is needed here. Those
        between are there: rows are kept for whole windows, put root first and deleted tail first.

        If the last has none, a window ends in the block before. If that is whole, so are those that
        the window began with.
        """
        if len(windows) < 2:
            return
        last = self._window(windows[-1])
        first, *others = windows[1 - self._lookup.n_window :] if last else windows[-2::-1]
        self._look([first])
        found = self._window(first)
        if found is None or found.w_rows > (last or found).w_rows:
            return
        if last is None and found.w_rows < BLOCK_TOKENS:
            return
        whole = [self._like(n, last or found) for n in others if not self._is_known(n)]
        self._known.add(one._replace(part=Part.WINDOW, w_rows=BLOCK_TOKENS) for one in whole)

    def _window(self, number: int) -> RemoteRecord | None:
        """A window record with rows."""
        found = self._known.find(self._lookup.refs[number].key, Part.WINDOW)
        return found if found and found.w_rows else None
