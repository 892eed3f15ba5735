"""Several tiers as one, fastest first: a record is read from the first tier that has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BlockKey
from keepwarm.records.record import Part, ReadBuffer, RecordView
from keepwarm.store.tier import BlockInfo, CheckpointRef, Child, ReadableTier, ReadFault, SharedTier

SHARED = "shared"  # the name of all that machines share


class Tiers:
    """Look-ups over all tiers. A read does not fill faster tiers: captured blocks do, and the page
    cache keeps files that are read often.
    """

    def __init__(
        self, tiers: Sequence[tuple[str, ReadableTier]], shared: Sequence[SharedTier] = ()
    ) -> None:
        """`shared` are tiers that machines share, looked up after the others."""
        self._local = list(tiers)
        self.shared = tuple(shared)
        self._tiers = [*self._local, *((SHARED, tier) for tier in shared)]

    @property
    def named(self) -> Sequence[tuple[str, ReadableTier]]:
        return self._tiers

    @property
    def local(self) -> Tiers:
        """Those of this machine alone."""
        return Tiers(self._local) if self.shared else self

    def reaches(self) -> list[Tiers]:
        """Those of this machine, then with the first shared one, then with more; without shared
        ones that have failed.
        """
        usable = [tier for tier in self.shared if tier.is_trusted]
        return [Tiers(self._local, usable[:n]) for n in range(len(usable) + 1)]

    def shared_bytes(self, records: Sequence[tuple[BlockKey, Part]]) -> dict[SharedTier, int]:
        """The bytes that each shared tier is read for, if these records are."""
        missing = set(_missing(self.local, records)) if self.shared else set()
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
        for _, tier in self._tiers:
            for key, known in tier.have(keys).items():
                merged[key] = _union(merged[key], known) if key in merged else known
        return merged

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        found = {child for _, tier in self._tiers for child in tier.children(parent, tokens)}
        return sorted(found, key=lambda child: -child.n_common)

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        return list({state for _, tier in self._tiers for state in tier.states(parents)})

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
        faults = [tier.take_fault(key, part) for _, tier in self._tiers]
        return next(filter(None, faults), None)

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Prefetch from the first tier that has the record; whether one has."""
        return any(tier.prefetch(key, part) for _, tier in self._tiers)

    def _in_order(self, key: BlockKey, part: Part) -> Sequence[tuple[str, ReadableTier]]:
        """The fastest first; for window rows the tier with the most: tiers may differ."""
        if part is not Part.WINDOW or len(self._tiers) == 1:
            return self._tiers
        return sorted(self._tiers, key=lambda named: -_window_rows(named[1], key))

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        for _, tier in self._tiers:
            tier.discard(key, part, why)

    def touch(self, keys: Collection[BlockKey]) -> None:
        for _, tier in self._tiers:
            tier.touch(keys)


def _missing(
    tiers: Tiers, records: Sequence[tuple[BlockKey, Part]]
) -> Iterator[tuple[BlockKey, Part]]:
    known = tiers.have({key for key, _ in records})
    return (one for one in records if one[0] not in known or one[1] not in known[one[0]].parts)


def _window_rows(tier: ReadableTier, key: BlockKey) -> int:
    known = tier.have([key]).get(key)
    return known.w_rows if known else 0


def _union(a: BlockInfo, b: BlockInfo) -> BlockInfo:
    if a.parts == b.parts and a.w_rows == b.w_rows:  # the usual case, and faster than a new one
        return a if a.n_bytes >= b.n_bytes else b
    return BlockInfo(
        a.parts | b.parts, a.n_tokens, max(a.w_rows, b.w_rows), max(a.n_bytes, b.n_bytes)
    )
