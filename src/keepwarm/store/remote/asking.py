"""Asking a shared place what it has of a prompt, for the caller's thread and in a few round trips.

First how far the chain of whole blocks reaches, then what lies around its end: window rows, states,
and blocks that share a part of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, common_tokens
from keepwarm.store.blobs.backend import PAGE, Backend, Listed, Near
from keepwarm.store.blobs.deadline import CallDeadline
from keepwarm.store.blobs.hands import Hands
from keepwarm.store.record import Header, Part
from keepwarm.store.remote.known import KnownRecord, KnownRecords, WindowSize
from keepwarm.store.remote.names import MAC, RecordPlace, RemoteNames, parse_last
from keepwarm.store.remote.question import Question, QuestionCalls
from keepwarm.store.remote.speed import TierSpeed
from keepwarm.store.remote.trust import MAC_BYTES
from keepwarm.store.seal import Seal

MAX_HEADERS = 16  # that are read at once
MIN_HEADERS = 2  # of what follows, for models with windows
MAX_REQUESTS = 12  # to a distant place, unless windows or states take more
LAST_ENDS = 4  # blocks of new text that a conversation mostly goes on with


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
        self._headers = _Headers(names, known, seal)
        self._speed = speed
        self._hands = Hands(MAX_HEADERS)
        self._has_macs = has_macs
        self.other_classes: Sequence[str] = ()  # in which records are looked for too

    def ask(self, question: Question, deadline: CallDeadline) -> None:
        calls = self._calls(deadline)
        if self._backend.in_batches:
            n_there = self._reach(question, calls)
            wanted = [*question.windows(n_there), *question.states(n_there)]
            self._look(question, wanted, question.forks(n_there), calls)
        else:
            n_there = self._bisect(question, calls)
            self._look(question, question.windows(n_there), question.forks(n_there, 1), calls)
            if question.has_states and not self._has_state(question, n_there):
                self._look(question, (), question.forks(n_there), calls)
        self._read_headers(question, n_there, calls)

    def has(self, header: Header, deadline: CallDeadline) -> bool:
        """Whether a record is there, in the class of this machine."""
        record = KnownRecord(RecordPlace.of(header), header.tokens, 0, header.w_rows)
        names = self._blobs_of([record.place])
        (n_bytes,) = self._trusted(self._calls(deadline).look(names, ()).sizes)
        if n_bytes:
            self._known.add([record._replace(n_bytes=n_bytes)])
        return bool(n_bytes)

    def close(self) -> None:
        self._hands.close()

    def _calls(self, deadline: CallDeadline) -> QuestionCalls:
        return QuestionCalls(self._backend, self._hands, self._speed, deadline)

    # How far the chain reaches

    def _reach(self, question: Question, calls: QuestionCalls) -> int:
        """How many leading whole blocks are there, or here. What lies around the places where
        prompts mostly part from others is asked for in the same call.
        """
        chain, first = question.chain(), question.n_here
        last = question.n_whole + 1
        ends = [first, *range(max(first + 1, last - LAST_ENDS), last)]
        wanted = [record for block in chain[first:] for record in block]
        for end in ends:
            wanted += [*question.windows(end), *question.states(end)]
        forks = sorted({n for end in ends for n in question.forks(end)})
        self._look(question, wanted, forks, calls)
        there = [self._found(block) is not None for block in chain[first:]]
        if question.has_rows:
            return first + sum(takewhile(bool, there))
        return first + max((n for n, held in enumerate(there, 1) if held), default=0)

    def _bisect(self, question: Question, calls: QuestionCalls) -> int:
        """The same in about log n questions: what is put root first has no gaps.

        Most prompts are new or there as a whole, so the first block and the last are asked for
        before those in the middle. With windows or states the last question is for a list, which
        tells them too.
        """
        chain, low, high = question.chain(), question.n_here, question.n_whole
        ends = [high - 1, low]  # all before `low` are there, `high` is not
        asked = [one for n in {*ends} if low <= n < high for one in chain[n]]
        lists = [] if question.has_rows or high - low < 2 else [high - 1]
        self._look(question, asked, lists, calls)
        while low < high:
            middle = ends.pop() if ends else (low + high) // 2
            is_new = not all(self._known.is_answered(one.place) for one in chain[middle])
            is_last = high - low == 1 and (question.n_window or question.has_states)
            listed = is_new and (is_last or not question.has_rows)
            self._look(question, chain[middle], [middle] if listed else (), calls)
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

    def _has_state(self, question: Question, n_there: int) -> bool:
        """Whether a checkpoint is known that the end of the chain can be continued from."""
        n_tokens = sum(ref.n_tokens for ref in question.refs)
        for number in question.forks(n_there, 1):
            parent, tokens = question.parent_at(number), question.refs[number].tokens
            for state in self._known.states([parent]):
                own = tokens[: 4 * state.n_tokens]
                is_before = number * BLOCK_TOKENS + state.n_tokens < n_tokens
                if is_before and block_key(question.namespace, parent, own) == state.key:
                    return True
        return False

    # One look

    def _look(
        self,
        question: Question,
        records: Iterable[KnownRecord],
        forks: Iterable[int],
        calls: QuestionCalls,
    ) -> None:
        """Learn which records are there, and what lies beside blocks of these numbers; only what is
        not known is asked for, and by name only what no list tells.
        """
        pairs = [(question.parent_at(n), question.refs[n].tokens) for n in forks]
        new = [pair for pair in pairs if not self._known.is_listed(*pair)]
        wanted = {one.place: one for one in records if not self._known.is_answered(one.place)}
        told = {} if self._backend.in_batches else self._told(wanted.values(), new)
        named = [one for place, one in wanted.items() if place not in told]
        cut = self._look_at(question, named, new, calls)
        lost = [one for place, one in told.items() if place.parent in cut]
        self._look_at(question, lost, (), calls)

    def _told(
        self, records: Iterable[KnownRecord], new: Collection[tuple[BlockKey, bytes]]
    ) -> dict[RecordPlace, KnownRecord]:
        """Records that a list tells."""
        pairs = ((one, (one.place.parent, one.tokens)) for one in records)
        return {one.place: one for one, p in pairs if p in new or self._known.is_listed(*p)}

    def _look_at(
        self,
        question: Question,
        records: Sequence[KnownRecord],
        pairs: Sequence[tuple[BlockKey, bytes]],
        calls: QuestionCalls,
    ) -> set[BlockKey]:
        """One call; the parents whose lists are cut."""
        places = [place for record in records for place in self._in_classes(record.place)]
        lists = [(*pair, numerics) for numerics in ("", *self.other_classes) for pair in pairs]
        near = [
            Near(self._names.folder(question.namespace, parent, its), b"" if self._seal else tokens)
            for parent, tokens, its in lists
        ]
        looked = calls.look(self._blobs_of(places), near)
        self._note_sizes(records, self._trusted(looked.sizes))
        for one, listed in zip(lists, looked.listed, strict=True):
            children = self._children(listed, question.namespace, *one)
            new = [one for one in children if self._is_new(question, one)]
            self._known.add(new)
            calls.listed += new
        for parent, tokens in pairs:
            self._known.note_listed(parent, tokens)
        return {
            parent
            for (parent, *_), listed in zip(lists, looked.listed, strict=True)
            if len(listed) >= PAGE
        }

    def _is_new(self, question: Question, record: KnownRecord) -> bool:
        found = self._known.find(record.place.key, record.place.part)
        if found is not None:
            return self._headers.is_unread(question, found)
        return not self._known.is_answered(record.place)

    def _note_sizes(self, records: Sequence[KnownRecord], sizes: Sequence[int | None]) -> None:
        left, there, absent = iter(sizes), [], []
        for record in records:
            found = [(place, next(left)) for place in self._in_classes(record.place)]
            held = next(((place, size) for place, size in found if size), None)
            if held is None:
                absent.append(record.place)
            else:
                there.append(record._replace(place=held[0], n_bytes=held[1] or 0))
        self._known.add_absent(absent)
        self._known.add(there)

    def _in_classes(self, place: RecordPlace) -> list[RecordPlace]:
        """The place in this machine's class first; one of another class is what it is."""
        others = () if place.numerics else self.other_classes
        return [place, *(place._replace(numerics=other) for other in others)]

    def _blobs_of(self, places: Sequence[RecordPlace]) -> list[str]:
        """Their names, and those of their MACs."""
        names = [self._names.of(place) for place in places]
        return [*names, *(name + MAC for name in names)] if self._has_macs else names

    def _trusted(self, sizes: Sequence[int | None]) -> Sequence[int | None]:
        if not self._has_macs:
            return sizes
        half = len(sizes) // 2
        pairs = zip(sizes[:half], sizes[half:], strict=True)
        return [size if mac == MAC_BYTES else None for size, mac in pairs]

    def _children(
        self,
        listed: Sequence[Listed],
        namespace: Namespace,
        parent: BlockKey,
        near: bytes,
        numerics: str,
    ) -> Iterator[KnownRecord]:
        """What is listed. Tokens that a place has kept are used if the key is their hash; without
        them the prompt's own beginnings are known by their keys.
        """
        sizes = {one.name: one.n_bytes for one in listed}
        own: dict[BlockKey, bytes] = {}
        if any(not one.order for one in listed):
            starts = (near[:n] for n in range(4, len(near) + 1, 4))
            own = {block_key(namespace, parent, start): start for start in starts}
        for name, order, n_bytes, _ in listed:
            if (parsed := parse_last(name)) is None or n_bytes <= 0:
                continue
            if self._has_macs and sizes.get(name + MAC) != MAC_BYTES:
                continue
            place = RecordPlace(namespace, parent, *parsed, numerics)
            if order and block_key(namespace, parent, order) != place.key:
                continue
            if not order or common_tokens(order, near):
                yield KnownRecord(place, order or own.get(place.key, b""), n_bytes)

    # Headers

    def _read_headers(self, question: Question, n_there: int, calls: QuestionCalls) -> None:
        """First those of the prompt's own blocks."""
        self._headers.read(question, question.windows(n_there), MAX_HEADERS, calls)
        parents = {question.parent_at(n) for n in question.forks(n_there)}
        beside = [one for one in calls.listed if one.place.parent in parents]
        self._headers.read(question, beside, self._n_headers(question, calls), calls)

    def _n_headers(self, question: Question, calls: QuestionCalls) -> int:
        """How many are read of what follows. They spare a part of one block, which is not worth
        many requests to a distant place.
        """
        if not self._backend.is_distant:
            return MAX_HEADERS
        n_least = MIN_HEADERS if question.n_window else 0
        return min(MAX_HEADERS, max(n_least, MAX_REQUESTS - calls.n_requests))


class _Headers:
    """Learns from records what neither names nor lists say: tokens, and rows of windows."""

    def __init__(self, names: RemoteNames, known: KnownRecords, seal: Seal | None) -> None:
        self._names, self._known, self._seal = names, known, seal

    def read(
        self,
        question: Question,
        records: Iterable[KnownRecord],
        n_most: int,
        calls: QuestionCalls,
    ) -> None:
        """Read so many: one for all parts of a block, and one for windows of equal size, which have
        equally many rows. First of what the prompt continues.
        """
        unread = self._unread(question, records)
        while unread and n_most > 0:
            first: dict[WindowSize | BlockKey, KnownRecord] = {}
            for one in sorted(unread, key=lambda one: (not one.tokens, not _is_window(one))):
                first.setdefault(WindowSize.of(one) if one.tokens else one.place.key, one)
            chosen = list(first.values())[:n_most]
            names = [self._names.of(one.place) for one in chosen]
            for one, header in zip(chosen, calls.headers(names, chosen, self._seal), strict=True):
                self._note(one, header)
            left = [one for one in unread if one not in chosen]
            self._known.add(left)  # with what is known now
            unread, n_most = self._unread(question, left), n_most - len(chosen)
        self._known.add_absent(one.place for one in unread)

    def is_unread(self, question: Question, record: KnownRecord) -> bool:
        wants_rows = question.n_window and _is_window(record) and not record.w_rows
        return not record.tokens or bool(wants_rows and self._known.rows_of(record) is None)

    def _unread(self, question: Question, records: Iterable[KnownRecord]) -> list[KnownRecord]:
        found = (self._known.find(one.place.key, one.place.part) for one in records)
        return [one for one in found if one and self.is_unread(question, one)]

    def _note(self, record: KnownRecord, header: Header | None) -> None:
        if header is None:
            self._known.add_absent([record.place])
            return
        told = record._replace(tokens=header.tokens, w_rows=header.w_rows)
        if _is_window(told):
            self._known.learn_rows(told)
        self._known.add([told])


def _is_window(record: KnownRecord) -> bool:
    return record.place.part is Part.WINDOW
