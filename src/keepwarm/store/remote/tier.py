"""A tier that machines share. Look-ups are answered from what is known and never call anybody;
`ask` does, on the caller's thread, and reads do, on reader threads.

An answer is never wrong because of it: every record is verified, and what cannot be had is a miss.
It is hardly later either: every call has a deadline, and after some failures nothing is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TypeVar

from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey
from keepwarm.store.blobs.backend import Backend, BlobError, Listed
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.buffers import decode_record
from keepwarm.store.memory import MemoryTier
from keepwarm.store.record import (
    Header,
    Part,
    ReadBuffer,
    Record,
    RecordView,
    check_identity,
    encode_record,
)
from keepwarm.store.remote.asking import Asker, Question
from keepwarm.store.remote.breaker import Breaker
from keepwarm.store.remote.flights import SingleFlight
from keepwarm.store.remote.known import KnownRecord, KnownRecords
from keepwarm.store.remote.names import RecordPlace, RemoteNames
from keepwarm.store.remote.speed import TierSpeed
from keepwarm.store.remote.trial import check_mark, try_backend
from keepwarm.store.seal import Seal
from keepwarm.store.tier import (
    BlockInfo,
    CheckpointRef,
    Child,
    PutResult,
    ReadFault,
    TierCounts,
    TierStats,
)

LOG = logging.getLogger(__name__)
T = TypeVar("T")
ASK_S = 0.05  # for a question
MIN_READ_S = 0.05
READERS = 3  # that share the rate
WRITE_S = 10.0  # nobody waits for a write
MAX_RECORD_BYTES = 1 << 30
MAX_BAD = 1024
CLOSE_S = 1.0  # a trial may be under way


class RemoteTier:
    """One place that machines share."""

    def __init__(
        self,
        backend: Backend,
        numerics: str,
        seal: Seal | None = None,
        memory: MemoryTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`numerics` is the class of machines that compute the same numbers. What is fetched goes
        into `memory`.
        """
        self._backend = backend
        self._names = RemoteNames(numerics)
        self._seal = seal
        self._memory = memory
        self.breaker = Breaker(clock)
        self.speed = TierSpeed()
        self._known = KnownRecords(clock)
        self._asker = Asker(backend, self._names, self._known, seal)
        self._counts = TierCounts()
        self._faults: dict[tuple[BlockKey, Part], ReadFault] = {}
        self._bad: Counter[RecordPlace] = Counter()
        self._questions: SingleFlight[None] = SingleFlight()
        self._fetches: SingleFlight[Record | None] = SingleFlight()
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._tried = threading.Event()
        self.refused = ""  # why it is not used at all
        self._thread = threading.Thread(target=self._watch, name="keepwarm-remote", daemon=True)
        self._thread.start()

    def wait_until_tried(self, timeout_s: float) -> bool:
        """Wait for the first trial; whether it may be used."""
        self._tried.wait(timeout_s)
        return not self.breaker.is_open

    # Look-ups: what is known

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        return self._known.have(keys) if self.breaker.is_trusted else {}

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self._known.children(parent, tokens)

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return self._known.states(parents)

    # Calls

    def ask(self, question: Question, deadline: CallDeadline) -> None:
        """Learn what is there of a prompt. Never fails."""

        def ask() -> None:
            with self.speed.asking():
                self._asker.ask(question, deadline)

        what = question.refs[-1].key, question.n_here
        self._questions.do(what, lambda: self._call("asked", ask))

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        record = self._fetches.do((key, part), lambda: self._fetch(key, part))
        self._counts.add(hits=1 if record else 0, misses=0 if record else 1)
        if record is None or tensors is None:
            return record
        return Record(record.header, tuple(t for t in record.tensors if t.name in tensors))

    def visit(
        self,
        key: BlockKey,
        part: Part,
        use: Callable[[RecordView], None],
        buffer: ReadBuffer,  # noqa: ARG002
    ) -> bool:
        record = self.read(key, part)
        if record is not None:
            use(RecordView(record.header, record.tensors))
        return record is not None

    def take_fault(self, key: BlockKey, part: Part) -> ReadFault | None:
        return self._faults.pop((key, part), None)

    def prefetch(self, key: BlockKey, part: Part) -> bool:  # noqa: ARG002
        """Nothing: readers read it once."""
        return False

    def put(self, record: Record) -> PutResult:
        """Store a record, unless it is there."""
        header, stored = record.header, self._call("written", lambda: self._put(record))
        self._counts.add(puts=int(stored is True), refused=int(stored is False))
        durable: Future[None] = Future()
        if stored is None:
            durable.set_exception(BlobError("the shared tier does not answer"))
        else:
            durable.set_result(None)
        if stored:
            self._learn(header, record.n_bytes)
        return PutResult(bool(stored), durable)

    def has(self, header: Header) -> bool | None:
        """Whether a record is there; None if that cannot be told now."""
        return self._call("asked", lambda: self._asker.has(header, CallDeadline(WRITE_S)))

    def knows(self, key: BlockKey, part: Part) -> bool:
        """Whether a record is known to be there."""
        return self._known.find(key, part) is not None

    def touch(self, keys: Collection[BlockKey]) -> None:
        """Nothing, because it may not wait: `note_use` tells the place."""

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Have the place evict the last of these blocks first, and other blocks before."""
        found = [
            r.place for key in reversed(keys) for part in Part if (r := self._known.find(key, part))
        ]
        names = [self._names.of(place) for place in found]
        if names:
            self._call("told of a use", lambda: self._backend.touch(names, WRITE_S))

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        """It fits no reader here, and perhaps others: it is a miss for a while."""
        LOG.warning("a shared record is not used: %s", why)
        if (record := self._known.find(key, part)) is not None:
            self._note_bad(record.place, record.tokens)

    def stats(self) -> TierStats:
        return self._counts.stats(0, 0, None)

    def close(self) -> None:
        self._closing.set()
        self._failed.set()
        self._backend.close()
        self._thread.join(CLOSE_S)

    # Reading

    def _fetch(self, key: BlockKey, part: Part) -> Record | None:
        known = self._known.find(key, part)
        if known is None or not self.breaker.is_trusted:
            return None
        if (record := self._just_fetched(known)) is not None:
            return record
        try:
            data = self._call("read", lambda: self._read(known))
            record = None if data is None else self._verified(data, known.place)
        except BadRecord as bad:
            LOG.warning("a shared record is bad: %s", bad)
            self._faults[key, part] = "damaged"
            self._counts.add(quarantined=1)
            self._note_bad(known.place, known.tokens)
            return None
        except (NewerFormat, PermissionError):
            self._faults[key, part] = "newer"
            self._counts.add(newer=1)
            record = None
        if record is None:
            self._known.lose(key)
            return None
        if self._memory is not None:
            self._memory.put(record)
        return record

    def _just_fetched(self, known: KnownRecord) -> Record | None:
        """What another thread has fetched since this one looked in memory."""
        if self._memory is None:
            return None
        key, part = known.place.key, known.place.part
        here = self._memory.have([key]).get(key)
        is_here = here is not None and part in here.parts and here.w_rows >= known.w_rows
        return self._memory.read(key, part) if is_here else None

    def _read(self, known: KnownRecord) -> memoryview | None:
        planned_s = self.speed.load_s(READERS * known.n_bytes)
        timeout_s = max(MIN_READ_S, 2 * planned_s)
        with self.speed.reading() as add:
            data = self._backend.read(self._names.of(known.place), _take, timeout_s)
            add(0 if data is None else len(data))
        return data

    def _verified(self, data: memoryview, place: RecordPlace) -> Record:
        record = decode_record(data, self._seal)
        check_identity(record.header, place.key, place.part)
        return record

    def _note_bad(self, place: RecordPlace, tokens: bytes) -> None:
        """Once may be an accident of the network; what is bad twice is deleted."""
        self._known.lose(place.key)
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad[place] += 1
        if self._bad[place] > 1:
            del self._bad[place]
            blob = Listed(self._names.of(place), self._order(tokens))
            self._call("deleted", lambda: self._backend.delete([blob], MIN_READ_S))

    # Writing

    def _put(self, record: Record) -> bool:
        header, deadline = record.header, CallDeadline(WRITE_S)
        name = self._names.of(_place(header))
        pieces = encode_record(record, self._seal)
        replace = header.part is Part.WINDOW  # one with more rows; the caller has looked
        return self._backend.put(
            name, pieces, deadline.left_s(), self._order(header.tokens), replace
        )

    def _order(self, tokens: bytes) -> bytes:
        """In a sealed tier no name tells tokens."""
        return b"" if self._seal else tokens

    def _learn(self, header: Header, n_bytes: int) -> None:
        self._known.add([KnownRecord(_place(header), header.tokens, n_bytes, header.w_rows)])

    # Failures

    def _call(self, what: str, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if the place does not do it, which is counted."""
        if self.breaker.is_open:
            return None
        try:
            result = work()
        except Exception as error:  # whatever it is, it is not worth a request
            is_own = not isinstance(error, BlobError)
            LOG.log(
                logging.ERROR if is_own else logging.INFO,
                "a shared tier could not be %s: %s",
                what,
                error,
                exc_info=is_own,
            )
            self._counts.add(errors=1)
            self.breaker.failed()
            if self.breaker.is_open:
                self._failed.set()
            return None
        self.breaker.succeeded()
        return result

    def _watch(self) -> None:
        """Try it at the start, and again whenever it was left alone for a while."""
        while not self._closing.is_set() and not self.refused:
            if not self.breaker.is_open:
                self._failed.wait()
                self._failed.clear()
            elif not self._closing.wait(self.breaker.retry_in_s):
                self._try()
                self._tried.set()

    def _try(self) -> None:
        try:
            check_mark(self._backend, self._seal)
            try_backend(self._backend, self.speed)
        except BlobError as error:
            LOG.info("a shared tier does not answer: %s", error)
            self.breaker.tried(False)
        except BadInput as error:
            LOG.warning("%s", error)
            self.refused = str(error)
        else:
            self.breaker.tried(True)


def _place(header: Header) -> RecordPlace:
    return RecordPlace(header.namespace, header.parent, header.key, header.part)


def _take(n_bytes: int) -> memoryview:
    if n_bytes > MAX_RECORD_BYTES:
        raise BlobError(f"a record of {n_bytes} bytes is too large")
    return memoryview(bytearray(n_bytes))
