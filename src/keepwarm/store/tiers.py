"""Several tiers as one, fastest first: a record is read from the first tier that has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic

from typing_extensions import TypeVar

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.record import Part, ReadBuffer, RecordView
from keepwarm.store.tier import (
    BlockInfo,
    CheckpointRef,
    Child,
    LookupTier,
    ReadableTier,
    ReadFault,
    SharedTier,
)

SHARED = "shared"  # the name of all that machines share
DISK = "disk"
T_co = TypeVar("T_co", bound=LookupTier, covariant=True, default=LookupTier)


class DiskAnswers:
    """What a disk has of one prompt, asked once: the engine's thread must not wait for an index.

    Until `close` it asks the disk and remembers. Afterwards it knows what was asked, and what this
    process has written since: more than that is a miss, and so is a block that is gone meanwhile.
    """

    def __init__(self, disk: LookupTier, written: Mapping[BlockKey, BlockInfo]) -> None:
        self._disk: LookupTier | None = disk
        self._written = written
        self._blocks: dict[BlockKey, BlockInfo | None] = {}
        self._gone: dict[BlockKey, BlockInfo] = {}  # written before it was asked, and deleted again
        self._children: dict[BlockKey, list[Child]] = {}
        self._states: dict[BlockKey, list[CheckpointRef]] = {}

    def close(self) -> None:
        self._disk = None

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        unasked = [key for key in keys if key not in self._blocks]
        if self._disk is not None and unasked:
            found = self._disk.have(unasked)
            self._blocks |= {key: found.get(key) for key in unasked}
            lost = (key for key in unasked if key in self._written and key not in found)
            self._gone |= {key: self._written[key] for key in lost}
        known = ((key, self._latest(key)) for key in keys)
        return {key: block for key, block in known if block is not None}

    def _latest(self, key: BlockKey) -> BlockInfo | None:
        written = self._written.get(key)
        if written is None or written is self._gone.get(key):
            return self._blocks.get(key)
        return written

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        if self._disk is not None and parent not in self._children:
            self._children[parent] = self._disk.children(parent, tokens)
        n_tokens = len(tokens) // 4  # of a part of the prompt
        return [
            Child(key, min(n_common, n_tokens)) for key, n_common in self._children.get(parent, ())
        ]

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        unasked = [key for key in parents if key not in self._states]
        if self._disk is not None and unasked:
            self._states |= {key: [] for key in unasked}
            for state in self._disk.states(unasked):
                self._states[state.parent].append(state)
        return [state for key in parents for state in self._states.get(key, ())]


class TierLookups(Generic[T_co]):
    """Look-ups over all tiers: what is stored, without the records."""

    def __init__(
        self, tiers: Sequence[tuple[str, T_co]], shared: Sequence[SharedTier] = ()
    ) -> None:
        """`shared` are tiers that machines share, looked up after the others."""
        self.here = list(tiers)
        self.shared = tuple(shared)
        self.named: Sequence[tuple[str, T_co | SharedTier]] = [
            *self.here,
            *((SHARED, tier) for tier in shared),
        ]

    def reaches(self) -> list[TierLookups]:
        """Those of this machine, then with the first shared one, then with more; without shared
        ones that have failed.
        """
        usable = [tier for tier in self.shared if tier.is_trusted]
        return [TierLookups(self.here, usable[:n]) for n in range(len(usable) + 1)]

    def shared_bytes(self, records: Sequence[tuple[BlockKey, Part]]) -> dict[SharedTier, int]:
        """The bytes that each shared tier is read for, if these records are."""
        missing = set(_missing(TierLookups(self.here), records)) if self.shared else set()
        found = {}
        for tier in self.shared:
            known = tier.have({key for key, _ in missing})
            there = {one for one in missing if one[0] in known and one[1] in known[one[0]].parts}
            if there:
                found[tier] = sum(known[key].n_bytes for key in {key for key, _ in there})
            missing -= there
        return found

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        merged: dict[BlockKey, BlockInfo] = {}
        for _, tier in self.named:
            for key, known in tier.have(keys).items():
                merged[key] = _union(merged[key], known) if key in merged else known
        return merged

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        found = {child for _, tier in self.named for child in tier.children(parent, tokens)}
        return sorted(found, key=lambda child: -child.n_common)

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return list({state for _, tier in self.named for state in tier.states(parents)})


class Tiers(TierLookups[ReadableTier]):
    """The same with the records. A read does not fill faster tiers: captured blocks do, and the
    page cache keeps files that are read often.
    """

    @property
    def local(self) -> Tiers:
        """Those of this machine alone."""
        return Tiers(self.here) if self.shared else self

    def with_answers(self, answers: DiskAnswers) -> TierLookups:
        """The same, where the disk is not asked again."""
        here = [(name, answers if name == DISK else tier) for name, tier in self.here]
        return TierLookups(here, self.shared)

    def visit(
        self,
        key: BlockKey,
        part: Part,
        use: Callable[[RecordView], None],
        buffer: ReadBuffer,
        deadline: CallDeadline | None = None,
    ) -> str | None:
        """Returns the name of the tier that had the record; None is a miss.

        The deadline is for tiers that machines share.
        """
        for name, tier in self._in_order(key, part):
            shared = next((one for one in self.shared if one is tier), None)
            if shared is not None:
                found = shared.visit(key, part, use, buffer, deadline)
            else:
                found = tier.visit(key, part, use, buffer)
            if found:
                return name
        return None

    def take_fault(self, key: BlockKey, part: Part) -> ReadFault | None:
        """Why no tier had the record at the last visit; None: it is in none."""
        faults = [tier.take_fault(key, part) for _, tier in self.named]
        return next(filter(None, faults), None)

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Prefetch from the first tier that has the record; whether one has."""
        return any(tier.prefetch(key, part) for _, tier in self.named)

    def _in_order(self, key: BlockKey, part: Part) -> Sequence[tuple[str, ReadableTier]]:
        """The fastest first; for window rows the tier with the most: tiers may differ."""
        if part is not Part.WINDOW or len(self.named) == 1:
            return self.named
        return sorted(self.named, key=lambda named: -_window_rows(named[1], key))

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        for _, tier in self.named:
            tier.discard(key, part, why)

    def touch(self, keys: Collection[BlockKey]) -> None:
        for _, tier in self.named:
            tier.touch(keys)


def _missing(
    tiers: TierLookups, records: Sequence[tuple[BlockKey, Part]]
) -> Iterator[tuple[BlockKey, Part]]:
    known = tiers.have({key for key, _ in records})
    return (one for one in records if one[0] not in known or one[1] not in known[one[0]].parts)


def _window_rows(tier: ReadableTier, key: BlockKey) -> int:
    known = tier.have([key]).get(key)
    return known.w_rows if known else 0


def _union(a: BlockInfo, b: BlockInfo) -> BlockInfo:
    prefill = a.prefill or b.prefill
    if a.parts == b.parts and a.w_rows == b.w_rows:  # the usual case, and faster than a new one
        larger = a if a.n_bytes >= b.n_bytes else b
        if larger.prefill == prefill:
            return larger
    n_bytes, w_rows = max(a.n_bytes, b.n_bytes), max(a.w_rows, b.w_rows)
    return BlockInfo(a.parts | b.parts, a.n_tokens, w_rows, n_bytes, prefill)
