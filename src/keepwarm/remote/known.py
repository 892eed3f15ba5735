"""What a shared tier is known to hold: answers are remembered for a while, so that planning asks
nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockKey, Namespace, common_tokens
from keepwarm.records.record import Part
from keepwarm.remote.names import RecordPlace
from keepwarm.store.tier import BlockInfo, CheckpointRef, Child

PRESENT_S = 60.0
ABSENT_S = 5.0
MAX_KNOWN = 50_000  # answers; the oldest are forgotten
MAX_CHILDREN = 16  # besides those that a prompt continues


class KnownRecord(NamedTuple):
    """A record that is there, as far as is known."""

    place: RecordPlace
    tokens: bytes
    n_bytes: int
    w_rows: int = 0

    @property
    def is_window(self) -> bool:
        return self.place.part is Part.WINDOW


class WindowSize(NamedTuple):
    """What is equal for window records with equally many rows."""

    namespace: Namespace
    n_tokens: int
    n_bytes: int

    @classmethod
    def of(cls, record: KnownRecord) -> WindowSize:
        return cls(record.place.namespace, len(record.tokens) // 4, record.n_bytes)


class _Answer(NamedTuple):
    place: RecordPlace
    record: KnownRecord | None  # None: it is not there
    until: float


class _List(NamedTuple):
    """A list of what follows a block."""

    until: float  # it need not be listed again
    is_whole: bool


class KnownRecords:
    """For all threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[tuple[BlockKey, Part], _Answer] = {}
        self._children: dict[BlockKey, dict[BlockKey, None]] = {}
        self._rows: dict[WindowSize, int] = {}
        self._listed: dict[tuple[BlockKey, bytes], _List] = {}

    def add(self, records: Iterable[KnownRecord]) -> None:
        until = self._clock() + PRESENT_S
        with self._lock:
            for record in records:
                place = record.place
                self._note(_Answer(place, self._completed(record), until))
                self._children.setdefault(place.parent, {})[place.key] = None

    def learn_rows(self, window: KnownRecord) -> None:
        """A window record says how many rows it has, and so have others of its size."""
        with self._lock:
            if len(self._rows) >= MAX_KNOWN:
                self._rows.clear()
            self._rows[WindowSize.of(window)] = window.w_rows

    def rows_of(self, record: KnownRecord) -> int | None:
        """Rows of a window record, if they are known by its size; one that has others is a miss
        when it is read.
        """
        return self._rows.get(WindowSize.of(record)) if record.is_window else None

    def is_unread(self, record: KnownRecord, wants_rows: bool) -> bool:
        """Whether only its header tells the tokens, or the rows of a window."""
        is_open = wants_rows and record.is_window and not record.w_rows
        return not record.tokens or (is_open and self.rows_of(record) is None)

    def add_absent(self, places: Iterable[RecordPlace]) -> None:
        until = self._clock() + ABSENT_S
        with self._lock:
            for place in places:
                self._note(_Answer(place, None, until))

    def lose(self, key: BlockKey) -> None:
        """A block could not be read: it counts as absent, and so does all that follows it."""
        until = self._clock() + ABSENT_S
        with self._lock:
            for one in self._below(key):
                for part in Part:
                    if (known := self._answers.get((one, part))) is not None:
                        self._answers[one, part] = _Answer(known.place, None, until)

    def is_answered(self, place: RecordPlace) -> bool:
        answer = self._answers.get((place.key, place.part))
        return answer is not None and self._clock() < answer.until

    def find(self, key: BlockKey, part: Part) -> KnownRecord | None:
        answer = self._answers.get((key, part))
        return answer.record if answer and self._clock() < answer.until else None

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        found = {}
        for key in keys:
            records = [r for part in Part if (r := self.find(key, part)) and r.tokens]
            if records:
                found[key] = BlockInfo(
                    frozenset(record.place.part for record in records),
                    len(records[0].tokens) // 4,
                    max(record.w_rows for record in records),
                    sum(record.n_bytes for record in records),
                )
        return found

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        found = {key: self._tokens_of(key) for key in self._children_of(parent)}
        children = [Child(key, common_tokens(own, tokens)) for key, own in found.items() if own]
        near = sorted((c for c in children if c.n_common), key=lambda child: -child.n_common)
        whole = [child for child in near[MAX_CHILDREN:] if tokens.startswith(found[child.key])]
        return near[:MAX_CHILDREN] + whole

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return [
            CheckpointRef(key, parent, len(state.tokens) // 4)
            for parent in parents
            for key in self._children_of(parent)
            if (state := self.find(key, Part.STATE))
        ]

    def note_listed(self, parent: BlockKey, near: bytes, *, is_whole: bool) -> None:
        with self._lock:
            if len(self._listed) >= MAX_KNOWN:
                self._listed.clear()
            self._listed[parent, near] = _List(self._clock() + ABSENT_S, is_whole)

    def is_listed(self, parent: BlockKey, near: bytes) -> bool:
        return self._find_list(parent, near) is not None

    def is_told(self, parent: BlockKey, near: bytes) -> bool:
        """Whether a list has told all that follows there."""
        listed = self._find_list(parent, near)
        return listed is not None and listed.is_whole

    def _find_list(self, parent: BlockKey, near: bytes) -> _List | None:
        listed = self._listed.get((parent, near))
        return listed if listed and self._clock() < listed.until else None

    def _completed(self, record: KnownRecord) -> KnownRecord:
        """With what is known of its block, and of windows of its size."""
        if not record.tokens:
            record = record._replace(tokens=self._tokens_of(record.place.key))
        rows = record.w_rows or self.rows_of(record)
        return record._replace(w_rows=rows) if rows else record

    def _tokens_of(self, key: BlockKey) -> bytes:
        found = (record.tokens for part in Part if (record := self.find(key, part)))
        return next(filter(None, found), b"")

    def _children_of(self, parent: BlockKey) -> list[BlockKey]:
        with self._lock:
            return list(self._children.get(parent, ()))

    def _below(self, key: BlockKey) -> Iterator[BlockKey]:
        """Names that others wrote may lead back to where they began."""
        waiting, seen = [key], {key}
        while waiting:
            one = waiting.pop()
            yield one
            new = self._children.get(one, {}).keys() - seen
            seen |= new
            waiting += new

    def _note(self, answer: _Answer) -> None:
        place = answer.place
        self._answers.pop((place.key, place.part), None)  # the latest is the last
        self._answers[place.key, place.part] = answer
        while len(self._answers) > MAX_KNOWN:
            oldest = self._answers.pop(next(iter(self._answers))).place
            siblings = self._children.get(oldest.parent, {})
            siblings.pop(oldest.key, None)
            if not siblings:
                self._children.pop(oldest.parent, None)
