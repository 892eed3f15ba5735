"""A tier that machines share. Look-ups are answered from what is known and never call anybody;
`ask` does, on the caller's thread, and reads do, on reader threads.

An answer is never wrong because of it: every record is verified, and what cannot be had is a miss.
It is hardly later either: every call has a deadline, and after some failures nothing is called.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

from keepwarm.concurrency import CallDeadline, CallError, SingleFlight
from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
    Header,
    Part,
    ReadBuffer,
    Record,
    RecordView,
    encode_record,
)
from keepwarm.remote.asking import Asker
from keepwarm.remote.backend import Backend, Listed
from keepwarm.remote.breaker import Breaker
from keepwarm.remote.compression import code_record, count_bytes
from keepwarm.remote.erasing import erase_blocks
from keepwarm.remote.guard import Guard
from keepwarm.remote.handshake import check_mark
from keepwarm.remote.janitor import Janitor, JanitorThread, PlaceLimits
from keepwarm.remote.known import KnownRecord, KnownRecords
from keepwarm.remote.names import CLASSES, MAC, RecordPlace, RemoteNames, list_classes
from keepwarm.remote.question import Question
from keepwarm.remote.speed import TierSpeed
from keepwarm.remote.trial import try_backend
from keepwarm.remote.trust import FleetKey, VerifiedRecords
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import (
    BlockInfo,
    CheckpointRef,
    Child,
    NamedBlock,
    PutResult,
    ReadFault,
    RemoteLookup,
    TierCounts,
    TierStats,
    use_whole,
)

LOG = logging.getLogger(__name__)
ASK_S = 0.05  # for a question
MAX_ASK_SHARE = 0.1  # of the time to compute, for a question to a distant store
MIN_READ_S = 0.05
READERS = 3  # that share the rate
WRITE_S = 10.0  # nobody waits for a write
MAX_BAD = 1024
MAX_CLASSES = 16  # others, that are looked in
REFRESH_S = 60.0  # how often other classes are listed, and what seemed slow is measured again


class RemoteTier:
    """One place that machines share."""

    def __init__(
        self,
        backend: Backend,
        numerics: str,
        cipher: Cipher | None = None,
        memory: MemoryTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        mark: bytes = b"",
        fleet_key: FleetKey | None = None,
        any_numerics: bool = False,
    ) -> None:
        """`numerics` is the class of machines that compute the same numbers; with `any_numerics`
        those of others are read too. What is fetched goes into `memory`. `mark` is that of the
        local store, if it is sealed. Sealed records need no fleet key.
        """
        self.backend = backend
        self._numerics = numerics
        self._clock = clock
        self._any_numerics = any_numerics
        self._names = RemoteNames(numerics)
        self._seal = cipher
        self._mark = mark
        self._fleet_key = fleet_key if cipher is None else None
        self._records = VerifiedRecords(backend, self._names, cipher, self._fleet_key)
        self._memory = memory
        self.breaker = Breaker(clock)
        self.speed = TierSpeed(clock)
        self._known = KnownRecords(clock)
        has_macs = self._fleet_key is not None
        self._asker = Asker(
            backend, self._names, self._known, cipher, self.speed, has_macs=has_macs
        )
        self._seemed_slow = False  # since it was last measured
        self._counts = TierCounts()
        self._faults: dict[tuple[BlockKey, Part], ReadFault] = {}
        self._bad: Counter[RecordPlace] = Counter()
        self._questions: SingleFlight[None] = SingleFlight()
        self._fetches: SingleFlight[Record | None] = SingleFlight()
        self._guard = Guard(self._try, self.breaker, self._counts, self._refresh, REFRESH_S)
        self._guard.start()

    @property
    def refused(self) -> str:
        """Why it is not used at all."""
        return self._guard.refused

    def wait_until_tried(self, timeout_s: float) -> bool:
        """Wait for the first trial; whether it may be used."""
        return self._guard.wait_until_tried(timeout_s)

    @property
    def is_open(self) -> bool:
        return self.breaker.is_open

    @property
    def is_trusted(self) -> bool:
        return self.breaker.is_trusted

    # Look-ups: what is known

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        return self._known.have(keys) if self.breaker.is_trusted else {}

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self._known.children(parent, tokens)

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return self._known.states(parents)

    # Calls

    def ask(self, lookup: RemoteLookup, computing_s: float) -> bool:
        """Learn what is there of a prompt, if that is worth the time that computing it takes.

        False if it was late: no request waits for two tiers.
        """
        question = Question(*lookup)
        seconds = self._ask_s(question, computing_s)
        if seconds is None:
            self.declined()
            return True
        deadline = CallDeadline(seconds, self._clock)
        self.look_up(question, deadline)
        return not deadline.is_over

    def look_up(self, question: Question, deadline: CallDeadline) -> None:
        """Learn what is there of a prompt. Never fails."""

        def ask() -> None:
            self._asker.ask(question, deadline)

        what = question.refs[-1].key, question.n_here
        self._questions.do(what, lambda: self._guard.call("asked", ask), deadline)

    def _ask_s(self, question: Question, computing_s: float) -> float | None:
        """Seconds that a question may take; None if it is not worth asking."""
        if not self.backend.is_distant:
            return ASK_S
        return lookup_s(question.n_round_trips * self.speed.call_s, computing_s)

    def load_s(self, n_bytes: int) -> float:
        return self.speed.load_s(n_bytes)

    def declined(self) -> None:
        """It seemed too slow to be asked, or loaded from; soon it is measured again."""
        self.speed.declined()
        self._seemed_slow = True

    def read(
        self,
        key: BlockKey,
        part: Part,
        tensors: Collection[str] | None = None,
        deadline: CallDeadline | None = None,
    ) -> Record | None:
        fetch = partial(self._fetch, key, part, deadline)
        record = self._fetches.do((key, part), fetch, deadline)
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
        deadline: CallDeadline | None = None,
    ) -> bool:
        return use_whole(self.read(key, part, deadline=deadline), use)

    def take_fault(self, key: BlockKey, part: Part) -> ReadFault | None:
        return self._faults.pop((key, part), None)

    def prefetch(self, key: BlockKey, part: Part) -> bool:  # noqa: ARG002
        """Nothing: readers read it once."""
        return False

    def put(self, record: Record) -> PutResult:
        """Store a record, unless it is there."""
        header = record.header
        stored, n_saved = self._guard.call("written", lambda: self._put(record)) or (None, 0)
        self._counts.add(puts=int(stored is True), refused=int(stored is False))
        durable: Future[None] = Future()
        if stored is None:
            durable.set_exception(CallError("the shared tier does not answer"))
        else:
            durable.set_result(None)
        if stored:
            self._learn(header, record.n_bytes - n_saved)
        return PutResult(bool(stored), durable, n_saved)

    def has(self, header: Header) -> bool | None:
        """Whether a record is there; None if that cannot be told now."""
        return self._guard.call("asked", lambda: self._asker.has(header, CallDeadline(WRITE_S)))

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
        names = [name for place in found for name in self._blobs_of(place)]
        if names:
            self._guard.call("told of a use", lambda: self.backend.touch(names, WRITE_S))

    def erase(
        self,
        namespaces: Sequence[Namespace],
        blocks: Sequence[NamedBlock],
        keep: Collection[BlockKey],
    ) -> bool:
        """Delete blocks for good, in every class; False if that must be tried again."""

        def erase() -> bool:
            erase_blocks(self.backend, self._seal, namespaces, blocks, keep)
            return True

        for block in blocks:
            self._known.lose(block.key)
        return self._guard.call("cleared", erase) or False

    def keep_within(self, limits: PlaceLimits) -> JanitorThread | None:
        """Have a place kept within limits that does not evict by itself."""
        if self.backend.in_batches or not any(limits):
            return None
        sweep = Janitor(self.backend, limits).sweep
        return JanitorThread(lambda: self._guard.call("swept", sweep))

    def withdraw(self, header: Header) -> None:
        """Delete a record that was just put."""
        place = RecordPlace.of(header)
        self._known.lose(place.key)
        self._delete(place, header.tokens)

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        """It fits no reader here, and perhaps others, so it stays: it is a miss for a while."""
        if self._known.find(key, part) is not None:
            LOG.warning("a shared record is not used: %s", why)
            self._known.lose(key)

    def stats(self) -> TierStats:
        return self._counts.stats(0, 0, None)

    def close(self) -> None:
        self.backend.close()
        self._asker.close()
        self._guard.close()

    # Reading

    def _fetch(self, key: BlockKey, part: Part, deadline: CallDeadline | None) -> Record | None:
        known = self._known.find(key, part)
        if known is None or not self.breaker.is_trusted:
            return None
        if deadline is not None and deadline.is_over:  # the load is left, and the tier is not bad
            return None
        if (record := self._just_fetched(known)) is not None:
            return record
        try:
            record = self._guard.call("read", lambda: self._read(known, deadline))
        except BadRecord as bad:
            LOG.warning("a shared record is bad: %s", bad)
            self._faults[key, part] = "damaged"
            self._counts.add(quarantined=1)
            self._note_bad(known.place, known.tokens)
            return None
        except NewerFormat:
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

    def _read(self, known: KnownRecord, load: CallDeadline | None) -> Record | None:
        """Within the time of the whole load: one record may be slow if others are fast. One that is
        read by itself has twice the time that is planned for it.
        """
        planned_s = self.speed.load_s(READERS * known.n_bytes)
        deadline = load or CallDeadline(max(MIN_READ_S, 2 * planned_s))
        with self.speed.reading(known.n_bytes) as add:
            found = self._records.fetch(known.place, deadline)
            add(found.n_bytes if found else 0)
        if not found and self.backend.in_batches:  # a list that outlived it would name it again
            self.backend.delete(self._as_listed(known.place, known.tokens), MIN_READ_S)
        return found and found.record

    def _note_bad(self, place: RecordPlace, tokens: bytes) -> None:
        """Once may be an accident of the network; what is bad twice is deleted."""
        self._known.lose(place.key)
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad[place] += 1
        if self._bad[place] > 1:
            del self._bad[place]
            self._delete(place, tokens)

    def _delete(self, place: RecordPlace, tokens: bytes) -> None:
        blobs = self._as_listed(place, tokens)
        self._guard.call("cleared", lambda: self.backend.delete(blobs, WRITE_S))

    def _as_listed(self, place: RecordPlace, tokens: bytes) -> list[Listed]:
        return [Listed(name, self._order(tokens)) for name in self._blobs_of(place)]

    def _blobs_of(self, place: RecordPlace) -> list[str]:
        """Its name, and that of its MAC."""
        name = self._names.of(place)
        return [name] if self._fleet_key is None else [name, name + MAC]

    # Writing

    def _put(self, record: Record) -> tuple[bool, int]:
        """Whether it is stored, and how many bytes a code saves; what is sealed has no likeness."""
        header = record.header
        name = self._names.of(RecordPlace.of(header))
        plain = encode_record(record, self._seal)
        pieces = plain if self._seal else code_record(record, plain, self.speed.line_bytes_per_s)
        stored = self._send(name, pieces, header)
        return stored, count_bytes(plain) - count_bytes(pieces)

    def _send(self, name: str, pieces: Sequence[bytes | memoryview], header: Header) -> bool:
        deadline = CallDeadline(WRITE_S)
        order = self._order(header.tokens)
        replace = header.part is Part.WINDOW  # one with more rows; the caller has looked
        if self._fleet_key is not None:  # one that is there is nobody's of the fleet
            mac, replace = self._fleet_key.mac(name, pieces), True
            if not self.backend.put(name + MAC, [mac], deadline.left_s(), order, replace):
                return False
        with self.speed.putting(count_bytes(pieces)):
            return self.backend.put(name, pieces, deadline.left_s(), order, replace)

    def _order(self, tokens: bytes) -> bytes:
        """In a sealed tier no name tells tokens."""
        return b"" if self._seal else tokens

    def _learn(self, header: Header, n_bytes: int) -> None:
        self._known.add(
            [KnownRecord(RecordPlace.of(header), header.tokens, n_bytes, header.w_rows)]
        )

    # Trials

    def _try(self) -> None:
        self.speed.begin_anew()
        try_backend(self.backend, self.speed)  # first: a mark is read in part
        check_mark(self.backend, self._seal, self._mark)
        self._list_classes()

    def _refresh(self) -> None:
        if self._any_numerics:
            self._list_classes()
        if self._seemed_slow:
            self._seemed_slow = False
            self.speed.begin_anew()
            try_backend(self.backend, self.speed)

    def _list_classes(self) -> None:
        """Have this machine's class found, and find others."""
        name = f"{CLASSES}/{self._numerics}"
        self.backend.put(name, [b"1"], WRITE_S, self._numerics.encode())
        if self._any_numerics:
            found = list_classes(self.backend, WRITE_S)
            others = [one for one in found if one != self._numerics]
            self._asker.looks.other_classes = others[:MAX_CLASSES]


def lookup_s(planned_s: float, computing_s: float) -> float | None:
    """Seconds that a look-up in a distant store may take: as long as its calls usually take, and no
    longer than a tenth of computing. None if it takes longer.
    """
    most_s = MAX_ASK_SHARE * computing_s
    return None if planned_s > most_s else max(planned_s, min(ASK_S, most_s))
