"""A question to a shared place: the records of a prompt that matter, and the calls for them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import partial
from io import BytesIO

from keepwarm.concurrency import AbandonableExecutor, CallDeadline
from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, root
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
    MAX_HEADER_BYTES,
    Part,
    VerifiedHeader,
    check_identity,
    open_record,
)
from keepwarm.remote.backend import Backend, Looked, Near, new_memory
from keepwarm.remote.compression import find_start
from keepwarm.remote.known import KnownRecord, KnownRecords, WindowSize
from keepwarm.remote.names import RecordPlace, RemoteNames
from keepwarm.remote.speed import TierSpeed
from keepwarm.store.tier import RemoteLookup

HEADER_GUESS = 1 << 16  # bytes; most headers are shorter
CONNECTING = 2  # round trips: the place may have closed the connection meanwhile
STATE_BLOCKS = 8  # last blocks of a chain in which states are looked for


class Question(RemoteLookup):
    """What a look-up asks a backend for."""

    @property
    def n_round_trips(self) -> int:
        """The most that it takes, where places are not asked in batches."""
        n_unknown = self.n_whole - self.n_here
        search = 1 + max(0, n_unknown - 2).bit_length() if n_unknown else 0
        around = 2 if self.has_states else 1
        return CONNECTING + search + around + 1  # headers

    @property
    def has_points(self) -> bool:
        """Whether not every token can be restored: lists tell which."""
        return not self.has_rows or self.n_window > 0 or self.has_states

    def parent_at(self, number: int) -> BlockKey:
        return self.refs[number - 1].key if number else root(self.namespace)

    def chain(self) -> list[list[KnownRecord]]:
        """Records of each whole block, one of which shows that it is there. With windows each has
        one of these, perhaps without rows; else it may have a state only.
        """
        parts = [Part.DELTA] if self.has_rows else [Part.WINDOW]
        if not self.has_rows and not self.n_window:
            parts.append(Part.STATE)
        return [[self.record(ref, part) for part in parts] for ref in self.refs[: self.n_whole]]

    def windows(self, n_there: int) -> list[KnownRecord]:
        """Window rows that may be needed where the chain ends after so many blocks."""
        last = self.refs[max(0, n_there - self.n_window) : n_there] if self.n_window else ()
        return [self.record(ref, Part.WINDOW) for ref in last]

    def states(self, n_there: int) -> list[KnownRecord]:
        last = self.refs[max(0, n_there - STATE_BLOCKS) : n_there] if self.has_states else ()
        return [self.record(ref, Part.STATE) for ref in last]

    def forks(self, n_there: int, n_back: int = STATE_BLOCKS) -> range:
        """Numbers of blocks beside which others may be of use: the next one, and with states those
        before it.
        """
        n_back = n_back if self.has_states else 0
        return range(max(0, n_there - n_back), min(n_there + 1, len(self.refs)))

    def record(self, ref: BlockRef, part: Part) -> KnownRecord:
        return KnownRecord(RecordPlace(self.namespace, ref.parent, ref.key, part), ref.tokens, 0)


class QuestionCalls:
    """The calls of one question: within its time, counted and timed."""

    def __init__(
        self, backend: Backend, hands: AbandonableExecutor, speed: TierSpeed, deadline: CallDeadline
    ) -> None:
        self._backend, self._hands, self._speed = backend, hands, speed
        self.deadline = deadline
        self.n_requests = 0
        self.listed: list[KnownRecord] = []

    def look(self, names: Sequence[str], places: Sequence[Near]) -> Looked:
        if not names and not places:
            return Looked([], [])
        self.n_requests += len(names) + len(places)
        with self._speed.calling():
            return self._backend.look(names, places, self.deadline.left_s())

    def headers(
        self, names: Sequence[str], records: Sequence[KnownRecord], cipher: Cipher | None
    ) -> list[VerifiedHeader | None]:
        """At the same time, so that they take one round trip."""

        def of(name: str, record: KnownRecord) -> VerifiedHeader | None:
            with self._speed.calling():
                return read_header(self._backend, cipher, name, record, self.deadline)

        self.n_requests += len(names)
        calls = [partial(of, *one) for one in zip(names, records, strict=True)]
        if len(calls) < 2:
            return [call() for call in calls]
        return self._hands.run_all(calls, self.deadline.left_s())


class Headers:
    """Learns from records what neither names nor lists say: tokens, and rows of windows."""

    def __init__(self, names: RemoteNames, known: KnownRecords, cipher: Cipher | None) -> None:
        self._names, self._known, self._seal = names, known, cipher

    def read(
        self,
        question: Question,
        records: Iterable[KnownRecord],
        n_most: int,
        calls: QuestionCalls,
    ) -> list[KnownRecord]:
        """Read so many: one for all parts of a block, and one for windows of equal size, which have
        equally many rows. First of what the prompt continues. Returns those that are left.
        """
        unread = self._unread(question, records)
        while unread and n_most > 0:
            first: dict[WindowSize | BlockKey, KnownRecord] = {}
            for one in sorted(unread, key=lambda one: (not one.tokens, not one.is_window)):
                first.setdefault(WindowSize.of(one) if one.tokens else one.place.key, one)
            chosen = list(first.values())[:n_most]
            names = [self._names.of(one.place) for one in chosen]
            for one, opened in zip(chosen, calls.headers(names, chosen, self._seal), strict=True):
                self._note(one, opened)
            left = [one for one in unread if one not in chosen]
            self._known.add(left)  # with what is known now
            unread, n_most = self._unread(question, left), n_most - len(chosen)
        return unread

    def presume(
        self, question: Question, windows: Sequence[KnownRecord], calls: QuestionCalls
    ) -> None:
        """Learn of window rows by two blocks: whether the last has any is known, and of the first
        that is needed here a header is read. Those between are there: rows are kept for whole
        windows, put root first and deleted tail first.

        If the last has none, a window ends in the block before. If that is whole, so are those
        that the window began with.
        """
        last = self._with_rows(windows[-1])
        first, *others = windows[1 - question.n_window :] if last else windows[-2::-1]
        told = self._told(_in_class_of(last, first) if last else first, calls)
        if told is None or not told.w_rows:
            return
        if last and last.n_bytes >= told.n_bytes:  # it has as many rows, or more
            self._add_whole(others, last)
        elif last is None and told.w_rows == BLOCK_TOKENS:
            self._add_whole(others, told)

    def _unread(self, question: Question, records: Iterable[KnownRecord]) -> list[KnownRecord]:
        found = (self._known.find(one.place.key, one.place.part) for one in records)
        return [one for one in found if one and self._known.is_unread(one, question.n_window > 0)]

    def _note(self, record: KnownRecord, opened: VerifiedHeader | None) -> None:
        if opened is None:
            self._known.add_absent([record.place])
            return
        n_bytes = record.n_bytes or opened.n_bytes
        told = KnownRecord(record.place, opened.header.tokens, n_bytes, opened.header.w_rows)
        if told.is_window:
            self._known.learn_rows(told)
        self._known.add([told])

    def _with_rows(self, window: KnownRecord) -> KnownRecord | None:
        """A window record that is there, unless it is known to have no rows."""
        found = self._known.find(window.place.key, window.place.part)
        return found if found and self._known.rows_of(found) != 0 else None

    def _told(self, window: KnownRecord, calls: QuestionCalls) -> KnownRecord | None:
        """A window record whose rows are known, after a read if need be."""
        place = window.place
        found = self._known.find(place.key, place.part)
        is_known = found is not None and not self._known.is_unread(found, True)
        if not is_known and (found or not self._known.is_answered(place)):
            one = (found or window)._replace(n_bytes=0)  # which may be a guess
            (opened,) = calls.headers([self._names.of(one.place)], [one], self._seal)
            self._note(one, opened)
        return self._known.find(place.key, place.part)

    def _add_whole(self, windows: Iterable[KnownRecord], like: KnownRecord) -> None:
        """Window records with all rows, but for what is known of them."""
        for one in windows:
            found = self._known.find(one.place.key, one.place.part)
            if found is None and not self._known.is_answered(one.place):
                found = _in_class_of(like, one)._replace(n_bytes=like.n_bytes)
            if found is not None:
                is_unread = self._known.is_unread(found, True)
                self._known.add([found._replace(w_rows=BLOCK_TOKENS) if is_unread else found])


def _in_class_of(other: KnownRecord, one: KnownRecord) -> KnownRecord:
    return one._replace(place=one.place._replace(numerics=other.place.numerics))


def read_header(
    backend: Backend, cipher: Cipher | None, name: str, record: KnownRecord, deadline: CallDeadline
) -> VerifiedHeader | None:
    """The header of a record, of which the bytes may be unknown; None if it has none that fits its
    place.
    """
    n_read, n_wanted = 0, HEADER_GUESS
    try:
        while n_read < n_wanted:
            found = backend.read(name, new_memory, deadline.left_s(), n_bytes=n_wanted)
            if found is None or len(found) <= n_read:
                return None
            start, n_read = find_start(found, record.n_bytes), len(found)
            n_header = 8 + min(struct.unpack_from("<Q", start.data)[0], MAX_HEADER_BYTES)
            n_wanted = n_read - len(start.data) + n_header
        opened = open_record(BytesIO(start.data), start.n_bytes or None, cipher)
        check_identity(opened.header, record.place.key, record.place.part)
    except (BadRecord, NewerFormat, PermissionError):
        return None
    return opened if opened.header.namespace == record.place.namespace else None
