"""The longest prefix that every layer can be restored at, and the records that takes.

    delta    rows of every block from the first on
    window   rows of the last window before the point
    state    a checkpoint exactly at the point

Pure: what the tiers hold comes in, what to read goes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import takewhile
from typing import NamedTuple

from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import Layout
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef
from keepwarm.store.record import Part
from keepwarm.store.tier import BlockInfo, Child


@dataclass(frozen=True)
class Needs:
    """What a model's layers need to go on from a point."""

    delta: bool
    window: int  # rows before the point; 0 where no layer has a window
    state: bool

    @property
    def checkpoints(self) -> bool:
        """Whether a place inside a block must be kept on purpose to be restored there."""
        return self.state or 0 < self.window < BLOCK_TOKENS

    def windowed(self, n_tokens: int) -> range:
        """The blocks whose window rows it takes to go on from a point."""
        n_blocks = -(-n_tokens // BLOCK_TOKENS)
        first = max(0, n_tokens - self.window) // BLOCK_TOKENS if self.window else n_blocks
        return range(first, n_blocks)

    def window_held(self, known: BlockInfo | None, number: int, n_tokens: int) -> bool:
        """Whether a block has the window rows that a point takes of it."""
        if known is None or Part.WINDOW not in known.parts:
            return False
        first_needed = max(0, n_tokens - self.window - number * BLOCK_TOKENS)
        return known.n_tokens - known.w_rows <= first_needed

    @classmethod
    def of(cls, layout: Layout) -> Needs:
        windows = [leaf.window or 0 for leaf in layout.leaves()]
        return cls(Kind.DELTA in layout.kinds, max(windows, default=0), Kind.STATE in layout.kinds)


class Read(NamedTuple):
    key: BlockKey
    part: Part
    number: int


class Point(NamedTuple):
    """A prefix of `n_tokens` and the records that restore it, in the order they are needed."""

    n_tokens: int
    reads: tuple[Read, ...]
    n_bytes: int


NOTHING = Point(0, (), 0)


@dataclass(frozen=True)
class KnownBlocks:
    """What is known around one prompt: its own blocks, and what lies beside its last one."""

    refs: Sequence[BlockRef]  # the prompt's whole blocks
    known: Mapping[BlockKey, BlockInfo]
    n_matched: int  # how many of them to build on
    children: Sequence[Child] = ()  # after the last of those, the nearest first
    states: Mapping[int, BlockKey] = field(default_factory=dict)  # inside blocks, by token


class Candidate(NamedTuple):
    """A point that might be restored, and the block that would serve the rows past the match."""

    n_tokens: int
    beside: BlockKey | None


def n_matched(needs: Needs, refs: Sequence[BlockRef], known: Mapping[BlockKey, BlockInfo]) -> int:
    """Leading blocks whose rows are there; where no layer needs them all, up to the last that is.

    A block may have lost its delta rows and still have others: what follows it is of no use then.
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
    """The furthest first; ends of blocks are hundreds, and mostly not needed."""
    last = min(blocks.n_matched, limit // BLOCK_TOKENS) * BLOCK_TOKENS
    ends = (Candidate(n_tokens, None) for n_tokens in range(last, 0, -BLOCK_TOKENS))
    inside = sorted(_inside(needs, blocks, limit), key=_nearness)
    return merge(ends, inside, key=_nearness)


def _nearness(candidate: Candidate) -> int:
    return -candidate.n_tokens


def _inside(needs: Needs, blocks: KnownBlocks, limit: int) -> Iterator[Candidate]:
    whole = blocks.n_matched * BLOCK_TOKENS
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
    windowed = needs.windowed(candidate.n_tokens)
    # These first: they are few, and mostly it is they that are missing.
    if not _windows_held(needs, blocks, candidate, windowed):
        return None
    reads: list[Read] = []
    for number in range(0 if needs.delta else windowed.start, windowed.stop):
        key = _holder(blocks, candidate, number)
        known = blocks.known.get(key) if key else None
        if key is None or known is None:
            return None
        if needs.delta:
            if Part.DELTA not in known.parts:
                return None
            reads.append(Read(key, Part.DELTA, number))
        if number in windowed:
            reads.append(Read(key, Part.WINDOW, number))
    if needs.state:
        key = candidate.beside or blocks.refs[windowed.stop - 1].key
        known = blocks.known.get(key)
        if known is None or Part.STATE not in known.parts:
            return None
        reads.append(Read(key, Part.STATE, windowed.stop - 1))
    return tuple(reads)


def _windows_held(needs: Needs, blocks: KnownBlocks, candidate: Candidate, windowed: range) -> bool:
    holders = ((number, _holder(blocks, candidate, number)) for number in windowed)
    return all(
        key is not None and needs.window_held(blocks.known.get(key), number, candidate.n_tokens)
        for number, key in holders
    )


def _holder(blocks: KnownBlocks, candidate: Candidate, number: int) -> BlockKey | None:
    """The block with the rows of this number; past the match there is only the last one, beside."""
    if number < blocks.n_matched:
        return blocks.refs[number].key
    is_last = number == (candidate.n_tokens - 1) // BLOCK_TOKENS
    return candidate.beside if is_last else None
