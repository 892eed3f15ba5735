"""Which checkpoints of a conversation to delete: a state may be as large as a thousand rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey

# The end of the last prompt, the end of its answer (also a cancelled one), and the end of the turn
# before, from which the prompt may be asked again in other words.
LAST_KEPT = 3
LAST_TURN = 2  # of them, however near
NEAR = 16  # tokens that are recomputed in about the time that one takes


class Checkpoint(NamedTuple):
    """A state on the path to a block."""

    at: int  # its position in tokens
    key: BlockKey
    beside: BlockKey  # the conversation's block at that position; mostly the same as `key`
    n_bytes: int
    held: bool  # pinned
    is_fork: bool = False  # conversations part here, or soon after


def find_surplus(checkpoints: Sequence[Checkpoint], kv_bytes: int) -> list[Checkpoint]:
    """Those to delete until states take no more bytes than K and V rows; three stay.

    The gap before a state is what its loss costs: it is recomputed from the state before. First go
    those near the one before, then those at the ends of blocks, where nothing ended and nobody
    parted so far, then the others, smallest gaps first. Where conversations part three more stay,
    and as many as fit into as many bytes again. None goes where there are no K and V rows.
    """
    kept, deleted = sorted(checkpoints), []
    while kv_bytes and (state := _worst(kept, kv_bytes)):
        kept.remove(state)
        deleted.append(state)
    return deleted


def _worst(kept: Sequence[Checkpoint], kv_bytes: int) -> Checkpoint | None:
    """The one to delete next, if any."""
    n_bytes = sum(one.n_bytes for one in kept)
    if len(kept) <= LAST_KEPT or n_bytes <= kv_bytes:
        return None
    gaps = [after - before for before, after in pairwise([0, *(one.at for one in kept)])]
    ranks = [_rank(one, gap) for one, gap in zip(kept, gaps, strict=True)]
    free = [rank for rank in ranks[:-LAST_KEPT] if not rank.held]
    free += [rank for rank in ranks[-LAST_KEPT:-LAST_TURN] if not rank.held and not rank.far]
    forks = [rank for rank in free if rank.is_fork]
    if len(forks) <= LAST_KEPT or n_bytes <= 2 * kv_bytes:
        free = [rank for rank in free if not rank.is_fork]
    return kept[ranks.index(min(free))] if free else None


class _Rank(NamedTuple):
    """The lowest is deleted first."""

    is_fork: bool
    far: bool
    chosen: bool  # the end of a prompt, an answer or a message, or a place where prompts parted
    gap: int
    at: int
    held: bool


def _rank(state: Checkpoint, gap: int) -> _Rank:
    is_chosen = state.at % BLOCK_TOKENS != 0
    return _Rank(state.is_fork, gap >= NEAR, is_chosen, gap, state.at, state.held)
