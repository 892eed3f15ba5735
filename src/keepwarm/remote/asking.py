"""Asking a shared place what it has of a prompt, for the caller's thread and in a few round trips.

First how far the chain of whole blocks reaches, then what lies around its end: window rows, states,
and blocks that share a part of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from keepwarm.concurrency import AbandonableExecutor, CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, common_tokens
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Header
from keepwarm.remote.backend import PAGE, Backend, Listed, Near
from keepwarm.remote.known import KnownRecord, KnownRecords
from keepwarm.remote.names import MAC, RecordPlace, RemoteNames, parse_last
from keepwarm.remote.question import Headers, Question, QuestionCalls
from keepwarm.remote.speed import TierSpeed
from keepwarm.remote.trust import MAC_BYTES

MAX_HEADERS = 16  # that are read at once
MAX_REQUESTS = 12  # to a distant place for 100,000 tokens, unless no state is near their end
LAST_ENDS = 4  # blocks of new text that a conversation mostly goes on with


class Asker:
    """Asks, and has the answers remembered. Raises CallError."""

    def __init__(
        self,
        backend: Backend,
        names: RemoteNames,
        known: KnownRecords,
        cipher: Cipher | None,
        speed: TierSpeed,
        *,
        has_macs: bool = False,
    ) -> None:
        """With `has_macs`, a record without one counts as absent."""
        self._backend = backend
        self._known = known
        self.looks = Looks(backend, names, known, cipher, has_macs)
        self._headers = Headers(names, known, cipher)
        self._speed = speed
        self._hands = AbandonableExecutor(MAX_HEADERS)

    def ask(self, question: Question, deadline: CallDeadline) -> None:
        calls = self._calls(deadline)
        if self._backend.in_batches:
            n_there = self._reach(question, calls)
            wanted = [*question.windows(n_there), *question.states(n_there)]
            self.looks.look(question, wanted, question.forks(n_there), calls)
        else:
            n_there = self._bisect(question, calls)
            self._look_around(question, n_there, calls)
            if question.has_states and not self._has_state(question, n_there):
                self.looks.look(question, (), question.forks(n_there), calls)
        self._read_headers(question, n_there, calls)

    def has(self, header: Header, deadline: CallDeadline) -> bool:
        """Whether a record is there, in the class of this machine."""
        record = KnownRecord(RecordPlace.of(header), header.tokens, 0, header.w_rows)
        return self.looks.has(record, self._calls(deadline))

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
        self.looks.look(question, wanted, forks, calls)
        there = [self._found(block) is not None for block in chain[first:]]
        if question.has_rows:
            return first + sum(takewhile(bool, there))
        return first + max((n for n, held in enumerate(there, 1) if held), default=0)

    def _bisect(self, question: Question, calls: QuestionCalls) -> int:
        """The same in about log n questions: what is put root first has no gaps.

        Most prompts are new or there as a whole, so the first block and the last are asked for
        before those in the middle.
        """
        chain, low, high = question.chain(), question.n_here, question.n_whole
        ends = [high - 1, low]  # all before `low` are there, `high` is not
        self._look_for(question, {n: chain[n] for n in ends if low <= n < high}, calls)
        while low < high:
            middle = ends.pop() if ends else (low + high - 1) // 2
            self._look_for(question, {middle: chain[middle]}, calls)
            if found := self._found(chain[middle]):
                missing = (block[0] for block in chain[low:middle] if not self._found(block))
                self._known.add([one._replace(n_bytes=found.n_bytes) for one in missing])
                low = middle + 1
            else:
                high = middle
        return low

    def _look_for(
        self, question: Question, blocks: Mapping[int, Sequence[KnownRecord]], calls: QuestionCalls
    ) -> None:
        """Learn whether blocks are there, by number. With windows or states by lists: then those of
        the last block that is there are known, and what follows it. The list of all first blocks
        may be long.
        """
        new = {
            number: block
            for number, block in blocks.items()
            if not all(self._known.is_answered(one.place) for one in block)
        }
        lists = [number for number in new if number and question.has_points]
        self.looks.look(question, [one for block in new.values() for one in block], lists, calls)

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

    def _look_around(self, question: Question, n_there: int, calls: QuestionCalls) -> None:
        """Learn of windows, states and what follows. Of windows only two records are asked for, if
        there are not requests enough for all.
        """
        windows, forks = question.windows(n_there), question.forks(n_there, 1)
        asked = windows if self._fits(windows, forks, calls) else windows[-1:]
        self.looks.look(question, asked, forks, calls)
        if len(asked) < len(windows):
            self._headers.presume(question, windows, calls)

    def _fits(
        self, windows: Sequence[KnownRecord], forks: Collection[int], calls: QuestionCalls
    ) -> bool:
        """Whether requests are left for all of these, and for their headers."""
        if not self._backend.is_distant:
            return True
        n_asked = self.looks.count_names(windows) + len(forks)
        return n_asked + len(windows) <= self._n_left(calls)

    # Headers

    def _read_headers(self, question: Question, n_there: int, calls: QuestionCalls) -> None:
        """First those of the prompt's own blocks. What follows spares a part of one block, which is
        not worth many requests to a distant place: rows of a window that the prompt continues, and
        that no request is left for, are presumed.
        """
        unread = self._headers.read(question, question.windows(n_there), self._n_left(calls), calls)
        self._known.add_absent(one.place for one in unread)
        own = {question.parent_at(n): question.refs[n].tokens for n in question.forks(n_there)}
        beside = [one for one in calls.listed if one.place.parent in own]
        unread = self._headers.read(question, beside, self._n_left(calls), calls)
        self._known.add_absent(one.place for one in unread)
        begun = [r for r in unread if r.tokens and own[r.place.parent].startswith(r.tokens)]
        self._known.add(one._replace(w_rows=len(one.tokens) // 4) for one in begun)

    def _n_left(self, calls: QuestionCalls) -> int:
        """Requests, of which each may be one of several at the same time."""
        n_left = MAX_REQUESTS - calls.n_requests if self._backend.is_distant else MAX_HEADERS
        return max(0, min(MAX_HEADERS, n_left))


class Looks:
    """Looks at a place: which records are there, and what lies beside a block."""

    def __init__(
        self,
        backend: Backend,
        names: RemoteNames,
        known: KnownRecords,
        cipher: Cipher | None,
        has_macs: bool,
    ) -> None:
        self._backend, self._names, self._known = backend, names, known
        self._seal, self._has_macs = cipher, has_macs
        self.other_classes: Sequence[str] = ()  # in which records are looked for too

    def has(self, record: KnownRecord, calls: QuestionCalls) -> bool:
        """Whether a record is there, in its class."""
        (n_bytes,) = self._trusted(calls.look(self._blobs_of([record.place]), ()).sizes)
        if n_bytes:
            self._known.add([record._replace(n_bytes=n_bytes)])
        return bool(n_bytes)

    def count_names(self, records: Iterable[KnownRecord]) -> int:
        """How many are asked for, to learn which of these are there."""
        new = [one.place for one in records if not self._known.is_answered(one.place)]
        return len(self._blobs_of([place for one in new for place in self._in_classes(one)]))

    def look(
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
        return {one.place: one for one, p in pairs if p in new or self._known.is_told(*p)}

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
        answers = zip(lists, looked.listed, strict=True)
        cut = {parent for (parent, *_), listed in answers if len(listed) >= PAGE}
        for parent, tokens in pairs:
            self._known.note_listed(parent, tokens, is_whole=parent not in cut)
        return cut

    def _is_new(self, question: Question, record: KnownRecord) -> bool:
        found = self._known.find(record.place.key, record.place.part)
        if found is not None:
            return self._known.is_unread(found, question.n_window > 0)
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
        own = {block_key(namespace, parent, near): near}
        if any(not one.order and not _is_among(one, own) for one in listed):
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


def _is_among(listed: Listed, keys: Collection[BlockKey]) -> bool:
    parsed = parse_last(listed.name)
    return parsed is not None and parsed[0] in keys
