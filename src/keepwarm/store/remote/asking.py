"""Asking a shared place what it has of a prompt, on the caller's thread and in a few round trips.

First how far the chain of whole blocks reaches, then what lies around its end: window rows, states,
and blocks that share a part of the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import takewhile
from typing import NamedTuple

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, BlockRef, Namespace, block_key, common_tokens, root
from keepwarm.store.blobs.backend import Backend, Listed
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.record import (
    MAX_HEADER_BYTES,
    Header,
    Part,
    check_identity,
    open_record,
)
from keepwarm.store.remote.known import KnownRecord, KnownRecords
from keepwarm.store.remote.names import RecordPlace, RemoteNames, parse_last
from keepwarm.store.seal import Seal

HEADER_GUESS = 1 << 16  # bytes; most headers are shorter
MAX_HEADERS = 16  # that are read for one question
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

    def parent_at(self, number: int) -> BlockKey:
        return self.refs[number - 1].key if number else root(self.namespace)

    def chain(self) -> list[list[KnownRecord]]:
        """Records of each whole block, one of which shows that it is there."""
        parts = (Part.DELTA,) if self.has_rows else (Part.WINDOW, Part.STATE)
        return [[self.record(ref, part) for part in parts] for ref in self.refs[: self.n_whole]]

    def record(self, ref: BlockRef, part: Part) -> KnownRecord:
        return KnownRecord(RecordPlace(self.namespace, ref.parent, ref.key, part), ref.tokens, 0)


class Asker:
    """Asks, and has the answers remembered. Raises BlobError."""

    def __init__(
        self, backend: Backend, names: RemoteNames, known: KnownRecords, seal: Seal | None
    ) -> None:
        self._backend = backend
        self._names = names
        self._known = known
        self._seal = seal

    def ask(self, question: Question, deadline: CallDeadline) -> None:
        n_there = self._reach(question, deadline)
        self._ask_parts(question, n_there, deadline)
        first = max(0, n_there - STATE_BLOCKS) if question.has_states else n_there
        for number in range(first, min(n_there + 1, len(question.refs))):
            self._ask_children(question, number, deadline)

    def has(self, header: Header, deadline: CallDeadline) -> bool:
        """Whether a record is there."""
        place = RecordPlace(header.namespace, header.parent, header.key, header.part)
        record = KnownRecord(place, header.tokens, 0, header.w_rows)
        self._sized([record], deadline)
        return self._found([record]) is not None

    # The chain

    def _reach(self, question: Question, deadline: CallDeadline) -> int:
        """How many leading whole blocks are there, or here."""
        chain, first = question.chain(), question.n_here
        if not self._backend.in_batches:
            return self._gallop(chain, first, deadline)
        self._sized([record for block in chain[first:] for record in block], deadline)
        there = [self._found(block) is not None for block in chain[first:]]
        if question.has_rows:
            return first + sum(takewhile(bool, there))
        return first + max((n for n, held in enumerate(there, 1) if held), default=0)

    def _gallop(
        self, chain: Sequence[Sequence[KnownRecord]], first: int, deadline: CallDeadline
    ) -> int:
        """The same in about log n questions: what is put root first has no gaps."""
        low, high, step = first, len(chain), 1  # all before `low` are there, `high` is not
        while low < high:
            middle = min(low + step - 1, high - 1) if step else (low + high) // 2
            self._sized(chain[middle], deadline)
            if found := self._found(chain[middle]):
                missing = (block[0] for block in chain[low:middle] if not self._found(block))
                self._known.add([one._replace(n_bytes=found.n_bytes) for one in missing])
                low, step = middle + 1, 2 * step
            else:
                high, step = middle, 0
        return low

    def _found(self, block: Iterable[KnownRecord]) -> KnownRecord | None:
        found = (self._known.find(one.place.key, one.place.part) for one in block)
        return next(filter(None, found), None)

    def _sized(self, records: Sequence[KnownRecord], deadline: CallDeadline) -> list[KnownRecord]:
        """Those that are there, with their bytes; only what is not known is asked for."""
        new = [record for record in records if not self._known.is_answered(record.place)]
        names = [self._names.of(record.place) for record in new]
        sizes = self._backend.sizes(names, deadline.left_s()) if names else []
        answers = list(zip(new, sizes, strict=True))
        there = [record._replace(n_bytes=size) for record, size in answers if size]
        self._known.add_absent(record.place for record, size in answers if not size)
        self._known.add(there)
        return there

    # Around its end

    def _ask_parts(self, question: Question, n_there: int, deadline: CallDeadline) -> None:
        """Window rows and states of the last blocks."""
        wanted = []
        if question.n_window:
            last = question.refs[max(0, n_there - question.n_window) : n_there]
            wanted += [question.record(ref, Part.WINDOW) for ref in last]
        if question.has_states:
            last = question.refs[max(0, n_there - STATE_BLOCKS) : n_there]
            wanted += [question.record(ref, Part.STATE) for ref in last]
        if not question.has_rows:  # their windows were sized with the chain
            self._read_headers((one for one in wanted if _is_window(one)), deadline)
        there = self._sized(wanted, deadline)
        self._read_headers((one for one in there if _is_window(one)), deadline)

    def _ask_children(self, question: Question, number: int, deadline: CallDeadline) -> None:
        """Blocks that share a part of the prompt's block of this number."""
        parent, near = question.parent_at(number), question.refs[number].tokens
        if self._known.is_listed(parent, near):
            return
        folder = self._names.folder(question.namespace, parent)
        order = b"" if self._seal else near
        listed = self._backend.list_names(folder, deadline.left_s(), order)
        records = list(_children(listed, question.namespace, parent, near))
        there = self._sized(records, deadline)
        unread = (one for one in there if not one.tokens or _is_window(one))
        self._read_headers(unread, deadline)
        self._known.note_listed(parent, near)

    def _read_headers(self, records: Iterable[KnownRecord], deadline: CallDeadline) -> None:
        """Learn from the records themselves what their names do not say."""
        for number, record in enumerate(records):
            known = self._known.find(record.place.key, record.place.part)
            if known is None or (known.tokens and known.w_rows):
                continue
            header = self._header(known, deadline) if number < MAX_HEADERS else None
            if header is None:
                self._known.add_absent([record.place])
            else:
                self._known.add([known._replace(tokens=header.tokens, w_rows=header.w_rows)])

    def _header(self, record: KnownRecord, deadline: CallDeadline) -> Header | None:
        """The verified header of a record; None if it has none that fits its name."""
        name, start = self._names.of(record.place), b""
        n_wanted = HEADER_GUESS
        while len(start) < n_wanted:
            found = self._backend.read(name, _new, deadline.left_s(), n_bytes=n_wanted)
            if found is None or len(found) < 8 or (start and len(found) <= len(start)):
                return None
            start = bytes(found)
            n_wanted = 8 + min(struct.unpack_from("<Q", start)[0], MAX_HEADER_BYTES)
        try:
            header = open_record(BytesIO(start), record.n_bytes, self._seal).header
            check_identity(header, record.place.key, record.place.part)
        except (BadRecord, NewerFormat, PermissionError):
            return None
        return header if header.namespace == record.place.namespace else None


def _is_window(record: KnownRecord) -> bool:
    return record.place.part is Part.WINDOW


def _children(
    listed: Iterable[Listed], namespace: Namespace, parent: BlockKey, near: bytes
) -> Iterator[KnownRecord]:
    """What is listed; tokens that a place has kept are used if the key is their hash."""
    for name, order in listed:
        if (parsed := parse_last(name)) is None:
            continue
        place = RecordPlace(namespace, parent, *parsed)
        if order and block_key(namespace, parent, order) != place.key:
            continue
        if not order or common_tokens(order, near):
            yield KnownRecord(place, order, 0)


def _new(n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))
