"""A tier that machines share. Look-ups are answered from what is known and never call anybody;
`ask` does, on the caller's thread, and reads do, on reader threads.

An answer is never wrong because of it: every record is verified, and what cannot be had is a miss.
It is hardly later either: every call has a deadline, and after some failures nothing is called.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeAlias

from keepwarm.concurrency import CallDeadline, CallError, SingleFlight
from keepwarm.errors import BadRecord, KeepwarmError, NewerFormat
from keepwarm.prefix.blocks import KEY_BYTES, BlockKey, BlockRef, Namespace
from keepwarm.records.at_rest import at_rest
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
    Header,
    Part,
    ReadBuffer,
    Record,
    RecordView,
    encode_record,
)
from keepwarm.remote.backend import Backend, FolderRange, at_most
from keepwarm.remote.compression import code_record, count_bytes, memory_for
from keepwarm.remote.handshake import check_mark
from keepwarm.remote.health import MAX_RETRY_S, Health, RemoteSpeed, try_backend
from keepwarm.remote.janitor import FIRST_SWEEP_S, SWEEP_S, Janitor, RemoteLimits
from keepwarm.remote.lookup import Finder, KnownRecords, n_round_trips
from keepwarm.remote.records import (
    CLASSES,
    FleetKey,
    RemoteNames,
    RemoteRecord,
    decode_named,
    list_classes,
)
from keepwarm.store.index.database import Database
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import (
    BlockInfo,
    CheckpointRef,
    Child,
    PutResult,
    ReadFault,
    RemoteLookup,
    SharedStats,
    TierCounts,
    use_whole,
)

LOG = logging.getLogger(__name__)
Keep: TypeAlias = Callable[[Record], object]
ASK_S = 0.05  # for a question
ANSWERS_S = 1.0  # to tell or read the tokens of past answers, on which those of a prompt depend
ANSWERS_BYTES = 1 << 20  # of one conversation
END_BYTES = 2 * KEY_BYTES  # parent and key of the block that its last answer ends in, before them
MAX_TOLD = 8  # conversations that begin with the same text, or its beginnings
BATCH_CALLS = 2  # that a question to Redis may take as long as
MAX_ASK_SHARE = 0.1  # of the time to compute, for a question to a distant store
MIN_READ_S = 0.05
READERS = 3  # that share the rate
WRITE_S = 10.0  # nobody waits for a write
MAX_BAD = 1024
MIN_FAR = 3  # questions in a row that it was too far for
MAX_CLASSES = 16  # others, that are looked in
REFRESH_S = 60.0  # how often other classes are listed, and what seemed slow is measured again


class RemoteTier:
    """One place that machines share."""

    def __init__(
        self,
        backend: Backend,
        compute_class: str,
        cipher: Cipher | None = None,
        memory: MemoryTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        address: str = "",
        mark: bytes = b"",
        fleet_key: FleetKey | None = None,
        any_class: bool = False,
        on_unverified: Callable[[Namespace], None] = lambda _: None,
        flags: Database | None = None,
    ) -> None:
        """`compute_class` is the class of machines that compute the same numbers; with `any_class`
        those of others are read too. What is fetched goes into `memory`. `mark` is that of the
        local store, if it is sealed; `flags` remember that the place at the address has one. Sealed
        records need no fleet key. `on_unverified` is called before a record is used that is neither
        sealed nor has a MAC.
        """
        self.backend = backend
        self._compute_class = compute_class
        self.classes = {compute_class}  # that were ever seen there
        self.is_writable, self._read_only_since = True, 0.0
        self._clock = clock
        self._any_class = any_class
        self.cipher = cipher
        self._mark, self._flags, self._flag = mark, flags, f"marked {address}"
        self._was_marked = flags is not None and flags.has_flag(self._flag)
        self._fleet_key = fleet_key if cipher is None else None
        self._names = RemoteNames(compute_class, has_mac=self._fleet_key is not None)
        self._memory = memory
        # What keeps a record, but only if nothing is deleted on purpose before it is called.
        self.unless_forgotten: Callable[[Keep], Keep] = lambda keep: keep
        self._on_unverified = on_unverified
        self.speed = RemoteSpeed(clock)
        self._known = KnownRecords(clock)
        self._finder = Finder(backend, self._names, self._known, self.speed)
        self._is_due = False  # for a measurement
        self._n_far = 0  # latest questions that were not asked
        self._janitor: Janitor | None = None
        self._sweep_at = clock() + FIRST_SWEEP_S
        self._counts = TierCounts()
        self._faults: dict[tuple[BlockKey, Part], ReadFault] = {}
        self._bad: Counter[str] = Counter()
        self._questions: SingleFlight[None] = SingleFlight()
        self._fetches: SingleFlight[Record | None] = SingleFlight()
        name = f"the shared tier {address}" if address else "a shared tier"
        works = self._try, self._counts, self._refresh, self._refresh_s
        self.health = Health(*works, clock, name=name)
        self.health.start()

    @property
    def is_open(self) -> bool:
        return self.health.is_open

    @property
    def is_trusted(self) -> bool:
        return self.health.is_trusted

    # Look-ups: what is known

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        return self._known.have(keys) if self.health.is_trusted else {}

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        return self._known.children(parent, tokens)

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return self._known.states(parents)

    # Calls

    def ask(self, lookup: RemoteLookup, computing_s: float) -> bool:
        """Learn what is there of a prompt, if that is worth the time that computing it takes.

        False if it was late: no request waits for two tiers.
        """
        seconds = self._ask_s(lookup, computing_s)
        if seconds is None:
            self._n_far += 1
            self._is_due = True  # the way is far, whatever it carries; it is measured again
            return True
        self._n_far = 0
        deadline = CallDeadline(seconds, self._clock)
        self.look_up(lookup, deadline)
        return not deadline.is_over

    def look_up(self, lookup: RemoteLookup, deadline: CallDeadline) -> None:
        """Learn what is there of a prompt. Never fails."""

        def ask() -> None:
            self._finder.find(lookup, deadline)

        what = lookup.refs[-1].key, lookup.n_here
        self._questions.do(what, lambda: self.health.call("asked", ask), deadline)

    def _ask_s(self, lookup: RemoteLookup, computing_s: float) -> float | None:
        """Seconds that a question may take; None if it is not worth asking."""
        is_batch = self.backend.in_batches
        planned_s = (BATCH_CALLS if is_batch else n_round_trips(lookup)) * self.speed.call_s
        is_near = planned_s <= ASK_S if is_batch else not self.backend.is_distant
        return ASK_S if is_near else lookup_s(planned_s, computing_s)

    def answers_to(self, namespace: Namespace, texts: Sequence[str]) -> list[bytes]:
        """Called also after a failure, unless there were several: tokens depend on it."""

        def ask() -> list[bytes]:
            deadline = CallDeadline(ANSWERS_S, self._clock)
            places = [FolderRange(self._names.answers_to(namespace, text), "") for text in texts]
            lists = self.backend.look(places, deadline.left_s())
            named = [one.name for some in lists for one in some]
            told: dict[str, bytes] = {}
            with suppress(CallError):  # what was read until then will do
                for name in named[:MAX_TOLD]:
                    if len(data := self._told(name, deadline)) > END_BYTES:
                        told[name] = data
            self._touch_told(namespace, told, deadline)
            return [data[END_BYTES:] for data in told.values()]

        found = self.health.call("asked", ask) if texts else None
        return found if found and self._is_noted(namespace) else []

    def _touch_told(
        self, namespace: Namespace, told: Mapping[str, bytes], deadline: CallDeadline
    ) -> None:
        """Have what was read evicted later, and what names it after that."""
        pointers = []
        for name, data in told.items():
            parent, key = BlockKey(data[:KEY_BYTES]), BlockKey(data[KEY_BYTES:END_BYTES])
            pointers.append(self._names.of_pointer(namespace, parent, key, name))
        if told and self.is_writable:
            with suppress(CallError):
                self.backend.touch([*told, *pointers], deadline.left_s())

    def _told(self, name: str, deadline: CallDeadline) -> bytes:
        """Empty if it is not what a machine of this fleet has put there."""
        found = self.backend.read(name, at_most(ANSWERS_BYTES), deadline.left_s())
        try:
            data = found and (self._fleet_key.checked(name, found) if self._fleet_key else found)
            plain = self.cipher.open(name.encode(), data) if data and self.cipher else data
            return bytes(plain or b"")
        except BadRecord:
            return b""

    def tell(
        self,
        namespace: Namespace,
        text: str,
        answers: bytes,
        end: BlockRef,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Put what is known of the answers in a conversation, the last of which ends with a block,
        and take it back if it is not wanted by then: the conversation was deleted. False if that
        must be tried again. Takes no longer than ANSWERS_S, and never fails.
        """
        told, deadline = end.parent + end.key + answers, CallDeadline(ANSWERS_S)
        name = self._names.of_answers(namespace, text, told)
        pointer = self._names.of_pointer(namespace, end.parent, end.key, name)
        data = self.cipher.seal(name.encode(), told) if self.cipher else told
        pieces = [data, self._fleet_key.mac(name, [data])] if self._fleet_key else [data]

        def put() -> None:
            self.backend.put(pointer, [b"1"], deadline.left_s())
            self.backend.put(name, pieces, deadline.left_s())

        def take_back() -> None:
            self.backend.delete([name, pointer], deadline.left_s())

        if self.is_writable:
            self.health.call("written", put)
        if is_wanted():
            return True
        return not deadline.is_over and self.clear([], take_back)  # one hang is one failure

    def load_s(self, n_bytes: int) -> float:
        return self.speed.load_s(n_bytes)

    def declined(self) -> None:
        """It seemed too slow to be asked, or loaded from; soon it is measured again."""
        self.speed.declined()
        self._is_due = True

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
        stored, n_saved = self.health.call("written", lambda: self._put(record)) or (None, 0)
        self._counts.add(puts=int(stored is True), refused=int(stored is False))
        durable: Future[None] = Future()
        if stored is None:
            durable.set_exception(CallError("the shared tier does not answer"))
        else:
            durable.set_result(None)
        if stored:
            there = RemoteRecord.of(record.header)
            self._known.add([there._replace(n_bytes=record.n_bytes - n_saved)])
        return PutResult(bool(stored), durable, n_saved)

    def has(self, header: Header) -> bool | None:
        """Whether a record is there, with as many window rows; None if that cannot be told now."""
        wanted = RemoteRecord.of(header)

        def ask() -> bool:
            found = self._finder.same(wanted, CallDeadline(WRITE_S))
            return any(one.w_rows >= wanted.w_rows for one in found)

        return self.health.call("asked", ask)

    def knows(self, key: BlockKey, part: Part) -> bool:
        """Whether a record is known to be there."""
        return self._known.find(key, part) is not None

    def touch(self, keys: Collection[BlockKey]) -> None:
        """Nothing, because it may not wait: `note_use` tells the place."""

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Have the place evict the last of these blocks first, and other blocks before."""
        found = (self._known.find(key, part) for key in reversed(keys) for part in Part)
        names = [self._names.of(record) for record in found if record]
        if names:
            self.health.call("told of a use", lambda: self._note_use(names))

    def _note_use(self, names: Sequence[str]) -> None:
        self.backend.touch(names, WRITE_S)
        if self.backend.in_batches:  # it may evict whatever is not used
            self._keep_books(CallDeadline(WRITE_S))

    def clear(self, blocks: Collection[BlockKey], delete: Callable[[], None]) -> bool:
        """Delete blocks for good; False if that must be tried again."""

        def clear() -> bool:
            delete()
            return True

        for key in blocks:
            self._known.lose(key)
        return (self.is_writable and self.health.call("cleared", clear)) or False

    def keep_within(self, limits: RemoteLimits, store: Path) -> None:
        """Have a place kept within limits that does not evict by itself."""
        if not self.backend.in_batches and any(limits):
            self._janitor = Janitor(self.backend, limits, store)

    def withdraw(self, record: RemoteRecord) -> bool:
        """Delete a record, as one that was just put; whether that is done."""
        names = [self._names.of(record)]
        return self.clear([record.key], lambda: self.backend.delete(names, WRITE_S))

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        """It fits no reader here, and perhaps others, so it stays: it is a miss for a while."""
        if self._known.find(key, part) is not None:
            LOG.warning("a shared record is not used: %s", why)
            self._known.lose(key)

    @property
    def state(self) -> str:
        """One of SHARED_STATES."""
        if self.is_open:
            return "refused" if self.health.refused else "open"
        if not self.is_trusted:
            return "half-open"
        if self._n_far >= MIN_FAR:
            return "too far"
        return "ok" if self.is_writable else "read-only"

    def stats(self) -> SharedStats:
        n_bytes, oldest_s = self._janitor.found if self._janitor else (0, None)
        counts = vars(self._counts.stats(0, n_bytes, None))
        last_error = self.health.last_error
        return SharedStats(**counts, state=self.state, last_error=last_error, oldest_s=oldest_s)

    def close(self) -> None:
        self.backend.close()
        self.health.close()

    # Reading

    def _fetch(self, key: BlockKey, part: Part, deadline: CallDeadline | None) -> Record | None:
        keep = None if self._memory is None else self.unless_forgotten(self._memory.put)
        known = self._known.find(key, part)
        if known is None or not self.health.is_trusted:
            return None
        if deadline is not None and deadline.is_over:  # the load is left, and the tier is not bad
            return None
        if (record := self._just_fetched(known)) is not None:
            return record
        try:
            record = self.health.call("read", lambda: self._read(known, deadline))
        except BadRecord as bad:
            LOG.warning("a shared record is bad: %s", bad)
            self._faults[key, part] = "damaged"
            self._counts.add(quarantined=1)
            self._note_bad(known)
            return None
        except NewerFormat:
            self._faults[key, part] = "newer"
            self._counts.add(newer=1)
            record = None
        if record is None or not self._is_noted(record.header.namespace):
            self._known.lose(key)
            return None
        if keep is not None:
            keep(record)
        return record

    def _is_noted(self, name: Namespace) -> bool:
        """Whether the store knows that it has records which anybody may have made."""
        try:
            if self.cipher is None and self._fleet_key is None:
                self._on_unverified(name)
        except KeepwarmError as error:
            LOG.warning("a shared record is not used: %s", error)
            return False
        return True

    def _just_fetched(self, known: RemoteRecord) -> Record | None:
        """What another thread has fetched since this one looked in memory."""
        if self._memory is None:
            return None
        key, part = known.key, known.part
        here = self._memory.have([key]).get(key)
        is_here = here is not None and part in here.parts and here.w_rows >= known.w_rows
        return self._memory.read(key, part) if is_here else None

    def _read(self, known: RemoteRecord, load: CallDeadline | None) -> Record | None:
        """Within the time of the whole load: one record may be slow if others are fast. One that is
        read by itself has twice the time that is planned for it.
        """
        planned_s = self.speed.load_s(READERS * known.n_bytes)
        deadline = load or CallDeadline(max(MIN_READ_S, 2 * planned_s))
        name = self._names.of(known)

        def verified(data: memoryview) -> tuple[Record, int]:
            plain = self._fleet_key.checked(name, data) if self._fleet_key else data
            return decode_named(plain, known, self.cipher), len(data)

        with self.speed.reading(known.n_bytes) as add:
            found = self.backend.fetch(name, memory_for, verified, deadline.left_s())
            add(found[1] if found else 0)
        return found and found[0]

    def _note_bad(self, bad: RemoteRecord) -> None:
        """Once may be an accident of the network; what is bad twice is deleted."""
        self._known.lose(bad.key)
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        name = self._names.of(bad)
        self._bad[name] += 1
        if self._bad[name] > 1:
            del self._bad[name]
            self.withdraw(bad)

    # Writing

    def _put(self, record: Record) -> tuple[bool, int]:
        """Whether it is stored, and how many bytes a code saves; what is sealed has no likeness.

        Of window rows those with fewer rows are replaced, and the reverse is refused.
        """
        record = at_rest(record)
        own, deadline = RemoteRecord.of(record.header), CallDeadline(WRITE_S)
        others = self._finder.same(own, deadline) if own.part is Part.WINDOW else []
        if any(one.w_rows >= own.w_rows for one in others):
            return False, 0
        name, plain = self._names.of(own), encode_record(record, self.cipher)
        pieces = plain if self.cipher else code_record(record, plain, self.speed.line_bytes_per_s)
        n_saved = count_bytes(plain) - count_bytes(pieces)
        if self._fleet_key is not None:
            pieces = [*pieces, self._fleet_key.mac(name, pieces)]
        put = partial(self.backend.put, name, pieces, deadline.left_s())
        is_stored = self.speed.put(count_bytes(pieces), put)
        self._is_due |= not is_stored
        if is_stored and others:
            self.backend.delete([self._names.of(one) for one in others], deadline.left_s())
        return is_stored, n_saved

    # Trials

    def _try(self, deadline: CallDeadline) -> None:
        self._measure(deadline)  # first: a mark is read in part
        self._keep_books(deadline)

    def _refresh_s(self) -> float:
        """Sooner while it is read-only: a server may have been replaced, and its name not yet."""
        if self.is_writable:
            return REFRESH_S
        return min(max(MAX_RETRY_S, self._clock() - self._read_only_since), REFRESH_S)

    def _refresh(self, deadline: CallDeadline) -> None:
        if self._is_due or not self.is_writable:
            self._measure(deadline)
        self._keep_books(deadline)
        if self._janitor is not None and self._clock() >= self._sweep_at:
            self._sweep_at = math.inf
            sweep = partial(self._sweep, self._janitor)
            Thread(target=sweep, name="keepwarm-janitor", daemon=True).start()

    def _sweep(self, janitor: Janitor) -> None:
        """On a thread that ends with it: it may take long, and trials must not wait for it."""
        self.health.call("swept", janitor.sweep)
        self._sweep_at = self._clock() + SWEEP_S

    def _measure(self, deadline: CallDeadline) -> None:
        self._is_due = False
        self.speed.begin_anew()
        was_writable = self.is_writable
        self.is_writable = try_backend(self.backend, self.speed, deadline)
        if self.is_writable != was_writable:
            self._read_only_since = self._clock()
            now = "written to again" if self.is_writable else "full or read-only: it is only read"
            LOG.warning("%s is %s", self.health.name, now)

    def _keep_books(self, deadline: CallDeadline) -> None:
        """Use the mark and the list of classes, which a place may evict like all else, and put back
        what is gone. A directory evicts nothing: without its mark it is not mounted.
        """
        may_evict = self.backend.in_batches or self.backend.is_distant
        is_known = self._was_marked and not may_evict
        check_mark(self.backend, self.cipher, self._mark, deadline, is_known)
        if self._flags is not None and not self._was_marked:
            self._flags.set_flag(self._flag)
        self._was_marked = True
        found = set(list_classes(self.backend, deadline.left_s()))
        for gone in self.classes - found:
            self.backend.put(f"{CLASSES}/{gone}", [b"1"], deadline.left_s())
        self.classes |= found
        if self._any_class:
            others = sorted(self.classes - {self._compute_class})
            self._finder.other_classes = others[:MAX_CLASSES]


def lookup_s(planned_s: float, computing_s: float) -> float | None:
    """Seconds that a look-up in a distant store may take: as long as its calls usually take, and no
    longer than a tenth of computing. None if it takes longer.
    """
    most_s = MAX_ASK_SHARE * computing_s
    return None if planned_s > most_s else max(planned_s, min(ASK_S, most_s))
