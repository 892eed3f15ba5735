"""The longest prefix at which every layer can be restored, and the records to read for it.

    delta    rows of every block from the first on
    window   rows of the last window before the point
    state    a checkpoint exactly at the point

Pure: takes what the tiers hold, returns what to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import takewhile
from typing import NamedTuple

from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import Layout
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef
from keepwarm.records.record import Part
from keepwarm.store.tier import BlockInfo, Child


@dataclass(frozen=True)
class Needs:
    """What a model's layers need to continue from a point."""

    delta: bool
    window: int  # rows before the point; 0 where no layer has a window
    state: bool
    narrow: int = 0  # rows of the narrowest window; a plan looks at those of the widest alone

    @property
    def points(self) -> bool:
        """Whether not every token can be restored for good, only chosen points."""
        return self.state or self.window > 0

    @property
    def checkpoints(self) -> bool:
        """Whether a point is restorable only where a slice ended. After a slice with a window as
        long as a block, all rows of its blocks are there.
        """
        return self.state or self.whole_blocks

    @property
    def whole_blocks(self) -> bool:
        """Whether a slice that ends inside a block loses the first rows of that block."""
        return not self.state and 0 < (self.narrow or self.window) < BLOCK_TOKENS

    def window_blocks(self, n_tokens: int) -> range:
        """The blocks whose window rows are needed to continue from a point."""
        n_blocks = -(-n_tokens // BLOCK_TOKENS)
        first = max(0, n_tokens - self.window) // BLOCK_TOKENS if self.window else n_blocks
        return range(first, n_blocks)

    def has_window(self, known: BlockInfo | None, number: int, n_tokens: int) -> bool:
        """Whether a block has the window rows that are needed at a point."""
        if known is None or Part.WINDOW not in known.parts:
            return False
        return self.has_rows(known.n_tokens - known.w_rows, number, n_tokens)

    def has_rows(self, first: int, number: int, n_tokens: int) -> bool:
        """Whether a block's window rows, from this one on, are those needed at a point."""
        return first <= max(0, n_tokens - self.window - number * BLOCK_TOKENS)

    @classmethod
    def of(cls, layout: Layout) -> Needs:
        windows = [leaf.window for leaf in layout.leaves() if leaf.window] or [0]
        kinds = layout.kinds
        return cls(Kind.DELTA in kinds, max(windows), Kind.STATE in kinds, min(windows))


class Read(NamedTuple):
    key: BlockKey
    part: Part
    number: int


class Point(NamedTuple):
    """A prefix of `n_tokens` and the records that restore it, those first that are the most likely
    to be missing.
    """

    n_tokens: int
    reads: tuple[Read, ...]
    n_bytes: int

    @property
    def keys_by_part(self) -> list[tuple[BlockKey, Part]]:
        return [(read.key, read.part) for read in self.reads]

    def n_in_block(self, number: int) -> int:
        """Tokens of one block that are restored."""
        return min(BLOCK_TOKENS, self.n_tokens - number * BLOCK_TOKENS)

    def tokens_by_tier(self, tiers: Sequence[str]) -> dict[str, int]:
        """From the tier of each record: a block counts for that of its last one, which has its
        rows, if any has.
        """
        by_number = {read.number: tier for read, tier in zip(self.reads, tiers, strict=True)}
        counts: Counter[str] = Counter()
        for number, tier in by_number.items():
            counts[tier] += self.n_in_block(number)
        if tiers:  # blocks before a window or a state that no layer has to read count for the last
            counts[tiers[-1]] += self.n_tokens - counts.total()
        return dict(counts)


NOTHING = Point(0, (), 0)


@dataclass(frozen=True)
class KnownBlocks:
    """What is stored around one prompt: its own blocks, and others that share part of one."""

    refs: Sequence[BlockRef]  # the prompt's whole blocks
    known: Mapping[BlockKey, BlockInfo]
    n_matched: int  # how many leading ones can be used
    children: Sequence[Child] = ()  # siblings after the last of those, nearest first
    states: Mapping[int, BlockKey] = field(
        default_factory=dict
    )  # checkpoints inside blocks, by position

    @property
    def n_stored(self) -> int:
        """Tokens of the leading blocks that can be used."""
        return self.n_matched * BLOCK_TOKENS

    @property
    def n_shared(self) -> int:
        """How many leading tokens some stored prompt has in common with this one."""
        n_common = max((child.n_common for child in self.children), default=0)
        return self.n_stored + n_common

    @property
    def goes_on(self) -> bool:
        """Whether one that has these in common has more tokens in the same block."""
        nearest = max((child.n_common for child in self.children), default=0)
        near = (child.key for child in self.children if child.n_common == nearest)
        return any(self.known[key].n_tokens > nearest for key in near if key in self.known)


class Candidate(NamedTuple):
    """A point that might be restored, and the block with the rows past the matched ones."""

    n_tokens: int
    sibling: BlockKey | None


def n_matched(needs: Needs, refs: Sequence[BlockRef], known: Mapping[BlockKey, BlockInfo]) -> int:
    """Leading blocks whose rows are stored; without delta layers, all up to the last stored one.

    A block may have lost its delta rows and still have others; later blocks are useless then.
    """
    if needs.delta:
        held = (ref.key in known and Part.DELTA in known[ref.key].parts for ref in refs)
        return sum(takewhile(bool, held))
    there = [ref.key in known for ref in refs]
    return len(there) - there[::-1].index(True) if True in there else 0


def longest(needs: Needs, blocks: KnownBlocks, limit: int) -> Point:
    """The furthest point not beyond `limit` tokens."""
    for candidate in _candidates(needs, blocks, limit):
        reads = _reads(needs, blocks, candidate)
        if reads is not None:
            sizes = {r.key: blocks.known[r.key].n_bytes for r in reads}
            return Point(candidate.n_tokens, reads, sum(sizes.values()))
    return NOTHING


def _candidates(needs: Needs, blocks: KnownBlocks, limit: int) -> Iterator[Candidate]:
    """The furthest first; lazily, because there may be hundreds."""
    last = min(blocks.n_stored, limit // BLOCK_TOKENS * BLOCK_TOKENS)
    ends = (Candidate(n_tokens, None) for n_tokens in range(last, 0, -BLOCK_TOKENS))
    inside = sorted(_inside(needs, blocks, limit), key=_nearness)
    return merge(ends, inside, key=_nearness)


def _nearness(candidate: Candidate) -> int:
    return -candidate.n_tokens


def _inside(needs: Needs, blocks: KnownBlocks, limit: int) -> Iterator[Candidate]:
    whole = blocks.n_stored
    if needs.state:
        yield from (Candidate(n, key) for n, key in blocks.states.items() if n <= limit)
        return
    if 0 < limit < whole:
        yield Candidate(limit, None)
    for child in blocks.children:
        if whole < limit:
            yield Candidate(min(whole + child.n_common, limit), child.key)


def _reads(needs: Needs, blocks: KnownBlocks, candidate: Candidate) -> tuple[Read, ...] | None:
    """The records for one point, or None if something is missing."""
    windowed = needs.window_blocks(candidate.n_tokens)
    # First, because they are few and the most likely to be missing.
    if not _windows_held(needs, blocks, candidate, windowed):
        return None
    rows: list[Read] = []
    reads: list[Read] = []
    for number in range(0 if needs.delta else windowed.start, windowed.stop):
        key = _holder(blocks, candidate, number)
        known = blocks.known.get(key) if key else None
        if key is None or known is None:
            return None
        if needs.delta:
            if Part.DELTA not in known.parts:
                return None
            rows.append(Read(key, Part.DELTA, number))
        if number in windowed:
            reads.append(Read(key, Part.WINDOW, number))
    if needs.state:
        key = candidate.sibling or blocks.refs[windowed.stop - 1].key
        known = blocks.known.get(key)
        if known is None or Part.STATE not in known.parts:
            return None
        reads.append(Read(key, Part.STATE, windowed.stop - 1))
    return (*reads, *rows)


def _windows_held(needs: Needs, blocks: KnownBlocks, candidate: Candidate, windowed: range) -> bool:
    holders = ((number, _holder(blocks, candidate, number)) for number in windowed)
    return all(
        key is not None and needs.has_window(blocks.known.get(key), number, candidate.n_tokens)
        for number, key in holders
    )


def _holder(blocks: KnownBlocks, candidate: Candidate, number: int) -> BlockKey | None:
    """The block with these rows; past the matched ones that is the sibling, for the last."""
    if number < blocks.n_matched:
        return blocks.refs[number].key
    is_last = number == (candidate.n_tokens - 1) // BLOCK_TOKENS
    return candidate.sibling if is_last else None
