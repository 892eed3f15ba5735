"""A question to a shared place: the records of a prompt that matter, and the calls for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import NamedTuple

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, BlockRef, Namespace, root
from keepwarm.store.blobs.backend import Backend, Looked, Near, new_memory
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.blobs.hands import Hands
from keepwarm.store.buffers import find_start
from keepwarm.store.record import MAX_HEADER_BYTES, Header, Part, check_identity, open_record
from keepwarm.store.remote.known import KnownRecord
from keepwarm.store.remote.names import RecordPlace
from keepwarm.store.remote.speed import TierSpeed
from keepwarm.store.seal import Seal

HEADER_GUESS = 1 << 16  # bytes; most headers are shorter
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
        around = 2 if self.has_states else 1
        return CONNECTING + search + around + 1  # headers

    def parent_at(self, number: int) -> BlockKey:
        return self.refs[number - 1].key if number else root(self.namespace)

    def chain(self) -> list[list[KnownRecord]]:
        """Records of each whole block, one of which shows that it is there."""
        parts = (Part.DELTA,) if self.has_rows else (Part.WINDOW, Part.STATE)
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
        self, backend: Backend, hands: Hands, speed: TierSpeed, deadline: CallDeadline
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
        self, names: Sequence[str], records: Sequence[KnownRecord], seal: Seal | None
    ) -> list[Header | None]:
        """At the same time, so that they take one round trip."""

        def of(name: str, record: KnownRecord) -> Header | None:
            with self._speed.calling():
                return read_header(self._backend, seal, name, record, self.deadline)

        self.n_requests += len(names)
        calls = [partial(of, *one) for one in zip(names, records, strict=True)]
        if len(calls) < 2:
            return [call() for call in calls]
        return self._hands.run_all(calls, self.deadline.left_s())


def read_header(
    backend: Backend, seal: Seal | None, name: str, record: KnownRecord, deadline: CallDeadline
) -> Header | None:
    """The verified header of a record; None if it has none that fits its place."""
    n_read, n_wanted = 0, HEADER_GUESS
    try:
        while n_read < n_wanted:
            found = backend.read(name, new_memory, deadline.left_s(), n_bytes=n_wanted)
            if found is None or len(found) <= n_read:
                return None
            start, n_read = find_start(found, record.n_bytes), len(found)
            n_header = 8 + min(struct.unpack_from("<Q", start.data)[0], MAX_HEADER_BYTES)
            n_wanted = n_read - len(start.data) + n_header
        header = open_record(BytesIO(start.data), start.n_bytes, seal).header
        check_identity(header, record.place.key, record.place.part)
    except (BadRecord, NewerFormat, PermissionError):
        return None
    return header if header.namespace == record.place.namespace else None
