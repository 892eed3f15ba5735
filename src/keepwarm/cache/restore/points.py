"""Where a prompt is to be restorable: there its slices end, and states and window rows are kept.

    cuts      ends of messages, where another prompt may part from this one
    sparse    at growing distances, because a raw prompt has no messages and a message may be long
    learned   where this prompt parts from a stored one that could not be restored there
    last      before the last token, for the same prompt again

Plain attention is restorable at every token and has no points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from typing import NamedTuple

from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.store.eviction import LAST_KEPT, NEAR, Checkpoint, find_surplus

SPARSE_SHARE = 0.25  # of the bytes that a prompt takes anyway, for its sparse points
NO_KEY = BlockKey(b"")


@dataclass(frozen=True)
class PointSizes:
    """What restore points take, beside the rows that are kept of every token."""

    layout: Layout

    def rows(self, n_tokens: int) -> int:
        """Bytes of the rows of a prompt, of which every token adds some."""
        return sum(_bytes(leaf, n_tokens) for leaf in self.layout.leaves() if _grows(leaf))

    def point(self, n_tokens: int) -> int:
        """Bytes of the states and window rows at one point."""
        kept = (leaf for leaf in self.layout.leaves() if leaf.kind is not Kind.DELTA)
        return sum(_bytes(leaf, n_tokens) for leaf in kept)


def _grows(leaf: LayerSpec) -> bool:
    return leaf.kind is Kind.DELTA or leaf.has_variable_tensors


def _bytes(leaf: LayerSpec, n_tokens: int) -> int:
    limit = leaf.window or leaf.scalars.get("max_size")
    n_rows = min(n_tokens, limit + BLOCK_TOKENS) if limit else n_tokens
    return sum(spec.n_bytes(n_rows) for spec in leaf.tensors.values())


class Divergence(NamedTuple):
    """Where a prompt diverges from stored ones."""

    n_shared: int  # tokens that one of them has too
    n_known: int  # of them can be restored
    n_states: int = 0  # kept so far before this place


def divergence_point(layout: Layout, divergence: Divergence, cuts: Iterable[int] = ()) -> int:
    """The place to keep for the next prompt that parts there; 0 where that is not worth it.

    That is the end of a message, if one is near: what follows parts anywhere in its first words.
    """
    nearest = divergence.n_known + NEAR
    if divergence.n_shared < nearest or not _fits(PointSizes(layout), divergence):
        return 0
    block = divergence.n_shared // BLOCK_TOKENS * BLOCK_TOKENS  # a fork is seen within its block
    near = range(max(nearest, block, divergence.n_shared - NEAR + 1), divergence.n_shared)
    return max((cut for cut in cuts if cut in near), default=divergence.n_shared)


def _fits(sizes: PointSizes, divergence: Divergence) -> bool:
    """Whether one state more takes no more bytes, with those before it, than the rows up to there,
    or than the rows that it spares. Three always fit, as in `find_surplus`; windows do too.
    """
    rows = sizes.rows(divergence.n_shared)
    if Kind.STATE not in sizes.layout.kinds or not rows or divergence.n_states < LAST_KEPT:
        return True
    state, spared = sizes.point(divergence.n_shared), rows - sizes.rows(divergence.n_known)
    return state <= spared or (divergence.n_states + 1) * state <= rows


def restore_points(
    layout: Layout, n_tokens: int, cuts: Iterable[int] = (), learned: int = 0
) -> frozenset[int]:
    """The points of a prompt. No state is taken that the store would delete at once."""
    sizes, last = PointSizes(layout), n_tokens - 1
    if not sizes.point(n_tokens):
        return frozenset()
    cuts = [cut for cut in {*cuts, learned} if 0 < cut < last]
    wanted = {*cuts, *sparse_points(sizes, n_tokens, cuts), last}
    if Kind.STATE not in layout.kinds:
        return frozenset(wanted)
    # The end of the answer will be one more.
    states = [_state(sizes, n, is_fork=n == learned) for n in sorted({*wanted, n_tokens})]
    surplus = {state.at for state in find_surplus(states, sizes.rows(n_tokens))}
    return frozenset(wanted - surplus)


def _state(sizes: PointSizes, n_tokens: int, *, is_fork: bool) -> Checkpoint:
    return Checkpoint(n_tokens, NO_KEY, NO_KEY, sizes.point(n_tokens), False, is_fork)


def sparse_points(sizes: PointSizes, n_tokens: int, others: Sequence[int] = ()) -> list[int]:
    """Points in the first three quarters of a prompt, each half as far again as the one before.

    The same in every prompt, so that prompts share them, and on the grid of long slices. Within a
    budget of bytes, smallest gaps first; none where another point is near.
    """
    near = takewhile(lambda n: 4 * n <= 3 * n_tokens, _growing())
    points = [n for n in near if not any(3 * n < 4 * other <= 4 * n for other in others)]
    budget = SPARSE_SHARE * sizes.rows(n_tokens)
    while budget and sum(map(sizes.point, points)) > budget:
        gaps = [after - before for before, after in pairwise([0, *points])]
        del points[gaps.index(min(gaps))]
    return points


def _growing() -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 … blocks."""
    yield BLOCK_TOKENS
    for power in count(1):
        yield BLOCK_TOKENS << power
        yield 3 * BLOCK_TOKENS << (power - 1)
