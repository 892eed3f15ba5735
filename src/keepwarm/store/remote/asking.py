"""Asking a shared place what it has of a prompt, for the caller's thread and in a few round trips.

First how far the chain of whole blocks reaches, then what lies around its end: window rows, states,
and blocks that share a part of the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import takewhile
from typing import NamedTuple, TypeVar

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, BlockRef, Namespace, block_key, common_tokens, root
from keepwarm.store.blobs.backend import Backend, Listed
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.blobs.hands import Hands
from keepwarm.store.record import (
    MAX_HEADER_BYTES,
    Header,
    Part,
    check_identity,
    open_record,
)
from keepwarm.store.remote.known import KnownRecord, KnownRecords
from keepwarm.store.remote.names import MAC, RecordPlace, RemoteNames, parse_last
from keepwarm.store.remote.speed import TierSpeed
from keepwarm.store.remote.trust import MAC_BYTES
from keepwarm.store.seal import Seal

T = TypeVar("T")
HEADER_GUESS = 1 << 16  # bytes; most headers are shorter
MAX_HEADERS = 16  # that are read at once
MAX_REQUESTS = 12  # to a distant place, for a prompt whose layers all have rows
CONNECTING = 2  # round trips: the place may have closed the connection meanwhile
STATE_BLOCKS = 8  # last blocks of a chain in which states are looked for


class Question(NamedTuple):
    """A prompt, as far as it matters to a shared tier."""

    namespace: Namespace
    refs: Sequence[BlockRef]  # whole blocks, and the open one at the end
    n_whole: int
    n_here: int  # leading whole blocks that this machine has
    has_rows: bool  # some layer needs the rows of every block
    n_window: int  # last blocks whose window rows may be needed
    has_states: bool

    @property
    def n_round_trips(self) -> int:
        """The most that it takes, where places are not asked in batches."""
        n_unknown = self.n_whole - self.n_here
        search = 1 + max(0, n_unknown - 2).bit_length() if n_unknown else 0
        parts = 2 if self.n_window or self.has_states else 0  # bytes and headers
        return CONNECTING + search + parts + 2  # what follows, and headers

    def parent_at(self, number: int) -> BlockKey:
        return self.refs[number - 1].key if number else root(self.namespace)

    def chain(self) -> list[list[KnownRecord]]:
        """Records of each whole block, one of which shows that it is there."""
        parts = (Part.DELTA,) if self.has_rows else (Part.WINDOW, Part.STATE)
        return [[self.record(ref, part) for part in parts] for ref in self.refs[: self.n_whole]]

    def record(self, ref: BlockRef, part: Part) -> KnownRecord:
        return KnownRecord(RecordPlace(self.namespace, ref.parent, ref.key, part), ref.tokens, 0)


class QuestionCalls:
    """The calls of one question: within its time, counted and timed."""

    def __init__(
        self, backend: Backend, hands: Hands, speed: TierSpeed, deadline: CallDeadline
    ) -> None:
        self._backend, self._hands, self._speed = backend, hands, speed
        self.deadline = deadline
        self.n_requests = 0

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        if not names:
            return []
        self.n_requests += len(names)
        with self._speed.calling():
            return self._backend.sizes(names, self.deadline.left_s())

    def list_all(self, folders: Sequence[str], near: Sequence[bytes]) -> list[list[Listed]]:
        """What lies in each of some folders."""

        def of(folder: str, order: bytes) -> list[Listed]:
            return self._backend.list_names(folder, self.deadline.left_s(), order)

        return self._together([partial(of, *one) for one in zip(folders, near, strict=True)])

    def headers(
        self, names: Sequence[str], records: Sequence[KnownRecord], seal: Seal | None
    ) -> list[Header | None]:
        return self._together(
            [
                partial(read_header, self._backend, seal, *one, self.deadline)
                for one in zip(names, records, strict=True)
            ]
        )

    def _together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """At the same time, so that they take one round trip."""
        self.n_requests += len(calls)
        timed = [partial(self._timed, call) for call in calls]
        if len(timed) < 2:
            return [call() for call in timed]
        return self._hands.run_all(timed, self.deadline.left_s())

    def _timed(self, call: Callable[[], T]) -> T:
        with self._speed.calling():
            return call()


class Asker:
    """Asks, and has the answers remembered. Raises BlobError."""

    def __init__(
        self,
        backend: Backend,
        names: RemoteNames,
        known: KnownRecords,
        seal: Seal | None,
        speed: TierSpeed,
        *,
        has_macs: bool = False,
    ) -> None:
        """With `has_macs`, a record without one counts as absent."""
        self._backend = backend
        self._names = names
        self._known = known
        self._seal = seal
        self._speed = speed
        self._hands = Hands(MAX_HEADERS)
        self._has_macs = has_macs
        self.other_classes: Sequence[str] = ()  # in which records are looked for too

    def ask(self, question: Question, deadline: CallDeadline) -> None:
        calls = self._calls(deadline)
        n_there = self._reach(question, calls)
        self._ask_parts(question, n_there, calls)
        first = max(0, n_there - STATE_BLOCKS) if question.has_states else n_there
        self._ask_children(question, range(first, min(n_there + 1, len(question.refs))), calls)

    def has(self, header: Header, deadline: CallDeadline) -> bool:
        """Whether a record is there, in the class of this machine."""
        record = KnownRecord(RecordPlace.of(header), header.tokens, 0, header.w_rows)
        (n_bytes,) = self._sizes([record.place], self._calls(deadline))
        if n_bytes:
            self._known.add([record._replace(n_bytes=n_bytes)])
        return bool(n_bytes)

    def close(self) -> None:
        self._hands.close()

    def _calls(self, deadline: CallDeadline) -> QuestionCalls:
        return QuestionCalls(self._backend, self._hands, self._speed, deadline)

    # The chain

    def _reach(self, question: Question, calls: QuestionCalls) -> int:
        """How many leading whole blocks are there, or here."""
        chain, first = question.chain(), question.n_here
        if not self._backend.in_batches:
            return self._bisect(chain, first, calls)
        self._sized([record for block in chain[first:] for record in block], calls)
        there = [self._found(block) is not None for block in chain[first:]]
        if question.has_rows:
            return first + sum(takewhile(bool, there))
        return first + max((n for n, held in enumerate(there, 1) if held), default=0)

    def _bisect(
        self, chain: Sequence[Sequence[KnownRecord]], first: int, calls: QuestionCalls
    ) -> int:
        """The same in about log n questions: what is put root first has no gaps.

        Most prompts are new or there as a whole, so the first block and the last are asked for
        before those in the middle.
        """
        low, high = first, len(chain)  # all before `low` are there, `high` is not
        ends = [high - 1, first]
        self._sized([one for n in {*ends} if first <= n < high for one in chain[n]], calls)
        while low < high:
            middle = ends.pop() if ends else (low + high) // 2
            self._sized(chain[middle], calls)
            if found := self._found(chain[middle]):
                missing = (block[0] for block in chain[low:middle] if not self._found(block))
                self._known.add([one._replace(n_bytes=found.n_bytes) for one in missing])
                low = middle + 1
            else:
                high = middle
        return low

    def _found(self, block: Iterable[KnownRecord]) -> KnownRecord | None:
        found = (self._known.find(one.place.key, one.place.part) for one in block)
        return next(filter(None, found), None)

    def _sized(self, records: Sequence[KnownRecord], calls: QuestionCalls) -> list[KnownRecord]:
        """Those that are there, with their bytes; only what is not known is asked for."""
        new = [record for record in records if not self._known.is_answered(record.place)]
        places = [place for record in new for place in self._in_classes(record.place)]
        sizes = iter(self._sizes(places, calls))
        there, absent = [], []
        for record in new:
            found = [(place, next(sizes)) for place in self._in_classes(record.place)]
            held = next(((place, size) for place, size in found if size), None)
            if held is None:
                absent.append(record.place)
            else:
                there.append(record._replace(place=held[0], n_bytes=held[1] or 0))
        self._known.add_absent(absent)
        self._known.add(there)
        return there

    def _in_classes(self, place: RecordPlace) -> list[RecordPlace]:
        """The place in this machine's class first; one of another class is what it is."""
        others = () if place.numerics else self.other_classes
        return [place, *(place._replace(numerics=other) for other in others)]

    def _sizes(self, places: Sequence[RecordPlace], calls: QuestionCalls) -> list[int | None]:
        names = [self._names.of(place) for place in places]
        macs = [name + MAC for name in names] if self._has_macs else []
        sizes = calls.sizes([*names, *macs])
        if not macs:
            return sizes
        pairs = zip(sizes[: len(names)], sizes[len(names) :], strict=True)
        return [size if mac == MAC_BYTES else None for size, mac in pairs]

    # Around its end

    def _ask_parts(self, question: Question, n_there: int, calls: QuestionCalls) -> None:
        """Window rows and states of the last blocks."""
        wanted = []
        if question.n_window:
            last = question.refs[max(0, n_there - question.n_window) : n_there]
            wanted += [question.record(ref, Part.WINDOW) for ref in last]
        if question.has_states:
            last = question.refs[max(0, n_there - STATE_BLOCKS) : n_there]
            wanted += [question.record(ref, Part.STATE) for ref in last]
        self._sized(wanted, calls)
        self._read_headers((one for one in wanted if _is_window(one)), calls)

    def _ask_children(
        self, question: Question, numbers: Iterable[int], calls: QuestionCalls
    ) -> None:
        """Blocks that share a part of the prompt's blocks of these numbers."""
        pairs = [(question.parent_at(n), question.refs[n].tokens) for n in numbers]
        new = [pair for pair in pairs if not self._known.is_listed(*pair)]
        records = self._listed(question.namespace, new, calls)
        told = [one for one in records if one.n_bytes]
        self._known.add(told)
        there = told + self._sized([one for one in records if not one.n_bytes], calls)
        unread = (one for one in there if not one.tokens or _is_window(one))
        self._read_headers(unread, calls, self._n_headers(question, calls))
        for parent, near in new:
            self._known.note_listed(parent, near)

    def _listed(
        self,
        namespace: Namespace,
        pairs: Sequence[tuple[BlockKey, bytes]],
        calls: QuestionCalls,
    ) -> list[KnownRecord]:
        """Records that follow these blocks and are not known, with their bytes if the place tells
        them: a request for each of a thousand would be too much.
        """
        wanted = [(*pair, numerics) for numerics in ("", *self.other_classes) for pair in pairs]
        folders = [self._names.folder(namespace, parent, its) for parent, _, its in wanted]
        near = [b"" if self._seal else tokens for _, tokens, _ in wanted]
        return [
            record
            for one, listed in zip(wanted, calls.list_all(folders, near), strict=True)
            for record in self._children(listed, namespace, *one)
            if not self._known.is_answered(record.place)
        ]

    def _children(
        self,
        listed: Sequence[Listed],
        namespace: Namespace,
        parent: BlockKey,
        near: bytes,
        numerics: str,
    ) -> Iterator[KnownRecord]:
        """What is listed; tokens that a place has kept are used if the key is their hash."""
        sizes = {one.name: one.n_bytes for one in listed}
        for name, order, n_bytes, _ in listed:
            if (parsed := parse_last(name)) is None:
                continue
            if n_bytes and self._has_macs and sizes.get(name + MAC) != MAC_BYTES:
                continue
            place = RecordPlace(namespace, parent, *parsed, numerics)
            if order and block_key(namespace, parent, order) != place.key:
                continue
            if not order or common_tokens(order, near):
                yield KnownRecord(place, order, n_bytes)

    def _n_headers(self, question: Question, calls: QuestionCalls) -> int:
        """How many are read of what follows. With rows alone they spare a part of one block, which
        is not worth many requests to a distant place.
        """
        if not self._backend.is_distant or question.n_window or question.has_states:
            return MAX_HEADERS
        return min(MAX_HEADERS, max(0, MAX_REQUESTS - calls.n_requests))

    def _read_headers(
        self, records: Iterable[KnownRecord], calls: QuestionCalls, n_most: int = MAX_HEADERS
    ) -> None:
        """Learn from the records themselves what their names do not say."""
        found = (self._known.find(one.place.key, one.place.part) for one in records)
        unread = [one for one in found if one and not (one.tokens and one.w_rows)]
        names = [self._names.of(one.place) for one in unread[:n_most]]
        headers = calls.headers(names, unread[:n_most], self._seal)
        pairs = list(zip(unread, headers, strict=False))
        self._known.add_absent(one.place for one, header in pairs if header is None)
        self._known.add_absent(one.place for one in unread[n_most:])
        self._known.add(
            one._replace(tokens=header.tokens, w_rows=header.w_rows)
            for one, header in pairs
            if header is not None
        )


def read_header(
    backend: Backend, seal: Seal | None, name: str, record: KnownRecord, deadline: CallDeadline
) -> Header | None:
    """The verified header of a record; None if it has none that fits its place."""
    start, n_wanted = b"", HEADER_GUESS
    while len(start) < n_wanted:
        found = backend.read(name, _new, deadline.left_s(), n_bytes=n_wanted)
        if found is None or len(found) < 8 or (start and len(found) <= len(start)):
            return None
        start = bytes(found)
        n_wanted = 8 + min(struct.unpack_from("<Q", start)[0], MAX_HEADER_BYTES)
    try:
        header = open_record(BytesIO(start), record.n_bytes, seal).header
        check_identity(header, record.place.key, record.place.part)
    except (BadRecord, NewerFormat, PermissionError):
        return None
    return header if header.namespace == record.place.namespace else None


def _is_window(record: KnownRecord) -> bool:
    return record.place.part is Part.WINDOW


def _new(n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))
