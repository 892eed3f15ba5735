"""The eviction priority of a block, in seconds, so that recency and value are one number.

    priority = time of last use + half-life * log2(weighted uses * prefill saved by one use)

A use counts half after every half-life, so the sum needs no ageing: it is carried from one use to
the next. A use of a block is a use of all its ancestors, so blocks with many descendants stay
longest. What a use saves is prefill time per byte, 1 for the first block of a prompt: attention
makes later tokens more expensive, and a state, or window rows alone, save all tokens before.

Position weighs less than by arithmetic, where a token at 32 k tokens costs twice as much (an 8B
model). Weights that strong saved up to 5 % of prefill time on a sixteenth of the traces and cost up
to 13 % more tokens elsewhere; this DOUBLE_COST_AT saves 0.5 to 2.3 % and loses no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2
from typing import NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey

MEMORY_HALF_LIFE_S = 20.0  # best of 10, 20, 30 on the traces, where pauses are 10 s at the median
DISK_HALF_LIFE_S = 600.0  # a disk holds hours, memory minutes
SUPERSEDED = -180.0  # half-lives: evicted before everything recent
SHORT_BRANCH = 8  # blocks; a wrong guess costs only their prefill
CLOCK_TOLERANCE_S = 1.0  # a use may lie so far in the future: threads note them out of order
DOUBLE_COST_AT = 1 << 14  # block number at which a token counts twice


def after_use(used: float, value: float, now: float, half_life_s: float) -> float:
    """The value of a block used now; it was `value` after the use before, at `used`."""
    age = max(0.0, now - used)  # the clock may have been set back
    return half_life_s * log2(1 + 2 ** min((value - age) / half_life_s, 64))


def prefill_saved(number: int, n_tokens: int, d: int, w: int, s: int) -> float:
    """Prefill saved per byte; d, w and s are the bytes of the delta, window and state parts."""
    own = 1 + number / DOUBLE_COST_AT
    if not s and (d or not w):
        return own
    n_blocks = number + n_tokens / BLOCK_TOKENS
    all_before = n_blocks * (1 + n_blocks / 2 / DOUBLE_COST_AT)
    return max(own, all_before * d / (d + w + s) if d else all_before)


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

    @property
    def is_chosen(self) -> bool:
        """Whether it is the end of a prompt, an answer or a message, or a place where prompts
        parted."""
        return self.at % BLOCK_TOKENS != 0


def find_surplus(checkpoints: Sequence[Checkpoint], kv_bytes: int) -> list[Checkpoint]:
    """Those to delete until states take no more bytes than K and V rows; three stay.

    The gap before a state is what its loss costs: it is recomputed from the state before. First go
    those near the one before, then those at the ends of blocks, where nothing ended and nobody
    parted so far, then the others, smallest gaps first. Where conversations part three more stay,
    and as many as fit into as many bytes again; the first end of a message counts as such a place.
    None goes where there are no K and V rows.
    """
    kept, deleted = _with_opening(sorted(checkpoints)), []
    while kv_bytes and (state := _worst(kept, kv_bytes)):
        kept.remove(state)
        deleted.append(state)
    return deleted


def _with_opening(states: list[Checkpoint]) -> list[Checkpoint]:
    """Mark the first end of a message at which none parted so far, most often that of the system
    prompt, unless it is less than a block from the start or the last fork: the next conversation
    that begins like this one parts from it there."""
    before = 0
    for number, one in enumerate(states):
        if one.is_chosen and one.is_fork:
            before = one.at
        elif one.is_chosen:
            is_far = one.at - before >= BLOCK_TOKENS
            return [*states[:number], one._replace(is_fork=is_far), *states[number + 1 :]]
    return states


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
    chosen: bool
    gap: int
    at: int
    held: bool


def _rank(state: Checkpoint, gap: int) -> _Rank:
    return _Rank(state.is_fork, gap >= NEAR, state.is_chosen, gap, state.at, state.held)
